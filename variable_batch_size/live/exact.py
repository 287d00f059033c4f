"""What makes the bits of a run those of any number of replicas.

A minibatch's gradient has the same bits wherever it is computed, if it is computed from
the same weights, buffers and random numbers, by the same programs. What it brings is
added as integers; see `xla_replica.backends.grid`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from variable_batch_size.data.schedule import Schedule, Step
from variable_batch_size.live.repeatable import RepeatableSums
from variable_batch_size.live.settings import environment
from variable_batch_size.step.gradients import StepGradients
from variable_batch_size.step.run import Run
from variable_batch_size.step.update import RunAgain
from xla_replica import Replica, ReplicaError
from xla_replica.backends.gradient_sum import GradientSum
from xla_replica.backends.grid import ExactSum, Grid
from xla_replica.common.arguments import check_type

# What chooses a CPU's kernels, beside what torch tells.
_KERNELS = "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"


class ExactModel(RepeatableSums):
    """The grid of a model's gradients and of its normalisation layers' statistics.

    Args:
        model: The model that is trained.
        replica: The replica that the caller runs in.

    Attributes:
        sums: Those of gradients.

    Raises:
        TypeError, ValueError: The model, or this process, cannot have such bits.
    """

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
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        if replica.has_streams and not is_deterministic:
            raise ValueError(
                "exact= on a GPU needs torch.use_deterministic_algorithms(True) first"
            )
        super().check([*self.names], None)
        self.grid = Grid([*self.names.values()], replica)
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
        if num_minibatches > self.grid.max_terms:
            raise ValueError(
                f"exact=: a batch of {largest} samples has {num_minibatches} "
                f"minibatches, more than {self.grid.max_terms}: take larger minibatches"
            )

    # --- as a part of the optimizer's updates ---------------------------------------

    def look(self, step: Step) -> None:
        """Raises RunAgain if sums do not fit their grid. Collective; reads one number.

        Or ReplicaError if they did not fit the last time either.
        """
        [must_repeat] = self._replica.fetch([self.grid.measure()])
        if must_repeat.item() and self._is_repeat:
            raise ReplicaError(
                f"step {step.number} of epoch {step.epoch} gave different "
                "gradients when rerun: the model or its data is nondeterministic",
                self._replica.rank,
            )
        self._is_repeat = must_repeat.item()
        if self._is_repeat:
            self.grid.follow()
            raise RunAgain
        super().look(step)

    def state_dict(self) -> dict[str, int]:
        return self.grid.state_dict()

    def meet(self, state: dict[str, int] | None) -> None:
        """Takes the grid of a state, or of other replicas; the step begins anew."""
        self.grid.load_state_dict(state or {})
        self._is_repeat = False

    def commit(self, step: Step) -> None:
        """Makes gradients means, uses what riders have summed, follows the maxima."""
        self.sums.commit()
        super().commit(step)
        self.grid.follow()

    def clear(self) -> None:
        super().clear()
        self.grid.drop_step()

    def gradients(self, run: Run) -> StepGradients:
        return ExactGradients(run)

    def environment(self) -> dict[str, Any]:
        kernels = {name: os.environ.get(name) for name in _KERNELS}
        return {**environment(self._replica), **kernels}


class ExactGradients(StepGradients):
    """Adds every minibatch's gradients as integers; ``.grad`` is that of one alone."""

    is_aged = True

    def make_sum(self) -> GradientSum:
        exact = self._run.sums
        self._adds_up_widely = False
        exact.sums = ExactSum(self._run.replica, self._is_unchanged, exact)
        return exact.sums

    @torch.no_grad()
    def accept(self, num_accumulated: int) -> None:
        self.sums.end_minibatch()
        self._run.sums.grid.end_minibatch()
