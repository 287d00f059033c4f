"""Families of options: one value each, or the flat arguments that its fields name."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from grab_xla.balancing.decisions import TIES
from xla_replica.common.arguments import check_fields, checked

Family = TypeVar("Family")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signs:
    """How the signs of the balance are decided.

    Attributes:
        tie: The sign at an inner product of exactly zero, such as that of each epoch's
            first sample: 'negative' (grab-sampler) or 'positive' (the papers' code).
        tile_size: How many rows' inner products are formed at once; any number gives
            the same signs. The default depends on the backend.
        prob_balance: Whether to draw signs by the self-balancing walk with the constant
            ``prob_balance_c`` instead of taking the better one.
        prob_balance_c: That constant.
    """

    tie: str = checked("negative", among=TIES)
    tile_size: int | None = checked(None, least=1)
    prob_balance: bool = False
    prob_balance_c: float = checked(30, above=0)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def walk_constant(self) -> float | None:
        """The constant of the walk; None: signs are not drawn."""
        return self.prob_balance_c if self.prob_balance else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurements:
    """What is measured of an epoch's vectors.

    Attributes:
        record_norm: Whether to keep the norms that `sorter.grad_norms` returns.
        record_herding: Whether to keep what `sorter.herding` and
            `sorter.avg_grad_error` return. Exact herding keeps all vectors of an epoch,
            and centres them by their own mean.
        stale_mean_herding: Whether herding is centred by the mean of the previous
            epoch (zero in the first one), in O(d) memory.
        cuda_herding: Accepted for code that passes it; vectors are kept where they are
            balanced.
    """

    record_norm: bool = False
    record_herding: bool = False
    stale_mean_herding: bool = False
    cuda_herding: bool = False


def family(kind: type[Family], value: Family | None, flat: dict[str, Any]) -> Family:
    """Returns a family's value, or makes it of the flat arguments, which it takes out.

    Raises:
        TypeError: Both are given.
    """
    fields = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    own = {name: flat.pop(name) for name in fields if name in flat}
    if own and value is not None:
        raise TypeError(f"give {', '.join(own)} as fields of {value!r}, not beside it")
    return kind(**own) if value is None else value
