"""How far replicas are in the order of an epoch, and which samples come next."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancing.reordering import RoundRobinSharding
from grab_xla.epoch.online_balancer import OnlineBalancer
from grab_xla.epoch.orders import Orders
from xla_replica.device.row_units import Rider


@dataclasses.dataclass
class Passes:
    """What the passes over one order have done.

    Attributes:
        num_drawn: The most samples that one of them has drawn.
        num_stepped: How many of this replica's samples had a step.
        step_size: The most in a step that did not say which they are.
        older_goes_on: Whether a pass over an earlier order has drawn since.
    """

    num_drawn: int = 0
    num_stepped: int = 0
    step_size: int = 0
    older_goes_on: bool = False


@dataclasses.dataclass(eq=False)
class Progress(Rider):
    """Begins epochs, and gives the balance the gradients of the next samples.

    The sampler deals the order itself, or another sampler does: then replica r runs the
    r-th of every W minibatches of a step. Positions in the order are those of groups;
    unless the order is one of groups, a group is a sample.

    A step is of the next samples of the order, which ``indices`` show to be those of
    the step. Without them there is one comparison, of how many samples of the order the
    loader has drawn and how many had a step. More steps are an error, and fewer a
    warning when the order is left, unless they are fewer than a step has, as those that
    a loader draws and leaves out by ``drop_last``.

    Attributes:
        orders: The orders of the epochs.
        sharding: How replicas share them.
        balancer: What balances; its ``num_seen`` counts groups, and after the whole
            ones also the smaller one at the end.
        dealt_elsewhere: The epoch whose whole order another sampler was given; None if
            no order was given.
    """

    orders: Orders
    sharding: RoundRobinSharding
    balancer: OnlineBalancer
    dealt_elsewhere: int | None = None

    def __post_init__(self) -> None:
        self._columns = self.balancer.columns
        self._group_size = self.sharding.group_size
        self._num_groups = self.sharding.num_groups
        self._passes = Passes()
        # The position at which the pass over the order began: 0, or that of a state
        # that was restored in the middle of an epoch.
        self._start = 0
        self._own = self.sharding.own(self.orders.order, 0)
        self._steps: list[int] = []  # their samples, since the last update
        self._waiting: list[Tensor] = []  # rows of minibatches, until their update
        self._has_updated = False
        self._gathered: Iterable[Tensor] = ()  # what `commit` balances
        self._num_gathered = 0  # groups

    @property
    def _num_left(self) -> int:
        """The groups of the order that no step has had, of all replicas."""
        return self._num_groups - self.balancer.num_seen

    @property
    def _waits(self) -> bool:
        """Whether rows of a step wait for the update."""
        return self._columns.joins_updates and self.dealt_elsewhere is not None

    def __len__(self) -> int:
        """Returns how many samples this replica runs in a pass."""
        return len(self.sharding.own(self.orders.order, self._start))

    # --- epochs ---------------------------------------------------------------------

    def deal(self) -> Iterator[int]:
        """Begins the next epoch, or what is left of a restored one."""
        self.dealt_elsewhere = None
        self._advance()
        self._own = self.sharding.own(self.orders.order, self._start)
        self._passes.older_goes_on, self._passes.num_stepped = False, 0
        return self._draw(self._own.tolist(), self._passes)

    def _draw(self, samples: list[int], passes: Passes) -> Iterator[int]:
        for num_drawn, sample in enumerate(samples, 1):
            passes.num_drawn = max(passes.num_drawn, num_drawn)
            if passes is not self._passes:
                self._passes.older_goes_on = True
            yield sample

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
        self._start = 0
        if epoch != given_for:
            self._advance()
        self.dealt_elsewhere = epoch

    def _advance(self) -> None:
        """Begins an epoch unless the current one has not been used."""
        orders, num_seen = self.orders, self.balancer.num_seen
        # Nor does looking at the rest of a restored epoch begin another.
        if orders.given is None and 0 < self._start == num_seen:
            return
        num_waiting = len(self._waiting)
        self.clear()
        if num_waiting and not self._has_updated:
            raise ValueError(
                f"{num_waiting} minibatches were not balanced: call sampler.step() "
                "before optimizer.step(), and optimizer.attach(sampler.after_update)"
            )
        if num_seen:
            self._compare()
        self._start = 0
        if orders.begun and orders.ordering.needs_gradients and num_seen == 0:
            return
        num_left = self.sharding.num_samples % self._group_size
        is_whole = num_seen == self._num_groups
        if num_left and num_seen and (is_whole or self.dealt_elsewhere is not None):
            orders.warn_once(
                "remainder",
                f"epoch {orders.epoch} left out {num_left} samples, which fill no "
                f"group, and all epochs will: choose a group_size that divides "
                f"{self.sharding.num_samples}, or a DataLoader without drop_last",
            )
        self._passes = Passes()
        orders.advance(self.balancer.placements())
        self.balancer.reset(self._num_groups, orders.generator)

    def _compare(self) -> None:
        """Warns if fewer samples of the order had a step than were drawn."""
        drawn, stepped = self._passes.num_drawn, self._passes.num_stepped
        if 0 < self._passes.step_size <= drawn - stepped:
            self.orders.warn_once(
                "steps",
                f"{drawn} samples of epoch {self.orders.epoch} were drawn, and "
                f"{stepped} had a step. Unless it was left early, give one loss (or "
                "gradient) for every sample, a zero for one that does not count, or "
                "indices=: others got these gradients. Later ones are not reported",
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the order, the balance, and how far it is; collective."""
        own = {"given_for": self.dealt_elsewhere, "engine": self.balancer.state_dict()}
        return own | self.orders.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was called."""
        orders, balancer, sharding = self.orders, self.balancer, self.sharding
        orders.load_state_dict(state)
        balancer.load_state_dict(state["engine"])
        self.dealt_elsewhere = state["given_for"]
        if orders.begun:  # the epoch's random numbers are drawn again, and not saved
            balancer.draw(self._num_groups, orders.generator)
        self.clear()
        num_seen = balancer.num_seen
        is_over = num_seen * self._group_size >= sharding.num_samples
        self._start = 0 if is_over else num_seen
        self._own = sharding.own(orders.order, self._start)
        self._passes = Passes(num_stepped=len(self._own) if is_over else 0)

    # --- steps ----------------------------------------------------------------------

    def next_samples(self, num_groups: int) -> np.ndarray:
        """Returns the next samples that this replica runs, as many as there are."""
        num_samples, replica = num_groups * self._group_size, self._columns.replica
        if self.dealt_elsewhere is None:
            return self._own[self._passes.num_stepped :][:num_samples]
        turn = replica.rank
        if self._waits:
            turn += len(self._steps) * replica.num_replicas
        position = self.balancer.num_seen + turn * num_groups
        return self.orders.order[position * self._group_size :][:num_samples]

    def claim(
        self,
        num_groups: int,
        indices: Sequence[int] | Tensor | None = None,
        num_losses: int | None = None,
    ) -> bool:
        """Counts a step; returns whether there is something to balance.

        ``num_losses`` is how many samples a group has, if it is known.

        Raises:
            ValueError: These cannot be the next groups.
        """
        expected, passes = self.next_samples(num_groups), self._passes
        num_samples, num_left = num_groups * self._group_size, len(expected)
        deals = self.dealt_elsewhere is None
        # What is left after the whole groups is not balanced.
        is_smaller = deals and num_groups == 1 and 0 < num_left < num_samples
        if is_smaller:
            num_samples = num_left
        if num_losses not in (None, num_samples):
            raise ValueError(
                f"backward() with {num_losses} losses for a group of {num_samples}: "
                "pass group_size= as batch_size= to the DataLoader, too"
            )
        if deals and (indices is None or not self.orders.begun):
            drawn = 0 if passes.older_goes_on else passes.num_drawn - passes.num_stepped
            num_left = min(num_left, drawn)
        if num_left < num_samples:
            raise ValueError(
                f"step() with {num_samples} samples, but only {num_left} are left of "
                "this epoch or of what its newest pass has drawn: add up losses of a "
                "batch, and evaluate in the middle of an epoch with a DataLoader of "
                "its own; iter(sampler) begins the next one"
            )
        if indices is not None:
            received = torch.as_tensor(indices).cpu().numpy().reshape(-1)
            if not np.array_equal(received, expected):
                raise ValueError(
                    f"step(): indices are {received[:8].tolist()}..., but the next "
                    f"samples of the order are {expected[:8].tolist()}...: call step() "
                    "once per batch, in the loader's order; a second pass over it "
                    "begins the next epoch"
                )
        if indices is None:
            passes.step_size = max(passes.step_size, num_samples)
        if deals:
            passes.num_stepped += num_samples
        elif num_groups:
            self._steps.append(num_samples)
        if self.balancer.uses_gradients and not is_smaller:
            return num_groups > 0
        if not self._waits:
            num_used = num_groups * self._columns.replica.num_replicas
            self.balancer.num_seen += min(num_used, self._num_left or 1)
        return False

    def place(self, pieces: Iterable[Tensor]) -> None:
        """Balances the rows of a step, or keeps them until the update."""
        if self._columns.joins_updates:
            [rows] = pieces
            if self._waits:
                # A copy: gradients may be zeroed before the update. It has the layout
                # of what replicas exchange.
                self._waiting.append(rows.clone(memory_format=torch.contiguous_format))
                return
            # Without the repeated samples at the end.
            pieces = [self._columns.in_sequence(rows)[: self._num_left]]
        for rows in pieces:
            self.balancer.place(rows)
            del rows  # before the next ones are formed

    # --- updates of an elastic optimizer --------------------------------------------

    def finish_update(self, update: Any) -> None:
        """Balances what waits for an update; see `GraBSampler.after_update`."""
        self._gather(update)
        if self._columns.joins_updates:
            self.commit()
        self._steps = []

    def exchange(self, step: Any) -> None:
        """Gathers what a step balances, before it is made. Collective."""
        self._gather(step)
        self._gathered = list(self._gathered)

    def _gather(self, update: Any) -> None:
        batch_size, minibatch_size = update.batch_size, update.minibatch_size
        size, replica = self._group_size, self._columns.replica
        if self.balancer.uses_gradients and batch_size % minibatch_size:
            raise ValueError(
                f"the batch size {batch_size} is not a multiple of minibatch_size="
                f"{minibatch_size}: padding would be balanced twice, so leave out "
                "pad_minibatches=True where gradients choose the order"
            )
        if self._columns.joins_updates:
            # An idle replica may come here before it asks for the epoch's order.
            self.give(update.epoch)
        self._num_gathered = batch_size // size
        if not self.balancer.uses_gradients or self.dealt_elsewhere != update.epoch:
            return
        # Of gradients that come later, a state that is saved during the update would
        # know nothing: the samples of a resumed run would get the signs of others.
        num_minibatches = batch_size // minibatch_size
        num_own = len(range(replica.rank, num_minibatches, replica.num_replicas))
        expected, joins = num_own * minibatch_size, self._columns.joins_updates
        if sum(self._steps) != expected or (joins and len(self._steps) != num_own):
            raise ValueError(
                f"replica {replica.rank} ran {num_own} minibatches of {minibatch_size} "
                f"samples in this update, but sampler.step() took the gradients of "
                f"{sum(self._steps)} since the last one, in {len(self._steps)} calls: "
                "call it once per minibatch, before optimizer.step(); a group is one"
            )
        if joins:
            self._gathered = self._columns.of_minibatches(
                self._waiting, num_minibatches, minibatch_size // size
            )

    def commit(self, num_minibatches: Any = None) -> None:
        """Balances what was gathered, minibatch after minibatch.

        Under an elastic sampler replicas run different numbers of minibatches, so they
        can only balance together at the update, which all of them reach.
        """
        self._has_updated = True
        if self.balancer.uses_gradients:
            sync = self._columns.replica.sync
            sync()  # so that every minibatch has the same program
            for rows in self._gathered:
                self.balancer.place(rows)
                sync()
        else:
            self.balancer.num_seen += self._num_gathered
        self.clear()

    def clear(self) -> None:
        """Forgets what waits for an update."""
        self._steps, self._waiting, self._gathered = [], [], ()
