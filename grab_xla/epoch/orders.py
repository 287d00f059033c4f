"""The order of the current epoch, and the next order."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from grab_xla.balancers import Ordering
from grab_xla.balancing.reordering import KEEP, RoundRobinSharding, check_permutation
from xla_replica.common.arguments import check_integer


class GraBWarning(UserWarning):
    """Something about an order that its user should know."""


class Orders:
    """Keeps the order of the current epoch and asks the balance type for the next.

    The generator is the only source of randomness. With a ``group_size``,
    consecutive samples of the first order stay together, and placements are those of
    groups; samples that do not fill a group keep the last places.

    Attributes:
        order: ``(num_samples,)`` int64, the order of the current epoch.
        epoch: The number of the current epoch, from 0.
        begun: Whether the first epoch has begun.
        given: The order that the next epoch has been given, if any.
        history: All orders so far if they are recorded.
    """

    def __init__(
        self,
        ordering: Ordering,
        sharding: RoundRobinSharding,
        shuffled: bool,
        seed: int,
        record: bool,
    ) -> None:
        self.generator = torch.Generator().manual_seed(check_integer("seed", seed))
        self.ordering, self._sharding, self._records = ordering, sharding, record
        size = sharding.num_samples
        self.order = self._checked(ordering.first_order(size, shuffled, self.generator))
        self.epoch, self.begun = 0, False
        self.history: list[list[int]] = []
        # That of the generator before the epoch's random numbers.
        self._drawn_from = self.generator.get_state()
        self._warned: set[str] = set()
        self.given: np.ndarray | None = None

    def give(self, order: np.ndarray) -> None:
        """Makes ``order`` the order of the next epoch."""
        self.given = self._checked(order)

    def _checked(self, order: np.ndarray) -> np.ndarray:
        if not self.ordering.is_permutation:
            return order
        return check_permutation("the order", order, self._sharding.num_samples)

    def advance(self, placements: np.ndarray) -> None:
        """Begins the first epoch, or the one that follows from these placements."""
        if self.begun:
            self._warn_of_nonfinite(placements)
            self.order = self._following(placements)
            self.epoch += 1
        self.begun = True
        if self.given is not None:
            self.order, self.given = self.given, None
        if self._records:
            self.history.append(self.order.tolist())
        self._drawn_from = self.generator.get_state()

    def _following(self, placements: np.ndarray) -> np.ndarray:
        num_groups, size = self._sharding.num_groups, self._sharding.group_size
        numbers = self.order if size == 1 else np.arange(num_groups)
        if self.ordering.is_drawn_anew:
            numbers = self.ordering.first_order(num_groups, True, self.generator)
        else:
            numbers = self.ordering.next_order(numbers, placements)
        if size == 1:
            return numbers
        whole, rest = np.split(self.order, [num_groups * size])
        groups = whole.reshape(num_groups, size)[numbers]
        return np.concatenate([groups.reshape(-1), rest])

    def _warn_of_nonfinite(self, placements: np.ndarray) -> None:
        is_score = placements.dtype.kind == "f"
        bad = ~np.isfinite(placements) if is_score else placements == KEEP
        if bad.any():
            size = self._sharding.group_size
            self.warn_once(
                "not finite",
                f"the gradients of {bad.sum()} {'samples' if size == 1 else 'groups'} "
                f"of epoch {self.epoch} were not finite, such as that of sample "
                f"{self.order[np.argmax(bad) * size]}; they keep their places and do "
                "not affect the balance. Later ones are not reported",
            )

    def warn_once(self, subject: str, text: str) -> None:
        """Warns unless there was a warning of this subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            warnings.warn(text, GraBWarning, stacklevel=6)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next orders depend on, except for gradients."""
        return {
            "epoch": self.epoch,
            "order": torch.from_numpy(self.order.copy()),
            "begun": self.begun,
            "generator": self._drawn_from,
            "given": None if self.given is None else torch.from_numpy(self.given),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; the epoch's numbers are not drawn."""
        self.epoch, self.begun = state["epoch"], state["begun"]
        self.order = state["order"].cpu().numpy().copy()
        self._drawn_from = state["generator"].cpu()
        self.generator.set_state(self._drawn_from)
        given = state["given"]
        self.given = None if given is None else given.cpu().numpy().copy()
