"""The order of the current epoch, the weights of its samples, and the next order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancers import Ordering
from grab_xla.balancing.reordering import KEEP, check_permutation
from xla_replica import traits
from xla_replica.common.arguments import check_choice, check_integer

# From the number of an epoch to numbers by position in its order, or None: all equal.
WeightsOf = Callable[[int], Sequence[float] | np.ndarray | None]
Weights = Literal["equal", "update"] | WeightsOf


class GraBWarning(UserWarning):
    """Something about an order that its user should know."""


class Orders:
    """Keeps the order of the current epoch and asks the balance type for the next.

    The generator, made from ``seed`` if there is none, is the only source of
    randomness. With a ``group_size``, consecutive samples of the first order stay
    together, and placements are those of groups; samples that do not fill a group keep
    the last places.

    Attributes:
        order: ``(num_samples,)`` int64, the order of the current epoch.
        epoch: The number of the current epoch, from 0.
        begun: Whether the first epoch has begun.
        given: The order that the next epoch has been given, if any.
        history: All orders so far if they are recorded.
        drawn_from: The state of the generator at the beginning of the epoch.
    """

    def __init__(
        self,
        ordering: Ordering,
        num_samples: int,
        shuffled: bool,
        generator: torch.Generator | None,
        seed: int,
        record: bool,
        group_size: int = 1,
    ) -> None:
        seed = check_integer("seed", seed)
        self.ordering, self.generator = ordering, torch.Generator()
        if generator is None:
            self.generator.manual_seed(seed)
        elif not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {generator!r}")
        elif not traits(generator.device).is_host:
            raise ValueError(
                f"generator must be on the CPU, got one on {generator.device}"
            )
        else:
            # A copy: replicas that are threads may have been given the same object.
            self.generator.set_state(generator.get_state())
        self.order = self._checked(
            ordering.first_order(num_samples, shuffled, self.generator), num_samples
        )
        self.epoch, self.begun = 0, False
        self.history: list[list[int]] = []
        self.drawn_from = self.generator.get_state()
        self._records, self._group_size = record, group_size
        self._warned: set[str] = set()  # of what has been warned, once
        self.given: np.ndarray | None = None

    def give(self, order: np.ndarray) -> None:
        """Makes ``order`` the order of the next epoch."""
        self.given = self._checked(order, len(self.order))

    def _checked(self, order: np.ndarray, num_samples: int) -> np.ndarray:
        if not self.ordering.is_permutation:
            return order
        return check_permutation("the order", order, num_samples)

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
        self.drawn_from = self.generator.get_state()

    def _following(self, placements: np.ndarray) -> np.ndarray:
        follows, size = self.ordering.next_order, self._group_size
        if size == 1:
            return follows(self.order, placements, self.generator)
        num_groups = len(self.order) // size
        numbers = follows(np.arange(num_groups), placements, self.generator)
        whole, rest = np.split(self.order, [num_groups * size])
        groups = whole.reshape(num_groups, size)[numbers]
        return np.concatenate([groups.reshape(-1), rest])

    def _warn_of_nonfinite(self, placements: np.ndarray) -> None:
        is_float = placements.dtype.kind == "f"
        bad = ~np.isfinite(placements) if is_float else placements == KEEP
        if bad.any():
            size = self._group_size
            of = "samples" if size == 1 else "groups"
            first = self.order[np.argmax(bad) * size]
            self._warn_once(
                "not finite",
                f"the gradients of {bad.sum()} {of} of epoch {self.epoch} were not "
                f"finite, such as that of sample {first}; they keep their places and "
                "do not affect the balance. Later ones are not reported",
            )

    def warn_of_steps(self, num_drawn: int, num_stepped: int) -> None:
        """Warns, once, that samples of the epoch were drawn and had no step."""
        self._warn_once(
            "steps",
            f"{num_drawn} samples of epoch {self.epoch} were drawn, and {num_stepped} "
            "had a step. Unless the others were the last ones, as where an epoch is "
            "left early, gradients were taken for those of other samples: give one "
            "loss (or gradient) for every sample that the loader gives, a zero for one "
            "that does not count, or pass indices=. Later ones are not reported",
        )

    def warn_of_remainder(self) -> None:
        """Warns, once, that samples which do not fill a group are left out."""
        num_samples = len(self.order) % self._group_size
        if num_samples:
            self._warn_once(
                "remainder",
                f"epoch {self.epoch} left out {num_samples} samples, the remainder of "
                f"{len(self.order)} samples in groups of {self._group_size}, and all "
                "epochs will: choose a group_size that divides the number of samples, "
                "or a DataLoader without drop_last",
            )

    def _warn_once(self, subject: str, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            warnings.warn(text, GraBWarning, stacklevel=6)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next orders depend on, except for gradients."""
        return {
            "epoch": self.epoch,
            "order": torch.from_numpy(self.order.copy()),
            "begun": self.begun,
            "generator": self.generator.get_state(),
            "drawn_from": self.drawn_from,
            "given": None if self.given is None else torch.from_numpy(self.given),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.epoch, self.begun = state["epoch"], state["begun"]
        self.order = state["order"].cpu().numpy().copy()
        self.drawn_from = state["drawn_from"].cpu()
        self.generator.set_state(state["generator"].cpu())
        given = state["given"]
        self.given = None if given is None else given.cpu().numpy().copy()


class SampleWeights:
    """The weights of an order's samples in every epoch.

    Args:
        weights: See `GraBSampler`.
        num_samples: The length of the order.

    Attributes:
        name: ``"equal"``, ``"update"`` or ``"given"``.
    """

    def __init__(self, weights: Weights, num_samples: int) -> None:
        self.name = "given"
        if not callable(weights):
            self.name = check_choice("weights", weights, ("equal", "update"))
        self._of_epoch = weights if callable(weights) else None
        self._num_samples = num_samples
        self._last: tuple[int, Tensor | None] = (-1, None)

    def follow(self, weights_of: WeightsOf) -> None:
        """Takes the weights of updates from what knows them."""
        if self.name == "update":
            self._of_epoch = weights_of

    def of(self, epoch: int) -> Tensor | None:
        """Returns ``(num_samples,)`` float64 on the CPU, or None: all weigh the same.

        Raises:
            ValueError: Nobody knows the updates, or weights are not allowed.
        """
        if self.name == "equal":
            return None
        if self._of_epoch is None:
            raise ValueError(
                "weights='update' needs an elastic sampler (CustomSampler(..., "
                "order=sampler)), or pass a function from the epoch to weights"
            )
        if self._last[0] != epoch:
            weights, values = self._of_epoch(epoch), None
            if weights is not None:
                values = np.asarray(weights, dtype=np.float64)
                fits = values.shape == (self._num_samples,)
                if not fits or not (np.isfinite(values) & (values >= 0)).all():
                    raise ValueError(
                        f"the weights of an epoch must be {self._num_samples} finite "
                        f"numbers of at least 0, got {weights!r}"
                    )
            self._last = epoch, None if values is None else torch.from_numpy(values)
        return self._last[1]
