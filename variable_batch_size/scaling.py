"""Applies a rule to one update: scales learning rate and gradient, then restores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.accumulate import like_dimensions_of
from variable_batch_size.lr_rules import Rule
from variable_batch_size.tensor_scalars import TensorScalars
from xla_replica import Replica

Groups = list[dict[str, Any]]


class Numbers:
    """Changing numbers on the device, uploaded once per value and use.

    By use, because two uses that shared a tensor when their values are equal would
    make another graph of it.

    Args:
        replica: Where they go.
        capacity: Values kept; beyond it the oldest is uploaded again when it returns.
    """

    def __init__(self, replica: Replica, capacity: int = 1024) -> None:
        self._replica = replica
        self._capacity = capacity
        self._kept: dict[tuple[object, ...], torch.Tensor] = {}

    def get(
        self, use: object, value: float, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """``value`` with shape ``(1,)``; not to be changed in place."""
        key = (use, value, dtype)
        if key not in self._kept:
            if len(self._kept) >= self._capacity:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = self._replica.scalar(value, dtype)
        return self._kept[key]


@contextlib.contextmanager
def scaled(
    optimizer: Optimizer,
    rule: Rule,
    batch_ratio: float,
    replica: Replica,
    numbers: Numbers,
) -> Iterator[Callable[[], None]]:
    """Scaled learning rates stand in ``param_groups`` inside; always restored.

    Numbers are on the device when this is entered, so enter it before a collective is
    traced.

    Yields:
        A function to call when gradients are averaged: it scales them, if the rule
        does, and steps the optimizer.

    Raises:
        ValueError: A step hook changed a learning rate.
    """
    groups = optimizer.param_groups
    kept = ("lr", "weight_decay", "foreach")
    before = [{name: group[name] for name in kept if name in group} for group in groups]
    gradient_factor = None
    if rule.gradient_factor is not None:
        gradient_factor = numbers.get(
            "gradient factor",
            rule.gradient_factor(batch_ratio),
            _widest(parameter for group in groups for parameter in group["params"]),
        )
    try:
        for index, group in enumerate(groups):
            group["lr"] *= rule.lr_factor(batch_ratio)
            if replica.compiles:
                dtype = _widest(group["params"])
                group["lr"] = numbers.get(("lr", index), group["lr"], dtype)
                if group.get("foreach"):
                    group["foreach"] = False  # would read a tensor learning rate back

        scaled_lrs = [group["lr"] for group in groups]

        def step() -> None:
            if gradient_factor is not None:
                _scale_gradients(groups, gradient_factor)
            with TensorScalars() if replica.compiles else contextlib.nullcontext():
                optimizer.step()
            if any(group["lr"] is not lr for group, lr in zip(groups, scaled_lrs)):
                raise ValueError(
                    "a step hook changed the learning rate, which is the scaled one "
                    "while hooks run: use optimizer.attach(...), which runs after the "
                    "update and sees the reference learning rate"
                )

        yield step
    finally:
        for group, values in zip(groups, before):
            group.update(values)


def _scale_gradients(groups: Groups, factor: torch.Tensor) -> None:
    """gradient = factor * (gradient + weight_decay * weight), and no decay after."""
    for group in groups:
        decay = -group["weight_decay"] if group["maximize"] else group["weight_decay"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if decay:
                parameter.grad.add_(parameter, alpha=decay)
            parameter.grad.mul_(like_dimensions_of(parameter.grad, factor))
        group["weight_decay"] = 0.0


def _widest(parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """float64 where a parameter is, else float32: the precision numbers need."""
    wide = any(parameter.dtype == torch.float64 for parameter in parameters)
    return torch.float64 if wide else torch.float32
