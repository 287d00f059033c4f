"""The part of a sampler on the device: the balance state and an epoch's placements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancers import Ordering, State
from grab_xla.balancing.decisions import TIES, Decisions
from grab_xla.balancing.rows import FactoredRows, Rows, UnformedRows
from grab_xla.epoch.columns import Columns
from grab_xla.epoch.epoch_metrics import EpochMetrics
from xla_replica import traits
from xla_replica.common.arguments import check_choice, check_integer, check_number
from xla_replica.common.compiling import has_numba

# Sums over an epoch need this precision.
DTYPES = (torch.float32, torch.float64)
# The number of rows whose inner products are formed at once on a CPU: few, so that they
# stay in the cache. Elsewhere a step is one tile.
CPU_TILE_SIZE = 4


class OnlineBalancer:
    """Balances rows in the order in which they come and keeps their placements.

    Only `placements` reads the device, once an epoch. A ``tile_size`` of None is chosen
    by backend; without a ``walk_constant``, c of the self-balancing walk, signs are not
    drawn. ``num_seen`` counts samples of this epoch that were balanced or skipped. A
    step may be balanced in pieces of a multiple of ``piece_size`` rows, one after the
    other; None means that it may not. ``weights`` are those of the epoch's samples, by
    position in the order, ``(num_samples,)`` on the CPU; None: all weigh the same.
    """

    def __init__(
        self,
        ordering: Ordering,
        columns: Columns,
        metrics: EpochMetrics,
        tie: str,
        tile_size: int | None,
        walk_constant: float | None,
    ) -> None:
        self._ordering, self.columns, self._metrics = ordering, columns, metrics
        self._replica, self._walk_constant = columns.replica, walk_constant
        check_choice("dtype", columns.dtype, DTYPES)
        check_choice("tie", tie, TIES)
        if tile_size is not None:
            check_integer("tile_size", tile_size, 1)
        if walk_constant is not None:
            check_number("prob_balance_c", walk_constant, above=0)
        on_host = traits(columns.device).is_host and not columns.shards
        compiled_row = on_host and tile_size is None and has_numba()
        # Replicas exchange a step at once, and a program would hold every piece.
        whole = self._replica.num_replicas > 1 or self._replica.is_lazy
        self.piece_size = None if whole else ordering.piece_size
        if on_host and tile_size is None:
            tile_size = CPU_TILE_SIZE
        if self.piece_size is not None and tile_size is not None:
            # Whole tiles, of vectors that come from up to two rows each.
            self.piece_size = math.lcm(self.piece_size, 2 * tile_size)
        self._decisions = Decisions(
            tie,
            sum_=columns.all_reduce_,
            tile_size=tile_size,
            compiled_row=compiled_row,
        )
        shape = (columns.num_own, columns.dtype, columns.device)
        self.state: State = ordering.init(*shape)
        # Zeros become data, or the first epoch would begin with a different program.
        self._replica.sync()
        self._placements: list[Tensor] = []
        self._uniforms: Tensor | None = None
        self.weights: Tensor | None = None
        self.num_seen = 0

    @torch.no_grad()
    def begin_epoch(self, num_samples: int, generator: torch.Generator) -> None:
        """Forgets placements, draws the epoch's random numbers and resets the state."""
        self.state = self._ordering.begin_epoch(self.state)
        self._placements, self.num_seen = [], 0
        self._metrics.begin_epoch()
        self.draw(num_samples, generator)
        # A separate graph, so that the first step has the same graph as the others.
        self._replica.sync()

    def draw(self, num_samples: int, generator: torch.Generator) -> None:
        """Draws the epoch's uniform numbers, by position in the order, all at once."""
        if self._walk_constant is not None:
            size = (num_samples, self._ordering.num_draws)
            like = {"generator": generator, "dtype": self.columns.dtype}
            self._uniforms = torch.rand(size, **like)

    def balance(self, pieces: Callable[[], Iterable[Rows]]) -> None:
        """Balances this replica's columns of a step's samples, with all replicas.

        ``pieces`` returns them, ``(R, columns)`` at a time; see ``piece_size``. Call it
        under ``torch.no_grad()``, as `balance_factored`.
        """
        self.state = self._ordering.begin_step(self.state, pieces(), self._decisions)
        for rows in pieces():
            self._balance(rows)
            del rows  # before the next ones are formed

    def takes_factored(self, num_rows: int) -> bool:
        """Returns whether a step may come as rows that are not formed.

        Replicas exchange columns, and metrics are of columns.
        """
        alone = self._replica.num_replicas == 1 and not self._metrics.on
        return alone and self._ordering.takes_factored(self.state, num_rows)

    def balance_factored(self, rows: FactoredRows) -> None:
        """Balances a step whose rows are not formed; see `takes_factored`."""
        self._balance(rows)

    def _balance(self, rows_RD: Rows) -> None:
        decide = self._decisions
        if self.weights is not None:
            weights = self.weights[self.num_seen : self.num_seen + len(rows_RD)]
            weights = weights.to(self.columns.device, self.columns.dtype)
            decide = dataclasses.replace(decide, weights_R=weights)
        if isinstance(rows_RD, Tensor):
            self._metrics.observe(rows_RD, decide.weights_R)
        elif isinstance(rows_RD, UnformedRows):
            decide = dataclasses.replace(decide, tile_size=None)
        if self._uniforms is not None and self._walk_constant is not None:
            first = self.num_seen - self._ordering.num_pending(self.state)
            drawn = self._uniforms[first : self.num_seen + len(rows_RD)]
            thresholds = (self._walk_constant * (1 - 2 * drawn)).to(self.columns.device)
            decide = dataclasses.replace(decide, thresholds_RN=thresholds)
        self.state, placements = self._ordering.balance(self.state, rows_RD, decide)
        self._placements.append(placements)
        self.num_seen += len(rows_RD)

    def placements(self) -> np.ndarray:
        """Returns the placements so far. One transfer."""
        placements = [part for part in self._placements if len(part)]
        if not placements:
            return np.zeros(0, dtype=np.int64)
        fetched = torch.cat(self._replica.fetch(placements))
        self._placements = placements
        return fetched.numpy()

    def update_second_moment(self, second_moment: Tensor) -> None:
        """See `GraBSampler.update_v`."""
        value = second_moment.detach().reshape(1, -1)
        value = value.to(self.columns.device, self.columns.dtype)
        if value.shape[1] != self.columns.num_columns:
            raise ValueError(
                f"update_v: got {value.shape[1]} numbers, but gradients have "
                f"{self.columns.num_columns}"
            )
        own = self.columns.own(value)
        self.state = self._ordering.with_second_moment(self.state, own)
        # The replica's columns are part of this program, so it must not be the program
        # of a collective, which is the same on all replicas.
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
        columns = self.columns
        # What an earlier version did not have is as at the beginning of an epoch.
        state = self._ordering.init(columns.num_own, columns.dtype, columns.device)
        for name, value in saved["state"].items():
            value = value.to(columns.dtype)
            fill = self._ordering.fills.get(name, 0.0)
            own = columns.own(value, fill) if value.dim() == 2 else value
            state[name] = own.clone().to(columns.device)
        self.state = state
        self._placements = [saved["codes"].to(columns.device)]
        self.num_seen = saved["num_seen"]
        self._metrics.begin_epoch()
