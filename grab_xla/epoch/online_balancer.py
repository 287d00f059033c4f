"""The part of a sampler on the device: the balance state and an epoch's placements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancers import Ordering
from grab_xla.balancing.decisions import TIES, Decisions
from grab_xla.epoch.columns import Columns
from grab_xla.epoch.epoch_metrics import EpochMetrics
from grab_xla.gradients.row_copies import interleaved
from xla_replica import full_matmul_precision, traits
from xla_replica.common.arguments import check_choice, check_integer, check_number

# Sums over an epoch need this precision.
DTYPES = (torch.float32, torch.float64)
# The number of rows whose inner products are formed at once on a CPU: few, so that they
# stay in the cache. Elsewhere a step is one tile.
CPU_TILE_SIZE = 4


class OnlineBalancer:
    """Places samples one step after the other, with all replicas.

    Only `placements` reads the device, once an epoch.

    Args:
        ordering: The balance type.
        columns: The columns that this replica holds.
        metrics: What measures the rows.
        tie, tile_size: Those of `Decisions`; a size of None is chosen by backend.
        walk_constant: c of the self-balancing walk; None: signs are not drawn.

    Attributes:
        state: The balance state, with this replica's columns.
        num_seen: How many samples of this epoch were balanced or skipped.
        weights: Those of the epoch's samples, by position in the order,
            ``(num_samples,)`` on the CPU; None: all weigh the same.
        piece_size: A step may be balanced in pieces of a multiple of so many rows, one
            after the other; None means that it may not.
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
        row_by_row = on_host and tile_size is None
        # Replicas exchange a step at once, and a program would hold every piece.
        whole = columns.joins_updates or self._replica.is_lazy
        self.piece_size = None if whole else ordering.piece_size
        if on_host and tile_size is None:
            tile_size = CPU_TILE_SIZE
        if self.piece_size is not None and tile_size is not None:
            # Whole tiles, of vectors that come from up to two rows each.
            self.piece_size = math.lcm(self.piece_size, 2 * tile_size)
        self._decisions = Decisions(
            tie,
            sum_=columns.all_reduce_ if columns.shards else None,
            tile_size=tile_size,
            row_by_row=row_by_row,
        )
        self.state = ordering.init(columns.num_own, columns.dtype, columns.device)
        # Zeros become data, or the first epoch would begin with a different program.
        self._replica.sync()
        self._placements: list[Tensor] = []
        self._uniforms: Tensor | None = None
        self._pending: list[Tensor] = []  # minibatches that wait for their update
        self._joins_updates = False
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
        """Draws the epoch's uniform numbers, by position in the order, all at once."""
        if self._walk_constant is not None:
            size = (num_samples, self._ordering.num_draws)
            like: dict[str, Any] = {"generator": generator, "dtype": self.columns.dtype}
            self._uniforms = torch.rand(size, **like)

    def place_together(self, rows: Tensor, end: int, waits: bool) -> None:
        """Balances a step of several replicas, or keeps its rows until the update.

        Args:
            rows: This replica's rows, ``(R, d)``.
            end: The number of samples that the pass has on all replicas; after these
                come repeated ones.
            waits: Whether replicas balance at the update, with `place_update`.
        """
        if waits:
            # A copy: gradients may be zeroed before the update. It has the layout of
            # what replicas exchange.
            self._pending.append(rows.clone(memory_format=torch.contiguous_format))
            return
        # In the sequence of the order, without repeated samples.
        ordered = interleaved(self.columns.of_all_replicas(rows))
        self.place([ordered[: end - self.num_seen]])

    @torch.no_grad()
    def place_update(self, minibatches: Iterable[Tensor]) -> None:
        """Balances all minibatches of an update, one by one, as `gather` yields them.

        Under an elastic sampler replicas run different numbers of minibatches, so they
        can only balance together at the update, which all of them reach.
        """
        self._joins_updates = True
        self._replica.sync()  # so that every minibatch has the same program
        for rows in minibatches:
            self.place([rows])
            self._replica.sync()
        self.drop_step()

    def gather(self, batch_size: int, minibatch_size: int) -> Iterator[Tensor]:
        """Yields the rows of all minibatches of an update, in the order's order.

        Collective. Minibatch k of a step was run by replica k mod W. In every round
        each replica exchanges one minibatch, zeros if it has none left. The same
        programs serve every batch size: one exchanges, one balances a minibatch.

        Raises:
            ValueError: Another number of minibatches waits than this replica ran.
        """
        num_replicas, rank = self._replica.num_replicas, self._replica.rank
        num_minibatches = batch_size // minibatch_size
        num_own = max(0, -(-(num_minibatches - rank) // num_replicas))
        if len(self._pending) != num_own:
            raise ValueError(
                f"replica {rank} ran {num_own} minibatches of this update, but "
                f"sampler.step() was called {len(self._pending)} times: call it "
                "once per minibatch, before optimizer.step()"
            )
        own = list(self._pending)
        if num_own * num_replicas < num_minibatches:
            shape = minibatch_size, self.columns.num_columns
            zeros = torch.zeros(shape, dtype=self.columns.dtype)
            own.append(zeros.to(self._replica.device))
        # Now what is sent is data, so that every replica runs the same program.
        self._replica.sync()
        for first in range(0, num_minibatches, num_replicas):
            sent = own[first // num_replicas]
            received = self.columns.of_all_replicas(sent)
            minibatches = [rows.clone() for rows in received.unbind(0)]
            self._replica.sync()
            yield from minibatches[: num_minibatches - first]

    def drop_step(self) -> None:
        """Forgets the minibatches that wait."""
        self._pending = []

    def drop_pending(self) -> None:
        """Forgets a step left before its update.

        Raises:
            ValueError: No update has ever been joined.
        """
        num_minibatches = len(self._pending)
        self._pending = []
        if num_minibatches and not self._joins_updates:
            raise ValueError(
                f"{num_minibatches} minibatches were not balanced: use "
                "optimizer.attach(sampler.after_update), and sampler.step() before "
                "optimizer.step()"
            )

    def place(self, pieces: Iterable[Tensor]) -> None:
        """Balances a step, given this replica's columns of its samples.

        ``pieces`` are ``(R, columns)`` at a time; see ``piece_size``. They are iterated
        over twice, if the balance type looks at a step before it is balanced.
        """
        with full_matmul_precision(self.columns.device):
            self.state = self._ordering.begin_step(self.state, pieces, self._decisions)
            for rows in pieces:
                self._place_piece(rows)
                del rows  # before the next ones are formed

    def _place_piece(self, rows_RD: Tensor) -> None:
        ordering, device = self._ordering, self.columns.device
        first, last = self.num_seen, self.num_seen + len(rows_RD)
        num_waiting = ordering.num_pending(self.state)
        decide, weights = self._decisions, None
        if self.weights is not None:
            weights = self.weights[first:last].to(device, self.columns.dtype)
            decide = dataclasses.replace(decide, weights_R=weights)
        if self._uniforms is not None and self._walk_constant is not None:
            drawn = self._uniforms[first - num_waiting : last]
            thresholds = (self._walk_constant * (1 - 2 * drawn)).to(device)
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
            ordering.check_placements(placements.numpy())
        self._placements.append(placements)
        self.num_seen = last

    def placements(self) -> np.ndarray:
        """Returns the placements so far. One transfer."""
        placements = [part for part in self._placements if len(part)]
        if not placements:
            return np.zeros(0, dtype=np.int64)
        fetched = torch.cat(self._replica.fetch(placements)).numpy()
        self._ordering.check_placements(fetched)
        self._placements = placements
        return fetched

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
        columns, ordering = self.columns, self._ordering
        for name, value in saved["state"].items():
            value = value.to(columns.dtype)
            fill = ordering.fills.get(name, 0.0)
            own = columns.own(value, fill) if value.dim() == 2 else value
            self.state[name] = own.clone().to(columns.device)
        self._placements = [saved["codes"].to(columns.device)]
        self.num_seen = saved["num_seen"]
        self.drop_step()
        self._metrics.reset()
