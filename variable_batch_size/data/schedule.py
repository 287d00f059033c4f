"""Which replica runs which minibatch of which step: integers, from the trace alone.

Everything elastic is read from one table, the `EpochPlan`: the sampler's indices, the
divisor of the summed gradients, the batch ratio, and which replicas are idle. This
module does not use torch. The rules are those of the earlier implementation:

- An epoch holds ``num_samples // minibatch_size`` whole minibatches and takes steps
  from the trace, in order, as long as they fit. The step that does not fit begins the
  next epoch; the minibatches that are left of this one are dropped.
- Minibatch k of a step (from 0) goes to replica ``k mod num_replicas``. With fewer
  minibatches than replicas, the high ranks are idle in that step.

With ``pad_minibatches``, which is new, a step's last minibatch may lack samples, and an
epoch holds all ``num_samples``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, NamedTuple, get_args

import numpy as np

from variable_batch_size.traces.batch_trace import Trace
from variable_batch_size.traces.trace_csv import TraceError
from xla_replica.common.arguments import check_fields, check_integer, checked
from xla_replica.common.later import pd


class Cursor(NamedTuple):
    """Where a run is, for the sampler, the optimizer wrapper and `Checkpointer`."""

    epoch: int  # from 0
    step: int  # how many are done; one that was interrupted is run again


class Place(NamedTuple):
    """The place of a minibatch among those of one replica."""

    epoch: int  # from 0
    step: int  # of the epoch
    substep: int  # minibatches of the step that come before


class Step(NamedTuple):
    """One step of an epoch, as one replica sees it."""

    epoch: int
    number: int  # within the epoch
    global_step: int  # since training began
    batch_size: int  # in samples, over all replicas
    minibatch_size: int
    num_minibatches: int  # over all replicas
    num_substeps: int  # minibatches that this replica runs
    idle: bool  # it runs none
    ends_epoch: bool


# What follows the last row of a trace.
OnEnd = Literal["stop", "hold", "cycle"]


@dataclasses.dataclass(frozen=True, eq=False)
class EpochPlan:
    """The steps of one epoch, and which replica runs which of their minibatches.

    Attributes:
        epoch: From 0.
        first_step: The number of its first step since the beginning of training.
        num_samples: The length of the epoch's order.
        minibatch_size: In samples.
        num_replicas: How many share the steps.
        head: ``(num_steps - num_held,)`` int64: the batch size of every step, in
            samples, until one is held.
        start_step: How many steps are done, where a run was resumed within the epoch.
        padded: Whether every replica runs as many minibatches in a step as replica 0.
        num_held: How many more steps are like the last of ``head``.
    """

    epoch: int
    first_step: int
    num_samples: int
    minibatch_size: int
    num_replicas: int
    head: np.ndarray
    start_step: int = 0
    padded: bool = False
    num_held: int = 0

    @functools.cached_property
    def batch_sizes(self) -> np.ndarray:
        """``(num_steps,)`` int64: of every step, in samples."""
        return np.append(self.head, np.repeat(self.head[-1:], self.num_held))

    @functools.cached_property
    def num_minibatches(self) -> np.ndarray:
        """``(num_steps,)`` int64: of every step."""
        return -(-self.batch_sizes // self.minibatch_size)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """``(num_steps + 1,)`` int64: each step's first minibatch in the order."""
        return np.concatenate([[0], np.cumsum(self.num_minibatches)]).astype(np.int64)

    # The three above have an entry for every step. What a sampler and an optimizer need
    # does not, so that a batch size may be held for any number of steps.

    @functools.cached_property
    def _head_starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.head)]).astype(np.int64)

    @property
    def num_steps(self) -> int:
        """Updates that every replica takes in this epoch."""
        return len(self.head) + self.num_held

    @property
    def num_dropped_samples(self) -> int:
        """Samples of the order that no step of this epoch uses."""
        return self.num_samples - self.start(self.num_steps)

    @functools.cached_property
    def has_idle_replicas(self) -> bool:
        """Whether some replica runs no minibatch in some step."""
        fewest = self.minibatch_size * (self.num_replicas - 1)
        return not self.padded and bool((self.head <= fewest).any())

    def start(self, step: int) -> int:
        """Returns how many samples of the order the steps before ``step`` use."""
        num_held = max(step - len(self.head), 0)
        held = num_held * int(self.head[-1]) if num_held else 0
        return int(self._head_starts[step - num_held]) + held

    def batch_size(self, step: int) -> int:
        """Returns the global batch size of step ``step`` of this epoch, in samples."""
        return int(self.head[min(step, len(self.head) - 1)])

    def num_substeps(self, rank: int) -> np.ndarray:
        """Returns ``(num_steps,)`` int64: minibatches of replica ``rank`` per step."""
        return self._substeps(self.batch_sizes, rank)

    def step(self, number: int, rank: int) -> Step | None:
        """Returns a step as replica ``rank`` sees it; None after the epoch's last."""
        head, size = self.head, self.minibatch_size
        num_steps = len(head) + self.num_held
        if number >= num_steps:
            return None
        batch_size = int(head[min(number, len(head) - 1)])
        num_minibatches = -(-batch_size // size)
        left = num_minibatches - (0 if self.padded else rank)
        own = max(-(-left // self.num_replicas), 0)
        sizes = batch_size, size, num_minibatches, own
        place = self.epoch, number, self.first_step + number
        return Step(*place, *sizes, own == 0, number + 1 == num_steps)

    def num_remaining(self, rank: int) -> int:
        """Returns how many minibatches replica ``rank`` runs from `start_step` on."""
        first, substeps = self.start_step, self._substeps(self.head, rank)
        num_held = min(self.num_held, self.num_steps - first)
        return int(substeps[first:].sum() + substeps[-1:].sum() * num_held)

    def _substeps(self, batch_sizes: np.ndarray, rank: int) -> np.ndarray:
        """Returns the minibatches of replica ``rank`` in steps of these sizes."""
        num_minibatches = -(-batch_sizes // self.minibatch_size)
        remaining = num_minibatches - (0 if self.padded else rank)
        return np.asarray(np.maximum(-(-remaining // self.num_replicas), 0))

    def num_real_samples(self, rank: int, step: int, substep: int) -> int:
        """Returns how many samples of a minibatch count; the others are padding.

        The last minibatch of a step may lack some. A replica that has no minibatch left
        in a step of a padded plan runs the step's last one, of which none counts.
        """
        number = substep * self.num_replicas + rank
        left = self.batch_size(step) - number * self.minibatch_size
        return min(max(left, 0), self.minibatch_size)

    def samples_of(self, step: int, number: int) -> slice:
        """Returns the part of the order that minibatch ``number`` of a step has."""
        first = self.start(step) + number * self.minibatch_size
        return slice(first, min(first + self.minibatch_size, self.start(step + 1)))


@dataclasses.dataclass(eq=False, repr=False)
class Schedule:
    """Cuts a trace into epochs over a dataset, each found by a binary search.

    Args:
        trace: Global batch size of every step.
        num_samples: Length of the dataset.
        minibatch_size: Samples in a minibatch; must divide every batch size, unless
            ``pad_minibatches``.
        on_end: What follows the trace's last step. 'stop': later epochs are empty;
            'hold': the last batch size is repeated without end; 'cycle': the trace
            begins again. The epoch in which the trace ends keeps the steps it has.
        pad_minibatches: Whether batch sizes need not be multiples of
            ``minibatch_size``, so that the last minibatch of a step lacks samples.

    Attributes:
        capacity: Whole minibatches in an epoch.

    Raises:
        TraceError: A batch size does not divide by ``minibatch_size``, or is too large.
        ValueError, TypeError: Another argument is out of range, or not an integer.
    """

    trace: Trace
    num_samples: int = checked(dataclasses.MISSING, least=1)
    minibatch_size: int = checked(dataclasses.MISSING, least=1)
    on_end: OnEnd = checked("stop", among=get_args(OnEnd))
    pad_minibatches: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        trace, unit = self.trace, self.minibatch_size
        sizes, self.capacity = trace.batch_sizes, self.num_samples // unit
        self.on_end = "hold" if trace.endless else self.on_end
        if (sizes % unit).any() and not self.pad_minibatches:
            row = int(np.argmax(sizes % unit != 0))
            raise TraceError(
                f"{trace.place(row)}: batch size {sizes[row]} is not a multiple of "
                f"minibatch_size={unit}: change it, or pass pad_minibatches=True"
            )
        # In samples. Without padding a rest smaller than a minibatch is not used.
        self._limit = self.num_samples if self.pad_minibatches else self.capacity * unit
        if sizes.max() > self._limit:
            row = int(np.argmax(sizes > self._limit))
            raise TraceError(
                f"{trace.place(row)}: batch size {sizes[row]} exceeds epoch capacity: "
                f"{self.num_samples} samples hold {self.capacity} minibatches of {unit}"
            )
        self._prefix = np.concatenate([[0], np.cumsum(sizes)])
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

        Raises ValueError or TypeError if ``epoch`` is negative or not an integer.
        """
        steps, trace = self.steps(epoch), self.trace.batch_sizes
        if self.on_end == "cycle":
            sizes = trace[np.arange(steps.start, steps.stop) % len(trace)]
        else:  # what is held begins with the trace's last step
            first = min(steps.start, len(trace) - 1)
            sizes = trace[first : steps.stop][: len(steps)]
        of = int(epoch), steps.start, self.num_samples, self.minibatch_size
        return EpochPlan(*of, num_replicas, sizes, num_held=len(steps) - len(sizes))

    def steps(self, epoch: int) -> range:
        """Returns the steps of an epoch, numbered since training began; see `plan`."""
        epoch, found = check_integer("epoch", epoch, least=0), self._first_steps
        end = math.inf if self.on_end in ("hold", "cycle") else len(self.trace)
        while len(found) <= epoch + 1 and found[-1] < end:
            self._find_next_epoch()
        last = len(found) - 1
        return range(found[min(epoch, last)], found[min(epoch + 1, last)])

    def changed(self, step: int, batch_size: int) -> Schedule:
        """Returns the schedule whose steps from ``step`` on have ``batch_size``.

        Raises ValueError unless ``on_end='hold'``: what is held is what can change; and
        TraceError if the batch size does not fit.
        """
        if self.on_end != "hold":
            raise ValueError(
                f"on_end='hold' is needed to change batch sizes, got {self.on_end!r}"
            )
        check_integer("batch_size", batch_size, least=1)
        sizes = self.trace.batch_sizes
        kept = sizes[np.minimum(np.arange(step), len(sizes) - 1)]
        return dataclasses.replace(self, trace=Trace(np.append(kept, batch_size)))

    def thresholds(self) -> pd.DataFrame:
        """Returns the trace as rows ``samples,batchsize``, one for each change of size.

        With ``on_end='hold'``, `Trace` makes the same steps of it.
        """
        sizes = self.trace.batch_sizes
        rows = np.flatnonzero(np.diff(sizes, prepend=0))
        return pd.DataFrame({"samples": self._prefix[rows], "batchsize": sizes[rows]})

    def samples_before(self, step: int) -> int:
        """Returns how many samples the first ``step`` steps of training have."""
        length, prefix = len(self.trace), self._prefix
        rounds, row = divmod(step, length) if self.on_end == "cycle" else (0, step)
        held = max(row - length, 0)  # steps after the trace, of its last batch size
        last = self.trace.batch_sizes[-1]
        return int(rounds * prefix[-1] + prefix[row - held] + held * last)

    def _find_next_epoch(self) -> None:
        """Appends the first step that does not fit into the epoch under way."""
        length, total = len(self.trace), int(self._prefix[-1])
        goal = self.samples_before(self._first_steps[-1]) + self._limit
        rounds, goal = divmod(goal, total) if self.on_end == "cycle" else (0, goal)
        if self.on_end == "hold" and goal >= total:
            last = int(self.trace.batch_sizes[-1])
            self._first_steps.append(length + (goal - total) // last)
        else:
            row = int(np.searchsorted(self._prefix, goal, side="right")) - 1
            self._first_steps.append(rounds * length + row)
