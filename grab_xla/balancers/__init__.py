"""The registry of balance types."""

from __future__ import annotations

import dataclasses
from typing import Any

from grab_xla.balancers import baselines, mean
from grab_xla.balancers.base import Balancer, Ordering, State
from grab_xla.balancers.batch import BatchBalance, UncentredBatchBalance
from grab_xla.balancers.pair import PairBalance
from grab_xla.balancers.recursive_pair import RecursivePairBalance

__all__ = ["BALANCE_TYPES", "Balancer", "Ordering", "State", "ordering_named"]

# Everything that is known of a balance type is in its class. Add a row for your own.
BALANCE_TYPES: dict[str, type[Ordering]] = {
    "mean": mean.MeanBalance,
    "pair": PairBalance,
    "recursive": mean.RecursiveBalance,
    "recursive-pair": RecursivePairBalance,
    "rr": baselines.RandomReshuffling,
    "so": baselines.ShuffleOnce,
    "swr": baselines.WithReplacement,
    "fixed": baselines.FixedOrder,
    "batch": BatchBalance,
    "batch-uncentred": UncentredBatchBalance,
    "ema": mean.EMABalance,
    "adamean": mean.AdaMeanBalance,
    "adaema": mean.AdaEMABalance,
    "sign": mean.SignBalance,
    "norm": baselines.NormOrder,
}


def ordering_named(balance_type: str, **options: Any) -> Ordering:
    """Returns the balance type of that name with its options.

    Raises:
        ValueError: There is no such type, or an option is out of range.
        TypeError: An option is unknown to this type, missing, or of the wrong type.
    """
    name = getattr(balance_type, "value", balance_type)  # grab-sampler has an enum.
    if name not in BALANCE_TYPES:
        raise ValueError(
            f"balance_type={balance_type!r} is unknown; allowed are "
            f"{', '.join(BALANCE_TYPES)}"
        )
    ordering = BALANCE_TYPES[name]
    fields = {field.name: field for field in dataclasses.fields(ordering)}
    for option in options.keys() - fields.keys():
        raise TypeError(
            f"{option!r} is not an option of balance_type={name!r}, whose options are: "
            f"{', '.join(sorted(fields)) or 'none'}"
        )
    for option, field in fields.items():
        if field.default is dataclasses.MISSING and option not in options:
            raise TypeError(f"balance_type={name!r} needs {option}=")
    return ordering(**options)
