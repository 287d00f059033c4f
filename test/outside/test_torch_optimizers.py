"""Torch's optimizers and LR schedulers, wrapped, and gains of others, are the same."""

import functools
import importlib.util
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.outside import package
from support.variable_batch_size.noise import make, step
from support.xla_replica.replicas import of_torch_alone
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler, swa_utils

import variable_batch_size as vbs

pytestmark = [pytest.mark.outside, of_torch_alone]

TRACE = (2, 6, 4, 2, 8, 4)  # 1, 3, 2, 1, 4 and 2 minibatches
NAMES = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS",
    "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
REFUSED = {
    "LBFGS": "evaluates the loss inside step",
    "SparseAdam": "takes sparse gradients alone",
}


@functools.cache
def database() -> dict[str, Any]:
    """Returns torch's description of each of its optimizers, by the class's name."""
    package("expecttest")  # which torch's tests import
    allows = "__allow_nonbracketed_mutation_flag"
    before = getattr(torch.backends, allows)
    from torch.testing._internal.common_optimizers import optim_db

    # Torch's tests forbid settings of backends to everybody; ours change some.
    setattr(torch.backends, allows, before)
    return {info.optim_cls.__name__: info for info in optim_db}


def options(name: str) -> list[Any]:
    """Returns what torch tests an optimizer with, by every implementation of a CPU."""
    from torch.testing._internal import common_optimizers as common

    get = common._get_optim_inputs_including_global_cliquey_kwargs
    return get("cpu", torch.float32, database()[name], skip=("differentiable",))


def weights(name: str, kwargs: dict[str, Any], is_wrapped: bool) -> list[torch.Tensor]:
    """Returns those after an epoch of the trace, of parameters in two groups."""
    torch.manual_seed(0)
    # Muon takes matrices only.
    shapes = ((4, 3), (2, 2)) if name == "Muon" else ((4, 3), (3,), ())
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    groups: list[Any] = parameters
    if database()[name].supports_param_groups:
        groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = database()[name].optim_cls(groups, **kwargs)
    samples = range(sum(TRACE))
    sampler = vbs.CustomSampler(samples, TRACE, minibatch_size=2, verbose=False)
    wrapper = is_wrapped and vbs.ElasticOptimizer(optimizer, sampler, "constant")
    minibatches = iter(sampler)
    for batch_size in TRACE:
        if not is_wrapped:
            optimizer.zero_grad()
        for _ in range(batch_size // 2):
            generator = torch.Generator().manual_seed(next(minibatches)[0])
            for parameter in parameters:  # a loss that is not linear in the weights
                target = torch.randn(parameter.shape, generator=generator)
                (parameter - target).tanh().square().sum().backward()
            made = wrapper.step() if is_wrapped else 0
        assert made == is_wrapped
        if not is_wrapped:
            for parameter in parameters:
                parameter.grad /= batch_size // 2
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("name", NAMES)
def test_a_wrapped_optimizer_is_the_optimizer_to_the_bit(name):
    for each in options(name):
        refused = REFUSED.get(name)
        if isinstance(each.kwargs.get("lr"), torch.Tensor):
            refused = refused or "a finite number, got tensor"
        if refused:
            with pytest.raises((TypeError, RuntimeError), match=refused):
                weights(name, each.kwargs, True)
            continue
        found, expected = (weights(name, each.kwargs, wraps) for wraps in (True, False))
        assert all(map(torch.equal, found, expected)), each.desc


# --- LR schedulers --------------------------------------------------------------------

NUM_UPDATES = 12
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 3)], o
    ),
    "SWALR": functools.partial(swa_utils.SWALR, swa_lr=0.01, anneal_epochs=6),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
}
# Of the others, what they take beside the optimizer.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": lambda t: 1 / (t + 1)},
    "MultiplicativeLR": {"lr_lambda": lambda t: 0.9},
    "ConstantLR": {"factor": 0.5, "total_iters": 4},
    "CosineAnnealingLR": {"T_max": 8},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3},
    "ExponentialLR": {"gamma": 0.8},
    "LinearLR": {"start_factor": 0.1, "total_iters": 5},
    "MultiStepLR": {"milestones": [2, 7]},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": NUM_UPDATES + 1},
    "PolynomialLR": {"total_iters": 9, "power": 2.0},
    "ReduceLROnPlateau": {"patience": 1},
    "StepLR": {"step_size": 4},
}
for name, arguments in ARGUMENTS.items():
    SCHEDULERS[name] = functools.partial(getattr(lr_scheduler, name), **arguments)
