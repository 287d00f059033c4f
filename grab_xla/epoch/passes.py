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
    """One pass over an order: the samples that it gave, and those of its steps.

    A loader draws the samples of its next batches between two steps. How many wait for
    their step then is 0 if the loader draws nothing ahead of time; otherwise it stays
    the same as long as batches have one size and every one of them has its step.

    Attributes:
        num_drawn, num_stepped: How many there are of each.
        ended: Whether it has given all of its samples.
        thread: The thread that draws them.
        num_waiting: How many of those that it had given when samples were drawn for the
            last time after a step still wait for theirs.
        is_unsteady: Whether another number waited then than a loader explains.
    """

    num_drawn: int = 0
    num_stepped: int = 0
    ended: bool = False
    thread: int | None = None
    num_waiting: int = 0
    is_unsteady: bool = False
    _stepped_before: int = 0  # when samples were drawn for the last time after a step
    _drawn_before: int = 0
    _stepped_after_end: int = 0
    _first: int = 0  # how many were drawn before the first step,
    _batch: int = 0  # and between the last two times that samples were drawn
    _usual: int = 0  # how many waited the first time,
    _least: int = 0  # and at least
    _size: int = 0  # of the first step
    _has_one_size: bool = True  # steps have, and what is drawn is made of such batches

    def draw(self) -> None:
        """Counts a sample that is given."""
        if self.num_stepped > self._stepped_before:
            self._begin_batch()
        self.num_drawn += 1

    def _begin_batch(self) -> None:
        """Looks how many samples wait when the first one is drawn after a step."""
        drawn = self.num_drawn - self._drawn_before
        self._stepped_before, self._drawn_before = self.num_stepped, self.num_drawn
        self.num_waiting = self.num_drawn - self.num_stepped
        self.thread = threading.get_ident()
        if not self._first:
            self._first, self._usual = drawn, self.num_waiting
            self._least = self._usual
            return
        self._least = min(self._least, self.num_waiting)
        self._has_one_size &= drawn % self._size == 0 or self._batch in (0, drawn)
        self._batch = drawn
        if self._has_one_size:
            self.is_unsteady = self.num_waiting != self._usual
        else:
            # Batches of several sizes: twice as many as at first may wait.
            most = 2 * self._first if self._least else 0
            self.is_unsteady = self.num_waiting > most

    def step(self, num_samples: int) -> None:
        """Counts the samples of a step."""
        self._size = self._size or num_samples
        self._has_one_size &= num_samples == self._size
        self.num_stepped += num_samples
        self.num_waiting = max(0, self.num_waiting - num_samples)
        if self.ended:
            self._stepped_after_end += num_samples

    @property
    def num_unused(self) -> int:
        """How many samples of whole batches had no step when all had been drawn.

        0 if the loop may have been left while a loader held batches that it had drawn
        ahead of time: the steps after the end are then of more than the last batch.
        """
        left = self.num_drawn - self.num_stepped
        last = self.num_drawn - self._drawn_before
        is_over = self.ended and self._stepped_after_end <= last
        return left if is_over and left >= self._batch > 0 else 0


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
        self._num_updated = 0  # Samples of this epoch that updates have used.

    def leave_epoch(self, num_updated: int = 0) -> None:
        """Ends the epoch: passes that have begun do not belong to the next order.

        Updates have used ``num_updated`` samples of the next one.
        """
        self._older, self._newest = self._newest, Pass(ended=True)
        self._epoch += 1
        self._older_goes_on = False
        self._num_updated = num_updated

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
        waiting = self._older.num_drawn - self._older.num_stepped
        evaluated = self._newest.ended and self._newest.num_stepped == 0
        if self._older_goes_on or (evaluated and 0 < num_samples <= waiting):
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
        num_left = own.num_drawn - own.num_stepped
        if own.num_drawn and num_samples > num_left:
            raise ValueError(
                f"step() with {num_samples} samples, but only {num_left} are left of "
                "those that the loader has given: every sample has one step, so where "
                "a batch has several losses, add them up and call backward() once"
            )
        too_few = own.num_waiting and own.num_waiting < num_samples
        unclear = own.is_unsteady or too_few
        if unclear and own.thread == threading.get_ident():
            raise ValueError(
                f"step() with {num_samples} samples, but samples of earlier batches "
                "had no step, or two, and these gradients would be taken for those of "
                "others: give one loss (or gradient) for every sample that the loader "
                "gives, a zero for one that does not count. If no batch was left out, "
                "such as where several are joined, pass indices="
            )

    def warn_of_unused(self, epoch: int) -> None:
        """Warns if samples of an epoch that is over had no step."""
        num_unused, thread = self._newest.num_unused, self._newest.thread
        if num_unused and thread == threading.get_ident():
            warnings.warn(
                f"{num_unused} samples of epoch {epoch} had no step. Unless they were "
                "the last ones, the gradients after them were taken for those of "
                "others: give one loss (or gradient) for every sample that the loader "
                "gives, a zero for one that does not count, or pass indices=",
                GraBWarning,
                stacklevel=4,
            )

    def check_update(self, num_seen: int, batch_size: int) -> None:
        """Raises ValueError unless all of an update's gradients have been taken.

        A state that is saved during the update would lack gradients that come later:
        the samples of a resumed run would get the signs of others.

        Args:
            num_seen: The samples of this epoch whose gradients have been taken.
            batch_size: The samples of the update.
        """
        num_taken, self._num_updated = num_seen - self._num_updated, num_seen
        if num_taken != batch_size:
            raise ValueError(
                f"this update has {batch_size} samples, but sampler.step() "
                f"took the gradients of {num_taken} since the last one: call it once "
                "per minibatch, before optimizer.step()"
            )
