"""Which replica runs which minibatch of which step: integers, from the trace alone.

Everything elastic is read from one table, the `EpochPlan`: the sampler's indices, the
divisor of the summed gradients, the batch ratio, and which replicas are idle. This
module does not use torch. The rules are those of the earlier implementation:

- An epoch holds ``num_samples // minibatch_size`` whole minibatches and takes steps
  from the trace, in order, as long as they fit. The step that does not fit begins the
  next epoch; the minibatches that are left of this one are dropped.
- Minibatch k of a step (from 0) goes to replica ``k mod num_replicas``. With fewer
  minibatches than replicas, the high ranks are idle in that step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from variable_batch_size.traces.batch_trace import Trace, TraceError
from xla_replica.common.arguments import check_choice, check_integer


class Cursor(NamedTuple):
    """Where a run is, for the sampler, the optimizer wrapper and `Checkpointer`."""

    epoch: int  # from 0
    step: int  # how many are done; one that was interrupted is run again


class TraceExhausted(TraceError):
    """An epoch was requested that begins after the last step of the trace."""


@dataclasses.dataclass(frozen=True, eq=False)
class EpochPlan:
    """The steps of one epoch, and which replica runs which of their minibatches."""

    epoch: int  # from 0
    first_step: int  # its number since the beginning of training
    num_samples: int  # the length of the epoch's order
    minibatch_size: int  # in samples
    num_replicas: int  # how many share the steps
    num_minibatches: np.ndarray  # (num_steps,) int64: of every step
    start_step: int = 0  # how many steps are done, where a run was resumed within it
    # Every replica runs as many minibatches in a step as replica 0; see `is_padding`.
    padded: bool = False

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """``(num_steps + 1,)`` int64: each step's first minibatch in the order."""
        return np.concatenate([[0], np.cumsum(self.num_minibatches)]).astype(np.int64)

    @property
    def num_steps(self) -> int:
        """Updates that every replica takes in this epoch."""
        return len(self.num_minibatches)

    @property
    def num_dropped_samples(self) -> int:
        """Samples of the order that no step of this epoch uses."""
        return self.num_samples - int(self.starts[-1]) * self.minibatch_size

    @functools.cached_property
    def has_idle_replicas(self) -> bool:
        """Whether some replica runs no minibatch in some step."""
        return not self.padded and bool(
            (self.num_minibatches < self.num_replicas).any()
        )

    def batch_size(self, step: int) -> int:
        """Returns the global batch size of step ``step`` of this epoch, in samples."""
        return int(self.num_minibatches[step]) * self.minibatch_size

    def num_substeps(self, rank: int) -> np.ndarray:
        """Returns ``(num_steps,)`` int64: minibatches of replica ``rank`` per step."""
        first = 0 if self.padded else rank
        remaining = self.num_minibatches - first + self.num_replicas - 1
        return np.maximum(remaining, 0) // self.num_replicas

    def is_padding(self, rank: int, step: int, substep: int) -> bool:
        """Returns whether replica ``rank`` runs a minibatch there that does not count.

        In a padded plan that is the step's last one, which another replica runs too.
        """
        number = substep * self.num_replicas + rank
        return self.padded and number >= int(self.num_minibatches[step])

    def minibatches(self, rank: int) -> np.ndarray:
        """Returns the minibatches that replica ``rank`` runs from `start_step` on.

        ``(num_minibatches,)`` int64: number n begins at ``n * minibatch_size`` in the
        order of samples.

        >>> plan = EpochPlan(0, 0, 256, 32, 2, np.array([2, 3]))
        >>> plan.minibatches(0).tolist(), plan.minibatches(1).tolist()
        ([0, 2, 4], [1, 3])
        """
        substeps = self.num_substeps(rank)
        substeps[: self.start_step] = 0
        first = np.repeat(self.starts[:-1] + rank, substeps)
        ends = np.cumsum(substeps)
        within_step = np.arange(len(first)) - np.repeat(ends - substeps, substeps)
        last = np.repeat(self.starts[1:] - 1, substeps)
        return np.minimum(first + within_step * self.num_replicas, last)


