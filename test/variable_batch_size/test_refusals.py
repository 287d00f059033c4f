"""What each function of the package refuses, and what it says of the remedy."""

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.variable_batch_size import exact
from support.variable_batch_size.noise import make as measured
from support.variable_batch_size.wrapping import CPU, make, one_weight, sampler_of
from torch import nn
from torch.optim import SGD, AdamW, SparseAdam
from torch.optim.lr_scheduler import StepLR

import variable_batch_size as vbs
from grab_xla import GraBSampler
from variable_batch_size import trace_tools as tools
from variable_batch_size.buffers import follow
from variable_batch_size.data.schedule import Schedule
from variable_batch_size.rules.rule import rule_named
from variable_batch_size.trace_tools import convert_rows, simulate
from variable_batch_size.trace_tools import families as made
from variable_batch_size.trace_tools.step_time import fit_step_time
from xla_replica import LocalReplica

NAN, ONES = float("nan"), torch.ones(3)
LOG = tools.Availability(np.array([0.0, 10.0]), np.array([2, 0]))
SCHEDULE = Schedule(vbs.Trace([16, 32]), 48, 8)
simulated = partial(simulate, SCHEDULE)
converted = partial(tools.convert, LOG, lambda devices: 8, minibatch_size=8)
step_time = partial(tools.StepTime, per_substep=0)
blocks = partial(vbs.BlockDataset, len)
seeded = vbs.SeededDataset
dealt = partial(sampler_of, trace=64)
every_step = partial(StepLR, step_size=1)
of_rule = partial(make, cls=vbs.ElasticOptimizer)


def planned(trace: Any, *arguments: Any) -> Schedule:
    return Schedule(vbs.Trace(trace), *arguments)


def wrapped(inner: Any = SGD, *arguments: Any, **options: Any) -> vbs.ElasticOptimizer:
    """Returns a wrapper of an optimizer, or of one of this class and arguments."""
    if isinstance(inner, type):
        inner = inner([nn.Parameter(torch.ones(1))], *(arguments or (0.1,)))
    common = {"sampler": make()[1], "ref_batchsize": 32, "replica": CPU}
    return vbs.ElasticOptimizer(inner, **common | options)


def controlled(noise: bool = True, trace: Any = 16, **limits: Any) -> Any:
    sampler = dealt(trace=trace, minibatch_size=4)
    limits = {"least": 4, "most": 64} | limits
    return vbs.BatchSizeController(wrapped(sampler=sampler, noise=noise), **limits)


def log(**options: Any) -> vbs.RunLog:
    return vbs.RunLog(None, wrapped(), **options)


def attached(target: Any, *arguments: Any, times: int = 1) -> None:
    wrapper = wrapped()
    for each in [target(wrapper)] * times:
        wrapper.attach(each, *arguments)


def measured_as(**changes: Any) -> None:
    meter = measured()[1].noise
    meter.load_state_dict(meter.state_dict() | changes)


def compiled(parameters: Any, lr: float) -> torch.optim.Optimizer:
    inner = SGD(parameters, lr)
    inner.step = torch.compile(inner.step, backend="aot_eager")
    return inner


def weighed(weight: Any, **options: Any) -> None:
    parameter, sampler, optimizer = one_weight([4], **{"reduction": "sum"} | options)
    next(iter(sampler))
    parameter.sum().backward()
    optimizer.step(**({} if weight is None else {"weight": weight}))


