"""Every balance type by name: one row each."""

from __future__ import annotations

import dataclasses
from typing import Any

from grab_xla.balancers.base import Balancer, Ordering, State
from grab_xla.balancers.batch import BatchBalance, UncentredBatchBalance
from grab_xla.balancers.gradient_free import (
    FixedOrder,
    RandomReshuffling,
    ShuffleOnce,
    WithReplacement,
)
from grab_xla.balancers.mean import (
    AdaEMABalance,
    AdaMeanBalance,
    EMABalance,
    MeanBalance,
    SignBalance,
)
from grab_xla.balancers.norm import NormOrder
from grab_xla.balancers.ntk import NTKEigen, NTKFixedBalance, NTKFixedEigen
from grab_xla.balancers.pair import PairBalance
from grab_xla.balancers.recursive import RecursiveBalance
from grab_xla.balancers.recursive_pair import RecursivePairBalance

__all__ = ["BALANCE_TYPES", "Balancer", "Ordering", "State", "ordering_named"]

BALANCE_TYPES: dict[str, type[Ordering]] = {
    "mean": MeanBalance,
    "pair": PairBalance,
    "recursive": RecursiveBalance,
    "recursive-pair": RecursivePairBalance,
    "rr": RandomReshuffling,
    "so": ShuffleOnce,
    "swr": WithReplacement,
    "fixed": FixedOrder,
    "batch": BatchBalance,
    "batch-uncentred": UncentredBatchBalance,
    "ema": EMABalance,
    "adamean": AdaMeanBalance,
    "adaema": AdaEMABalance,
    "sign": SignBalance,
    "norm": NormOrder,
    "ntk-fixed": NTKFixedBalance,
    "ntk-eigen": NTKEigen,
    "ntk-fixed-eigen": NTKFixedEigen,
}


def ordering_named(balance_type: str, **options: Any) -> Ordering:
    """The balance type of that name with its options.

    Raises:
        ValueError: There is no such type, or an option is out of its range.
        TypeError: An option is unknown to this type, missing, or of the wrong type.
    """
    name = getattr(balance_type, "value", balance_type)  # grab-sampler has an enum
    if name not in BALANCE_TYPES:
        raise ValueError(
            f"balance_type={balance_type!r} is unknown; allowed are "
            f"{', '.join(BALANCE_TYPES)}"
        )
    ordering = BALANCE_TYPES[name]
    fields = {field.name: field for field in dataclasses.fields(ordering)}
    for option in options.keys() - fields.keys():
        raise TypeError(
            f"{option!r} is no option of balance_type={name!r}, which has "
            f"{', '.join(sorted(fields)) or 'none of its own'}"
        )
    for field in fields.values():
        required = field.default is dataclasses.MISSING
        if required and field.name not in options:
            raise TypeError(f"balance_type={name!r} needs {field.name}=")
    return ordering(**options)
