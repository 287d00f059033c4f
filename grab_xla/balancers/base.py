"""What a balance type is: a handful of pure functions and their options.

A new type is one subclass and one row of the registry. Its options are the fields of a
frozen dataclass; what changes lives in a state, a dict of tensors that the functions
take and return:

- a two-dimensional tensor, ``(rows, columns)``, has a column for every (projected)
  parameter; with several replicas, for this replica's share of them;
- a one-dimensional tensor holds numbers that are the same on every replica.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch

from grab_xla.balancing.decisions import Decisions
from grab_xla.balancing.reordering import reorder

State = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ordering:
    """An order for every epoch that needs no gradients; the base of those that do.

    Class attributes:
        needs_gradients: Whether `GraBSampler.step` has anything to do.
        is_permutation: Whether every sample comes once an epoch.
    """

    needs_gradients: ClassVar[bool] = False
    is_permutation: ClassVar[bool] = True

    def first_order(
        self, num_samples: int, shuffled: bool, generator: torch.Generator
    ) -> np.ndarray:
        """``(n,)`` int64: the order of the first epoch."""
        if shuffled:
            return torch.randperm(num_samples, generator=generator).numpy()
        return np.arange(num_samples)

    def next_order(
        self, order: np.ndarray, codes: np.ndarray, generator: torch.Generator
    ) -> np.ndarray:
        """``(n,)`` int64: the order that follows ``order``.

        Args:
            order: Of the epoch that ends.
            codes: ``(m,)``, what `Balancer.balance` gave for its first m samples.
            generator: The only source of random numbers.
        """
        del codes, generator
        return order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balancer(Ordering, abc.ABC):
    """An order that follows from the gradients of the epoch before.

    Class attributes:
        code_dtype: Of the codes, which stay on the device for a whole epoch.
        fills: By name, what tensors of the state hold in columns that no parameter
            has, where those of a shard are filled up; 0 if not named.
    """

    needs_gradients: ClassVar[bool] = True
    fills: ClassVar[Mapping[str, float]] = {}
    code_dtype: ClassVar[torch.dtype] = torch.int8

    @property
    def num_draws(self) -> int:
        """Uniform random numbers a sample needs in probabilistic balancing."""
        return 1

    @property
    def num_leaves(self) -> int:
        """Leaves that codes name; see `reorder`."""
        return 1

    def num_pending(self, state: State) -> int:
        """Samples that wait for a partner."""
        del state
        return 0

    @abc.abstractmethod
    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        """The state before the first epoch."""

    def begin_epoch(self, state: State) -> State:
        """The state at the beginning of an epoch, the first one too."""
        return {name: torch.zeros_like(value) for name, value in state.items()}

    @abc.abstractmethod
    def balance(
        self, state: State, rows_RD: torch.Tensor, decide: Decisions
    ) -> tuple[State, torch.Tensor]:
        """Balances the next R samples of the order.

        Args:
            state: What the call before returned.
            rows_RD: ``(R, columns)`` gradients, one sample after the other.
            decide: How signs are decided in this step.

        Returns:
            The new state, and ``(C,)`` codes: of samples that waited for a partner in
            an earlier call, then of these, but for those that wait now.
        """

    def next_order(
        self, order: np.ndarray, codes: np.ndarray, generator: torch.Generator
    ) -> np.ndarray:
        del generator
        return reorder(order, codes, self.num_leaves)
