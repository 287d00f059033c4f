"""The order of the epoch under way, and how one follows from another."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from grab_xla.balancers import Ordering
from grab_xla.balancers.gradient_free import checked_permutation
from grab_xla.balancing.reordering import KEEP


class GraBWarning(UserWarning):
    """Something about an order that its user should know."""


class Orders:
    """Goes from order to order.

    Args:
        ordering: What decides on the next one.
        num_samples: Length of an order.
        shuffled: Whether the first one is a shuffle.
        generator: The only source of randomness.
        record: Keep all orders in `history`.

    Attributes:
        order: ``(num_samples,)`` int64, that of the epoch under way.
        epoch: Its number, from 0.
        begun: Whether the first one has begun.
        history: See ``record``.
        drawn_from: State of the generator at the beginning of the epoch.
    """

    def __init__(
        self,
        ordering: Ordering,
        num_samples: int,
        shuffled: bool,
        generator: torch.Generator,
        record: bool,
    ) -> None:
        self.ordering, self.generator = ordering, generator
        self.order = self._checked(
            ordering.first_order(num_samples, shuffled, generator), num_samples
        )
        self.epoch, self.begun = 0, False
        self.history: list[list[int]] = []
        self.drawn_from = generator.get_state()
        self._records, self._warned = record, False
        self._given: np.ndarray | None = None

    def give(self, order: np.ndarray) -> None:
        """Makes ``order`` that of the next epoch to begin.

        Raises:
            ValueError: It is no permutation of the samples.
        """
        self._given = self._checked(order, len(self.order))

    @property
    def has_given(self) -> bool:
        """Whether an order waits for the next epoch."""
        return self._given is not None

    def _checked(self, order: np.ndarray, num_samples: int) -> np.ndarray:
        if not self.ordering.is_permutation:
            return order
        return checked_permutation("the order", order, num_samples)

    def advance(self, codes: np.ndarray) -> None:
        """Begins the first epoch, or the next one given this one's codes."""
        if self.begun:
            self._warn_of(codes)
            self.order = self.ordering.next_order(self.order, codes, self.generator)
            self.epoch += 1
        self.begun = True
        if self._given is not None:
            self.order, self._given = self._given, None
        if self._records:
            self.history.append(self.order.tolist())
        self.drawn_from = self.generator.get_state()

    def _warn_of(self, codes: np.ndarray) -> None:
        bad = ~np.isfinite(codes) if codes.dtype.kind == "f" else codes == KEEP
        if bad.any() and not self._warned:
            self._warned = True
            warnings.warn(
                f"the gradients of {bad.sum()} samples of epoch {self.epoch} were not "
                f"finite, such as sample {self.order[np.argmax(bad)]}; they keep their "
                "places and have no say in the balance. Later ones are not reported",
                GraBWarning,
                stacklevel=5,
            )

    def state_dict(self) -> dict[str, Any]:
        """What the orders to come depend on, but for gradients."""
        return {
            "epoch": self.epoch,
            "order": torch.from_numpy(self.order.copy()),
            "begun": self.begun,
            "generator": self.generator.get_state(),
            "drawn_from": self.drawn_from,
            "given": None if self._given is None else torch.from_numpy(self._given),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        self.epoch, self.begun = state["epoch"], state["begun"]
        self.order = state["order"].cpu().numpy().copy()
        self.drawn_from = state["drawn_from"].cpu()
        self.generator.set_state(state["generator"].cpu())
        given = state["given"]
        self._given = None if given is None else given.cpu().numpy().copy()
