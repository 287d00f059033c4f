"""Every LR scheduler of torch around the wrapper, against torch alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

import variable_batch_size as vbs

pytestmark = pytest.mark.outside

NUM_UPDATES = 12
SCHEDULERS: dict[str, Callable[[Any], LRScheduler]] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 3)], o
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(
        o, 3
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 7]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, 0.1, total_steps=NUM_UPDATES + 1
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=6),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4),
}
INNER = {
    "sgd": lambda params: SGD(params, 0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: AdamW(params, 0.05),
}


def make(inner: str) -> tuple[nn.Parameter, Optimizer]:
    weight = nn.Parameter(torch.linspace(-1, 1, 5))
    return weight, INNER[inner]([weight])


def backward(weight: nn.Parameter, index: int) -> None:
    (weight * (1 + index % 3)).sin().square().sum().backward()


def tick(scheduler: LRScheduler, index: int) -> None:
    """Steps a scheduler; one that needs a metric gets one that stops improving."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(max(1.0, 4.0 - index))
    else:
        scheduler.step()


def alone(name: str, inner: str) -> tuple[torch.Tensor, list[float]]:
    """Returns the last weights and the learning rate of every update, in torch."""
    weight, optimizer = make(inner)
    scheduler = SCHEDULERS[name](optimizer)
    lrs = []
    for index in range(NUM_UPDATES):
        optimizer.zero_grad()
        backward(weight, index)
        optimizer.step()
        lrs.append(optimizer.param_groups[0]["lr"])
        tick(scheduler, index)
    return weight.detach(), lrs


def wrapped(
    name: str, inner: str, place: str, by_hand: bool
) -> tuple[torch.Tensor, list[float]]:
    """Returns the same of a wrapped optimizer under the constant rule."""
    weight, inner_optimizer = make(inner)
    samples = range(NUM_UPDATES)
    sampler = vbs.CustomSampler(samples, 1, minibatch_size=1, verbose=False)
    optimizer = vbs.ElasticOptimizer(inner_optimizer, sampler, "constant")
    scheduler = SCHEDULERS[name](optimizer if place == "wrapper" else inner_optimizer)
    lrs: list[float] = []
    optimizer.attach(lambda update: lrs.append(update.lr[0]))
    if name == "ReduceLROnPlateau" and not by_hand:
        optimizer.attach(lambda update: tick(scheduler, update.step))
    elif not by_hand:
        optimizer.attach(scheduler)
    for index, _ in enumerate(sampler):
        backward(weight, index)
        assert optimizer.step() == 1
        if by_hand:
            tick(scheduler, index)
    return weight.detach(), lrs


@pytest.mark.parametrize("by_hand", [False, True], ids=["attached", "by hand"])
@pytest.mark.parametrize("place", ["wrapper", "inner"])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_does_what_it_does_in_torch(name, inner, place, by_hand):
    expected_weight, expected_lrs = alone(name, inner)
    found_weight, found_lrs = wrapped(name, inner, place, by_hand)
    assert found_lrs == expected_lrs
    assert len(set(found_lrs)) > 1
    assert torch.equal(found_weight, expected_weight)


def test_every_scheduler_of_torch_is_checked():
    found = inspect.getmembers(lr_scheduler, inspect.isclass)
    known = {name for name, each in found if issubclass(each, LRScheduler)}
    known = {name for name in known if not name.endswith("LRScheduler")}
    assert known | {"SWALR"} == set(SCHEDULERS)
