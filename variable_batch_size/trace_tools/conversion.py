"""From a log of devices to a trace: policies, and when each step runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pandas as pd

from variable_batch_size.trace_tools.availability import Availability
from variable_batch_size.traces.batch_trace import Trace
from variable_batch_size.traces.trace_csv import COLUMN, STEP_COLUMN, TraceError
from xla_replica.common.arguments import check_integer, check_number

# From the number of devices, at least 1, to the global batch size in samples.
BatchSize = Callable[[int], int]
# From the global batch size and the number of devices to the seconds of a step.
Seconds = Callable[[int, int], float]


def proportional(*, samples_per_device: int) -> BatchSize:
    """Every device adds its samples, so a step always takes about as long.

    example:
      vbs convert proportional log.csv --samples-per-device 32 --out trace.csv

    Args:
        samples_per_device: What one device adds to the global batch size.
    """
    check_integer("samples_per_device", samples_per_device, least=1)
    return lambda devices: devices * samples_per_device


def fixed(*, batch_size: int) -> BatchSize:
    """The global batch size never changes; with fewer devices a step takes longer.

    example:
      vbs convert fixed log.csv --batch-size 1024 --minibatch-size 32 \\
          --seconds-per-update 0.1 --seconds-per-substep 0.4

    Args:
        batch_size: The global batch size.
    """
    check_integer("batch_size", batch_size, least=1)
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
    check_integer("samples_per_device", samples_per_device, least=1)
    check_integer("least", least, least=1)
    check_integer("most", most, least=least)
    return lambda devices: min(max(devices * samples_per_device, least), most)


# Functions whose keywords are their options; see docs/extending.md.
POLICIES: dict[str, Callable[..., BatchSize]] = {
    "proportional": proportional,
    "fixed": fixed,
    "capped": capped,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Conversion:
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
    sizes = [policy(int(count)) for count in devices]
    starts = (availability.times - availability.times[0])[runs]
    return _table(sizes, devices, starts)


def convert(
    availability: Availability,
    policy: BatchSize,
    seconds: Seconds,
    restart_seconds: float = 0.0,
) -> Conversion:
    """Returns the steps that a run on these devices makes, one after the other.

    A step uses the devices that there are when it begins. If some of them go away
    before it ends, it is lost, and its samples are run again; devices that come
    meanwhile wait for the next step.

    Args:
        availability: The log.
        policy: What a member of `POLICIES` returns.
        seconds: How long a step takes.
        restart_seconds: How long the run takes to begin, at first and whenever the
            number of devices has changed.

    Raises:
        TraceError: Not one step is completed.
        ValueError: A step does not take a positive time.
    """
    check_number("restart_seconds", restart_seconds, least=0)
    log = availability.changes
    times, counts = (log.times - log.times[0]).tolist(), log.devices.tolist()
    end, last = times[-1], len(times) - 1
    sizes: list[int] = []
    devices: list[int] = []
    starts: list[np.ndarray] = []
    in_steps = lost = now = 0.0
    running, row = 0, 0  # row: the one that holds now
    while now < end:
        count = counts[row]
        change = times[row + 1]
        if count == 0 or (count != running and now + restart_seconds > change):
            running, now, row = 0, change, row + 1
            continue
        if count != running:
            running, now = count, now + restart_seconds
        size = policy(count)
        duration = check_number(
            "seconds of a step", float(seconds(size, count)), above=0
        )
        whole = int((change - now) / duration + 1e-9)
        sizes += [size] * whole
        devices += [count] * whole
        starts.append(now + duration * np.arange(whole))
        in_steps += whole * duration * count
        now = min(now + whole * duration, change)
        if change - now <= 1e-9 * duration:
            now, row = change, row + 1
            continue
        done = now + duration  # of the step during which the number changes
        slack = 1e-9 * duration
        row += 1
        while row < last and counts[row] >= count and times[row + 1] < done - slack:
            row += 1
        if row < last and counts[row] >= count:
            sizes.append(size)
            devices.append(count)
            starts.append(np.array([now]))
            in_steps += duration * count
            now = done
            if times[row + 1] <= done + slack:
                now, row = times[row + 1], row + 1
        else:
            lost += (times[row] - now) * count
            now = times[row]
    if not sizes:
        raise TraceError(
            f"no step is completed in the {end:g} seconds of the log: one takes "
            f"{seconds(policy(max(counts)), max(counts)):g} seconds on {max(counts)} "
            f"devices, after restart_seconds={restart_seconds:g}"
        )
    total = availability.device_seconds
    table = _table(sizes, np.asarray(devices), np.concatenate(starts))
    idle = max(total - in_steps - lost, 0.0)  # which rounding may bring below zero
    return Conversion(table, total, in_steps, lost, idle)


def _table(
    sizes: list[int], devices: np.ndarray, start_seconds: np.ndarray
) -> pd.DataFrame:
    Trace(sizes)  # raises where a policy returns what is not a batch size
    return pd.DataFrame(
        {
            STEP_COLUMN: np.arange(len(sizes)),
            COLUMN: np.asarray(sizes, dtype=np.int64),
            "devices": devices,
            "start_seconds": start_seconds,
        }
    )
