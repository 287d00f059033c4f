"""Adam when the batch size changes: which betas and epsilon, and how to bias-correct.

Adam as a discretised stochastic differential equation (Malladi et al. 2022,
arXiv:2205.10287, Definition 5.2): at kappa times the batch, learning rate times
sqrt(kappa), 1 - beta times kappa, epsilon over sqrt(kappa).

With betas that change, a moving average m_t = beta_t m_(t-1) + (1 - beta_t) g_t has the
weight 1 - prod(beta_t) and is to be divided by it. torch divides by 1 - beta_t ** t, of
the current beta. `update` therefore hands torch's Adam a learning rate and an epsilon
that make up for the difference, so the optimizer itself stays torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Beta = Callable[[float, float], float]


def sde_beta(beta: float, batch_ratio: float) -> float:
    """Returns 1 - kappa (1 - beta): the SDE rule (arXiv:2205.10287, Definition 5.2).

    >>> round(sde_beta(0.999, 4.0), 6)
    0.996

    Raises:
        ValueError: kappa (1 - beta) >= 1, where nothing would be left of the average.
    """
    scaled = 1 - batch_ratio * (1 - beta)
    if scaled < 1e-9:  # not 0, to which a tiny beta would round
        raise ValueError(
            f"rule 'adam-root' at batch ratio {batch_ratio:g} would make beta={beta} "
            f"into {scaled:g}: use rule 'adam-half-life', or raise ref_batchsize"
        )
    return scaled


def half_life_beta(beta: float, batch_ratio: float) -> float:
    """Returns beta ** kappa: the average's half-life stays the same number of samples.

    Equal to `sde_beta` to first order in 1 - beta, and valid at every batch ratio
    (Marek et al. 2025, arXiv:2507.07101, keep beta2's half-life in tokens).

    >>> round(half_life_beta(0.9, 2.0), 6)
    0.81
    """
    return beta**batch_ratio


class AdamState(NamedTuple):
    """The history of one parameter group's betas.

    Attributes:
        num_updates: Updates made.
        products: prod(beta1_t) and prod(beta2_t) over them; None if all had the betas
            of the next update.
        pristine: Whether every batch ratio was one. As long as that is so, weights are
            torch's own to the last bit, with torch's bias correction, even where a
            scheduler cycles betas.
    """

    num_updates: int
    products: tuple[float, float] | None = None
    pristine: bool = True


def update(
    beta: Beta, batch_ratio: float, group: Mapping[str, Any], state: AdamState
) -> tuple[float, tuple[float, float], float, AdamState]:
    """Returns what makes torch's Adam take the right step, and the next state.

    That is a factor of the learning rate, betas and epsilon. AdamW multiplies its
    weight decay by the learning rate, so it is to be divided by the factor.

    The step wanted is lr / C1 * m / (sqrt(v / C2) + eps / sqrt(kappa)) with
    C = 1 - prod(beta_t); torch takes lr' / c1 * m / (sqrt(v / c2) + eps') with
    c = 1 - beta_t ** t. Multiplying numerator and denominator by k = sqrt(C2 / c2):
    eps' = k eps / sqrt(kappa) and lr' = k lr c1 / C1. ``betas`` and ``eps`` of the
    parameter group are those tuned at batch ratio one.
    """
    t, eps, (beta1, beta2) = state.num_updates + 1, group["eps"], group["betas"]
    before = state.products or (beta1 ** (t - 1), beta2 ** (t - 1))
    if batch_ratio != 1:
        beta1, beta2 = beta(beta1, batch_ratio), beta(beta2, batch_ratio)
    scaled, products = (beta1, beta2), (before[0] * beta1, before[1] * beta2)
    if state.pristine and batch_ratio == 1:
        return 1.0, scaled, eps, AdamState(t, products)
    wanted = [1 - product for product in products]
    torchs = [1 - b**t for b in scaled]
    k = math.sqrt(wanted[1] / torchs[1])
    factor = k * torchs[0] / wanted[0]
    eps = k * eps / math.sqrt(batch_ratio)
    return factor, scaled, eps, AdamState(t, products, pristine=False)
