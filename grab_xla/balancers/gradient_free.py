"""Orders that need no gradients: the baselines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from grab_xla.balancers.base import Balancer, Ordering, State
from grab_xla.balancing.decisions import Decisions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unbalanced(Balancer):
    """Looks at gradients and balances nothing, so that baselines can be measured.

    Attributes:
        ordering: Whose orders these are.
    """

    needs_gradients: ClassVar[bool] = False

    ordering: Ordering

    def init(self, num_columns: int, dtype: torch.dtype, device: torch.device) -> State:
        del num_columns, dtype, device
        return {}

    def balance(
        self, state: State, rows_RD: torch.Tensor, decide: Decisions
    ) -> tuple[State, torch.Tensor]:
        del decide
        return state, torch.zeros(0, dtype=self.code_dtype, device=rows_RD.device)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomReshuffling(Ordering):
    """A new random permutation every epoch."""

    def next_order(
        self, order: np.ndarray, codes: np.ndarray, generator: torch.Generator
    ) -> np.ndarray:
        del codes
        return torch.randperm(len(order), generator=generator).numpy()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffleOnce(Ordering):
    """The first epoch's order for ever."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithReplacement(Ordering):
    """Every sample drawn from all of them, every epoch: not a permutation."""

    is_permutation: ClassVar[bool] = False

    def first_order(
        self, num_samples: int, shuffled: bool, generator: torch.Generator
    ) -> np.ndarray:
        del shuffled
        size = (num_samples,)
        return torch.randint(num_samples, size, generator=generator).numpy()

    def next_order(
        self, order: np.ndarray, codes: np.ndarray, generator: torch.Generator
    ) -> np.ndarray:
        del codes
        return self.first_order(len(order), True, generator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedOrder(Ordering):
    """A given order for ever.

    Attributes:
        orders: A permutation of ``range(num_samples)``.
    """

    # Not in the fingerprint of a saved state: the order itself is saved.
    orders: Sequence[int] | Any = dataclasses.field(repr=False)

    def first_order(
        self, num_samples: int, shuffled: bool, generator: torch.Generator
    ) -> np.ndarray:
        del shuffled, generator
        return checked_permutation("orders", self.orders, num_samples)


def checked_permutation(name: str, value: Any, num_samples: int) -> np.ndarray:
    """``value`` as ``(num_samples,)`` int64.

    Raises:
        ValueError: It is no permutation of ``range(num_samples)``.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    order = np.asarray(value)
    if not (
        order.shape == (num_samples,)
        and order.dtype.kind in "iu"
        and bool((np.sort(order) == np.arange(num_samples)).all())
    ):
        raise ValueError(
            f"{name} must be a permutation of range({num_samples}), got an array of "
            f"shape {order.shape} and dtype {order.dtype}"
        )
    return order.astype(np.int64)