INNER = {
    "sgd": lambda params: SGD(params, 0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: AdamW(params, 0.05),
}


def scheduled(name: str, inner: str, place: str | None = None, by_hand: bool = True):
    """Returns the last weights and all learning rates; wrapped if there is a place."""
    weight, lrs = nn.Parameter(torch.linspace(-1, 1, 5)), []
    optimizer = wrapper = INNER[inner]([weight])
    sampler = vbs.CustomSampler(range(NUM_UPDATES), 1, minibatch_size=1, verbose=False)
    if place:
        wrapper = vbs.ElasticOptimizer(optimizer, sampler, "constant")
        wrapper.attach(lambda update: lrs.append(update.lr[0]))
    scheduler = SCHEDULERS[name](wrapper if place == "wrapper" else optimizer)

    def tick(index: int) -> None:
        metric = [max(1.0, 4.0 - index)] if name == "ReduceLROnPlateau" else []
        scheduler.step(*metric)

    if not by_hand and name == "ReduceLROnPlateau":  # which needs a metric
        wrapper.attach(lambda update: tick(update.step))
    elif not by_hand:
        wrapper.attach(scheduler)
    for index, _ in enumerate(sampler):
        if not place:
            optimizer.zero_grad()
        (weight * (1 + index % 3)).sin().square().sum().backward()
        wrapper.step()
        if not place:
            lrs.append(optimizer.param_groups[0]["lr"])
        if by_hand:
            tick(index)
    return weight.detach(), lrs


@pytest.mark.parametrize("by_hand", [False, True], ids=["attached", "by hand"])
@pytest.mark.parametrize("place", ["wrapper", "inner"])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_does_what_it_does_in_torch(name, inner, place, by_hand):
    expected_weight, expected_lrs = scheduled(name, inner)
    found_weight, found_lrs = scheduled(name, inner, place, by_hand)
    assert found_lrs == expected_lrs
    assert len(set(found_lrs)) > 1
    assert torch.equal(found_weight, expected_weight)


def test_every_optimizer_and_scheduler_of_torch_is_checked():
    assert sorted(database()) == sorted(NAMES)
    found = inspect.getmembers(lr_scheduler, inspect.isclass)
    known = {n for n, each in found if issubclass(each, lr_scheduler.LRScheduler)}
    known = {name for name in known if not name.endswith("LRScheduler")}
    assert known | {"SWALR"} == set(SCHEDULERS)


# --- gains and noise as AdaptDL and fairscale compute them ----------------------------


def time_constant(share: float) -> float:
    """Returns that under which averages keep this share of theirs at a minibatch."""
    return -1 / math.log(share)


def gradients(num_steps: int, num_minibatches: int) -> torch.Tensor:
    """Returns the minibatches' gradients of every step: ``(5,)`` each.

    Their noise makes no estimate negative, which theirs, not ours, would make zero.
    """
    random = np.random.default_rng(0)
    return torch.from_numpy(2 + random.normal(size=(num_steps, num_minibatches, 5)))


@pytest.mark.filterwarnings("ignore")
def test_gains_of_every_group_are_those_of_fairscale():
    adascale = package("fairscale.optim").AdaScale
    num_minibatches, share = 3, 0.97
    theirs_groups, ours_groups = (
        [{"params": [nn.Parameter(torch.zeros(n).double())]} for n in (2, 3)]
        for _ in range(2)
    )
    theirs = adascale(
        SGD(theirs_groups, 0.01), num_gradients_to_accumulate=num_minibatches,
        smoothing=share**num_minibatches, debias_ewma=True, is_scaled_loss=True,
    )  # fmt: skip
    noise = vbs.NoiseOptions(time_constant=time_constant(share))
    _, ours = make((num_minibatches,), ours_groups, noise=noise)

    def loss(groups: list[dict], row: torch.Tensor) -> torch.Tensor:
        """Returns one with gradient ``row``, cut at the groups' sizes."""
        weights = [group["params"][0] for group in groups]
        return sum(map(torch.dot, row.split((2, 3)), weights))

    for rows in gradients(8, num_minibatches):
        for row in rows:
            (loss(theirs_groups, row) / num_minibatches).backward()
        gains, overall = [theirs.gain(0), theirs.gain(1)], theirs.gain()
        theirs.step()
        theirs.zero_grad()
        for row, _ in zip(rows, ours.minibatches):
            loss(ours_groups, row).backward()
            ours.step()
        assert ours.noise.lr_factors() == pytest.approx(gains, rel=1e-5)
        assert ours.noise.measure().gain == pytest.approx(overall, rel=1e-5)
        for one, other in zip(ours_groups, theirs_groups):
            assert torch.allclose(one["params"][0], other["params"][0], atol=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_minibatches", [2, 4])
def test_noise_is_what_adaptdl_measures(num_minibatches):
    """And its gains; before anything is known, they are 1."""
    # The file alone: the package imports what one needs for jobs on Kubernetes.
    path = Path(package("adaptdl").__path__[0], "torch", "gradient_noise_scale.py")
    spec = importlib.util.spec_from_file_location("gradient_noise_scale", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    weight, own = (nn.Parameter(torch.zeros(5).double()) for _ in range(2))
    replica, plain = SimpleNamespace(require_backward_grad_sync=True), SGD([weight], 1)
    scale = module.GradientNoiseScale(replica, plain, num_replicas=1, accum_scale=1.0)
    noise = vbs.NoiseOptions(time_constant=time_constant(0.999))
    _, optimizer = make((num_minibatches,), [own], noise=noise)
    one = pytest.approx(1, rel=1e-5)
    assert scale.gain(2.0) == one == optimizer.noise.measure(2.0).gain
    for rows in gradients(12, num_minibatches):
        for number, row in enumerate(rows, 1):
            replica.require_backward_grad_sync = number == num_minibatches
            (weight * row).sum().backward()
        scale.reset_accumulation()
        step(optimizer, own, rows)
        measured = optimizer.noise.measure()
        assert measured.variance == pytest.approx(scale.var_avg(), rel=1e-5)
        assert measured.square == pytest.approx(scale.sqr_avg(), rel=1e-5)
        for ratio in (1.0, 2.0, 3.0, 64.0):
            gain = optimizer.noise.measure(ratio).gain
            assert gain == pytest.approx(scale.gain(ratio), rel=1e-5)
