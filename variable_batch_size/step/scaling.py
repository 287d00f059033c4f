"""Applies a rule to one update: scales hyperparameters and gradient, then restores."""

from __future__ import annotations

import contextlib
import math
import weakref
from typing import Any

import numpy as np
import torch

from variable_batch_size.data.account import Account
from variable_batch_size.data.schedule import Step
from variable_batch_size.device_scalars import TensorScalars, dtype_for, operand_for
from variable_batch_size.rules.adam import AdamState
from variable_batch_size.rules.rule import HYPERPARAMETERS, ScaledHyperparameters
from variable_batch_size.step.run import Run
from xla_replica import ReplicaError
from xla_replica.common.arguments import check_number
from xla_replica.common.trees import without_numpy

Group = dict[str, Any]
_RESTORED = (*HYPERPARAMETERS, "foreach")


class Scaling:
    """The rule of a run, and its state for each parameter group of the optimizer.

    The inner optimizer steps here alone: its own ``step()`` is an error from now on, as
    long as the wrapper is alive.
    """

    def __init__(self, run: Run) -> None:
        replica, inner = run.replica, run.inner
        self._run, self._rule, self._optimizer = run, run.rule, inner
        self._states: list[AdamState | None] = []
        self._trained: list[list[int]] = []  # ids of parameters, by group
        # What is known only then stays on the device where reading is not free.
        self._is_late = self._rule.measured or run.ref_weight is not None
        self._on_device = replica.is_lazy or (self._is_late and not replica.is_host)
        # Where gain or batch ratio are measured: a rule's inputs for each group, and
        # the batch ratio if it is known.
        self._inputs: list[tuple[Group, Any]] = []
        # For each group: the hyperparameters that it steps with, and the next state.
        self._made: list[tuple[ScaledHyperparameters, AdamState | None]] = []
        self._given: tuple[Any, ...] | None = None  # None: they may change
        self.is_stepping = False
        if not hasattr(inner, "_scaling"):
            inner.register_step_pre_hook(_refuse_own_step)
        inner._scaling = weakref.ref(self)  # the newest, if there are several

    # --- the numbers that the user gives --------------------------------------------

    def note_given(self, account: Account) -> None:
        """Notes the hyperparameters that replicas have; none but within an epoch."""
        is_within = account.announced and not account.ended
        groups = self._optimizer.param_groups
        self._given = hyperparameters(groups) if is_within else None

    def refuse_changes(self, account: Account) -> None:
        """Raises ReplicaError if a change since then was not seen by all replicas.

        Replicas run the user's loop body different numbers of times: once per
        minibatch, and not at all in steps in which they are idle. What looks right
        from here and is not, the ballots find.
        """
        is_within = account.substep  # on one replica, too: more would do otherwise
        may_idle = account.plan.has_idle_replicas and not self._run.lockstep
        may_change = self._given is None or not (is_within or may_idle)
        if may_change or self._given == hyperparameters(self._optimizer.param_groups):
            return
        where = f"within step {account.number}" if is_within else "between two updates"
        raise ReplicaError(
            f"a hyperparameter changed {where} of epoch {account.epoch}: call "
            "optimizer.attach(scheduler), or change it before optimizer.set_epoch: "
            "docs/variable_batch_size.md#replicas-without-work",
            account.ledger.rank,
        )

    # --- before the collective ------------------------------------------------------

    def prepare(self, step: Step) -> None:
        """Computes what `step` needs, or uploads what that is computed from.

        Uploads are made here, before a collective is traced.

        Args:
            step: Its size over the reference batch size is kappa, unless that is
                measured.

        Raises:
            ValueError, TypeError: The rule has no meaning at this batch ratio, or a
                reference learning rate is not a finite number >= 0.
        """
        groups = self._optimizer.param_groups
        batch_ratio: Any = None  # measured
        if self._run.ref_weight is None:
            batch_ratio = step.batch_size / (self._run.ref_batchsize or 1)
        for group in groups[len(self._states) :]:  # may have made updates already
            steps = self._steps(group["params"]) if self._rule.beta else set()
            self._states.append(self._rule.init(max(steps, default=0)))
        if self._rule.beta:
            self._check_histories()
        self._inputs, self._made = [], []
        for index, group in enumerate(groups):
            lr = group["lr"]
            if not (type(lr) is float and 0 <= lr < math.inf):
                check_number(f"the learning rate of group {index} now", lr, least=0)
            if self._is_late:
                self._inputs.append(self._inputs_of(index, group, batch_ratio))
                continue
            scaled, state = self._rule.update(batch_ratio, group, self._states[index])
            if self._on_device:
                uploaded: Any = self._uploaded(index, group, scaled._asdict())
                scaled = scaled._replace(**uploaded)
            self._made.append((scaled, state))

    def _inputs_of(self, index: int, group: Group, ratio: Any) -> tuple[Group, Any]:
        if not self._on_device:
            return {**group}, ratio
        inputs = {**group, **self._uploaded(index, group, group)}
        if ratio is not None and self._rule.decay_per_sample:
            dtype = dtype_for(group["params"])
            ratio = self._run.scalars.get(("batch ratio", index), ratio, dtype)
        return inputs, ratio

    def _uploaded(self, index: int, group: Group, numbers: Group) -> Group:
        """Returns those numbers that change from update to update, on the device."""
        names = ["lr"]
        if numbers.get("gradient_factor") is not None:
            names.append("gradient_factor")
        changes_decay = self._rule.decay_per_sample or self._rule.beta
        if changes_decay and group.get("weight_decay"):
            names.append("weight_decay")
        dtype = dtype_for(group["params"])
        return {n: self._run.scalars.get((n, index), numbers[n], dtype) for n in names}

    # --- after it -------------------------------------------------------------------

    def step(self, factors: torch.Tensor | None, batch_ratio: Any) -> tuple[Any, ...]:
        """Scales hyperparameters and gradients, steps, restores hyperparameters.

        Call it after `prepare`, when gradients are averaged.

        Args:
            factors: ``(G,)``: the gains, if the rule is measured.
            batch_ratio: If it is measured: a number, or ``(1,)`` on the device.

        Returns:
            The effective learning rate of each group: a float, or ``(1,)``.

        Raises:
            ValueError: A step hook changed what is restored, such as a learning rate.
        """
        if self._is_late:
            self._scale_late(factors if self._rule.measured else None, batch_ratio)
        run, groups = self._run, self._optimizer.param_groups
        given = [(g, {n: g[n] for n in _RESTORED if n in g}) for g in groups]
        mode: Any = contextlib.nullcontext()
        if self._on_device:
            mode = TensorScalars(run.scalars if run.replica.is_lazy else None)
        try:
            with mode:
                for group, (scaled, _) in zip(groups, self._made):
                    self._hand_over(group, scaled)
                used = [{n: group[n] for n in names} for group, names in given]
                self.is_stepping = True
                self._optimizer.step()
            changed = [n for g, u in zip(groups, used) for n in u if g[n] is not u[n]]
        finally:
            self.is_stepping = False
            for group, values in given:
                group.update(values)
        if self._rule.beta:
            for index, (_, state) in enumerate(self._made):
                if _trained(groups[index]):
                    self._states[index] = state
        if changed:
            raise ValueError(
                f"a step hook changed {changed[0]!r} of a parameter group: use "
                "optimizer.attach(...), which runs later and sees the reference value"
            )
        return tuple(scaled.effective_lr for scaled, _ in self._made)

    def _scale_late(self, factors: torch.Tensor | None, batch_ratio: Any) -> None:
        gains: list[Any] = [None] * len(self._inputs)
        if factors is not None:
            gains = list(factors.split(1)) if self._on_device else factors.tolist()
        for (inputs, known), gain in zip(self._inputs, gains):
            ratio = batch_ratio if known is None else known
            self._made.append(self._rule.update(ratio, inputs, None, gain))

    def _hand_over(self, group: Group, scaled: ScaledHyperparameters) -> None:
        """Writes the numbers into the group; does what torch cannot do with them."""
        numbers = scaled._asdict().items()
        group.update({n: x for n, x in numbers if n in group and x is not None})
        if self._on_device and "foreach" in group and not group.get("fused"):
            group["foreach"] = False  # would read a tensor learning rate back
        decay = scaled.weight_decay
        if scaled.gradient_factor is None and not isinstance(decay, torch.Tensor):
            return
        if group.get("decoupled_weight_decay"):
            for parameter in _trained(group):
                parameter.mul_(operand_for(parameter, 1 - scaled.lr * decay))
        else:
            _scale_gradients(group, decay, scaled.gradient_factor)
        group["weight_decay"] = 0.0

    # --- the history of Adam's betas ------------------------------------------------

    def state_dict(self) -> list[Any]:
        """Returns, for each parameter group, None or the numbers of an `AdamState`."""
        return [None if state is None else list(state) for state in self._states]

    def load_state_dict(self, states: list[Any]) -> None:
        """Loads what `state_dict` returned; an empty list forgets all history."""
        self._states = [state and AdamState(*state) for state in states]
        self._trained = []

    def _check_histories(self) -> None:
        """Raises ValueError if parameters of one group have made different updates.

        One learning rate cannot correct the bias of two histories. Looks at the
        optimizer's own counters only when other parameters are trained than in the
        update before.
        """
        groups = self._optimizer.param_groups
        trained = [[id(p) for p in _trained(group)] for group in groups]
        if trained == self._trained:
            return
        for index, group in enumerate(groups):
            steps = self._steps(_trained(group))
            history = self._states[index].num_updates
            if steps and steps != {history}:
                raise ValueError(
                    f"rule {self._rule.name!r}: parameters of group {index} have made "
                    f"{sorted(steps)} updates and the group {history}: put those that "
                    "begin to train later into a group of their own"
                )
        self._trained = trained

    def _steps(self, parameters: list[torch.Tensor]) -> set[int]:
        """Returns the numbers of updates that the parameters have made."""
        state = self._optimizer.state
        return {int(state.get(each, {}).get("step", 0)) for each in parameters}


