"""`Sums`: how the gradients and statistics of a step's minibatches add up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from variable_batch_size.data.account import Account
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.data.schedule import Schedule
from variable_batch_size.step.gradients import StepGradients
from variable_batch_size.step.run import Run

Modules = Mapping[str, nn.Module]


class Sums:
    """Sums in floating point, whose last bits depend on the order of minibatches.

    `variable_batch_size.live.exact.ExactModel` has the same bits in any order.

    `variable_batch_size.live.repeatable.RepeatableSums` is for members of live runs.

    Attributes:
        is_exact: Whether sums have the same bits in any order.
        keeps_buffers: Whether a step may be run again by others, so that buffers are
            equal on all replicas after every update.
    """

    is_exact = keeps_buffers = False

    def check(self, parameters: list[nn.Parameter], schedule: Schedule) -> None:
        """Raises ValueError unless these parameters' gradients can be added."""

    def environment(self) -> dict[str, Any]:
        """Returns what the bits of a gradient depend on beside the model."""
        return {}

    def watch(self, modules: Modules) -> None:
        """Has what forward passes of these modules move be summed, too."""

    def follow_order(self, order: Any) -> None:
        """Has what orders a sampler's samples move with the steps."""

    def account(self, sampler: CustomSampler, key: int) -> Account:
        """Returns the account of an optimizer with these sums."""
        return Account(sampler.ledger, key)

    def gradients(self, run: Run) -> StepGradients:
        """Returns what accumulates the gradients of a step."""
        return StepGradients(run)

    def parts(self) -> Mapping[str, Any]:
        """Returns the parts that an update has because of these sums, by name."""
        return {}

    def state_dict(self) -> dict[str, int] | None:
        """Returns what sums go on from after a step; None: they begin from nothing."""
        return None

    def meet(self, state: dict[str, int] | None) -> None:
        """Takes the state of a run that is resumed, or of other members."""
