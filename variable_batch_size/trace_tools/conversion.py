"""From a log of devices to a trace: the log, policies, and when each step runs."""

from __future__ import annotations

import bisect
import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from variable_batch_size.trace_tools.step_time import StepTime
from variable_batch_size.traces import trace_csv
from variable_batch_size.traces.batch_trace import MOST_STEPS, Trace
from variable_batch_size.traces.trace_csv import COLUMN, STEP_COLUMN, Table, TraceError
from xla_replica.common.arguments import check_integer, check_number
from xla_replica.common.later import pd

logger = logging.getLogger(__name__)

TIME_COLUMNS = ("Time", "time", "timestamp")
DEVICE_COLUMNS = ("TPU_cores", "GPUs", "devices", "replicas")
# A Unix time in seconds is below it for 3000 years; one in milliseconds was in 1973.
MOST_SECONDS = 1e11
_HEADLESS = re.compile(r"\s*[0-9.eE+-]+[ \t]*,[ \t]*[0-9.]+[ \t]*([\r\n]|$)")
# From the number of devices, at least 1, to the global batch size in samples.
BatchSize = Callable[[int], int]


class Availability(NamedTuple):
    """The number of devices from each moment on.

    Attributes:
        times: ``(num_rows,)`` float64: increasing, in seconds.
        devices: ``(num_rows,)`` int64: how many there are from that moment to the next
            one. The last row ends the log, so that its number holds for no time.
    """

    times: np.ndarray
    devices: np.ndarray

    @property
    def device_seconds(self) -> float:
        """The devices that there were, each times its seconds."""
        return float(np.diff(self.times) @ self.devices[:-1])


def read_availability(source: trace_csv.Source) -> Availability:
    """Returns the log of a file, with irregular rows and zeros for pauses.

    Times in seconds are in a column Time, time or timestamp; devices in one of the name
    TPU_cores, GPUs, devices or replicas.

    Of rows with one time the last one holds, with a warning. Two columns of numbers
    without a header are times and devices. A file of JSON is one of SkyPilot's spot
    traces: the number of available instances, every ``gap_seconds``.

    Raises:
        TraceError: A column is missing; or a time is below the one before, or a
            number of devices is not an integer >= 0. It names the line.
    """
    name, text = trace_csv.read_text(source)
    if text.lstrip().startswith("{"):
        table = _table_of_ticks(name, text)
    else:
        header = ("Time", "devices") if _HEADLESS.match(text) else ()
        table = trace_csv.table_of(name, text, header)
    when, what = table.find(*TIME_COLUMNS), table.find(*DEVICE_COLUMNS)
    times, counts = table.numbers(when), table.integers(what, 0)
    table.refuse(when, times > MOST_SECONDS, "must be in seconds, not milliseconds")
    gaps = np.diff(times, append=np.inf)
    table.refuse(when, np.roll(gaps, 1) < 0, "must not be before the row above")
    if not counts[gaps > 0].any():
        raise TraceError(f"{name}: no row has a device, so no step can run")
    if again := times[gaps == 0].tolist():
        logger.warning(
            f"{name}: the last of the rows of one time holds; left out because of a "
            f"later one: {len(again)}, the first at {again[0]:.16g}"
        )
    return Availability(times[gaps > 0], counts[gaps > 0])


def _table_of_ticks(name: str, text: str) -> Table:
    """Returns the table of a file of JSON with a number at every tick."""
    try:
        found = json.loads(text)
        gap, counts = found["metadata"]["gap_seconds"], [*found["data"], 0]
        check_number("gap_seconds", gap, above=0)
    except (ValueError, TypeError, KeyError) as error:
        told = '{"metadata": {"gap_seconds": 300}, "data": [4, 3, 0]}'
        raise TraceError(f"{name}: not JSON such as {told}: {error!r}") from error
    times = np.arange(len(counts)) * float(gap)
    return Table(name, ["Time", "devices"], [times, counts])


def proportional(*, samples_per_device: int) -> BatchSize:
    """Every device adds its samples, so a step always takes about as long.

    example:
      vbs convert proportional log.csv --samples-per-device 32 --out trace.csv

    Args:
        samples_per_device: What one device adds to the global batch size.
    """
    return lambda devices: devices * samples_per_device


def fixed(*, batch_size: int) -> BatchSize:
    """The global batch size never changes; with fewer devices a step takes longer.

    example:
      vbs convert fixed log.csv --batch-size 1024 --minibatch-size 32 \\
          --seconds-per-update 0.1 --seconds-per-substep 0.4

    Args:
        batch_size: The global batch size.
    """
    return lambda devices: batch_size


