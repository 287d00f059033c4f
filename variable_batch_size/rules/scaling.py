"""Applies a rule to one update: scales hyperparameters and gradient, then restores."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.device_scalars import (
    DeviceScalars,
    TensorScalars,
    dtype_for,
    operand_for,
)
from variable_batch_size.rules.adam import AdamState
from variable_batch_size.rules.rule import (
    HYPERPARAMETERS,
    Rule,
    ScaledHyperparameters,
)
from xla_replica import Replica
from xla_replica.common.arguments import is_number

Group = dict[str, Any]
# From the gain, if the rule is measured, and the batch ratio to a group's numbers and
# its next state.
Finish = Callable[[Any, Any], tuple[ScaledHyperparameters, AdamState | None]]
Step = Callable[[torch.Tensor | None, Any], tuple[Any, ...]]
_RESTORED = (*HYPERPARAMETERS, "foreach")


class Scaling:
    """A rule, and its state for each parameter group.

    Args:
        rule: The rule.
        replica: The replica whose hyperparameters it scales.
        scalars: Uploads numbers.
        late_ratio: The batch ratio is known only after the collective.
    """

    def __init__(
        self,
        rule: Rule,
        replica: Replica,
        scalars: DeviceScalars,
        late_ratio: bool = False,
    ) -> None:
        self._rule = rule
        self._replica = replica
        self._scalars = scalars
        self._states: list[AdamState | None] = []
        self._trained: list[list[int]] = []  # ids of parameters, by group
        # What is known only then stays on the device where reading is not free.
        self._is_late = rule.measured or late_ratio
        self._on_device = replica.is_lazy or (self._is_late and not replica.is_host)

    def prepare(self, optimizer: Optimizer, batch_ratio: float | None) -> Step:
        """Returns the function that steps the optimizer.

        Uploads the numbers, so call it before a collective is traced.

        Args:
            optimizer: The inner optimizer.
            batch_ratio: kappa; None if it is late.

        Returns:
            To be called when gradients are averaged, with the ``(G,)`` learning rate
            factors if the rule is measured, and the batch ratio: a number, or ``(1,)``
            on the device. It scales hyperparameters and gradients,
            steps the optimizer, restores the hyperparameters and returns the effective
            learning rate of each group: a float, or a tensor of shape ``(1,)``. It
            raises ValueError if a step hook changed a learning rate.

        Raises:
            ValueError: The rule has no meaning at this batch ratio.
        """
        groups = optimizer.param_groups
        for group in groups[len(self._states) :]:  # may have made updates already
            steps = _steps(optimizer, group["params"]) if self._rule.beta else set()
            self._states.append(self._rule.init(max(steps, default=0)))
        if self._rule.beta:
            self._check_histories(optimizer)
        ready = [
            self._prepare_group(index, group, batch_ratio)
            for index, group in enumerate(groups)
        ]

        def step(factors: torch.Tensor | None, ratio: Any) -> tuple[Any, ...]:
            gains: list[Any] = [None] * len(groups)
            if factors is not None:
                on_host = not self._on_device
                gains = factors.tolist() if on_host else list(factors.split(1))
            outcomes = [finish(gain, ratio) for finish, gain in zip(ready, gains)]
            before = [{k: g[k] for k in _RESTORED if k in g} for g in groups]
            mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if self._on_device:
                upload = self._replica.scalar if self._replica.is_lazy else None
                mode = TensorScalars(upload)
            try:
                with mode:
                    for group, (scaled, _) in zip(groups, outcomes):
                        self._hand_over(group, scaled)
                    lrs = [group["lr"] for group in groups]
                    optimizer.step()
                changed = any(group["lr"] is not lr for group, lr in zip(groups, lrs))
            finally:
                for group, values in zip(groups, before):
                    group.update(values)
            for index, (_, state) in enumerate(outcomes):
                if not self._rule.beta or _trained(groups[index]):
                    self._states[index] = state
            if changed:
                raise ValueError(
                    "a step hook changed the learning rate, which is the scaled one "
                    "while hooks run: use optimizer.attach(...), which runs after the "
                    "update and sees the reference learning rate"
                )
            return tuple(scaled.effective_lr for scaled, _ in outcomes)

        return step

    def state_dict(self) -> list[Any]:
        """Returns, for each parameter group, None or the numbers of an `AdamState`."""
        return [None if state is None else list(state) for state in self._states]

    def load_state_dict(self, states: list[Any]) -> None:
        """Takes what `state_dict` returned; an empty list forgets all history."""
        self._states = [
            None
            if state is None
            else AdamState(state[0], state[1] and (*state[1],), state[2])
            for state in states
        ]
        self._trained = []

    def _check_histories(self, optimizer: Optimizer) -> None:
        """Raises ValueError if parameters of one group have made different updates.

        One learning rate cannot correct the bias of two histories. Looks at the
        optimizer's own counters only when other parameters are trained than in the
        update before.
        """
        trained = [[id(p) for p in _trained(g)] for g in optimizer.param_groups]
        if trained == self._trained:
            return
        for index, group in enumerate(optimizer.param_groups):
            steps = _steps(optimizer, _trained(group))
            history = self._states[index].num_updates
            if steps and steps != {history}:
                raise ValueError(
                    f"rule {self._rule.name!r}: parameters of group {index} have made "
                    f"{sorted(steps)} updates and the group {history}, so their "
                    "averages need different bias corrections, which one group cannot "
                    "have: put parameters that begin to train later into a group of "
                    "their own"
                )
        self._trained = trained

    def _prepare_group(
        self, index: int, group: Group, batch_ratio: float | None
    ) -> Finish:
        """Returns what is left to do when gain and batch ratio are known."""
        dtype = dtype_for(group["params"])

        def upload(name: str, value: float) -> torch.Tensor:
            return self._scalars.get((name, index), value, dtype)

        decay = group.get("weight_decay", 0.0)
        if not (is_number(group["lr"]) and 0 <= group["lr"] < math.inf):
            raise ValueError(
                f"the learning rate of parameter group {index} has become "
                f"{group['lr']!r}; it must be a finite number >= 0, not a tensor: look "
                "at what sets it, a scheduler or an attached function"
            )
        if self._is_late:
            inputs = {**group}
            known: Any = batch_ratio
            if self._on_device:
                inputs["lr"] = upload("lr", group["lr"])
                if self._rule.decay_per_sample and decay:
                    inputs["weight_decay"] = upload("weight decay", decay)
                    if known is not None:
                        known = upload("batch ratio", known)
            return lambda gain, late: self._rule.update(
                late if known is None else known, inputs, None, gain
            )
        scaled, state = self._rule.update(batch_ratio, group, self._states[index])
        if self._on_device:
            scaled = scaled._replace(lr=upload("lr", scaled.lr))
            if scaled.gradient_factor is not None:
                factor = upload("gradient factor", scaled.gradient_factor)
                scaled = scaled._replace(gradient_factor=factor)
            if decay and (self._rule.decay_per_sample or self._rule.beta):
                decay = upload("weight decay", scaled.weight_decay)
                scaled = scaled._replace(weight_decay=decay)
        return lambda gain, late: (scaled, state)

    def _hand_over(self, group: Group, scaled: ScaledHyperparameters) -> None:
        """Writes the numbers into the group; does what torch cannot do with them."""
        group["lr"] = scaled.lr
        if scaled.betas is not None:
            group["betas"] = scaled.betas
        if scaled.eps is not None:
            group["eps"] = scaled.eps
        if self._on_device and "foreach" in group and not group.get("fused"):
            group["foreach"] = False  # would read a tensor learning rate back
        decay = scaled.weight_decay
        if "weight_decay" in group:
            group["weight_decay"] = decay
        if scaled.gradient_factor is None and not isinstance(decay, torch.Tensor):
            return
        if group.get("decoupled_weight_decay"):
            for parameter in _trained(group):
                parameter.mul_(operand_for(parameter, 1 - scaled.lr * decay))
        else:
            _scale_gradients(group, decay, scaled.gradient_factor)
        group["weight_decay"] = 0.0


def _scale_gradients(group: Group, decay: Any, factor: Any) -> None:
    """Makes every gradient factor * (gradient + decay * weight), in place."""
    decays = isinstance(decay, torch.Tensor) or decay != 0
    if group.get("maximize"):
        decay = -decay
    for parameter in _trained(group):
        gradient = parameter.grad
        if isinstance(decay, torch.Tensor):
            gradient.add_(parameter * operand_for(parameter, decay))
        elif decays:
            gradient.add_(parameter, alpha=decay)
        if isinstance(factor, torch.Tensor):
            gradient.mul_(operand_for(gradient, factor))
        elif factor is not None:
            gradient.mul_(factor)


def _steps(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> set[int]:
    """Returns the numbers of updates that the parameters have made."""
    return {
        int(optimizer.state.get(parameter, {}).get("step", 0))
        for parameter in parameters
    }


def _trained(group: Group) -> list[torch.Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]
