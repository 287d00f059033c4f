"""Passes over a sampler: which of them a step can belong to."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor


@dataclasses.dataclass
class Pass:
    """One pass over an order: the samples that it gave, and those of its steps.

    Attributes:
        num_drawn, num_stepped: How many there are of each.
        ended: Whether it has given all of its samples.
        thread: The thread that draws them.
        num_waiting: How many of those that it had given when samples were drawn for the
            last time after a step still wait for theirs.
        is_prompt: Whether none did once: then nobody draws samples ahead of time.
    """

    num_drawn: int = 0
    num_stepped: int = 0
    ended: bool = False
    thread: int | None = None
    num_waiting: int = 0
    is_prompt: bool = False
    _stepped_before: int = 0

    def draw(self) -> None:
        """Counts a sample that is given."""
        if self.num_stepped > self._stepped_before:
            self._stepped_before = self.num_stepped
            self.num_waiting = self.num_drawn - self.num_stepped
            self.is_prompt |= self.num_waiting == 0
            self.thread = threading.get_ident()
        self.num_drawn += 1

    def step(self, num_samples: int) -> None:
        """Counts the samples of a step."""
        self.num_stepped += num_samples
        self.num_waiting = max(0, self.num_waiting - num_samples)


class Passes:
    """Refuses steps that may belong to another pass than the newest one.

    A pass that begins after some steps of an epoch begins the next epoch: the epoch was
    left early. If the older pass goes on nevertheless, because the newer one was an
    evaluation in the middle of it, its steps are taken for those of the new order. That
    shows in one of two ways:

    - samples are drawn from the older pass;
    - the newer pass is over without a step, while the older one has given samples that
      may still be used: the current minibatch, and those that a loader prefetched.
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

    def take(
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
        """Raises ValueError if samples of an earlier batch had no step.

        Batches that a loader draws ahead of time are whole. So what waits is either no
        sample or at least the next batch, and always none where none has waited before.
        A thread that draws samples beside the steps may do so at any time.
        """
        own = self._newest
        too_few = own.is_prompt or own.num_waiting < num_samples
        if own.num_waiting and too_few and own.thread == threading.get_ident():
            raise ValueError(
                f"step() with {num_samples} samples, but {own.num_waiting} samples of "
                "earlier batches had no step, and these gradients would be taken for "
                "theirs: give a loss (or a gradient) for every sample that the loader "
                "gives, a zero for one that does not count. If no batch was left out, "
                "such as where several are joined, pass indices="
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
