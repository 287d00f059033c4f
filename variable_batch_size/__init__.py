"""Training with a global batch size that changes from step to step.

import variable_batch_size as vbs

sampler = vbs.CustomSampler(dataset=dataset, trace="trace.csv", minibatch_size=32)
optimizer = vbs.LinearRuleOptimizer(inner_optimizer, sampler, ref_batchsize=128)
"""

# isort: off
from variable_batch_size.buffers import average_buffers
from variable_batch_size.checkpoint.checkpointer import Checkpointer
from variable_batch_size.checkpoint.files import (
    CheckpointError, read_checkpoint, write_checkpoint,
)  # fmt: skip
from variable_batch_size.control.controller import BatchSizeController
from variable_batch_size.control.policies import Observation, per_replica
from variable_batch_size.data.blocks import BlockDataset, BlockShuffle
from variable_batch_size.data.evaluation import EvaluationSampler
from variable_batch_size.data.lazy_orders import IndexShuffle, LazyOrder
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import EpochPlan, Schedule
from variable_batch_size.data.seeded_dataset import SeededDataset
from variable_batch_size.gradient_noise.meter import (
    Measurements, NoiseMeter, NoiseOptions,
)  # fmt: skip
from variable_batch_size.optimizer import ElasticOptimizer
from variable_batch_size.rule_optimizers import (
    AdamHalfLifeRuleOptimizer, AdamRootRuleOptimizer, AdaScaleOptimizer,
    ConstantOptimizer, LinearRuleMomentumOptimizer, LinearRuleOptimizer,
    RootRuleOptimizer,
)  # fmt: skip
from variable_batch_size.rules.rule import (
    RULES, Rule, ScaledHyperparameters, power, rule_named,
)  # fmt: skip
from variable_batch_size.runs.picture import draw_runs
from variable_batch_size.runs.run_file import Run, RunFile, read_run
from variable_batch_size.runs.run_log import RunLog, tensorboard
from variable_batch_size.step.attached import Update
from variable_batch_size.traces.batch_trace import Trace, TraceWarning
from variable_batch_size.traces.trace_csv import TraceError
from variable_batch_size.training import Epoch, epochs

__all__ = [
    "RULES", "AdaScaleOptimizer", "AdamHalfLifeRuleOptimizer", "AdamRootRuleOptimizer",
    "BatchSizeController", "BlockDataset", "BlockShuffle", "CheckpointError",
    "Checkpointer", "ConstantOptimizer", "CustomSampler", "ElasticOptimizer", "Epoch",
    "EpochPlan", "EvaluationSampler", "IndexShuffle", "LazyOrder",
    "LinearRuleMomentumOptimizer", "LinearRuleOptimizer", "Measurements", "NoiseMeter",
    "NoiseOptions", "Observation", "RootRuleOptimizer", "Rule", "Run", "RunFile",
    "RunLog", "ScaledHyperparameters", "Schedule", "SeededDataset", "Trace",
    "TraceError", "TraceWarning", "Update", "average_buffers", "draw_runs", "epochs",
    "per_replica", "power", "read_checkpoint", "read_run", "rule_named", "tensorboard",
    "write_checkpoint",
]  # fmt: skip
