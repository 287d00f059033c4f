"""Families of options: one value each, or the flat arguments that its fields name."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from grab_xla.balancing.decisions import TIES
from xla_replica.common.arguments import check_fields, checked

Family = TypeVar("Family")
# grab-sampler's random projections.
KINDS = ("none", "jl", "jl_sparse", "kron")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signs:
    """How the signs of the balance are decided.

    Attributes:
        tie: The sign at an inner product of exactly zero, such as that of each epoch's
            first sample: 'negative' (grab-sampler) or 'positive' (the papers' code).
        prob_balance: Whether to draw signs by the self-balancing walk with the constant
            ``prob_balance_c`` instead of taking the better one.
        prob_balance_c: That constant.
    """

    tie: str = checked("negative", among=TIES)
    prob_balance: bool = False
    prob_balance_c: float = checked(30, above=0)

    def __post_init__(self) -> None:
        check_fields(self)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomProjection:
    """grab-sampler's way to ask for a `per_sample_grad.Projection` of a size.

    Attributes:
        random_projection: One of `KINDS`, which differ in their size only. With
            ``"none"`` the others count nothing; they are refused if it is left out.
        pi_eps: The factor by which distances may change.
        kron_order: The size of ``"kron"`` is a number to this power.
    """

    random_projection: str | None = checked(None, among=KINDS)
    pi_eps: float = checked(0.1, above=0, below=1)
    kron_order: int = checked(2, least=1)

    def __post_init__(self) -> None:
        kind = getattr(self.random_projection, "value", self.random_projection)
        if kind is None and (self.pi_eps, self.kron_order) != (0.1, 2):
            raise ValueError(
                f"pi_eps={self.pi_eps!r} and kron_order={self.kron_order!r} need "
                f"random_projection=, one of {', '.join(map(repr, KINDS))}"
            )
        # grab-sampler has enums.
        object.__setattr__(self, "random_projection", kind or "none")
        check_fields(self)

    def size(
        self, shapes: Mapping[str, tuple[int, ...]], num_samples: int
    ) -> int | None:
        """Returns how many numbers grab-sampler's projection makes of a gradient.

        Args:
            shapes: Those of the parameters, each of which keeps a number.
            num_samples: The number of samples whose distances are kept.

        Returns:
            None for ``"none"``.

        Warns:
            UserWarning: The size is not below the number of parameters.
        """
        kind = self.random_projection
        if kind == "none":
            return None
        # Distances between n points change by at most this factor under some map to 4
        # ln n / (eps^2 / 2 - eps^3 / 3) numbers (Dasgupta & Gupta 2003, "An Elementary
        # Proof of a Theorem of Johnson and Lindenstrauss", Theorem 2.1).
        least = 4 * math.log(num_samples) / (self.pi_eps**2 / 2 - self.pi_eps**3 / 3)
        size = max(len(shapes), int(least))
        if kind == "kron":
            powers = (root**self.kron_order for root in itertools.count(1))
            size = next(each for each in powers if each >= size)
        num_inputs = sum(map(math.prod, shapes.values()))
        if size >= num_inputs:
            warnings.warn(
                f"random_projection={kind!r} makes {size} numbers of {num_inputs} "
                f"({num_samples} samples, pi_eps={self.pi_eps}), which reduces "
                "nothing: use 'none' or a larger pi_eps",
                stacklevel=3,
            )
        return size


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
