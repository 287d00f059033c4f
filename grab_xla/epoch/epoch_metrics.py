"""Norms and herding of an epoch's vectors.

Everything stays on the device until it is read. Vectors are measured as they are
balanced: after projection and normalisation, in the order visited, from all replicas.
Where samples have weights, herding is that of ``weight (vector - mean)`` around the
weighted mean; norms are those of vectors. With sharded columns, reading is a
collective.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grab_xla.balancing.decisions import SMALLEST
from grab_xla.balancing.prefix_sums import PrefixNorms, RunningHerding
from grab_xla.epoch.columns import Columns
from xla_replica import where_finite


class EpochMetrics:
    """Measures norms and herding of the current epoch.

    'exact' herding keeps all vectors of an epoch, n d numbers, and centres them by
    their own mean; 'running' keeps O(d) numbers and centres by the mean of the previous
    epoch (zero in the first one).
    """

    def __init__(self, columns: Columns, norms: bool, herding: str | None) -> None:
        self._columns, self._replica = columns, columns.replica
        self._keeps_norms, self._herding = norms, herding
        self.on = norms or herding is not None  # Whether anything is measured.
        self._running = RunningHerding(columns.dtype, columns.device)
        self._sum = self._running.init(columns.num_own)["prefix"]
        self._count = self._sum.new_zeros(1)  # the sum of the weights
        self.reset()

    def reset(self) -> None:
        """Forgets the previous epoch, except for its mean."""
        self._squares: list[Tensor] = []
        self._vectors: list[tuple[Tensor, Tensor | None]] = []
        self._prefixes: list[PrefixNorms] = []
        if self._herding is not None:
            self._mean = self._sum / self._count.clamp(min=SMALLEST)
            self._sum = torch.zeros_like(self._sum)
            self._count = torch.zeros_like(self._count)
            self._state = self._running.init(self._columns.num_own)

    def observe(self, rows_RD: Tensor, weights_R: Tensor | None = None) -> None:
        """Measures the next vectors, given this replica's columns of them."""
        if self._keeps_norms:
            self._squares.append(rows_RD.square().sum(1))
        if self._herding is None:
            return
        # What is not finite is not balanced.
        instead = self._mean if self._herding == "running" else 0.0
        rows_RD = torch.where(where_finite(rows_RD), rows_RD, instead)
        self._sum = self._sum + _weighted(rows_RD, weights_R).sum(0)
        self._count = self._count + (
            len(rows_RD) if weights_R is None else weights_R.sum()
        )
        if self._herding == "exact":
            self._vectors.append((rows_RD, weights_R))
            return
        deviations = _weighted(rows_RD - self._mean, weights_R)
        zeros = torch.zeros_like(self._mean)
        self._state, norms = self._running.advance(self._state, deviations, zeros)
        self._prefixes.append(norms)

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
        prefixes = list(self._prefixes)
        if self._vectors:
            mean = self._sum / self._count.clamp(min=SMALLEST)
            state = self._running.init(self._columns.num_own)
            for rows, weights in self._vectors:
                deviations = _weighted(rows - mean, weights)
                zeros = torch.zeros_like(mean)
                state, norms = self._running.advance(state, deviations, zeros)
                prefixes.append(norms)
        if not prefixes:
            return -math.inf, -math.inf
        infinity = torch.cat([norms.infinity for norms in prefixes])
        squares = torch.cat([norms.squares for norms in prefixes])
        if self._columns.shards:
            self._columns.all_reduce_([squares])
            infinity = self._replica.all_gather(infinity).amax(0)
        state = self._running.init(0)
        state = self._running.record(state, PrefixNorms(infinity, squares))
        result = self._running.result(state)
        infinity, euclidean = self._replica.fetch(list(result))
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


def _weighted(rows_RD: Tensor, weights_R: Tensor | None) -> Tensor:
    return rows_RD if weights_R is None else rows_RD * weights_R.unsqueeze(1)
