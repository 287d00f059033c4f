"""What of a sampler lives on the device: the balance state and an epoch's codes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from grab_xla.balancers import Balancer, State
from grab_xla.balancing import compiled_loop
from grab_xla.balancing.checks import check_integer, check_positive
from grab_xla.balancing.decisions import TIES, Decisions
from grab_xla.epoch.columns import Columns
from grab_xla.epoch.epoch_metrics import Instruments
from xla_replica import Replica

# Rows whose inner products are formed at once on a CPU without the compiled loop: few,
# for a tile of vectors to stay in the cache. Elsewhere a step is one tile.
CPU_TILE_SIZE = 4


class Engine:
    """Balances rows in the order in which they come and keeps their codes.

    Nothing is read back but in `codes`, once an epoch.

    Args:
        balancer: The balance type.
        columns: Which columns this replica holds.
        replica: Whose device it is.
        dtype: Of the state.
        tie: See `Decisions`.
        tile_size: See `Decisions`; None chooses by backend.
        walk_constant: c of the self-balancing walk; None decides deterministically.
        instruments: See every row that is balanced.
    """

    def __init__(
        self,
        balancer: Balancer,
        columns: Columns,
        replica: Replica,
        device: torch.device,
        *,
        dtype: torch.dtype,
        tie: str,
        tile_size: int | None,
        walk_constant: float | None,
        instruments: Instruments,
    ) -> None:
        self.balancer = balancer
        self.columns, self._replica = columns, replica
        self._device, self._dtype = device, dtype
        self._walk_constant = walk_constant
        if dtype not in compiled_loop.DTYPES:
            raise ValueError(
                f"dtype={dtype}; sums over an epoch need torch.float32 or torch.float64"
            )
        if tie not in TIES:
            raise ValueError(f"tie={tie!r}; allowed are {', '.join(TIES)}")
        if tile_size is not None:
            check_integer("tile_size", tile_size, 1)
        if walk_constant is not None:
            check_positive("prob_balance_c", walk_constant)
        on_cpu = device.type == "cpu" and not columns.shards
        loops = on_cpu and tile_size is None and compiled_loop.available()
        if on_cpu and tile_size is None:
            tile_size = CPU_TILE_SIZE
        self._decisions = Decisions(
            tie=tie, sum_=columns.all_reduce_, tile_size=tile_size, loops=loops
        )
        self.state: State = balancer.init(columns.num_own, dtype, device)
        # Zeros become data, or the first epoch would begin with a program of its own.
        self._replica.sync()
        self.instruments = instruments
        self._codes: list[torch.Tensor] = []
        self._uniforms: torch.Tensor | None = None
        self.num_seen = 0

    @torch.no_grad()
    def begin_epoch(self, num_samples: int, generator: torch.Generator) -> None:
        """Forgets codes, draws the epoch's random numbers and resets the state."""
        self.state = self.balancer.begin_epoch(self.state)
        self._codes, self.num_seen = [], 0
        self.instruments.begin_epoch()
        self.draw(num_samples, generator)
        # Its own graph: that of a step is then the same in the first and other steps.
        self._replica.sync()

    def draw(self, num_samples: int, generator: torch.Generator) -> None:
        """Draws the epoch's uniform numbers, all at once: by position in the order."""
        if self._walk_constant is not None:
            size = (num_samples, self.balancer.num_draws)
            self._uniforms = torch.rand(size, generator=generator, dtype=self._dtype)

    @torch.no_grad()
    def balance(self, rows_RD: torch.Tensor) -> None:
        """Balances the next R samples, own columns of each. Collective if sharded."""
        self.instruments.observe(rows_RD)
        decide = self._decisions
        if self._uniforms is not None and self._walk_constant is not None:
            first = self.num_seen - self.balancer.num_pending(self.state)
            drawn = self._uniforms[first : self.num_seen + len(rows_RD)]
            thresholds = self._walk_constant * (1 - 2 * drawn)
            decide = dataclasses.replace(
                decide, thresholds_RN=thresholds.to(self._device)
            )
        self.state, codes = self.balancer.balance(self.state, rows_RD, decide)
        self._codes.append(codes)
        self.num_seen += len(rows_RD)

    def skip(self, num_rows: int) -> None:
        """Counts the next samples without a look at their gradients."""
        self.num_seen += num_rows

    def codes(self) -> np.ndarray:
        """The codes so far: one transfer."""
        codes = [part for part in self._codes if len(part)]
        if not codes:
            return np.zeros(0, dtype=np.int64)
        fetched = torch.cat(self._replica.fetch(codes))
        self._codes = codes
        return fetched.numpy()

    def update_second_moment(self, second_moment: torch.Tensor) -> None:
        """See `GraBSampler.update_v`."""
        value = second_moment.detach().reshape(1, -1).to(self._device, self._dtype)
        if value.shape[1] != self.columns.num_columns:
            raise ValueError(
                f"update_v: got {value.shape[1]} numbers, but gradients have "
                f"{self.columns.num_columns}"
            )
        own = self.columns.own(value)
        self.state = self.balancer.with_second_moment(self.state, own)
        # Which columns are own is in the program: it must not be that of a collective.
        self._replica.sync()

    def state_dict(self) -> dict[str, Any]:
        """Whole vectors on the CPU, whatever the number of replicas. Collective."""
        whole = [
            self.columns.whole(value) if value.dim() == 2 else value
            for value in self.state.values()
        ]
        fetched = self._replica.fetch(whole)
        return {
            "state": {name: value.clone() for name, value in zip(self.state, fetched)},
            "codes": torch.from_numpy(self.codes()),
            "num_seen": self.num_seen,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes what `state_dict` gave, on any number of replicas."""
        state = {}
        for name, value in saved["state"].items():
            value = value.to(self._dtype)
            fill = self.balancer.fills.get(name, 0.0)
            own = self.columns.own(value, fill) if value.dim() == 2 else value
            state[name] = own.clone().to(self._device)
        self.state = state
        codes = saved["codes"]
        self._codes = [codes.to(self._device)] if len(codes) else []
        self.num_seen = saved["num_seen"]
        self.instruments.begin_epoch()
