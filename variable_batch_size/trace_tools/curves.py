"""Numbers that follow the samples used so far: learning rates and critical batches.

A curve is a function from an array of numbers of samples to an array of that shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from variable_batch_size.traces.trace_csv import Source, read_table
from xla_replica.common.arguments import check_choice, check_integer

Curve = Callable[[np.ndarray], np.ndarray]


def read_curve(source: Source) -> Curve:
    """Returns the curve of a CSV file with a column ``samples`` and one more.

    Args:
        source: The file. Numbers of samples increase. Numbers between two rows are
            interpolated linearly; before the first row its number holds, after the last
            row the last one's.

    Raises:
        TraceError: The file has other columns, samples that do not increase, or numbers
            below 0.
    """
    table = read_table(source)
    first = table.find("samples")
    others = [name for name in table.header if name and name != first]
    second = table.find(*(others or ["of any other name"]))
    samples, numbers = table.numbers(first), table.numbers(second)
    table.check_increasing(first, samples)
    table.refuse(second, numbers < 0, "must be >= 0")
    return lambda at: np.interp(at, samples, numbers)


@dataclasses.dataclass(frozen=True)
class LearningRates:
    """A learning-rate schedule over samples, relative to its peak.

    Attributes:
        factor: From the samples used so far to the learning rate over the peak's.
        peak_at: The number of samples at which warm-up ends.
    """

    factor: Curve
    peak_at: int = 0

    def num_halvings(self, samples: np.ndarray) -> np.ndarray:
        """Returns how often the rate has halved since its peak: an integer array.

        >>> schedule = decay("cosine", total_samples=1000)
        >>> schedule.num_halvings(np.array([0, 499, 500, 750]))
        array([0, 0, 1, 2])
        """
        samples = np.asarray(samples)
        factor = np.clip(self.factor(samples), 2.0**-60, 1.0)
        # A factor that is a power of two up to rounding has halved that often.
        halvings = np.floor(1e-9 - np.log2(factor)).astype(np.int64)
        return np.where(samples < self.peak_at, 0, halvings)

    def halved(self) -> LearningRates:
        """Returns the schedule that halves where this one has halved, and only there.

        The step decay by which Seesaw replaces a smooth schedule.
        """

        def factor(samples: np.ndarray) -> np.ndarray:
            rising = np.asarray(samples) < self.peak_at
            halved = 0.5 ** self.num_halvings(samples)
            return np.where(rising, self.factor(samples), halved)

        return LearningRates(factor, self.peak_at)


SHAPES: dict[str, Curve] = {
    "constant": np.ones_like,
    "cosine": lambda fraction: (1 + np.cos(np.pi * fraction)) / 2,
    "linear": lambda fraction: 1 - fraction,
}


def decay(name: str, total_samples: int, warm_up_samples: int = 0) -> LearningRates:
    """Returns a schedule that rises linearly from 0 and then decays as its name says.

    Args:
        name: A key of `SHAPES`, which are functions of the part that is done.
        total_samples: Where it ends. It stays at its last value from there on.
        warm_up_samples: Where it is at its peak.

    Raises ValueError if no schedule has that name.
    """
    shape = SHAPES[check_choice("schedule", name, SHAPES)]
    check_integer("total_samples", total_samples, least=1)
    check_integer("warm_up_samples", warm_up_samples, 0, total_samples - 1)

    def factor(samples: np.ndarray) -> np.ndarray:
        samples = np.asarray(samples, float)
        rising = samples / max(warm_up_samples, 1)
        done = (samples - warm_up_samples) / (total_samples - warm_up_samples)
        falling = shape(np.clip(done, 0.0, 1.0))
        return np.where(samples < warm_up_samples, rising, falling)

    return LearningRates(factor, warm_up_samples)
