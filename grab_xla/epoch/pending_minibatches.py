"""Minibatches that wait for the update they are part of."""

from __future__ import annotations

import torch
from torch import Tensor

from grab_xla.epoch.columns import Columns
from grab_xla.epoch.online_balancer import OnlineBalancer


class PendingMinibatches:
    """Gradients of this replica's minibatches in the current step.

    Under an elastic sampler replicas run different numbers of minibatches, so they can
    only balance together at the update, which all of them reach. Minibatch k of a step
    was run by replica k mod W. In every round each replica exchanges one minibatch,
    zeros if it has none left, and all replicas balance them one by one. The same
    programs serve every batch size: one exchanges, one balances a minibatch.

    Memory: one minibatch of per-sample gradients for every substep.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns, self._replica = columns, columns.replica
        self.minibatches: list[Tensor] = []
        self._zero_rows: Tensor | None = None
        self._attached = False

    def abandon(self) -> None:
        """Forgets a step left before its update; raises if `balance` never ran."""
        num_minibatches = len(self.minibatches)
        self.minibatches = []
        if num_minibatches and not self._attached:
            raise ValueError(
                f"{num_minibatches} minibatches of gradients were never balanced: with "
                "several replicas, call optimizer.attach(sampler.after_update) once, "
                "and sampler.step() before optimizer.step()"
            )

    def balance(
        self, balancer: OnlineBalancer, batch_size: int, minibatch_size: int
    ) -> None:
        """Balances all minibatches of an update, in the order's order. Collective."""
        self._attached = True
        num_replicas, rank = self._replica.num_replicas, self._replica.rank
        num_minibatches = batch_size // minibatch_size
        num_own = max(0, -(-(num_minibatches - rank) // num_replicas))
        if len(self.minibatches) != num_own:
            raise ValueError(
                f"replica {rank} ran {num_own} minibatches of this update, but "
                f"sampler.step() was called {len(self.minibatches)} times: call it "
                "once per minibatch, before optimizer.step()"
            )
        # Now what is sent is data, so that every replica runs the same program.
        self._replica.sync()
        for first in range(0, num_minibatches, num_replicas):
            own = self.minibatches[first // num_replicas :]
            sent = own[0] if own else self._zeros(minibatch_size)
            received = self._columns.of_all_replicas(sent)
            minibatches = [rows.clone() for rows in received.unbind(0)]
            self._replica.sync()
            for rows in minibatches[: num_minibatches - first]:
                balancer.balance(lambda rows=rows: [rows])
                self._replica.sync()
        self.minibatches = []

    def _zeros(self, minibatch_size: int) -> Tensor:
        if self._zero_rows is None or len(self._zero_rows) != minibatch_size:
            shape = (minibatch_size, self._columns.num_columns)
            zeros = torch.zeros(shape, dtype=self._columns.dtype)
            self._zero_rows = zeros.to(self._replica.device)
        return self._zero_rows
