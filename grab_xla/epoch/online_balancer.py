"""The part of a sampler on the device: the balance state and an epoch's placements."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancers import Ordering
from grab_xla.balancing.decisions import Decisions
from grab_xla.epoch.columns import Columns
from grab_xla.epoch.epoch_metrics import EpochMetrics
from grab_xla.gradients.rows import numbers_at_once
from grab_xla.options import Signs
from xla_replica import full_matmul_precision, traits


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
        uses_gradients: Whether anything is balanced, or measured.
        piece_size: A step may be balanced in pieces of so many rows, one after the
            other; None means that it may not.
    """

    def __init__(
        self, ordering: Ordering, columns: Columns, metrics: EpochMetrics, signs: Signs
    ) -> None:
        self._ordering, self.columns, self._metrics = ordering, columns, metrics
        self._replica, self._signs = columns.replica, signs
        self.uses_gradients = ordering.needs_gradients or metrics.on
        least, size = ordering.piece_size or 1, None
        # Replicas exchange a step at once, and a program would hold every piece.
        if not columns.joins_updates and not self._replica.is_lazy:
            blocks = numbers_at_once(columns.device) // max(1, least * columns.num_own)
            size = max(1, blocks) * least
        self.piece_size = ordering.piece_size and size
        by_row = traits(columns.device).is_host and not columns.shards
        self._decisions = Decisions(signs.tie, None, columns.all_reduce_, by_row, size)
        self.state = ordering.init(columns.num_own, columns.dtype, columns.device)
        # Zeros become data, or the first epoch would begin with a different program.
        self._replica.sync()
        self._placements: list[Tensor] = []
        self._thresholds: Tensor | None = None
        self._num_leaves, self.num_seen = ordering.num_leaves, 0

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
        if self._signs.prob_balance:
            size = num_samples, self._ordering.depth + 1
            uniforms = torch.rand(size, generator=generator, dtype=self.columns.dtype)
            self._thresholds = self._signs.prob_balance_c * (1 - 2 * uniforms)

    @torch.no_grad()
    def place(self, rows_RD: Tensor) -> None:
        """Balances samples, given this replica's columns of them, ``(R, columns)``."""
        ordering, decide = self._ordering, self._decisions
        num_waiting = ordering.num_pending(self.state)
        first, last = self.num_seen - num_waiting, self.num_seen + len(rows_RD)
        if self._thresholds is not None:
            thresholds = self._thresholds[first:last].to(self.columns.device)
            decide = dataclasses.replace(decide, thresholds_RN=thresholds)
        if self._metrics.on:
            self._metrics.observe(rows_RD)
        with full_matmul_precision(self.columns.device):
            self.state, placements = ordering.balance(self.state, rows_RD, decide)
        num_decided = last - first - ordering.num_pending(self.state)
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
        parts = [part for part in self._placements if len(part)]
        if not parts:
            return np.zeros(0, dtype=np.int64)
        placements = torch.cat(self._replica.fetch(parts)).numpy()
        self._check(placements)
        return placements

    def _check(self, placements: np.ndarray) -> None:
        """Raises ValueError if `Ordering.balance` may not return these."""
        if self._ordering.placement_dtype.is_floating_point:
            return
        leaves, is_flag = self._num_leaves, placements.dtype.kind == "b"
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
            RuntimeError: It does not have a number for every (projected) parameter.
        """
        value = vector.detach().reshape(1, self.columns.num_columns)
        value = value.to(self.columns.device, self.columns.dtype)
        # The replica's columns are part of this program, so it must not be the program
        # of a collective, of a step before it or after it, which all replicas share.
        self._replica.sync()
        own = self.columns.own(value)
        self.state = getattr(self._ordering, method)(self.state, own)
        self._replica.sync()

    def state_dict(self) -> dict[str, Any]:
        """Returns whole vectors on the CPU, for any number of replicas. Collective."""
        whole = self.columns.whole
        values = [whole(v) if v.dim() == 2 else v for v in self.state.values()]
        fetched = self._replica.fetch(values)
        return {
            "state": {name: value.clone() for name, value in zip(self.state, fetched)},
            "codes": torch.from_numpy(self.placements()),
            "num_seen": self.num_seen,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restores what `state_dict` returned, on any number of replicas."""
        columns = self.columns
        for name, value in saved["state"].items():
            value = value.to(columns.dtype)
            if value.dim() == 2:
                value = columns.own(value)
            self.state[name] = value.clone().to(columns.device)
        self._placements = [saved["codes"].to(columns.device)]
        self.num_seen = saved["num_seen"]
        self._metrics.reset()
