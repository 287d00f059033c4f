"""Training with a global batch size that changes from step to step.

import variable_batch_size as vbs

sampler = vbs.CustomSampler(dataset=dataset, trace="trace.csv", minibatch_size=32)
optimizer = vbs.LinearRuleOptimizer(inner_optimizer, sampler, ref_batchsize=128)
"""

from variable_batch_size.buffers import average_buffers
from variable_batch_size.lr_rules import RULES, Rule
from variable_batch_size.optimizer import ElasticOptimizer, Update
from variable_batch_size.rule_optimizers import (
    ConstantOptimizer,
    LinearRuleMomentumOptimizer,
    LinearRuleOptimizer,
    RootRuleOptimizer,
)
from variable_batch_size.sampler import CustomSampler
from variable_batch_size.schedule import EpochPlan, Schedule, TraceExhausted
from variable_batch_size.trace import Trace, TraceError, TraceWarning

__all__ = [
    "RULES",
    "ConstantOptimizer",
    "CustomSampler",
    "ElasticOptimizer",
    "EpochPlan",
    "LinearRuleMomentumOptimizer",
    "LinearRuleOptimizer",
    "RootRuleOptimizer",
    "Rule",
    "Schedule",
    "Trace",
    "TraceError",
    "TraceExhausted",
    "TraceWarning",
    "Update",
    "average_buffers",
]
