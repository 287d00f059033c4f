"""A closed loop: what a run measures decides its batch sizes to come."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from variable_batch_size.control.policies import Observation, Policy, decide, policy_of
from variable_batch_size.optimizer import ElasticOptimizer
from variable_batch_size.runs.run_log import RunLog
from variable_batch_size.step.attached import Update
from variable_batch_size.trace_tools.step_time import fit_step_time
from xla_replica.common.arguments import check_fields, check_integer, checked
from xla_replica.common.files import unfinished_name, write_whole


@dataclasses.dataclass(eq=False, repr=False)
class BatchSizeController:
    """Changes the batch size of the steps to come, from what the run measures.

    Attach it, before the Checkpointer. The sampler holds its last batch size, and the
    wrapper measures noise::

        sampler = vbs.CustomSampler(dataset, trace=256, minibatch_size=32)
        optimizer = vbs.LinearRuleOptimizer(inner, sampler, 256, noise=True)
        controller = vbs.BatchSizeController(
            optimizer, least=64, most=4096, trace_file="decided.csv"
        )
        optimizer.attach(controller)

    Replicas decide alike: from the numbers of replica 0, and the smallest of what is
    available. ``trace_file`` is a trace by thresholds of samples: a run with it and
    without a controller has the same steps, bit for bit. A change is part of the
    sampler's state, so a resumed run keeps those that were made.

    It reads the device and gathers a few numbers once every ``every`` updates. A new
    batch size compiles nothing.

    Args:
        optimizer: The wrapper, which must measure noise for policies by name.
        least, most: The limits of the batch size, in samples.
        every: Decide after every so many updates, and after the first one of other
            members of a live run.
        factor: Hysteresis: change only to a size that is at least so many times larger
            or smaller.
        policy: 'noise-scale', 'goodput', or a function from an `Observation` to the
            batch size wanted, in samples, NaN for none: `per_replica` returns one.
        available: A function that returns how many samples can be run at once, such as
            devices times what fits into one: a limit beside ``most``.
        trace_file: Where to write the trace as it was decided, on replica 0.
        log: Tells the decisions, as events ``decision``.

    Attributes:
        updates_of: The optimizer, the only one that this may be attached to.

    Raises:
        ValueError, TypeError: An argument is out of range, or of the wrong type.
    """

    optimizer: ElasticOptimizer
    _: dataclasses.KW_ONLY
    least: int = checked(dataclasses.MISSING, least=1)
    most: int
    every: int = checked(100, least=1)
    factor: float = checked(1.5, above=1)
    policy: str | Policy = "noise-scale"
    available: Callable[[], int] | None = None
    trace_file: str | os.PathLike[str] | None = None
    log: RunLog | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        self.updates_of = optimizer = self.optimizer
        unit = optimizer.sampler.minibatch_size
        low = -(-self.least // unit) * unit  # batch sizes are whole minibatches
        name = f"most (least={self.least} in minibatches of {unit})"
        most = check_integer(name, self.most, least=low)
        self._policy, self._replica = policy_of(self.policy), optimizer.replica
        if self._policy is not self.policy and optimizer.noise is None:
            raise TypeError(
                "BatchSizeController decides from the gradient noise scale: build the "
                "optimizer with noise=True, or pass policy=, a function"
            )
        for size in (low, most // unit * unit):
            optimizer.check_batch_size(size)
        self._available = self.available or (lambda: most)
        self._generation: int | None = None  # of a live run, at the last update
        # Seconds, substeps and updates from one decision to the next, newest last.
        self._windows: list[list[float]] = [[0.0, 0, 0]]
        self._since: float | None = None  # None where the next update waits for more

    def __call__(self, update: Update) -> None:
        """Decides if it is time to; called after every update, on every replica."""
        now, generation = time.perf_counter(), self._replica.generation
        if self._since is not None:
            num_minibatches = -(-update.batch_size // update.minibatch_size)
            num_substeps = -(-num_minibatches // self._replica.num_replicas)
            spent = now - self._since, num_substeps, 1
            self._windows[-1] = [a + b for a, b in zip(self._windows[-1], spent)]
        is_new = generation not in (0, self._generation)
        if is_new or (update.step + 1) % self.every == 0:
            self._decide(update)
            now = time.perf_counter()
        if generation != self._generation:  # who has written the trace may be lost
            self._write()
        self._generation = generation
        # After an epoch the script does what it likes.
        self._since = None if update.ends_epoch else now

    def _decide(self, update: Update) -> None:
        schedule, noise = self.updates_of.sampler.schedule, self.updates_of.noise
        # The first window compiles.
        fitted = [*zip(*[window for window in self._windows if window[2]][1:])]
        self._windows.append([0.0, 0, 0])
        seen = Observation(
            step=update.step,
            batch_size=int(schedule.trace.batch_sizes[-1]),
            noise_scale=noise.measure().noise_scale if noise else math.nan,
            step_time=fit_step_time(*fitted) if fitted else None,
            minibatch_size=schedule.minibatch_size,
            num_replicas=self._replica.num_replicas,
        )
        available = check_integer("what available() returns", self._available(), 0)
        told = self._replica.all_gather_object((seen, available))
        seen, _ = told[0]
        most = max(schedule.minibatch_size, min(self.most, *(n for _, n in told)))
        wanted = self._policy(seen)
        new = decide(seen, wanted, min(self.least, most), most, self.factor)
        if new != seen.batch_size:
            first = self.updates_of.change_batch_size(new)
            self._write()
            event = {"batch_size": new, "before": seen.batch_size, "first_step": first}
            event |= {"noise_scale": seen.noise_scale, "wanted": wanted}
            if self.log:
                self.log.event("decision", **event, available=most)

    def _write(self) -> None:
        """Writes the trace as it is now, with the last batch size held."""
        if self.trace_file is None or not self._replica.is_primary:
            return
        path = Path(self.trace_file)
        text = self.updates_of.sampler.schedule.thresholds().to_csv(index=False)
        write_whole(unfinished_name(path), lambda f: f.write(text.encode()), path)
