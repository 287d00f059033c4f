"""The registry of balance types."""

from __future__ import annotations

import dataclasses
from typing import Any

from grab_xla.balancers import baselines, mean, pair
from grab_xla.balancers.base import Balancer, Ordering, State
from grab_xla.balancers.moving_averages import AdaEMABalance, EMABalance
from xla_replica.common.arguments import check_choice

__all__ = ["BALANCE_TYPES", "Balancer", "Ordering", "State", "ordering_named"]

# Everything that is known of a balance type is in its class. Add a row for your own.
BALANCE_TYPES: dict[str, type[Ordering]] = {
    "mean": mean.MeanBalance,
    "pair": pair.PairBalance,
    "recursive": mean.RecursiveBalance,
    "recursive-pair": pair.RecursivePairBalance,
    "rr": baselines.RandomReshuffling,
    "so": baselines.ShuffleOnce,
    "swr": baselines.WithReplacement,
    "fixed": baselines.FixedOrder,
    "batch": mean.BatchBalance,
    "ema": EMABalance,
    "adamean": mean.AdaMeanBalance,
    "adaema": AdaEMABalance,
    "sign": mean.SignBalance,
    "norm": baselines.NormOrder,
}


def ordering_named(balance_type: str, **options: Any) -> Ordering:
    """Returns the balance type of that name with its options.

    Args:
        balance_type: A key of `BALANCE_TYPES`.
        **options: The fields of that type, such as ``seed=``.

    Raises:
        ValueError: There is no such type, or an option is out of range.
        TypeError: An option is unknown to this type, missing, or of the wrong type.
    """
    ordering = BALANCE_TYPES[check_choice("balance_type", balance_type, BALANCE_TYPES)]
    try:
        return ordering(**options)
    except TypeError as error:
        allowed = [field.name for field in dataclasses.fields(ordering)]
        raise TypeError(
            f"balance_type={balance_type!r} has the options "
            f"{', '.join(allowed) or 'none'}: {error}"
        ) from error
