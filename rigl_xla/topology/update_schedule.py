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

from xla_replica.common.arguments import check_fields, check_integer, checked

# (step, T_end) -> what alpha is multiplied with; rounded as rigl-torch rounds it
ANNEALINGS: dict[str, Callable[[int, int], float]] = {
    "cosine": lambda step, end: (1 + math.cos(step * math.pi / end)) / 2,
    "constant": lambda step, end: 1.0,
    "linear": lambda step, end: 1 - step / end,
    "cubic": lambda step, end: (1 - step / end) ** 3,
}


@dataclasses.dataclass(frozen=True)
class UpdateSchedule:
    """Updates the topology every ``delta`` steps before ``T_end``, by less each time.

    Evci et al. 2020, arXiv:1911.11134, 3(2) and 3(3).

    Attributes:
        T_end: Step from which on the topology no longer changes; about 75 % of all
            steps. None for a topology that never changes.
        delta: Steps from one topology update to the next.
        alpha: Drop fraction at step 0, in [0, 1]; the paper uses 0.3.
        grad_accumulation_n: How many steps' dense gradients are averaged to score
            growth, including the update's own step; 1 to ``delta``.
        annealing: How the drop fraction shrinks from alpha: a key of `ANNEALINGS`.
    """

    T_end: int | None = checked(None, least=1)
    delta: int = checked(100, least=1)
    alpha: float = checked(0.3, least=0, most=1)
    grad_accumulation_n: int = checked(1, least=1)
    annealing: str = checked("cosine", among=ANNEALINGS)

    def __post_init__(self) -> None:
        check_fields(self)
        check_integer("grad_accumulation_n", self.grad_accumulation_n, 1, self.delta)

    @property
    def last_update(self) -> int:
        """The last step that changes the topology; 0 if none does."""
        return 0 if self.T_end is None else (self.T_end - 1) // self.delta * self.delta

    def is_update(self, step: int) -> bool:
        """Returns whether step number ``step``, from 1, changes the topology."""
        return self.T_end is not None and step % self.delta == 0 < step < self.T_end

    def collects(self, step: int) -> bool:
        """Returns whether the dense gradient of this step scores an update."""
        update = -(-step // self.delta) * self.delta
        return self.is_update(update) and update - step < self.grad_accumulation_n

    def drop_fraction(self, step: int) -> float:
        """Returns the largest share of active connections an update at ``step`` drops.

        For 'cosine': ``alpha / 2 (1 + cos(pi step / T_end))``; 0 from ``T_end`` on.
        """
        if self.T_end is None or step >= self.T_end:
            return 0.0
        return self.alpha * ANNEALINGS[self.annealing](step, self.T_end)

    def num_dropped(self, step: int, num_active: int) -> int:
        """Returns how many of ``num_active`` connections the update drops."""
        return int(num_active * self.drop_fraction(step))


def gradual_sparsity(step: int, final: float, begin: int, end: int) -> float:
    """Returns the sparsity of gradual magnitude pruning at ``step``.

    ``s_f - s_f (1 - (t - t_0) / (t_1 - t_0))^3`` between ``begin`` and ``end``
    (Zhu and Gupta 2017, arXiv:1710.01878, eq. 1).

    >>> [round(gradual_sparsity(t, 0.9, 10, 30), 4) for t in (10, 20, 30, 99)]
    [0.0, 0.7875, 0.9, 0.9]
    """
    progress = min(max((step - begin) / (end - begin), 0.0), 1.0)
    return final - final * (1 - progress) ** 3
