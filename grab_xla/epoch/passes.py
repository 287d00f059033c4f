"""Passes over a sampler: which of them a step can belong to."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from grab_xla.epoch.orders import GraBWarning


@dataclasses.dataclass
class Pass:
    """One pass over an order: counts of the samples that it gave, and of its steps.

    A loader draws the samples of its next batches between two steps. How many wait for
    their step then is 0 if the loader draws nothing ahead of time; otherwise it stays
    the same as long as steps have one size and every batch has its step.

    Attributes:
        num_drawn, num_stepped: How many samples there are of each.
        ended: Whether it has given all of its samples.
        thread: The thread that draws them.
        step_size: The number of samples of the first step.
        has_one_size: Whether all steps have that.
        usually_waiting: How many samples waited when samples were drawn for the first
            time after a step.
        num_waiting: How many of those that waited when this happened last still wait.
        is_unsteady: Whether another number waited then.
        steps_after_end: How many steps were taken after the last sample was given.
    """

    num_drawn: int = 0
    num_stepped: int = 0
    ended: bool = False
    thread: int | None = None
    step_size: int = 0
    has_one_size: bool = True
    usually_waiting: int | None = None
    num_waiting: int = 0
    is_unsteady: bool = False
    steps_after_end: int = 0
    _stepped_before: int = 0  # when samples were drawn for the last time after a step

    @property
    def num_left(self) -> int:
        """How many samples were given and had no step."""
        return self.num_drawn - self.num_stepped

    def draw(self) -> None:
        """Counts a sample that is given."""
        if self.num_stepped > self._stepped_before:
            self._stepped_before, self.num_waiting = self.num_stepped, self.num_left
            self.thread = threading.get_ident()
            if self.usually_waiting is None:
                self.usually_waiting = self.num_left
            differs = self.num_left != self.usually_waiting
            self.is_unsteady = differs and self.has_one_size
        self.num_drawn += 1

    def step(self, num_samples: int) -> None:
        """Counts the samples of a step."""
        self.step_size = self.step_size or num_samples
        self.has_one_size &= num_samples == self.step_size
        self.num_stepped += num_samples
        self.num_waiting = max(0, self.num_waiting - num_samples)
        self.steps_after_end += self.ended


class Passes:
    """Refuses steps that may belong to another pass than the newest one.

    A pass that begins after some steps of an epoch begins the next epoch: the epoch was
    left early. If the older pass goes on nevertheless, because the newer one was an
    evaluation in the middle of it, its steps are taken for those of the new order. That
    shows in one of two ways:

    - samples are drawn from the older pass;
    - the newer pass is over without a step, while the older one has given samples that
      may still be used: the current minibatch, and those that a loader prefetched.

    It also refuses steps after samples that had none, or two: see `Pass`.
    """

    def __init__(self) -> None:
        self._older, self._newest = Pass(), Pass(ended=True)
        self._epoch = 0  # Counts orders, also those that were restored.
        self._older_goes_on = False

    def leave_epoch(self) -> None:
        """Ends the epoch: passes that have begun do not belong to the next order."""
        self._older, self._newest = self._newest, Pass(ended=True)
        self._epoch += 1
        self._older_goes_on = False

    def over(self, samples: list[int]) -> Iterator[int]:
        """Begins a pass over the samples."""
        self._newest, self._older_goes_on = Pass(), False
        return self._draw(samples, self._newest, self._epoch)

    def _draw(self, samples: list[int], own: Pass, epoch: int) -> Iterator[int]:
        try:
            for sample in samples:
                own.draw()
                self._older_goes_on |= epoch != self._epoch
                yield sample
        except GeneratorExit:
            # Whoever drew these samples is gone, and with it what it prefetched.
            own.num_drawn = own.num_stepped
            raise
        finally:
            own.ended = True

    def claim(
        self,
        num_samples: int,
        expected: np.ndarray,
        indices: Sequence[int] | Tensor | None,
        guesses: bool,
    ) -> None:
        """Counts a step of the newest pass.

        Args:
            num_samples: How many samples the step has.
            expected: The next samples of the order, as many if there are.
            indices: The samples of the step, if they are known.
            guesses: Whether the step may belong to another pass if they are not.

        Raises:
            ValueError: These cannot be the next samples.
        """
        if guesses and indices is None:  # Otherwise they tell passes apart.
            self._check_pass(num_samples)
            self._check_all_used(num_samples)
        if len(expected) < num_samples:
            raise ValueError(
                f"step() with {num_samples} samples, but only {len(expected)} are left "
                "of this epoch on this replica: iter(sampler) begins the next one"
            )
        if indices is not None:
            received = torch.as_tensor(indices).cpu().numpy().reshape(-1)
            if not np.array_equal(received, expected):
                raise ValueError(
                    f"step(): indices are {received[:8].tolist()}..., but the next "
                    f"{num_samples} samples of the order are "
                    f"{expected[:8].tolist()}...: call step() once per batch, in the "
                    "order in which the loader gives them; a second pass over the "
                    "loader begins the next epoch"
                )
        self._newest.step(num_samples)

    def _check_pass(self, num_samples: int) -> None:
        """Raises ValueError unless a step can only be one of the newest pass."""
        evaluated = self._newest.ended and self._newest.num_stepped == 0
        if self._older_goes_on or (
            evaluated and 0 < num_samples <= self._older.num_left
        ):
            raise ValueError(
                f"step() with {num_samples} samples: a pass over the sampler (or its "
                "DataLoader) began before another one had taken all its steps, so "
                "these gradients may be of samples of either. Evaluate with a "
                "DataLoader of its own, such as DataLoader(dataset, batch_size); take "
                "the steps of a pass before the next one begins; or pass indices=, the "
                "samples that these gradients are of"
            )

    def _check_all_used(self, num_samples: int) -> None:
        """Raises ValueError if samples of an earlier batch had no step, or two.

        Batches that a loader draws ahead of time are whole. So what waits is either no
        sample or at least the next batch. A thread that draws samples beside the steps
        may do so at any time.
        """
        own = self._newest
        if own.num_drawn and num_samples > own.num_left:
            raise ValueError(
                f"step() with {num_samples} samples, but only {own.num_left} are left "
                "of those that the loader has given: every sample has one step, so "
                "where a batch has several losses, add them up and call backward() once"
            )
        too_few = 0 < own.num_waiting < num_samples
        if (own.is_unsteady or too_few) and own.thread == threading.get_ident():
            raise ValueError(
                f"step() with {num_samples} samples, but samples of earlier batches "
                "had no step, or two, and these gradients would be taken for those of "
                "others: give one loss (or gradient) for every sample that the loader "
                "gives, a zero for one that does not count. If no batch was left out, "
                "such as where several are joined, pass indices="
            )

    def warn_of_unused(self, epoch: int) -> None:
        """Warns if samples of an epoch that is over had no step.

        A first batch without a step looks like one that is drawn ahead of time. Steps
        that come after the last sample was given show that a loader does that.
        """
        own = self._newest
        is_over = own.ended and own.thread == threading.get_ident()
        one_waited = own.usually_waiting == own.step_size <= own.num_left
        if is_over and one_waited and own.steps_after_end <= 1:
            warnings.warn(
                f"{own.num_left} samples of epoch {epoch} had no step. Unless they "
                "were the last ones, the gradients after them were taken for those of "
                "others: give one loss (or gradient) for every sample that the loader "
                "gives, a zero for one that does not count, or pass indices=",
                GraBWarning,
                stacklevel=4,
            )
