"""Norms and herding of an epoch's vectors.

Everything stays on the device until it is read. Vectors are measured as they are
balanced: after projection and normalisation, in the order visited, from all replicas.
With sharded columns, reading is a collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from grab_xla.balancing.prefix_sums import prefix_norms
from grab_xla.epoch.columns import Columns
from grab_xla.options import Measurements
from xla_replica import where_finite


class EpochMetrics:
    """Measures norms and herding of the current epoch."""

    def __init__(self, columns: Columns, asked: Measurements) -> None:
        self._columns, self._replica, self._asked = columns, columns.replica, asked
        self.on = asked.record_norm or asked.record_herding
        size = columns.num_own if asked.record_herding else 0
        self._sum = torch.zeros(size, dtype=columns.dtype, device=columns.device)
        self._count = self._sum.new_zeros(1)
        self.reset()

    def reset(self) -> None:
        """Forgets the previous epoch, except for its mean."""
        self._squares: list[Tensor] = []
        self._vectors: list[Tensor] = []
        self._prefixes: list[Iterable[Tensor]] = []
        self._mean = self._sum / self._count.clamp(min=1)
        self._sum, self._count = map(torch.zeros_like, (self._sum, self._count))
        self._prefix = torch.zeros_like(self._sum)

    def observe(self, rows_RD: Tensor) -> None:
        """Measures the next vectors, given this replica's columns of them."""
        if self._asked.record_norm:
            self._squares.append(rows_RD.square().sum(1))
        if self._asked.record_herding:
            # What is not finite is not balanced.
            is_stale = self._asked.stale_mean_herding
            instead = self._mean if is_stale else 0.0
            rows_RD = torch.where(where_finite(rows_RD), rows_RD, instead)
            self._sum = self._sum + rows_RD.sum(0)
            self._count = self._count + len(rows_RD)
            if is_stale:
                self._prefix, *norms = prefix_norms(self._prefix, [rows_RD], self._mean)
                self._prefixes.append(norms)
            else:
                self._vectors.append(rows_RD)

    def norms(self) -> list[float]:
        """Returns 2-norms in the order visited. One transfer."""
        if not self._squares:
            return []
        squares = torch.cat(self._squares)
        self._columns.all_reduce_([squares])
        return self._replica.fetch([squares.sqrt()])[0].tolist()

    def herding(self) -> tuple[float, float]:
        """Returns the largest prefix sum's infinity norm and 2-norm; -inf without one.

        One transfer.
        """
        if self._vectors:
            mean, zeros = self._sum / self._count, torch.zeros_like(self._sum)
            self._prefixes = [prefix_norms(zeros, self._vectors, mean)[1:]]
        if not self._prefixes:
            return -math.inf, -math.inf
        infinity, squares = (torch.cat(parts) for parts in zip(*self._prefixes))
        if self._columns.shards:
            self._columns.all_reduce_([squares])
            infinity = self._replica.all_gather(infinity).amax(0)
        largest = [infinity.amax(0), squares.amax(0).sqrt()]
        infinity, euclidean = self._replica.fetch(largest)
        return float(infinity), float(euclidean)

    def scalars(self) -> dict[str, float]:
        """Returns what is measured, by its name in TensorBoard."""
        values: dict[str, float] = {}
        infinity, euclidean = self.herding()
        if infinity != -math.inf:
            values |= {"herding": infinity, "avg_grad_error": euclidean}
        if norms := self.norms():
            values |= {"norm/mean": sum(norms) / len(norms), "norm/max": max(norms)}
        return values
