"""The sizes of grab-sampler's random projections, for `per_sample_grad.Projection`."""

from __future__ import annotations

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


def size_of(
    kind: str,
    shapes: Mapping[str, tuple[int, ...]],
    num_samples: int,
    eps: float,
    order: int,
) -> int | None:
    """Returns how many numbers grab-sampler's projection makes of a gradient.

    Args:
        kind: One of `KINDS`, which differ in their size only; None is the answer to
            ``"none"``.
        shapes: Those of the parameters, each of which keeps a number.
        num_samples: The number of samples whose distances are kept.
        eps: The factor by which distances may change; see
            `johnson_lindenstrauss_min_dim`.
        order: The size of ``"kron"`` is a number to this power.

    Raises:
        ValueError: The kind is unknown, or a number is out of range.
        TypeError: A count is not an integer.

    Warns:
        UserWarning: The size is not below the number of parameters.
    """
    check_choice("random_projection", kind, KINDS)
    check_integer("kron_order", order, 1)
    if kind == "none":
        return None
    size = max(len(shapes), johnson_lindenstrauss_min_dim(num_samples, eps))
    if kind == "kron":
        root = max(1, round(size ** (1 / order)) - 1)  # 3125 ** (1 / 5) is above 5
        while root**order < size:
            root += 1
        size = root**order
    num_inputs = sum(map(math.prod, shapes.values()))
    if size >= num_inputs:
        warnings.warn(
            f"random_projection={kind!r} makes {size} numbers of {num_inputs} "
            f"({num_samples} samples, pi_eps={eps}), which reduces nothing: use 'none' "
            "or a larger pi_eps",
            stacklevel=3,
        )
    return size
