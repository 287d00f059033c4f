"""Every balance type under test, its oracle, and epochs of made-up gradients."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from grab_xla import BALANCE_TYPES, GraBSampler
from grab_xla.epoch import online_balancer
from xla_replica import DeviceTraits

NUM_SAMPLES, NUM_PARAMETERS = 48, 13


class Kind(NamedTuple):
    """A balance type with options, and its promises."""

    name: str
    options: dict[str, Any]
    # The order does not depend on how the epoch is cut into steps.
    invariant: bool = True
    # ``(order, rows, centre, steps) -> next order``, rows in the order visited.
    oracle: Callable[..., list[int]] | None = None

    def expected(self, order, rows, memory, steps) -> list[int]:
        """Returns the oracle's next order; ``memory`` has the last epoch's mean."""
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


# Balancing as in the papers, one sample at a time, in float64: ``rows`` are ``(n, d)``
# gradients in the order visited. A tie is negative, as by grab-sampler's rule.


def pair(order, rows, *_, num_workers: int = 1):
    """Returns the next order of (coordinated) pair balance; 2W must divide n."""
    lefts = [[] for _ in range(num_workers)]
    rights = [[] for _ in range(num_workers)]
    total = np.zeros(rows.shape[1])
    for block in range(0, len(order), 2 * num_workers):
        for worker in range(num_workers):
            i, j = block + worker, block + num_workers + worker
            z = rows[i] - rows[j]
            plus = total @ z < 0
            total = total + z if plus else total - z
            first, second = (order[i], order[j]) if plus else (order[j], order[i])
            lefts[worker].append(first)
            rights[worker].insert(0, second)
    following = [left + right for left, right in zip(lefts, rights)]
    return [following[i % num_workers][i // num_workers] for i in range(len(order))]


def recursive(order, rows, centre, *_, depth: int = 2):
    """Returns the next order of recursive balance: samples walk from root to leaf."""
    totals = [np.zeros(rows.shape[1]) for _ in range(2 ** (depth + 1) - 1)]
    leaves = [([], []) for _ in range(2**depth)]
    for i, sample in enumerate(order):
        z, node = rows[i] - centre, 0
        for level in range(depth + 1):
            plus = totals[node] @ z < 0
            totals[node] = totals[node] + z if plus else totals[node] - z
            leaf, node = node - (2**level - 1), 2 * node + (1 if plus else 2)
        if plus:
            leaves[leaf][0].append(sample)
        else:
            leaves[leaf][1].insert(0, sample)
    return [sample for front, back in leaves for sample in front + back]


def recursive_pair(order, rows, *_, size: int = 8, tie="negative", limits=None):
    """Returns the next order of recursive pair balance; products are below limits."""
    limits = np.zeros((len(order), size)) if limits is None else limits
    totals = [np.zeros(rows.shape[1]) for _ in range(size - 1)]

    def sort(items, node, before, level=0):
        if len(items) == 1:
            return items
        left, right = [], []
        for x, y in zip(items[0::2], items[1::2]):
            product, limit = before[node] @ (rows[x] - rows[y]), limits[x, level]
            plus = product < limit or (tie == "positive" and product == limit)
            left.append(x if plus else y)
            right.append(y if plus else x)
        totals[node] = totals[node] + rows[left].sum(0) - rows[right].sum(0)
        halves = (2 * node + 1, left), (2 * node + 2, right)
        return [
            i for child, half in halves for i in sort(half, child, before, level + 1)
        ]

    blocks = [
        sort(list(range(first, first + size)), 0, list(totals))
        for first in range(0, len(order), size)
    ]
    columns = enumerate(zip(*blocks))
    return [order[i] for n, column in columns for i in column[:: -1 if n % 2 else 1]]


def mean(order, rows, centre, steps=None):
    """Returns the next order of mean balance; in ``steps``, that of batch balance."""
    left, right, total = [], [], np.zeros(rows.shape[1])
    for start, end in steps or [(i, i + 1) for i in range(len(order))]:
        plus = [total @ (rows[i] - centre) < 0 for i in range(start, end)]
        for i, is_plus in zip(range(start, end), plus):
            z = rows[i] - centre
            total = total + z if is_plus else total - z
            if is_plus:
                left.append(order[i])
            else:
                right.insert(0, order[i])
    return left + right


def by_norm(order, rows, *_):
    return [order[i] for i in np.argsort(-(rows**2).sum(1), kind="stable")]


ONE_BY_ONE = {}, True, lambda *of: mean(*of[:3])
FOUR = {"num_workers": 4}
KINDS = {
    **{name: Kind(name, *ONE_BY_ONE) for name in ("mean", "sign", "adamean")},
    "pair": Kind("pair", {}, True, pair),
    "coordinated pair": Kind("pair", FOUR, True, partial(pair, **FOUR)),
    "recursive": Kind("recursive", {"depth": 2}, True, recursive),
    "recursive-pair": Kind("recursive-pair", {"batch_size": 8}, True, recursive_pair),
    "batch": Kind("batch", {}, False, mean),
    "norm": Kind("norm", {}, True, by_norm),
    **{name: Kind(name, {}, invariant=False) for name in ("ema", "adaema")},
    **{name: Kind(name, {}) for name in ("rr", "so", "fixed", "swr")},
}
ALL = list(KINDS)
BALANCING = [n for n, kind in KINDS.items() if BALANCE_TYPES[kind.name].needs_gradients]
PERMUTING = [n for n, kind in KINDS.items() if BALANCE_TYPES[kind.name].is_permutation]
INVARIANT = [name for name in BALANCING if KINDS[name].invariant]
# The first batch sums to zero around its own mean: moving averages meet exact ties,
# which rounding decides, and so the number of shards.
TIE_FREE = [name for name in BALANCING if name not in ("ema", "adaema")]


def by_products(monkeypatch, wanted: bool = True) -> None:
    """Has new samplers balance by inner products, as on a GPU, if it is wanted."""
    if wanted:
        monkeypatch.setattr(online_balancer, "traits", lambda _: DeviceTraits())


def gradients(epoch: int, num_samples=NUM_SAMPLES, size=NUM_PARAMETERS) -> torch.Tensor:
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


def take_steps(sampler, epoch: int, samples: list[int], size: int, steps=None) -> None:
    """Has the gradients of these samples balanced, in steps of a size."""
    rows = gradients(epoch, sampler.num_samples)
    for batch in list(batches(samples, size))[:steps]:
        sampler.step(as_dict(rows[batch].to(sampler.device)), indices=batch)


def run_epoch(sampler: GraBSampler, epoch: int, size: int, steps=None) -> list[int]:
    """Runs an epoch (or its first ``steps`` steps); returns this replica's samples."""
    order = list(sampler)
    take_steps(sampler, epoch, order, size, steps)
    return order