def capped(*, samples_per_device: int, most: int, least: int = 1) -> BatchSize:
    """Proportional between two bounds, as where larger batches would not pay.

    example:
      vbs convert capped log.csv --samples-per-device 32 --most 1024

    Args:
        samples_per_device: What one device adds to the global batch size.
        most: The largest global batch size.
        least: The smallest one.
    """
    check_integer("most", most, least=least)
    return lambda devices: min(max(devices * samples_per_device, least), most)


# Functions whose keywords are their options; see docs/extending.md.
_ALL: tuple[Callable[..., BatchSize], ...] = proportional, fixed, capped
POLICIES = {policy.__name__: policy for policy in _ALL}


class Conversion(NamedTuple):
    """The steps that a log allows, and what became of its device-seconds.

    Attributes:
        steps: One row per step, with the columns ``step``, ``batchsize``, ``devices``
            and ``start_seconds``, which counts from the log's beginning.
        device_seconds: Of the log. It is the sum of the next three.
        in_steps: Of complete steps.
        lost: Of steps that ended because a device went away, or the log did.
        idle: The rest: restarts, and devices that came while a step was running.
    """

    steps: pd.DataFrame
    device_seconds: float
    in_steps: float
    lost: float
    idle: float


def convert_rows(availability: Availability, policy: BatchSize) -> pd.DataFrame:
    """Returns one step for every row of the log that has devices.

    The columns are those of `Conversion.steps`; ``start_seconds`` is the row's time.
    """
    runs = availability.devices > 0
    devices = availability.devices[runs]
    sizes = np.array([policy(int(count)) for count in devices])
    starts = (availability.times - availability.times[0])[runs]
    return _table(sizes, devices, starts)


def convert(
    availability: Availability,
    policy: BatchSize,
    step_time: StepTime,
    *,
    minibatch_size: int = 32,
    restart_seconds: float = 0.0,
) -> Conversion:
    """Returns the steps that a run on these devices makes, one after the other.

    A step uses the devices that there are when it begins. If some of them go away
    before it ends, it is lost, and its samples are run again; devices that come
    meanwhile wait for the next step.

    Args:
        availability: The log.
        policy: What a member of `POLICIES` returns.
        step_time: How long a step takes.
        minibatch_size: Samples of a minibatch, of which a device runs one at a time.
        restart_seconds: Until the run begins, at first and whenever devices change.

    Raises:
        TraceError: Not one step is completed, or the policy returns what is not a batch
            size.
        ValueError: A step does not take a positive time, or far too little of the log.
    """
    check_number("restart_seconds", restart_seconds, least=0)
    check_integer("minibatch_size", minibatch_size, least=1)
    # Rows that change nothing are left out; the last one ends the log: -1 devices.
    changes = np.diff(availability.devices, prepend=-1) != 0
    changes[-1] = True
    starts = availability.times - availability.times[0]
    times = starts[changes].tolist()
    counts = [*availability.devices[changes][:-1].tolist(), -1]
    steps: list[Sequence[float]] = []  # (start, seconds, batch size, devices)
    lost = now = 0.0
    running, row = 0, 0  # devices of the run, and the row that holds now
    while counts[row] >= 0:
        count, change = counts[row], times[row + 1]
        if count == 0 or (count != running and now + restart_seconds >= change):
            running, now, row = 0, change, row + 1
            continue
        if count != running:
            running, now, size = count, now + restart_seconds, policy(count)
            duration = step_time.seconds(-(-size // (minibatch_size * count)))
            least = times[-1] / MOST_STEPS  # or far too many would be completed
            check_number("seconds of a step", duration, least, above=0)
            slack = 1e-6 * duration  # less than that is rounding
        end = now + duration
        met = range(row + 1, bisect.bisect_left(times, end - slack))
        fewer = next((each for each in met if counts[each] < count), None)
        if fewer is None:
            steps.append((now, duration, size, count))
        else:
            end = times[fewer]
            lost += (end - now) * count
        row = bisect.bisect_right(times, end + slack) - 1
        now = max(end, times[row])
    if not steps:
        raise TraceError(
            f"no step is completed in the {times[-1]:g} seconds of the log: check "
            "the step time and restart_seconds"
        )
    starts, durations, sizes, devices = map(np.array, zip(*steps))
    total, in_steps = availability.device_seconds, float(durations @ devices)
    idle = max(total - in_steps - lost, 0.0)  # which rounding may bring below zero
    return Conversion(_table(sizes, devices, starts), total, in_steps, lost, idle)


def _table(sizes: Any, devices: Any, start_seconds: Any) -> pd.DataFrame:
    """Returns the steps of these batch sizes, devices and beginnings."""
    sizes = Trace(np.asarray(sizes)).batch_sizes  # raises where one is not a batch size
    columns = np.arange(len(sizes)), sizes, devices, start_seconds
    names = STEP_COLUMN, COLUMN, "devices", "start_seconds"
    return pd.DataFrame(dict(zip(names, map(np.asarray, columns))))
