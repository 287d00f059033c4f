"""What makes the bits of a run those of any number of replicas.

A minibatch's gradient has the same bits wherever it is computed, if it is computed from
the same weights, buffers and random numbers, by the same programs. What it brings is
added as integers; see `xla_replica.device.row_units`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from variable_batch_size.data.schedule import Schedule, Step
from variable_batch_size.live.repeatable import RepeatableSums, environment
from variable_batch_size.step.gradients import StepGradients
from variable_batch_size.step.update import RunAgain
from xla_replica import Replica, ReplicaError
from xla_replica.backends.exact_sum import ExactSum, ShardedExactSum
from xla_replica.backends.gradient_sum import GradientSum
from xla_replica.backends.sharded_sum import ShardedSum
from xla_replica.common.arguments import check_type
from xla_replica.device.row_units import MOST_MINIBATCHES, MOST_NARROW, RowUnits

# What chooses a CPU's kernels, beside what torch tells.
_KERNELS = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"


class ExactGradients(StepGradients):
    """Adds every minibatch's gradients as integers; ``.grad`` is that of one alone."""

    is_aged = True

    def make_sum(self) -> GradientSum:
        run, exact, floats = self._run, self._run.sums, super().make_sum()
        self._adds_up_widely = False
        if isinstance(floats, ShardedSum):
            exact.sums = ShardedExactSum(floats, exact.units, exact.names)
        else:
            exact.sums = ExactSum(floats, exact.units, exact.names, run.overlap)
        return exact.sums

    @torch.no_grad()
    def accept(self, num_accumulated: int) -> None:
        self.sums.end_minibatch()
        self._run.sums.units.end_minibatch()


class ExactModel(RepeatableSums):
    """Sums of a model's gradients, and what else its steps have, with the same bits.

    Args:
        model: The model that is trained.
        replica: The replica that the caller runs in.

    Attributes:
        sums: Those of gradients.

    Raises:
        TypeError, ValueError: The model, or this process, cannot have such bits.
    """

    gradients = ExactGradients
    is_exact = True

    def __init__(self, model: nn.Module, replica: Replica) -> None:
        check_type("exact=", model, nn.Module, "the model, whose buffers count too")
        super().__init__(replica)
        self._is_repeat = False  # whether the step under way was run before
        self.sums: Any = None
        self.names = {p: name for name, p in model.named_parameters()}
        for parameter, name in self.names.items():
            if not (parameter.is_floating_point() and parameter.element_size() <= 4):
                raise TypeError(
                    f"exact=: the parameter {name!r} is {parameter.dtype}, and exact "
                    "sums are of float32 and narrower floats"
                )
        if replica.has_streams and not torch.are_deterministic_algorithms_enabled():
            raise ValueError(
                "exact= on a GPU needs torch.use_deterministic_algorithms(True) first"
            )
        self.units = RowUnits(replica)
        self.units.extend({name: p for p, name in self.names.items()})
        super().watch({"": model})

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Watches no other model than the one that it was built with."""

    def check(self, parameters: list[nn.Parameter], schedule: Schedule) -> None:
        """Raises ValueError unless sums can hold the steps, and name the parameters."""
        for parameter in parameters:
            if parameter not in self.names:
                raise ValueError(
                    f"exact=: a parameter of shape {tuple(parameter.shape)} is not one "
                    "of the model's: give exact= the module that has them all"
                )
        largest = int(schedule.trace.batch_sizes.max())
        num_minibatches = -(-largest // schedule.minibatch_size)
        if num_minibatches > MOST_MINIBATCHES:
            raise ValueError(
                f"exact=: a batch of {largest} samples has {num_minibatches} "
                f"minibatches, more than {MOST_MINIBATCHES}: take larger minibatches"
            )

        if self.sums is None:  # so that all steps are one program
            is_wide = num_minibatches > MOST_NARROW
            self.units.stays_wide = self._replica.is_lazy and is_wide

    # --- as a part of the optimizer's updates ---------------------------------------

    def begin_minibatch(self, step: Step | None) -> None:
        if step is not None:
            self.prepare(step)

    def prepare(self, step: Step) -> None:
        """Sets the units of a step's numbers."""
        self.units.begin(step.num_minibatches)

    def look(self, step: Step) -> None:
        """Raises RunAgain if numbers do not fit their units. Collective; reads one.

        Or ReplicaError if they did not fit the last time either.
        """
        [must_repeat] = self._replica.fetch([self.units.measure()])
        if must_repeat.item() and self._is_repeat:
            raise ReplicaError(
                f"step {step.number} of epoch {step.epoch} gave different "
                "gradients when rerun: the model or its data is nondeterministic",
                self._replica.rank,
            )
        self._is_repeat = must_repeat.item()
        if self._is_repeat:
            self.units.follow()
            raise RunAgain
        super().look(step)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.units.state_dict()

    def meet(self, state: dict[str, torch.Tensor] | None) -> None:
        """Takes the peaks of a state, or of other replicas; the step begins anew."""
        self.units.load_state_dict(state or {})
        self._is_repeat = False

    def commit(self, step: Step) -> None:
        """Makes gradients means, uses what riders have summed, follows the maxima."""
        self.sums.commit()
        super().commit(step)
        self.units.follow()

    def clear(self) -> None:
        super().clear()
        self.units.drop_step()

    def environment(self) -> dict[str, Any]:
        return environment(self._replica) | {n: os.environ.get(n) for n in _KERNELS}
