"""The part of a sampler on the device: the balance state and an epoch's placements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancers import Ordering
from grab_xla.balancing.decisions import Decisions
from grab_xla.epoch.columns import Columns
from grab_xla.epoch.epoch_metrics import EpochMetrics
from grab_xla.options import Signs
from xla_replica import full_matmul_precision, traits

# The number of rows whose inner products are formed at once on a CPU: few, so that they
# stay in the cache. Elsewhere a step is one tile.
CPU_TILE_SIZE = 4


class OnlineBalancer:
    """Places samples one step after the other.

    Only `placements` reads the device, once an epoch.

    Args:
        ordering: The balance type.
        columns: The columns that this replica holds.
        metrics: What measures the rows.
        signs: How signs are decided.

    Attributes:
        state: The balance state, with this replica's columns.
        num_seen: How many samples of this epoch were balanced or skipped: the one
            place in the order, the same on all replicas.
        weights: Those of the epoch's samples, by position in the order,
            ``(num_samples,)`` on the CPU; None: all weigh the same.
        piece_size: A step may be balanced in pieces of a multiple of so many rows, one
            after the other; None means that it may not.
    """

    def __init__(
        self, ordering: Ordering, columns: Columns, metrics: EpochMetrics, signs: Signs
    ) -> None:
        self._ordering, self.columns, self._metrics = ordering, columns, metrics
        self._replica, self._walk_constant = columns.replica, signs.walk_constant
        tile_size, on_host = signs.tile_size, traits(columns.device).is_host
        row_by_row = on_host and not columns.shards and tile_size is None
        if row_by_row:
            tile_size = CPU_TILE_SIZE
        # Replicas exchange a step at once, and a program would hold every piece.
        whole = columns.joins_updates or self._replica.is_lazy
        self.piece_size = None if whole else ordering.piece_size
        if self.piece_size is not None and tile_size is not None:
            # Whole tiles, of vectors that come from up to two rows each.
            self.piece_size = math.lcm(self.piece_size, 2 * tile_size)
        self._decisions = Decisions(
            signs.tie,
            sum_=columns.all_reduce_ if columns.shards else None,
            tile_size=tile_size,
            row_by_row=row_by_row,
        )
        self.state = ordering.init(columns.num_own, columns.dtype, columns.device)
        # Zeros become data, or the first epoch would begin with a different program.
        self._replica.sync()
        self._placements: list[Tensor] = []
        self._thresholds: Tensor | None = None
        self.weights: Tensor | None = None
        self.num_seen = 0

    @torch.no_grad()
    def reset(self, num_samples: int, generator: torch.Generator) -> None:
        """Begins an epoch: forgets placements and draws the epoch's random numbers."""
        self.state = self._ordering.begin_epoch(self.state)
        self._placements, self.num_seen = [], 0
        if self._metrics.on:
            self._metrics.reset()
        self.draw(num_samples, generator)
        # A separate graph, so that the first step has the same graph as the others.
        self._replica.sync()

    def draw(self, num_samples: int, generator: torch.Generator) -> None:
        """Draws the epoch's thresholds, by position in the order, all at once."""
        if self._walk_constant is not None:
            size = num_samples, self._ordering.depth + 1
            uniforms = torch.rand(size, generator=generator, dtype=self.columns.dtype)
            self._thresholds = self._walk_constant * (1 - 2 * uniforms)

    @torch.no_grad()
    def place(self, pieces: Iterable[Tensor]) -> None:
        """Balances samples, given this replica's columns of them.

        ``pieces`` are ``(R, columns)`` at a time; see ``piece_size``.
        """
        with full_matmul_precision(self.columns.device):
            for rows in pieces:
                self._place(rows)
                del rows  # before the next ones are formed

    def _place(self, rows_RD: Tensor) -> None:
        ordering, like = self._ordering, (self.columns.device, self.columns.dtype)
        first, last = self.num_seen, self.num_seen + len(rows_RD)
        num_waiting = ordering.num_pending(self.state)
        decide, weights = self._decisions, None
        if self.weights is not None:
            weights = self.weights[first:last].to(*like)
            decide = dataclasses.replace(decide, weights_R=weights)
        if self._thresholds is not None:
            thresholds = self._thresholds[first - num_waiting : last].to(*like)
            decide = dataclasses.replace(decide, thresholds_RN=thresholds)
        if self._metrics.on:
            self._metrics.observe(rows_RD, weights)
        self.state, placements = ordering.balance(self.state, rows_RD, decide)
        num_decided = num_waiting + len(rows_RD) - ordering.num_pending(self.state)
        if ordering.needs_gradients and placements.shape != (num_decided,):
            raise ValueError(
                f"{type(ordering).__name__}.balance returned placements of shape "
                f"{tuple(placements.shape)} for {num_decided} samples: return one for "
                "every sample, except those that num_pending counts"
            )
        if traits(placements).is_host:
            self._check(placements.numpy())
        self._placements.append(placements)
        self.num_seen = last

    def placements(self) -> np.ndarray:
        """Returns the placements so far. One transfer."""
        placements = [part for part in self._placements if len(part)]
        if not placements:
            return np.zeros(0, dtype=np.int64)
        fetched = torch.cat(self._replica.fetch(placements)).numpy()
        self._check(fetched)
        self._placements = placements
        return fetched

    def _check(self, placements: np.ndarray) -> None:
        """Raises ValueError if `Ordering.balance` may not return these."""
        if self._ordering.placement_dtype.is_floating_point:
            return
        leaves, is_flag = self._ordering.num_leaves, placements.dtype.kind == "b"
        wrong = is_flag | (placements % 1 != 0) | (np.abs(placements) > leaves)
        if wrong.any():
            raise ValueError(
                f"{type(self._ordering).__name__}.balance returned "
                f"{placements[wrong][0]} ({placements.dtype}); allowed are integers "
                f"from {-leaves} to {leaves}"
            )

    def change_state(self, method: str, vector: Tensor) -> None:
        """Replaces the state by what a method of the ordering makes of it and a vector.

        Raises:
            ValueError: It does not have a number for every (projected) parameter.
        """
        value = vector.detach().reshape(1, -1)
        value = value.to(self.columns.device, self.columns.dtype)
        if value.shape[1] != self.columns.num_columns:
            raise ValueError(
                f"{method}: got {value.shape[1]} numbers, but gradients have "
                f"{self.columns.num_columns}"
            )
        # The replica's columns are part of this program, so it must not be the program
        # of a collective, of a step before it or after it, which all replicas share.
        self._replica.sync()
        own = self.columns.own(value)
        self.state = getattr(self._ordering, method)(self.state, own)
        self._replica.sync()

    def state_dict(self) -> dict[str, Any]:
        """Returns whole vectors on the CPU, for any number of replicas. Collective."""
        whole = [
            self.columns.whole(value) if value.dim() == 2 else value
            for value in self.state.values()
        ]
        fetched = self._replica.fetch(whole)
        return {
            "state": {name: value.clone() for name, value in zip(self.state, fetched)},
            "codes": torch.from_numpy(self.placements()),
            "num_seen": self.num_seen,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restores what `state_dict` returned, on any number of replicas."""
        columns, fills = self.columns, self._ordering.fills
        for name, value in saved["state"].items():
            value = value.to(columns.dtype)
            if value.dim() == 2:
                value = columns.own(value, fills.get(name, 0.0))
            self.state[name] = value.clone().to(columns.device)
        self._placements = [saved["codes"].to(columns.device)]
        self.num_seen = saved["num_seen"]
        self._metrics.reset()
