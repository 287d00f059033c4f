"""The sizes of grab-sampler's random projections, for `per_sample_grad.Projection`."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping

from xla_replica.common.arguments import check_choice, check_integer, check_number

KINDS = ("none", "jl", "jl_sparse", "kron")


def johnson_lindenstrauss_min_dim(num_samples: int, eps: float) -> int:
    """Returns how many outputs keep all distances between n points up to 1 +- eps.

    4 ln n / (eps^2 / 2 - eps^3 / 3), rounded down: Dasgupta & Gupta 2003, "An
    Elementary Proof of a Theorem of Johnson and Lindenstrauss", Theorem 2.1, which
    holds for squared Euclidean distances and some map. Independent of the dimension.

    >>> johnson_lindenstrauss_min_dim(1000, eps=0.1)
    5920

    Raises:
        ValueError: ``eps`` is not between 0 and 1, exclusive.
    """
    check_number("pi_eps", eps, above=0, below=1)
    return int(4 * math.log(num_samples) / (eps**2 / 2 - eps**3 / 3))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomProjection:
    """grab-sampler's way to ask for a projection of a size.

    Attributes:
        random_projection: One of `KINDS`, which differ in their size only. With
            ``"none"`` the others count nothing; they are refused if it is left out.
        pi_eps: The factor by which distances may change; see
            `johnson_lindenstrauss_min_dim`.
        kron_order: The size of ``"kron"`` is a number to this power.
    """

    random_projection: str | None = None
    pi_eps: float = 0.1
    kron_order: int = 2

    def __post_init__(self) -> None:
        kind = getattr(self.random_projection, "value", self.random_projection)
        check_integer("kron_order", self.kron_order, 1)
        defaults = RandomProjection.pi_eps, RandomProjection.kron_order
        if kind is None and (self.pi_eps, self.kron_order) != defaults:
            raise ValueError(
                f"pi_eps={self.pi_eps!r} and kron_order={self.kron_order!r} need "
                f"random_projection=, one of {', '.join(map(repr, KINDS))}"
            )
        # grab-sampler has enums.
        object.__setattr__(self, "random_projection", kind or "none")
        check_choice("random_projection", self.random_projection, KINDS)

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
        min_dim = johnson_lindenstrauss_min_dim(num_samples, self.pi_eps)
        size = max(len(shapes), min_dim)
        if kind == "kron":
            root = max(1, round(size ** (1 / self.kron_order)) - 1)  # 3125^(1/5) > 5
            while root**self.kron_order < size:
                root += 1
            size = root**self.kron_order
        num_inputs = sum(map(math.prod, shapes.values()))
        if size >= num_inputs:
            warnings.warn(
                f"random_projection={kind!r} makes {size} numbers of {num_inputs} "
                f"({num_samples} samples, pi_eps={self.pi_eps}), which reduces "
                "nothing: use 'none' or a larger pi_eps",
                stacklevel=3,
            )
        return size
