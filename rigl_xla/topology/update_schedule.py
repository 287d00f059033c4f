"""When the topology changes and by how much. Steps count from 1, as calls do.

>>> schedule = UpdateSchedule(T_end=12, delta=3)
>>> [step for step in range(1, 16) if schedule.is_update(step)]
[3, 6, 9]
>>> round(schedule.drop_fraction(6), 3)
0.15
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

# (progress from 0 to 1) -> what alpha is multiplied with
ANNEALINGS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: (1 + math.cos(progress * math.pi)) / 2,
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1 - progress,
    "cubic": lambda progress: (1 - progress) ** 3,
}


@dataclasses.dataclass(frozen=True)
class UpdateSchedule:
    """Every ``delta`` steps before ``T_end``, ever fewer connections move.

    Evci et al. 2020, arXiv:1911.11134, 3(2) and 3(3).

    Attributes:
        T_end: Step from which on the topology stays; about 75 % of all steps. None
            for a topology that never changes.
        delta: Steps from one topology update to the next.
        alpha: Drop fraction at step 0.
        grad_accumulation_n: How many steps' dense gradients are averaged to score
            growth, the update's own included; 1 to ``delta``.
        annealing: What becomes of alpha: a key of `ANNEALINGS`.
    """

    T_end: int | None
    delta: int = 100
    alpha: float = 0.3
    grad_accumulation_n: int = 1
    annealing: str = "cosine"

    def __post_init__(self) -> None:
        if self.T_end is not None:
            _check_count("T_end", self.T_end)
        _check_count("delta", self.delta)
        _check_count("grad_accumulation_n", self.grad_accumulation_n)
        if self.grad_accumulation_n > self.delta:
            raise ValueError(
                f"grad_accumulation_n={self.grad_accumulation_n} steps do not fit "
                f"between topology updates delta={self.delta} steps apart; it must be "
                "from 1 to delta"
            )
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)):
            raise TypeError(f"alpha is {self.alpha!r}; it must be a number in [0, 1]")
        if not 0 <= self.alpha <= 1:
            raise ValueError(
                f"alpha is {self.alpha!r}; the share of active connections that an "
                "update may drop must be in [0, 1]; the paper uses 0.3"
            )
        if not isinstance(self.annealing, str):
            raise TypeError(
                f"annealing is {self.annealing!r}; it must be one of "
                f"{sorted(ANNEALINGS)}"
            )
        if self.annealing not in ANNEALINGS:
            raise ValueError(
                f"annealing={self.annealing!r} is not known; allowed are "
                f"{sorted(ANNEALINGS)}"
            )

    @property
    def last_update(self) -> int:
        """The last step that changes the topology; 0 if none does."""
        return 0 if self.T_end is None else (self.T_end - 1) // self.delta * self.delta

    def is_update(self, step: int) -> bool:
        """Whether step number ``step``, from 1, changes the topology."""
        return self.T_end is not None and step % self.delta == 0 and step < self.T_end

    def collects(self, step: int) -> bool:
        """Whether the dense gradient of step number ``step`` scores an update."""
        update = -(-step // self.delta) * self.delta
        return self.is_update(update) and update - step < self.grad_accumulation_n

    def drop_fraction(self, step: int) -> float:
        """Share of active connections that an update at ``step`` drops, at most.

        For 'cosine': ``alpha / 2 (1 + cos(pi step / T_end))``; 0 from ``T_end`` on.
        """
        if self.T_end is None or step >= self.T_end:
            return 0.0
        if self.annealing == "cosine":  # rounded as rigl-torch rounds it
            return self.alpha / 2 * (1 + math.cos((step * math.pi) / self.T_end))
        return self.alpha * ANNEALINGS[self.annealing](step / self.T_end)

    def num_dropped(self, step: int, num_active: int) -> int:
        """Connections that an update at ``step`` drops of ``num_active``."""
        return int(num_active * self.drop_fraction(step))


def gradual_sparsity(
    step: int, final: float, begin: int, end: int, initial: float = 0.0
) -> float:
    """Sparsity of gradual magnitude pruning at ``step``.

    ``s_f + (s_i - s_f) (1 - (t - t_0) / (t_1 - t_0))^3`` between ``begin`` and ``end``
    (Zhu and Gupta 2017, arXiv:1710.01878, eq. 1).

    >>> [round(gradual_sparsity(t, 0.9, 10, 30), 4) for t in (10, 20, 30, 99)]
    [0.0, 0.7875, 0.9, 0.9]
    """
    progress = min(max((step - begin) / (end - begin), 0.0), 1.0)
    return final + (initial - final) * (1 - progress) ** 3


def _check_count(what: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is {value!r}; it must be a whole number of steps")
    if value < 1:
        raise ValueError(f"{what} is {value}; it must be at least 1 step")