OF_TYPES = [
    (lambda: simulated(noise_scale=9.0), "ref_batchsize must be an integer"),
    (lambda: weighed(3, reduction="mean"), "needs reduction='sum'"),
    (lambda: weighed(None), "needs weight="),
    (lambda: weighed(1, reduction="mean", ref_weight=4), "needs reduction='sum'"),
    (lambda: weighed(1, ref_weight=4, ref_batchsize=4), "give one of them"),
    (lambda: weighed(1, noise=True), "needs ref_weight="),
    (lambda: weighed(1, ref_weight=4, rule="adam-root", inner=AdamW),
     "ref_batchsize= in place of ref_weight="),
    (lambda: rule_named(0.5), "rule must be a name or a Rule, got 0.5"),
    (lambda: of_rule(rule="adam-root"), "SGD does not suit .* Adam or AdamW"),
    (lambda: of_rule(inner=torch.optim.RAdam, rule="adam-half-life"),
     "RAdam does not suit"),
    (lambda: of_rule(inner=AdamW, rule="root", momentum_correction=True),
     "as only SGD does"),
    (lambda: of_rule(inner=torch.optim.Adam, rule="root", decay_per_sample=True),
     "AdamW's, which multiplies the weights"),
    (lambda: of_rule(inner=partial(AdamW, capturable=True), rule="adam-root"),
     "does not work with capturable=True"),
    (lambda: measured(cls=vbs.LinearRuleOptimizer, noise={"time_constant": 10}),
     "noise must be a bool or NoiseOpt"),
    (lambda: of_rule(rule=vbs.Rule("x", math.sqrt, measured=True)),
     r"gain \*\* 0.5, in place of math.sqrt"),
    (lambda: make(cls=vbs.ConstantOptimizer, ref_batchsize=None, noise=True),
     "noise= needs ref_batchsize="),
    (lambda: make(inner=compiled), r"every learning rate.* compile the model"),
    (lambda: one_weight([3], sampler={"pad_minibatches": True}),
     "reduction='sum' and, as the loss"),
    (lambda: exact.wrapped(nn.Linear(4, 4).double()), "'weight' is torch.float64"),
    (lambda: exact.wrapped(nn.Sequential(nn.SyncBatchNorm(4))), "'0' is a SyncBatchN"),
    (lambda: exact.wrapped(nn.Linear(4, 4), exact=True), "exact= must be the model"),
    (lambda: exact.wrapped(nn.Linear(4, 4), lockstep=True), "lockstep"),
    (lambda: seeded({1, 2}, 1)[0], "'set' object is not subscriptable"),
    (lambda: dealt(dataset_size=None), "either dataset= or dataset_size="),
    (lambda: dealt(dataset=256, dataset_size=None), r"has no len\(\)"),
    (lambda: dealt(trace=None), "trace=None of type NoneType: allowed are"),
    (lambda: made.make("constant", steps=2, batch_size=8, seed=1), "unexpected"),
    (lambda: wrapped(ref_batchsize=None), "rule 'linear' needs ref_batchsize="),
    (lambda: wrapped(sampler=[1]), "must be a CustomSampler"),
    (lambda: wrapped(replica="cpu"), "replica must be an xla_replica"),
    (lambda: wrapped(3), "must be a torch.optim.Opt"),
    (lambda: wrapped(torch.optim.LBFGS), "LBFGS evaluates the loss inside"),
    (lambda: wrapped(SparseAdam), "SparseAdam takes sparse gradients alone"),
    (lambda: wrapped(torch.optim.Optimizer, {}), "be a finite number, got None"),
    (lambda: wrapped().add_param_group({"params": ONES, "lr": torch.tensor(0.1)}),
     "a finite number, got tensor"),
    (lambda: wrapped(make()[2], rule="root"), "Optimizer is a wrapper: wrap"),
    (lambda: wrapped().step(lambda: None), r"step\(closure\) is not supported"),
    (lambda: copy.deepcopy(wrapped()), r"save optimizer.state_dict\(\) instead"),
    (lambda: controlled(noise=False), "build the optimizer with noise=True"),
    (lambda: log().write(accuracy=ONES), "write: accuracy must be a number, got"),
]  # fmt: skip
OF_TRACES = [
    (lambda: convert_rows(LOG, lambda _: 0), "element 0, batchsize: 0 must be an int"),
    (lambda: wrapped(sampler=dealt(minibatch_size=4)).change_batch_size(6),
     "not a multiple of minibatch_size=4"),
    (lambda: converted(step_time(11)), "^no step is completed in the 10 seconds"),
]  # fmt: skip
OF_VALUES = [
    (lambda: simulate(planned(16, 48, 8)), "the constant trace has no end: give num"),
    (lambda: weighed(-1), "got -1"),
    (lambda: weighed(torch.tensor(-2.0)), "got -2.0"),
    (lambda: weighed(1, reduction="tokens"), "got 'tokens'"),
    (lambda: rule_named("lars"), "one of 'adam-half.* 'power:ALPHA', got 'lars'"),
    (lambda: rule_named("power:x"), "to float: 'x'"),
    (lambda: of_rule(rule=vbs.Rule("mine", lambda ratio: NAN)), "rule 'mine' makes of"),
    (lambda: of_rule([32, 256], AdamW, rule="adam-root", ref_batchsize=16),
     "batch ratio 16.* use rule 'adam-half-life'"),
    (lambda: vbs.NoiseOptions(time_constant=0.0), "time_constant must be a finite"),
    (lambda: measured_as(base=torch.tensor([7.0])), "batch size was 7.0 and is"),
    (lambda: measured_as(averages=torch.zeros(3, 2)), "groups was 2 and is 1.*same gr"),
    (lambda: measured()[1].load_state_dict(
        measured(ref_batchsize=2)[1].state_dict(), allow_changes=True
    ), "reference batch size was 2.0 and is 1.0"),
    (lambda: attached(lambda _: print, "samples", 10), "are for LR schedulers"),
    (lambda: attached(lambda _: print, "epochs"), "may ask for update.ends_epoch"),
    (lambda: attached(lambda wrapper: StepLR(wrapper, 1).step), "is a method of an LR"),
    (lambda: attached(every_step, "minutes"), "'updates', .* 'epochs', got"),
    # It would run twice after every update, or change what nobody uses.
    (lambda: attached(lambda _: [].append, times=2), "already, and would run tw"),
    (lambda: attached(every_step, times=2), "is attached already, and would run"),
    (lambda: attached(lambda _: StepLR(wrapped().inner, 1)),
     "with another optimizer: build it"),
    (lambda: exact.wrapped(nn.Linear(4, 4), nn.Linear(4, 4).parameters()),
     "not one of the model's"),
    (lambda: exact.wrapped(nn.Linear(4, 4), trace=(4 * 16385,), size=4 * 16385),
     "has 16385 minibatches, more than 16384:"),
    (lambda: follow(nn.Sequential(nn.BatchNorm1d(2, momentum=None)), {}),
     "^0: momentum=None averages"),
    (lambda: exact.Training("small", saved=exact.Training("small", True, 2).state()),
     "num_threads"),
    (lambda: GraBSampler(range(8), {"w": nn.Parameter(ONES)}, exact=True),
     "needs scheme='gather', got 'sharded'"),
    # It would balance the samples that fill up a minibatch twice.
    (lambda: GraBSampler(range(8), {"w": nn.Parameter(ONES)}).after_update(
        vbs.Update(0, 0, 3, 2, (0.1,), False, False)
    ), "batch size 3 is not a multiple"),
    (lambda: blocks([0, 0]), r"not all 0, got .*: \[0, 0\]"),
    (lambda: blocks([1.5]), "block_sizes must be .*got float64"),
    (lambda: blocks([[1]]), r"block_sizes must be .*got int64 of shape \(1, 1\)"),
    (lambda: vbs.BlockShuffle([3, -1]), "must be >= 0"),
    *((lambda order=order: list(dealt(order=order)), "be a permutation of range.256")
      for order in (range(255), [0] * 256, range(1, 257), np.arange(256.0), [])),
    (lambda: dealt(rank=1), "rank must be an integer >= 0 and <= 0, got 1"),
    (lambda: dealt(seed=2**70), "seed must be an integer >= .* got 11805916207"),
    (lambda: planned([32], 256, 32, "loop"), "on_end must be one of 'stop', .* 'loop'"),
    (lambda: fit_step_time([1.0], [1, 2]), "must have the same shape"),
    (lambda: fit_step_time([NAN], [1]), "must not contain infs or NaNs"),
    (lambda: simulated(rule="adascale", ref_batchsize=8), "measures the gradients"),
    (lambda: simulated(rule="adam-root", ref_batchsize=1), "adam-root"),
    (lambda: converted(step_time(0)), r"seconds of a step must be .* > 0, got 0"),
    (lambda: converted(step_time(1e-9)), "seconds of a step must be .*, got 1e-09"),
    (lambda: made.make("ramps"), "family must be one of 'constant', 'ramp'"),
    (lambda: made.make("critical-batch", first=8, most=64, total_samples=4000),
     "either curve or coefficient"),
    (lambda: wrapped(replica=LocalReplica("meta")), "is on cpu, but this is repl"),
    (lambda: wrapped(sampler=dealt(num_replicas=4, rank=1)), "deals to replica 1 of"),
    (lambda: wrapped(SGD, NAN), "reference learning rate must .*got nan"),
    (lambda: wrapped().set_lr((0.1, 0.2)), "argument 2 is longer"),
    (lambda: make(cls=vbs.LinearRuleMomentumOptimizer, weight_decay=-1),
     "weight_decay must be a fin.* >= 0"),
    (lambda: controlled(most=2), "most .* must be an integer >= 4, got 2"),
    (lambda: controlled(policy="x"), "policy must be one of 'noise-scale', 'g"),
    (lambda: controlled(trace=[16, 8]), "on_end='hold' is needed to"),
    (lambda: controlled(least=5, most=7), "most .*minibatches of 4.* >= 8, got 7"),
    (lambda: controlled(most=10**6), "batch size 1000000 exceeds epoch"),
    (lambda: log().write(accuracy=1.0), "there has been no update"),
    (lambda: log().write(step=3), "step= is what the log itself"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "call", "message"), [
    *((TypeError, *row) for row in OF_TYPES),
    *((vbs.TraceError, *row) for row in OF_TRACES),
    *((ValueError, *row) for row in OF_VALUES),
])  # fmt: skip
def test_what_is_refused_is_told_with_the_remedy(error, call, message):
    with pytest.raises(error, match=message):
        call()
