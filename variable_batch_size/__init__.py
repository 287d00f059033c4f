"""Training with a global batch size that changes from step to step.

import variable_batch_size as vbs

sampler = vbs.CustomSampler(dataset=dataset, trace="trace.csv", minibatch_size=32)
optimizer = vbs.LinearRuleOptimizer(inner_optimizer, sampler, ref_batchsize=128)
"""

from variable_batch_size.buffers import average_buffers
from variable_batch_size.checkpoint import Checkpointer, Restored
from variable_batch_size.checkpoint_files import CheckpointError
from variable_batch_size.lr_rules import RULES, Rule, Scaled, power, rule_named
from variable_batch_size.noise_meter import NoiseMeter
from variable_batch_size.noise_options import Measurements, NoiseOptions
from variable_batch_size.optimizer import ElasticOptimizer
from variable_batch_size.rule_optimizers import (
    AdamHalfLifeRuleOptimizer,
    AdamRootRuleOptimizer,
    AdaScaleOptimizer,
    ConstantOptimizer,
    LinearRuleMomentumOptimizer,
    LinearRuleOptimizer,
    PowerRuleOptimizer,
    RootRuleOptimizer,
)
from variable_batch_size.sampler import CustomSampler
from variable_batch_size.schedule import EpochPlan, Schedule, TraceExhausted
from variable_batch_size.seeded_dataset import SeededDataset
from variable_batch_size.single_checkpoint import (
    read_checkpoint,
    write_checkpoint,
)
from variable_batch_size.trace import Trace, TraceError, TraceWarning
from variable_batch_size.update import Update

__all__ = [
    "RULES",
    "AdaScaleOptimizer",
    "AdamHalfLifeRuleOptimizer",
    "AdamRootRuleOptimizer",
    "CheckpointError",
    "Checkpointer",
    "ConstantOptimizer",
    "CustomSampler",
    "ElasticOptimizer",
    "EpochPlan",
    "LinearRuleMomentumOptimizer",
    "LinearRuleOptimizer",
    "Measurements",
    "NoiseMeter",
    "NoiseOptions",
    "PowerRuleOptimizer",
    "Restored",
    "RootRuleOptimizer",
    "Rule",
    "Scaled",
    "Schedule",
    "SeededDataset",
    "Trace",
    "TraceError",
    "TraceExhausted",
    "TraceWarning",
    "Update",
    "average_buffers",
    "power",
    "read_checkpoint",
    "rule_named",
    "write_checkpoint",
]