class Schedule:
    """Cuts a trace into epochs over a dataset, each found by a binary search.

    Args:
        trace: Global batch size of every step.
        num_samples: Length of the dataset.
        minibatch_size: Samples in a minibatch; must divide every batch size.
        on_end: What follows the trace's last step. 'stop': later epochs are empty;
            'error': they raise `TraceExhausted`; 'hold': the last batch size is
            repeated without end; 'cycle': the trace begins again. The epoch in which
            the trace ends keeps the steps it has.

    Attributes:
        capacity: Minibatches in an epoch.

    Raises:
        TraceError: A batch size does not divide by ``minibatch_size``, or is too large.
        ValueError, TypeError: Another argument is out of range, or not an integer.
    """

    def __init__(
        self, trace: Trace, num_samples: int, minibatch_size: int, on_end: str = "stop"
    ) -> None:
        self.minibatch_size = check_integer("minibatch_size", minibatch_size, least=1)
        if num_samples < minibatch_size:
            raise ValueError(
                f"the dataset has {num_samples} samples, fewer than one minibatch of "
                f"minibatch_size={minibatch_size}"
            )
        check_choice("on_end", on_end, ("stop", "error", "hold", "cycle"))
        self.trace = trace
        self.num_samples = int(num_samples)
        self.capacity = self.num_samples // self.minibatch_size
        self.on_end = "hold" if trace.endless else on_end
        sizes, unit = trace.batch_sizes, self.minibatch_size
        if (sizes % unit).any():
            row = int(np.argmax(sizes % unit != 0))
            below = int(sizes[row]) // unit * unit
            nearest = f"{below} or {below + unit}" if below else f"{unit}"
            raise TraceError(
                f"{trace.place(row)}: batch size {sizes[row]} is not a multiple of "
                f"minibatch_size={unit}; nearest is {nearest}"
            )
        if sizes.max() > self.capacity * unit:
            row = int(np.argmax(sizes > self.capacity * unit))
            raise TraceError(
                f"{trace.place(row)}: batch size {sizes[row]} exceeds epoch capacity: "
                f"{num_samples} samples hold {self.capacity} minibatches of {unit}, "
                f"{self.capacity * unit} samples"
            )
        self._num_minibatches = sizes // unit
        self._prefix = np.concatenate([[0], np.cumsum(self._num_minibatches)])
        self._first_steps = [0]  # of epochs found so far, and of the next one

    @property
    def num_epochs(self) -> float:
        """Epochs with at least one step: an integer, or ``math.inf``."""
        if self.on_end in ("hold", "cycle"):
            return math.inf
        while self._first_steps[-1] < len(self.trace):
            self._find_next_epoch()
        return len(self._first_steps) - 1

    def plan(self, epoch: int, num_replicas: int) -> EpochPlan:
        """Returns the plan of one epoch, which may be empty; see ``on_end``.

        Raises TraceExhausted if the trace has ended before and ``on_end='error'``, and
        ValueError or TypeError if ``epoch`` is negative or not an integer.
        """
        steps = self.steps(epoch)
        rows = np.arange(steps.start, steps.stop)
        if self.on_end == "cycle":
            rows %= len(self.trace)
        rows = np.minimum(rows, len(self.trace) - 1)
        return EpochPlan(
            epoch=int(epoch),
            first_step=steps.start,
            num_samples=self.num_samples,
            minibatch_size=self.minibatch_size,
            num_replicas=num_replicas,
            num_minibatches=self._num_minibatches[rows],
        )

    def steps(self, epoch: int) -> range:
        """Returns the steps of an epoch, numbered since training began; see `plan`."""
        epoch, found = check_integer("epoch", epoch, least=0), self._first_steps
        end = math.inf if self.on_end in ("hold", "cycle") else len(self.trace)
        while len(found) <= epoch + 1 and found[-1] < end:
            self._find_next_epoch()
        if epoch + 1 < len(found):
            return range(found[epoch], found[epoch + 1])
        if self.on_end == "error":
            raise TraceExhausted(
                f"epoch {epoch} begins after the last of the {len(self.trace)} steps "
                f"of {self.trace.name}, which fill {self.num_epochs} epochs; lengthen "
                "the trace, train fewer epochs, or choose on_end='hold' or 'cycle'"
            )
        return range(found[-1], found[-1])

    def _find_next_epoch(self) -> None:
        """Appends the first step that does not fit into the epoch under way."""
        first, length = self._first_steps[-1], len(self.trace)
        total, last = int(self._prefix[-1]), int(self._num_minibatches[-1])
        rounds, row = divmod(first, length) if self.on_end == "cycle" else (0, first)
        held = max(row - length, 0)  # steps after the trace, of its last batch size
        goal = int(self._prefix[row - held]) + held * last + self.capacity
        if self.on_end == "cycle":
            rounds, goal = divmod(rounds * total + goal, total)
        if self.on_end == "hold" and goal >= total:
            self._first_steps.append(length + (goal - total) // last)
        else:
            row = int(np.searchsorted(self._prefix, goal, side="right")) - 1
            self._first_steps.append(rounds * length + row)
