"""Every balance type under test, and epochs of made-up gradients for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from grab_xla import BALANCE_TYPES, GraBSampler
from support.grab_xla import balancing

NUM_SAMPLES, NUM_PARAMETERS = 48, 13


class Kind(NamedTuple):
    """A balance type with options, and its promises.

    Attributes:
        invariant: The order does not depend on how the epoch is cut into steps.
        oracle: ``(order, rows, centre, steps) -> next order``, rows in the order
            visited; the centre counts where rows are balanced one by one. None for
            types that need no gradients.
    """

    name: str
    options: dict[str, Any]
    invariant: bool = True
    oracle: Callable[..., list[int]] | None = None

    def expected(self, order, rows, memory, steps) -> list[int]:
        """Returns the oracle's next order around the mean of the epoch before.

        ``memory`` is a dict that lives as long as the run.
        """
        rows = np.sign(rows) if self.name == "sign" else rows
        centre, memory["mean"] = memory.get("mean", 0.0), rows.mean(0)
        return self.oracle(order, rows, centre, steps)

    def sampler(self, num_samples: int = NUM_SAMPLES, **options: Any) -> GraBSampler:
        """Returns a sampler for `NUM_PARAMETERS` float64 parameters."""
        parameters = {"w": torch.zeros(2, 5), "b": torch.zeros(NUM_PARAMETERS - 10)}
        options = {"dtype": torch.float64, **self.options, **options}
        if self.name == "fixed":
            options = {"orders": list(range(num_samples))[::-1], **options}
        return GraBSampler(range(num_samples), parameters, self.name, **options)


ORACLES: dict[str, Callable[..., list[int]]] = {
    "mean": lambda order, rows, centre, steps: balancing.mean(order, rows, centre),
    "pair": lambda order, rows, *_: balancing.pair(order, rows),
    "coordinated pair": lambda order, rows, *_: balancing.pair(order, rows, 4),
    "recursive": lambda *of: balancing.recursive(*of[:3], depth=2),
    "recursive-pair": lambda order, rows, *_: balancing.recursive_pair(order, rows, 8),
    "batch": balancing.batch,
    "batch-uncentred": lambda *of: balancing.batch(*of, centred_update=False),
    "norm": lambda order, rows, *_: [
        order[i] for i in np.argsort(-(rows**2).sum(1), kind="stable")
    ],
}
ORACLES["sign"] = ORACLES["adamean"] = ORACLES["mean"]
KINDS = {
    name: Kind(type_, options, invariant, ORACLES.get(name))
    for name, type_, options, invariant in [
        ("mean", "mean", {}, True),
        ("pair", "pair", {}, True),
        ("coordinated pair", "pair", {"num_workers": 4}, True),
        ("recursive", "recursive", {"depth": 2}, True),
        ("recursive-pair", "recursive-pair", {"batch_size": 8}, True),
        *((name, name, {}, True) for name in ("sign", "adamean")),
        *((name, name, {}, False) for name in ("batch", "batch-uncentred")),
        ("norm", "norm", {}, True),
        *((name, name, {}, False) for name in ("ema", "adaema")),
        *((name, name, {}, True) for name in ("rr", "so", "fixed", "swr")),
    ]
}
ALL = list(KINDS)
BALANCING = [
    name for name, kind in KINDS.items() if BALANCE_TYPES[kind.name].needs_gradients
]
PERMUTING = [
    name for name, kind in KINDS.items() if BALANCE_TYPES[kind.name].is_permutation
]
INVARIANT = [name for name in BALANCING if KINDS[name].invariant]
# The first batch sums to zero around its own mean: moving averages meet exact ties,
# which rounding decides, and so the number of shards.
TIE_FREE = [name for name in BALANCING if name not in ("ema", "adaema")]


def gradients(
    epoch: int, num_samples: int = NUM_SAMPLES, size: int = NUM_PARAMETERS
) -> torch.Tensor:
    """Returns ``(n, size)`` float64 gradients with a mean, which drift by epoch."""
    generator, shape = torch.Generator().manual_seed(0), (num_samples, size)
    base = torch.randn(shape, generator=generator, dtype=torch.float64) + 0.3
    generator.manual_seed(1 + epoch)
    drift = torch.randn(shape, generator=generator, dtype=torch.float64)
    return base + 0.3 * drift


def as_dict(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns rows as per-sample gradients of the parameters of `Kind.sampler`."""
    return {"w": rows[:, :10].reshape(-1, 2, 5), "b": rows[:, 10:]}


def batches(order: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(order), size):
        yield order[start : start + size]


def take_steps(
    sampler: GraBSampler,
    epoch: int,
    samples: list[int],
    size: int,
    steps: int | None = None,
) -> None:
    """Has the gradients of these samples balanced, in steps of a size."""
    rows = gradients(epoch, sampler.num_samples)
    for batch in list(batches(samples, size))[:steps]:
        sampler.step(as_dict(rows[batch].to(sampler.device)), indices=batch)


def run_epoch(
    sampler: GraBSampler, epoch: int, size: int, steps: int | None = None
) -> list[int]:
    """Runs an epoch (or its first ``steps`` steps); returns this replica's samples."""
    order = list(sampler)
    take_steps(sampler, epoch, order, size, steps)
    return order
