"""Passes over a sampler: which of them a step can belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass
class Pass:
    """One pass over an order: the samples that it gave, and those of its steps."""

    num_drawn: int = 0
    num_stepped: int = 0
    ended: bool = False


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
                own.num_drawn += 1
                self._older_goes_on |= epoch != self._epoch
                yield sample
        except GeneratorExit:
            # Whoever drew these samples is gone, and with it what it prefetched.
            own.num_drawn = own.num_stepped
            raise
        finally:
            own.ended = True

    def check_step(self, num_samples: int) -> None:
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

    def count_step(self, num_samples: int) -> None:
        """Counts a step of the newest pass."""
        self._newest.num_stepped += num_samples
