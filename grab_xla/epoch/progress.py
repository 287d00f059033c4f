"""How far replicas are in the order of an epoch, and which samples come next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancing.reordering import RoundRobinSharding
from grab_xla.epoch.online_balancer import OnlineBalancer
from grab_xla.epoch.orders import Orders, SampleWeights
from xla_replica.backends.grid import Rider


class Progress(Rider):
    """Begins epochs, and checks that steps are of the next samples of their order.

    The sampler deals the order itself, or another sampler does: then replica r runs the
    r-th of every W minibatches of a step. Positions in the order are those of groups;
    unless the order is one of groups, a group is a sample.

    A step is of the next samples of the order, which ``indices`` show to be those of
    the step. Without them there is one comparison, of how many samples of the order the
    loader has drawn and how many had a step. More steps are an error, and fewer a
    warning when the order is left, unless they are fewer than a step has, as those that
    a loader draws and leaves out by ``drop_last``.

    Args:
        orders: The orders of the epochs.
        sharding: How replicas share them.
        balancer: What balances; its ``num_seen`` counts groups, and after the whole
            ones also the smaller one at the end.
        weights: What samples' gradients are multiplied by.
        uses_gradients: Whether anything is balanced.
        timer: Makes a context from a name.

    Attributes:
        dealt_elsewhere: The epoch whose whole order another sampler was given; None if
            no order was given.
        waits: Whether gradients of a step wait for the update, as several replicas' do
            then, and exact ones.
        end: How many whole groups of the order the pass uses on all replicas.
    """

    def __init__(
        self,
        orders: Orders,
        sharding: RoundRobinSharding,
        balancer: OnlineBalancer,
        weights: SampleWeights,
        uses_gradients: bool,
        timer: Callable[[str], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._orders, self._sharding, self._balancer = orders, sharding, balancer
        self._weights, self._timer = weights, timer
        self._replica, self._group_size = balancer.columns.replica, sharding.group_size
        self._uses_gradients = uses_gradients
        # Of this order: samples that were drawn, that had a step, and the most in a
        # step that did not say which they are.
        self._num_drawn = self._num_stepped = self._step_size = 0
        self._orders_left, self._is_drawn, self._older_goes_on = 0, False, False
        # The position at which the pass over the order began, and whether that is in
        # the middle of an epoch, which a state restored.
        self._start, self._resumed = 0, False
        self._own = sharding.own(orders.order, 0)
        self._set_dealer(None)
        self._gathered: Iterable[Tensor] = ()  # what `commit` balances
        self._num_pending = 0  # minibatches of this replica that wait for their update
        self._num_updated = 0  # samples of this epoch that updates have used

    def __len__(self) -> int:
        """Returns how many samples this replica runs in a pass."""
        return self._sharding.length(self._start)

    @property
    def num_seen(self) -> int:
        """The samples of the current order whose gradients have been taken."""
        num_samples = self._balancer.num_seen * self._group_size
        return min(num_samples, self._sharding.num_samples)

    def _set_dealer(self, dealt_elsewhere: int | None) -> None:
        self.dealt_elsewhere = dealt_elsewhere
        waits = self._balancer.columns.joins_updates
        self.waits = waits and dealt_elsewhere is not None
        self.end = self._sharding.end(self._start)

    def deal(self) -> Iterator[int]:
        """Begins the next epoch, or what is left of a restored one."""
        self.dealt_elsewhere = None
        self._advance()
        self._set_dealer(None)
        self._set_weights(self._orders.epoch)
        self._own = self._sharding.own(self._orders.order, self._start)
        self._older_goes_on = False
        return self._draw(self._own.tolist(), self._orders_left)

    def _draw(self, samples: list[int], orders_left: int) -> Iterator[int]:
        for num_drawn, sample in enumerate(samples, 1):
            if orders_left == self._orders_left:
                self._num_drawn, self._is_drawn = max(self._num_drawn, num_drawn), True
            else:
                self._older_goes_on = True
            yield sample

    def _leave_order(self) -> None:
        """Ends the passes over the order."""
        self._orders_left += 1
        self._num_drawn = self._num_stepped = self._step_size = 0

    def give(self, epoch: int) -> None:
        """Begins the epoch unless it has begun; another sampler deals its order.

        Raises:
            ValueError: ``epoch`` is earlier than the current one.
        """
        given_for = self.dealt_elsewhere
        if given_for is not None and epoch < given_for:
            raise ValueError(
                f"the order of epoch {epoch} is gone: the current epoch is {given_for}"
            )
        # The elastic sampler knows its position: it asks for whole orders.
        if given_for is None or epoch > given_for:
            self._resumed = False
            self._advance()
        self._start, self._resumed = 0, False
        self._set_dealer(epoch)
        self._set_weights(epoch)

    def _set_weights(self, epoch: int) -> None:
        weights = self._weights.of(epoch)
        # Samples of a group are of one update.
        self._balancer.weights = (
            None if weights is None else weights[:: self._group_size]
        )

    def _advance(self) -> None:
        """Begins an epoch unless the current one has not been used."""
        orders, num_seen = self._orders, self._balancer.num_seen
        # Nor does looking at the rest of a restored epoch begin another.
        unused = self._resumed and num_seen == self._start
        if unused and orders.given is None:
            return
        self._balancer.drop_pending()
        self._start, self._resumed, self._num_pending = 0, False, 0
        if orders.begun and orders.ordering.needs_gradients and num_seen == 0:
            return
        num_groups = self._sharding.num_groups
        if num_seen:
            if 0 < self._step_size <= self._num_drawn - self._num_stepped:
                orders.warn_of_steps(self._num_drawn, self._num_stepped)
            self._leave_order()
            self._num_updated = 0
            if num_seen == num_groups or self.dealt_elsewhere is not None:
                orders.warn_of_remainder()
        placements = self._balancer.placements()
        with self._timer("reset_epoch"):
            orders.advance(placements)
            self._balancer.reset(num_groups, orders.generator)

    def next_samples(self, num_groups: int) -> np.ndarray:
        """Returns the next samples that this replica runs, as many as there are."""
        num_seen, num_replicas = self._balancer.num_seen, self._replica.num_replicas
        if self.dealt_elsewhere is None:
            own, first = self._own, -(-(num_seen - self._start) // num_replicas)
            if num_seen > self.end:  # the smaller group at the end is done, too
                first = len(own)
        else:
            own = self._orders.order
            turn = self._num_pending * num_replicas + self._replica.rank
            first = num_seen + turn * num_groups
        return own[first * self._group_size : (first + num_groups) * self._group_size]

    def claim(
        self, num_groups: int, indices: Sequence[int] | Tensor | None = None
    ) -> bool:
        """Counts a step; returns whether there is something to balance.

        Raises:
            ValueError: These cannot be the next groups.
        """
        if not self._orders.begun:
            raise ValueError(
                "step() before the first epoch: iterate over the sampler first"
            )
        expected = self.next_samples(num_groups)
        num_samples = num_groups * self._group_size
        deals = self.dealt_elsewhere is None
        # What is left after the whole groups is not balanced.
        is_smaller = deals and num_groups == 1 and 0 < len(expected) < num_samples
        if is_smaller:
            num_samples = len(expected)
        num_left = len(expected)
        if deals and self._is_drawn and indices is None:
            drawn = 0 if self._older_goes_on else self._num_drawn - self._num_stepped
            num_left = min(num_left, drawn)
        if num_left < num_samples:
            raise ValueError(
                f"step() with {num_samples} samples, but only {num_left} are left of "
                "this epoch on this replica, or of those that its newest pass has "
                "drawn. Every sample has one step: add up several losses of a batch, "
                "and evaluate in the middle of an epoch with a DataLoader of its own. "
                "iter(sampler) begins the next epoch"
            )
        if indices is not None:
            received = torch.as_tensor(indices).cpu().numpy().reshape(-1)
            if not np.array_equal(received, expected):
                raise ValueError(
                    f"step(): indices are {received[:8].tolist()}..., but the next "
                    f"{num_samples} samples of the order are "
                    f"{expected[:8].tolist()}...: call step() once per batch, in the "
                    "order in which the loader gives them; a second pass over the "
                    "loader begins the next epoch"
                )
        self._num_stepped += num_samples
        if indices is None:
            self._step_size = max(self._step_size, num_samples)
        self._num_pending += self.waits
        if self._uses_gradients and not is_smaller:
            return num_groups > 0
        if not self.waits:
            num_left = self.end - self._balancer.num_seen
            num_used = num_groups * self._replica.num_replicas
            self._balancer.num_seen += min(num_used, num_left or 1)
        return False

    def count(self, num_samples: int) -> None:
        """Counts steps of an order that needs no gradients."""
        num_groups, num_remaining = divmod(num_samples, self._group_size)
        if num_remaining and num_remaining != self._sharding.num_remaining:
            raise ValueError(
                f"count({num_samples}): with group_size={self._group_size} samples are "
                "used in whole groups"
            )
        self.claim(num_groups)
        if num_remaining:
            self.claim(1)

    def finish_update(self, update: Any) -> None:
        """Balances what waits for an update; see `GraBSampler.after_update`."""
        num_samples = update.batch_size
        self._gather(update.epoch, num_samples, update.minibatch_size)
        if self._balancer.columns.joins_updates:
            self.commit()
        elif self._uses_gradients and self.dealt_elsewhere == update.epoch:
            # A state that is saved during the update would lack gradients that come
            # later: the samples of a resumed run would get the signs of others.
            num_new = self.num_seen - self._num_updated
            self._num_updated = self.num_seen
            if num_new != num_samples:
                raise ValueError(
                    f"this update has {num_samples} samples, but sampler.step() took "
                    f"the gradients of {num_new} since the last one: call it once per "
                    "minibatch, before optimizer.step()"
                )

    def _gather(self, epoch: int, batch_size: int, minibatch_size: int) -> None:
        size = self._group_size
        if size > 1 and minibatch_size != size:
            raise ValueError(
                f"group_size={size}, but minibatches have {minibatch_size} samples: "
                f"CustomSampler(..., minibatch_size={size})"
            )
        if self._uses_gradients and batch_size % minibatch_size:
            raise ValueError(
                f"the batch size {batch_size} is not a multiple of the minibatch size "
                f"{minibatch_size}, so a minibatch was padded with samples that would "
                "be balanced twice: leave out pad_minibatches=True where gradients "
                "choose the order"
            )
        if self._balancer.columns.joins_updates:
            # An idle replica may come here before it asks for the epoch's order.
            self.give(epoch)
        self._num_new = batch_size // size
        self._gathered = self._balancer.gather(self._num_new, minibatch_size // size)

    def exchange(self, step: Any) -> None:
        """Gathers what a step balances, before it is made. Collective."""
        self._gather(step.epoch, step.batch_size, step.minibatch_size)
        if self._uses_gradients:
            self._gathered = list(self._gathered)

    def commit(self, num_minibatches: Any = None) -> None:
        """Balances what was gathered."""
        del num_minibatches
        self._num_pending = 0
        if self._uses_gradients:
            self._balancer.place_update(self._gathered)
        else:
            self._balancer.num_seen += self._num_new

    def clear(self) -> None:
        """Forgets what waits for an update."""
        self._balancer.drop_step()
        self._num_pending, self._gathered = 0, ()

    def restore(self, dealt_elsewhere: int | None) -> None:
        """Continues where the orders and the balancer were restored."""
        self._leave_order()
        self._num_pending, self._num_updated = 0, self.num_seen
        num_seen, sharding = self._balancer.num_seen, self._sharding
        end = sharding.end(0) + (sharding.num_remaining > 0)
        self._resumed = 0 < num_seen < end
        self._start = num_seen if self._resumed else 0
        self._set_dealer(dealt_elsewhere)
        self._own = sharding.own(self._orders.order, self._start)