def _refuse_own_step(inner: Any, *_: Any) -> None:
    """Runs before every step of an inner optimizer; raises RuntimeError if it is own.

    A module's function and not a method, so that the hook keeps no wrapper alive.
    """
    scaling = inner._scaling()
    if scaling is not None and not scaling.is_stepping:
        raise RuntimeError(
            f"step() of a wrapped {type(inner).__name__} was called: it would use "
            "partial sums of gradients, on this replica alone. Call the wrapper's step"
        )


def _scale_gradients(group: Group, decay: Any, factor: Any) -> None:
    """Makes every gradient factor * (gradient + decay * weight), in place."""
    if group.get("maximize"):
        decay = -decay
    for parameter in _trained(group):
        gradient: Any = parameter.grad
        if isinstance(decay, torch.Tensor):
            gradient.add_(parameter * operand_for(parameter, decay))
        elif decay != 0:
            gradient.add_(parameter, alpha=decay)
        if factor is not None:
            gradient.mul_(operand_for(gradient, factor))


def _trained(group: Group) -> list[torch.Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def hyperparameters(groups: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Returns the name and value of every number in the parameter groups.

    NumPy's are those of Python, as in a checkpoint that another replica has loaded.
    """
    found = []
    for name, value in (item for group in groups for item in group.items()):
        if isinstance(value, (np.generic, tuple)):
            value = without_numpy(value)
        if isinstance(value, (int, float, tuple)):
            found.append((name, value))
    return tuple(found)
