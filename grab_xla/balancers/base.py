"""What a balance type is: a handful of functions of a state, and their options.

Adding a balance type takes one subclass and one row in `BALANCE_TYPES`. Its options are
the fields of a frozen dataclass, checked by their types. Whatever changes lives in a
state, a dict of tensors that the functions take and return:

- a two-dimensional tensor, ``(rows, columns)``, has a column for every (projected)
  parameter; with several replicas, for this replica's share of them;
- a one-dimensional tensor holds numbers that are the same on every replica.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancing.decisions import Decisions
from grab_xla.balancing.reordering import reorder
from xla_replica.common.arguments import check_fields

State = dict[str, Tensor]
Balanced = tuple[State, Tensor]  # A state and placements.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ordering:
    """An order for every epoch that needs no gradients; the base of those that do.

    Class attributes:
        needs_gradients: Whether the order follows from gradients. If not,
            `GraBSampler.step` has nothing to do unless metrics are recorded.
        is_drawn_anew: Whether every epoch's order is a new `first_order`, shuffled.
        is_permutation: Whether every sample comes once an epoch.
        placement_dtype: The dtype of placements, which stay on the device for an epoch.
            Floating ones may be any numbers.
        depth: The levels below the root, if there is a tree of accumulators; may be a
            property or a field, as may the next one.
        piece_size: A step may be balanced in pieces of any multiple of this many
            samples, one after the other, which gives the same placements; fewer samples
            have none. None means that it may not.
        order_methods, state_methods: The names of methods that `GraBSampler.sorter`
            hands on: those that return the next epoch's order, and those that return a
            new state of a state and a vector, ``(1, columns)``.
    """

    needs_gradients: ClassVar[bool] = False
    is_drawn_anew: ClassVar[bool] = False
    is_permutation: ClassVar[bool] = True
    placement_dtype: ClassVar[torch.dtype] = torch.int8
    depth: ClassVar[int] = 0
    piece_size: ClassVar[int | None] = None
    order_methods: ClassVar[Collection[str]] = ()
    state_methods: ClassVar[Collection[str]] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def num_nodes(self) -> int:
        """The number of accumulators in the tree."""
        return int(2 ** (self.depth + 1) - 1)

    @property
    def num_leaves(self) -> int:
        """The leaves that placements name, see `reorder`."""
        return int(2**self.depth)

    def num_pending(self, state: State) -> int:
        """Returns the number of samples that wait for a partner."""
        return len(state.get("pending", ()))

    def first_order(
        self, num_samples: int, shuffled: bool, generator: torch.Generator
    ) -> np.ndarray:
        """Returns the order of the first epoch, ``(n,)`` int64."""
        if shuffled:
            return torch.randperm(num_samples, generator=generator).numpy()
        return np.arange(num_samples)

    def next_order(self, order: np.ndarray, placements: np.ndarray) -> np.ndarray:
        """Returns the order of the next epoch, ``(n,)`` int64.

        `GraBSampler` calls it once an epoch on every replica, on the host, when the
        next epoch begins; not where no gradient came to a type that needs them, or
        where `is_drawn_anew`. The result must be the same on all replicas, and a
        permutation of ``order``.

        Args:
            order: The order of the epoch that ends. Of groups, their numbers 0, 1, ...
                in that order; samples that do not fill a group are not among them.
            placements: What `balance` returned for its first m samples, ``(m,)``. The
                others had no gradient, or still wait for a partner.
        """
        return order

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        """Returns the state before the first epoch."""
        return {}

    def begin_epoch(self, state: State) -> State:
        """Returns the state at the beginning of every epoch, the first one included."""
        return {name: torch.zeros_like(value) for name, value in state.items()}

    def balance(self, state: State, rows_RD: Tensor, decide: Decisions) -> Balanced:
        """Balances the next R samples of the order, with gradients ``(R, columns)``.

        Returns the new state, and ``(P,)`` placements: those of samples that waited for
        a partner, then those of these samples, except the ones that wait now. It may
        change tensors of the state in place.
        """
        return state, torch.zeros(0, dtype=self.placement_dtype, device=rows_RD.device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balancer(Ordering):
    """An order that follows from the gradients of the previous epoch."""

    needs_gradients: ClassVar[bool] = True

    def next_order(self, order: np.ndarray, placements: np.ndarray) -> np.ndarray:
        return reorder(order, placements, self.num_leaves)
