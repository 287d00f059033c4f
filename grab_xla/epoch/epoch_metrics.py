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

from grab_xla.balancers import State
from grab_xla.balancing.decisions import SMALLEST
from grab_xla.balancing.prefix_sums import PrefixNorms, RunningHerding
from grab_xla.epoch.columns import Columns
from grab_xla.options import Measurements
from xla_replica import where_finite

Weighted = tuple[Tensor, Tensor]  # rows and their weights


class EpochMetrics:
    """Measures norms and herding of the current epoch."""

    def __init__(self, columns: Columns, asked: Measurements) -> None:
        self._columns, self._replica, self._asked = columns, columns.replica, asked
        self.on = asked.record_norm or asked.record_herding
        self._running = RunningHerding(columns.dtype, columns.device)
        self._sum = self._running.init(columns.num_own)["prefix"]
        self._count = self._sum.new_zeros(1)  # the sum of the weights
        self.reset()

    def reset(self) -> None:
        """Forgets the previous epoch, except for its mean."""
        self._squares: list[Tensor] = []
        self._vectors: list[Weighted] = []
        self._prefixes: list[PrefixNorms] = []
        if self._asked.record_herding:
            self._mean = self._sum / self._count.clamp(min=SMALLEST)
            self._sum = torch.zeros_like(self._sum)
            self._count = torch.zeros_like(self._count)
            self._state = self._running.init(self._columns.num_own)

    def observe(self, rows_RD: Tensor, weights_R: Tensor | None = None) -> None:
        """Measures the next vectors, given this replica's columns of them."""
        if self._asked.record_norm:
            self._squares.append(rows_RD.square().sum(1))
        if not self._asked.record_herding:
            return
        # What is not finite is not balanced.
        is_stale = self._asked.stale_mean_herding
        instead = self._mean if is_stale else 0.0
        rows_RD = torch.where(where_finite(rows_RD), rows_RD, instead)
        if weights_R is None:
            weights_R = rows_RD.new_ones(len(rows_RD))
        self._sum = self._sum + (rows_RD * weights_R.unsqueeze(1)).sum(0)
        self._count = self._count + weights_R.sum()
        if is_stale:
            self._state = self._advance(self._state, (rows_RD, weights_R), self._mean)
        else:
            self._vectors.append((rows_RD, weights_R))

    def _advance(self, state: State, weighted: Weighted, mean: Tensor) -> State:
        """Notes the norms of the prefix sums that end at these rows."""
        rows_RD, weights_R = weighted
        deviations = (rows_RD - mean) * weights_R.unsqueeze(1)
        state, norms = self._running.advance(state, deviations, torch.zeros_like(mean))
        self._prefixes.append(norms)
        return state

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
            self._prefixes = []
            mean = self._sum / self._count.clamp(min=SMALLEST)
            state = self._running.init(self._columns.num_own)
            for weighted in self._vectors:
                state = self._advance(state, weighted, mean)
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
