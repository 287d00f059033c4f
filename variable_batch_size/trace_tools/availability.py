"""How many devices there were at every moment, from a log."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from variable_batch_size.trace_tools.columns import Columns
from variable_batch_size.traces.trace_csv import Source, TraceError

TIME_COLUMNS = ("Time", "time", "timestamp")
DEVICE_COLUMNS = ("TPU_cores", "GPUs", "devices", "replicas")
# A Unix time in seconds is below it for 3000 years; one in milliseconds was in 1973.
MOST_SECONDS = 1e11


@dataclasses.dataclass(frozen=True, eq=False)
class Availability:
    """The number of devices from each moment on.

    Attributes:
        times: ``(num_rows,)`` float64: increasing, in seconds.
        devices: ``(num_rows,)`` int64: how many there are from that moment to the next
            one. The last row ends the log, so that its number holds for no time.
    """

    times: np.ndarray
    devices: np.ndarray

    @property
    def seconds(self) -> float:
        """How long the log is."""
        return float(self.times[-1] - self.times[0])

    @property
    def device_seconds(self) -> float:
        """The devices that there were, each times its seconds."""
        return float(np.diff(self.times) @ self.devices[:-1])

    @functools.cached_property
    def changes(self) -> Availability:
        """The log without rows that change nothing; the last one stays."""
        keep = np.diff(self.devices, prepend=-1) != 0
        keep[-1] = True
        return Availability(self.times[keep], self.devices[keep])


def read_availability(
    source: Source, time: str | None = None, devices: str | None = None
) -> Availability:
    """Returns the log of a CSV file, with irregular rows and zeros for pauses.

    Args:
        source: The file.
        time: The column of times, in seconds, such as Unix times; default: the one of
            `TIME_COLUMNS`.
        devices: The column with numbers of devices; default: the one of
            `DEVICE_COLUMNS`.

    Raises:
        TraceError: A column is missing; or a time is not above the one before, or a
            number of devices is not an integer >= 0. It names the line.
    """
    table = Columns(source)
    times = table.numbers("times", TIME_COLUMNS if time is None else (time,))
    counts = table.numbers("devices", DEVICE_COLUMNS if devices is None else (devices,))
    table.refuse("times", times > MOST_SECONDS, "must be in seconds, not milliseconds")
    table.refuse(
        "times",
        np.diff(times, prepend=-np.inf) <= 0,
        "must be later than the row before",
    )
    table.refuse("devices", counts < 0, "must be >= 0; 0 means paused")
    table.refuse("devices", counts != np.floor(counts), "is not an integer")
    if not counts.any():
        raise TraceError(f"{table.name}: no row has a device, so no step can run")
    return Availability(times, counts.astype(np.int64))
