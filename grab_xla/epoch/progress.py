"""How far replicas are in the order of an epoch, and what every step does there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grab_xla.epoch.columns import Columns
from grab_xla.epoch.cursor import Cursor
from grab_xla.epoch.online_balancer import OnlineBalancer
from grab_xla.epoch.orders import Orders
from grab_xla.epoch.passes import Passes
from grab_xla.epoch.pending_minibatches import PendingMinibatches
from grab_xla.epoch.round_robin_sharding import RoundRobinSharding
from grab_xla.epoch.row_copies import interleaved
from grab_xla.epoch.sample_weights import SampleWeights


class Progress:
    """Checks whose gradients come in a step, and has them balanced in the order.

    Args:
        orders: The orders of the epochs.
        sharding: How replicas share them.
        columns: The columns that this replica holds.
        balancer: What balances; its ``num_seen`` counts groups, and after the whole
            ones also the smaller one at the end. Unless the order is one of groups, a
            group is a sample.
        weights: What samples' gradients are multiplied by.
        uses_gradients: Whether anything is balanced.
        timer: Makes a context from a name.
    """

    def __init__(
        self,
        orders: Orders,
        sharding: RoundRobinSharding,
        columns: Columns,
        balancer: OnlineBalancer,
        weights: SampleWeights,
        uses_gradients: bool,
        timer: Callable[[str], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._orders, self._sharding, self._columns = orders, sharding, columns
        self.balancer, self._weights, self._timer = balancer, weights, timer
        self._replica, self.ordering = columns.replica, orders.ordering
        self.group_size = sharding.group_size
        self.uses_gradients = uses_gradients
        self.cursor = Cursor(sharding, orders.order)
        self._passes = Passes()
        self._pending = PendingMinibatches(columns)

    @property
    def num_seen(self) -> int:
        """The samples of the current order whose gradients have been taken."""
        return min(self.balancer.num_seen * self.group_size, self._sharding.num_samples)

    def iterate(self) -> Iterator[int]:
        """Begins the next epoch, or what is left of a restored one."""
        self.cursor.given_for = None
        self._advance()
        self._weigh(self._orders.epoch)
        return self._passes.over(self.cursor.deal(self._orders.order))

    def give(self, epoch: int) -> None:
        """Begins the epoch unless it has begun; another sampler deals its order.

        Raises:
            ValueError: ``epoch`` is earlier than the current one.
        """
        given_for = self.cursor.given_for
        if given_for is not None and epoch < given_for:
            raise ValueError(
                f"the order of epoch {epoch} is gone: the current epoch is "
                f"{given_for}, and orders follow from gradients"
            )
        # The elastic sampler knows its position: it asks for whole orders.
        if given_for is None or epoch > given_for:
            self.cursor.resumed = False
            self._advance()
        self.cursor.give(epoch)
        self._weigh(epoch)

    def _weigh(self, epoch: int) -> None:
        weights = self._weights.of(epoch)
        # Samples of a group are of one update.
        self.balancer.weights = None if weights is None else weights[:: self.group_size]

    def _advance(self) -> None:
        """Begins an epoch unless the current one has not been used."""
        num_seen, cursor = self.balancer.num_seen, self.cursor
        # Nor does looking at the rest of a restored epoch begin another.
        unused = cursor.resumed and num_seen == cursor.start
        if unused and self._orders.given is None:
            return
        self._pending.abandon()
        cursor.begin()
        needs_gradients = self._orders.ordering.needs_gradients
        if self._orders.begun and needs_gradients and num_seen == 0:
            return
        num_groups = self._sharding.num_groups
        if num_seen:
            self._passes.warn_of_unused(self._orders.epoch)
            self._passes.leave_epoch()
            if num_seen == num_groups or cursor.given_for is not None:
                self._orders.warn_of_remainder()
        placements = self.balancer.placements()
        with self._timer("reset_epoch"):
            self._orders.advance(placements)
            self.balancer.begin_epoch(num_groups, self._orders.generator)

    def next_samples(self, num_groups: int) -> np.ndarray:
        """Returns the next samples that this replica runs, as many as there are."""
        num_pending = len(self._pending.minibatches)
        done = self.balancer.num_seen, num_pending
        return self.cursor.next_samples(self._orders.order, *done, num_groups)

    def take(
        self,
        num_groups: int,
        indices: Sequence[int] | Tensor | None,
        expected: np.ndarray | None = None,
    ) -> bool:
        """Counts a step; returns whether there is something to balance.

        ``expected`` is what `next_samples` returned, if it was asked.

        Raises:
            ValueError: These cannot be the next groups.
        """
        if not self._orders.begun:
            raise ValueError(
                "step() before the first epoch: iterate over the sampler (or its "
                "DataLoader) first"
            )
        if expected is None:
            expected = self.next_samples(num_groups)
        num_samples = num_groups * self.group_size
        deals = self.cursor.given_for is None
        # What is left after the whole groups is not balanced.
        is_smaller = deals and num_groups == 1 and 0 < len(expected) < num_samples
        if is_smaller:
            num_samples = len(expected)
        self._passes.take(num_samples, expected, indices, guesses=deals)
        if self.uses_gradients and not is_smaller:
            return num_groups > 0
        if deals or self._replica.num_replicas == 1:
            left = self.cursor.left(self.balancer.num_seen)
            num_used = min(num_groups * self._replica.num_replicas, left or 1)
            self.balancer.num_seen += num_used
        return False

    def count(self, num_samples: int) -> None:
        """Counts steps of an order that needs no gradients."""
        num_groups, num_remaining = divmod(num_samples, self.group_size)
        if num_remaining and num_remaining != self._sharding.num_remaining:
            raise ValueError(
                f"count({num_samples}): with group_size={self.group_size} samples are "
                "used in whole groups"
            )
        self.take(num_groups, None)
        if num_remaining:
            self.take(1, None)

    def balance(self, rows_RD: Tensor) -> None:
        """Balances this replica's rows of a step, or keeps them until the update."""
        if self.cursor.given_for is not None and self._replica.num_replicas > 1:
            # A copy: gradients may be zeroed before the update.
            self._pending.minibatches.append(rows_RD.clone())
            return
        everyone = self._columns.of_all_replicas(rows_RD)
        left = self.cursor.left(self.balancer.num_seen)
        # In the sequence of the order, without repeated samples.
        ordered = interleaved(everyone)[:left]
        self.balancer.balance(lambda: [ordered])

    def after_update(self, update: Any) -> None:
        """Balances what waits for an update; see `GraBSampler.after_update`."""
        size = self.group_size
        if size > 1 and update.minibatch_size != size:
            raise ValueError(
                f"group_size={size}, but minibatches have {update.minibatch_size} "
                f"samples: CustomSampler(..., minibatch_size={size})"
            )
        if self.uses_gradients and update.batch_size % update.minibatch_size:
            raise ValueError(
                f"the batch size {update.batch_size} is not a multiple of the "
                f"minibatch size {update.minibatch_size}, so a minibatch was padded "
                "with samples that would be balanced twice: leave out "
                "pad_minibatches=True where gradients choose the order"
            )
        if self._replica.num_replicas == 1:
            if self.uses_gradients and self.cursor.given_for == update.epoch:
                self._passes.check_update(self.num_seen, update.batch_size)
            return
        # An idle replica may come here before it asks for the epoch's order.
        self.give(update.epoch)
        if not self.uses_gradients:
            self.balancer.num_seen += update.batch_size // size
            return
        sizes = update.batch_size // size, update.minibatch_size // size
        with torch.no_grad():
            self._pending.balance(self.balancer, *sizes)

    def restore(self, given_for: int | None) -> None:
        """Continues where the orders and the balancer were restored."""
        self._pending.minibatches = []
        self._passes.leave_epoch(num_updated=self.num_seen)
        self.cursor.restore(self.balancer.num_seen, given_for, self._orders.order)
