"""Families of traces that can be made from a few numbers.

A member is a function whose keywords are its options, on the command line too. It
returns the batch size of every step, or a table with the column ``batchsize`` and
others; see docs/extending.md.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from variable_batch_size.trace_tools.curves import decay, read_curve
from variable_batch_size.trace_tools.options import amount
from variable_batch_size.traces.batch_trace import MOST_STEPS, Trace
from variable_batch_size.traces.trace_csv import COLUMN, STEP_COLUMN
from xla_replica.common.arguments import check_choice, check_integer, check_number
from xla_replica.common.later import is_pandas, pd

Made: TypeAlias = "Iterable[int] | pd.DataFrame"


def constant(*, steps: int, batch_size: int) -> Made:
    """The same batch size in every step.

    example:
      vbs make constant --steps 1000 --batch-size 256

    Args:
        steps: The number of steps.
        batch_size: The global batch size.
    """
    return np.full(steps, batch_size)


def ramp(*, steps: int, first: int, last: int, multiple_of: int = 1) -> Made:
    """From one batch size to another in equal differences.

    example:
      vbs make ramp --steps 1000 --first 256 --last 4096 --multiple-of 32

    Args:
        steps: The number of steps, the first and the last one included.
        first: The batch size of the first step.
        last: The batch size of the last step.
        multiple_of: Batch sizes are rounded to multiples of it.
    """
    _check_multiple("first", first, multiple_of)
    _check_multiple("last", last, multiple_of)
    sizes = np.linspace(first, last, steps) / multiple_of
    return np.rint(sizes).astype(np.int64) * multiple_of


def doubling(*, steps: int, first: int, every: int, most: int) -> Made:
    """Twice the batch size every so many steps.

    example:
      vbs make doubling --steps 1000 --first 256 --every 200 --most 4096

    Args:
        steps: The number of steps.
        first: The batch size of the first step.
        every: Steps between two doublings.
        most: The largest batch size; a doubling that exceeds it is left out.
    """
    check_integer("every", every, least=1)
    return [_doubled(first, step // every, most) for step in range(steps)]


def thresholds(
    *,
    rows: str,
    total: int,
    unit: str = "samples",
    tokens_per_sample: int | None = None,
) -> Made:
    """Batch sizes that hold from some number of steps, samples or tokens on.

    example:
      vbs make thresholds --rows "0:768 100K:1536" --total 1M

    Args:
        rows: Such as "0:768 250B:1536": from where on, a colon, and the batch size.
        total: How many steps, samples or tokens the trace has, the last step whole.
        unit: steps, samples or tokens.
        tokens_per_sample: With unit=tokens, which needs it.
    """
    check_choice("unit", unit, ("steps", "samples", "tokens"))
    given = tokens_per_sample if unit == "tokens" else 1
    per_sample = check_integer("tokens_per_sample", given, least=1)
    pairs = [row.split(":") for row in rows.split()]
    if {*map(len, pairs)} != {2} or "," in rows:
        raise ValueError(f"rows must be like '0:768 250B:1536', got {rows!r}")
    starts, sizes = ([*map(amount, texts)] for texts in zip(*pairs))
    if starts[0] != 0 or sorted({*starts}) != starts:
        raise ValueError(f"rows must begin at 0 and increase, got {rows!r}")

    def used(size: int) -> int:
        return 1 if unit == "steps" else size * per_sample

    return _until(total, lambda done: sizes[bisect.bisect(starts, done) - 1], used)


def seesaw(
    *,
    first: int,
    most: int,
    total_samples: int,
    schedule: str = "cosine",
    warm_up_samples: int = 0,
) -> Made:
    """Doubles the batch size wherever a learning-rate schedule would have halved.

    Train with the learning rate divided by the square root of two there: the rule
    'root' at ref_batchsize=FIRST and the schedule that halves only (arXiv:2510.14717).

    example:
      vbs make seesaw --first 256 --most 4096 --total-samples 10M

    Args:
        first: The batch size for which the schedule was made.
        most: The largest batch size; later halvings are of the learning rate alone.
        total_samples: How many samples the trace has, the last step whole.
        schedule: constant, cosine or linear.
        warm_up_samples: Where the schedule is at its peak, after a linear rise.
    """
    rates = decay(schedule, total_samples, warm_up_samples)

    def size(used: int) -> int:
        return _doubled(first, int(rates.num_halvings(np.array(used))), most)

    return _until(total_samples, size)


def critical_batch(
    *,
    first: int,
    most: int,
    total_samples: int,
    curve: str = "",
    coefficient: float = 0.0,
    exponent: float = 0.5,
) -> Made:
    """Doubles the batch size when the critical batch size has grown to twice it.

    The warm-up of arXiv:2505.23971. The critical batch size is measured, or a power law
    of the samples used so far, which grows with data (arXiv:2410.21676).

    example:
      vbs make critical-batch --first 64 --most 2048 --total-samples 5M \\
          --coefficient 2

    Args:
        first: The batch size of the first step.
        most: The largest batch size.
        total_samples: How many samples the trace has, the last step whole.
        curve: A CSV file with the columns samples and critical_batch.
        coefficient: Without a curve: of coefficient * samples ** exponent.
        exponent: Without a curve.
    """
    check_number("coefficient", coefficient, least=0)
    if bool(curve) == bool(coefficient):
        raise ValueError("critical_batch needs either curve or coefficient above 0")
    critical: Any = read_curve(curve) if curve else None
    reached = first

    def size(used: int) -> int:
        nonlocal reached
        largest = critical(used) if curve else coefficient * used**exponent
        while reached < (larger := _doubled(reached, 1, most)) <= largest:
            reached = larger
        return reached

    return _until(total_samples, size)


def spot_market(
    *,
    steps: int,
    devices: int,
    samples_per_device: int,
    lost: float = 0.01,
    returned: float = 0.05,
    devices_per_machine: int = 1,
    seed: int = 0,
) -> Made:
    """Devices of a spot market, whose machines are taken away and given back at random.

    The batch size is proportional to the devices that there are. Steps in which there
    are none are paused, and are not in the trace. The column devices says how many
    there are.

    example:
      vbs make spot-market --steps 500 --devices 64 --samples-per-device 32 \\
          --devices-per-machine 8

    Args:
        steps: The number of steps, the paused ones included.
        devices: How many devices there are at most, and at first.
        samples_per_device: What one device adds to the global batch size.
        lost: The probability that a machine that is there is gone in the next step.
        returned: The probability that one that is gone is back in the next step.
        devices_per_machine: How many devices come and go together.
        seed: Of the random numbers.
    """
    _check_multiple("devices", devices, devices_per_machine)
    check_number("lost", lost, 0, 1)
    check_number("returned", returned, 0, 1)
    random = np.random.default_rng(seed)
    there = np.ones(devices // devices_per_machine, dtype=bool)
    counts = [devices]
    for _ in range(steps - 1):
        draws = random.random(len(there))
        there = np.where(there, draws >= lost, draws < returned)
        counts.append(int(there.sum()) * devices_per_machine)
    held = np.array([count for count in counts if count])
    return pd.DataFrame({COLUMN: held * samples_per_device, "devices": held})


_ALL: tuple[Callable[..., Made], ...] = (
    constant, ramp, doubling, thresholds, seesaw, critical_batch, spot_market,
)  # fmt: skip
FAMILIES = {family.__name__.replace("_", "-"): family for family in _ALL}


def make(family: str, **options: object) -> pd.DataFrame:
    """Returns a trace with the columns ``step``, ``batchsize`` and what else is known.

    >>> make("doubling", steps=5, first=32, every=2, most=64).batchsize.tolist()
    [32, 32, 64, 64, 64]

    Args:
        family: A key of `FAMILIES`.
        options: The keywords of that function.

    Raises:
        ValueError, TypeError: There is no such family, or an option is not allowed.
        TraceError: The batch sizes are not positive integers.
    """
    function = FAMILIES[check_choice("family", family, FAMILIES)]
    if "steps" in options:
        check_integer("steps", options["steps"], 1, MOST_STEPS)
    made: Any = function(**options)
    table = made if is_pandas(made, "DataFrame") else pd.DataFrame({COLUMN: [*made]})
    table = table.assign(**{COLUMN: Trace(table[[COLUMN]]).batch_sizes})
    table.insert(0, STEP_COLUMN, np.arange(len(table)))
    return table


def _check_multiple(name: str, value: int, unit: int) -> None:
    check_integer(f"what divides {name}", unit, least=1)
    if check_integer(name, value, least=unit) % unit:
        raise ValueError(f"{name} must be a multiple of {unit}, got {value}")


def _until(
    total: int, size_at: Callable[[int], int], used: Callable[[int], int] = int
) -> list[int]:
    """Returns batch sizes up to a total number of units.

    Args:
        total: The number of units.
        size_at: From the units before a step to its batch size.
        used: From a step's batch size to the units that it uses.
    """
    check_integer("total", total, least=1)
    sizes, done = [], 0
    while done < total:
        sizes.append(check_integer("the batch size", size_at(done), least=1))
        done += used(sizes[-1])
    return sizes


def _doubled(first: int, times: int, most: int) -> int:
    """Returns ``first``, doubled so often, or as often as ``most`` allows."""
    check_integer("first", first, least=1)
    check_integer("most", most, least=first)
    return first << min(times, (most // first).bit_length() - 1)
