"""How the learning rate follows the batch size: pure functions of the batch ratio.

The batch ratio is B / ref_batchsize: the step's global batch size over the one for
which the reference learning rate was tuned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a batch ratio does to one update.

    Attributes:
        name: The key in `RULES`.
        lr_factor: From the batch ratio to what multiplies every learning rate.
        gradient_factor: From the batch ratio to what multiplies the mean gradient,
            weight decay included; None leaves the gradient alone. For optimizers whose
            update is linear in the gradient (SGD) this puts the factor inside the
            momentum buffer.
    """

    name: str
    lr_factor: Callable[[float], float]
    gradient_factor: Callable[[float], float] | None = None

    def effective_lr_factor(self, batch_ratio: float) -> float:
        """What the rule makes of the learning rate, wherever the factor is applied."""
        inside = self.gradient_factor(batch_ratio) if self.gradient_factor else 1.0
        return self.lr_factor(batch_ratio) * inside


def constant(batch_ratio: float) -> float:
    """1: the learning rate stays at its reference."""
    del batch_ratio
    return 1.0


def linear(batch_ratio: float) -> float:
    """B / ref: the linear scaling rule (Goyal et al. 2017, arXiv:1706.02677, 2.1).

    >>> linear(4.0)
    4.0
    """
    return batch_ratio


def root(batch_ratio: float) -> float:
    """sqrt(B / ref): the square root rule (Krizhevsky 2014, arXiv:1404.5997, 5).

    >>> root(4.0)
    2.0
    """
    return math.sqrt(batch_ratio)


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("constant", constant),
        Rule("linear", linear),
        Rule("root", root),
        # v = m v + (B/ref) (mean gradient + wd w); w -= lr v. The linear rule with the
        # factor inside the momentum buffer (Goyal et al. 2017, 3, eq. 9): a step's
        # contribution keeps the factor of its own batch, not of later ones.
        Rule("linear-momentum", constant, gradient_factor=linear),
    )
}


def rule_named(name: str) -> Rule:
    """The rule called ``name``.

    Raises:
        ValueError: There is none.
    """
    if name not in RULES:
        raise ValueError(f"rule={name!r} is unknown; allowed are {sorted(RULES)}")
    return RULES[name]
