"""Random projections of per-sample gradients: fewer columns, nearly the same geometry.

Balancing reads inner products of gradients only. A random matrix P of k rows with
E[P^T P] = I keeps them up to an error of the order of sqrt(log n / k), whatever the
number of parameters (Johnson & Lindenstrauss 1984).

Everything is drawn from one CPU generator seeded with ``seed`` and then moved, so every
replica, device and resumed run has the same matrix. There is no state to save.

Axes: B samples, D inputs, K outputs.
"""

from __future__ import annotations

import dataclasses
import math
import warnings

import torch

from grab_xla.balancing.checks import check_integer
from grab_xla.projections.kinds import PROJECTIONS, Tables, Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Projection:
    """A fixed linear map of gradients, ``(B, num_inputs)`` to ``(B, num_outputs)``.

    Attributes:
        kind: A key of `PROJECTIONS`.
        num_inputs: D, the numbers in a gradient.
        num_outputs: K, the numbers left of it.
        tables: The random numbers, on the device.
    """

    kind: str
    num_inputs: int
    num_outputs: int
    tables: Tables = ()

    def __call__(self, rows: Tensor) -> Tensor:
        """``(B, K)``, in the projection's dtype and on its device; B may be 1.

        Args:
            rows: ``(B, D)``, any floating dtype. ``kind="none"`` returns it as it is.

        Raises:
            ValueError: It has another shape.
        """
        if rows.ndim != 2 or rows.shape[1] != self.num_inputs:
            raise ValueError(
                f"projection {self.kind!r}: rows must have the shape (B, "
                f"{self.num_inputs}), got {tuple(rows.shape)}"
            )
        return PROJECTIONS[self.kind].apply(rows, self.num_outputs, *self.tables)


def johnson_lindenstrauss_min_dim(num_samples: int, eps: float) -> int:
    """Outputs that keep all distances between n points to within a factor 1 +- eps.

    4 ln n / (eps^2 / 2 - eps^3 / 3), rounded down: Dasgupta & Gupta 2003, "An
    Elementary Proof of a Theorem of Johnson and Lindenstrauss", Theorem 2.1, which
    holds for squared Euclidean distances and some map. Independent of the dimension.

    >>> johnson_lindenstrauss_min_dim(1000, eps=0.1)
    5920

    Args:
        num_samples: n.
        eps: Between 0 and 1, exclusive.

    Raises:
        ValueError: One of them is out of its range.
    """
    check_integer("num_samples", num_samples, 1)
    if not 0 < eps < 1:
        raise ValueError(f"eps must be between 0 and 1, exclusive, got {eps!r}")
    return int(4 * math.log(num_samples) / (eps**2 / 2 - eps**3 / 3))


def projection(
    kind: str,
    num_inputs: int,
    num_samples: int,
    eps: float = 0.1,
    order: int = 2,
    seed: int = 42,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    num_outputs: int | None = None,
) -> Projection:
    """A random projection of gradients to fewer numbers; a pure function of its seed.

    Args:
        kind: A key of `PROJECTIONS`. ``"none"`` projects nothing. ``"jl"`` is a dense
            Gaussian matrix and holds K D numbers. ``"jl_sparse"`` holds about
            2 K sqrt(D). ``"kron"`` is a Kronecker product of ``order`` Gaussian
            factors and holds about ``order`` (K D) ** (1 / order); its K is rounded up
            to a power. The less is held, the more the error varies.
        num_inputs: D, the numbers in a gradient.
        num_samples: n, the samples whose distances are to be kept.
        eps: By which factor distances may change: what K follows from, see
            `johnson_lindenstrauss_min_dim`.
        order: Factors of ``"kron"``; other kinds do not read it.
        seed: Of the matrix.
        dtype: Of the matrix and of what it makes. Tables of different dtypes are
            roundings of the same numbers.
        device: Where gradients will be.
        num_outputs: K, in place of the one that follows from n and eps.

    Raises:
        ValueError: The kind is unknown, or a number out of its range.
        TypeError: A count is no integer, or ``dtype`` no floating one.

    Warns:
        UserWarning: K is not below D: the projection costs more than it saves.
    """
    if kind not in PROJECTIONS:
        raise ValueError(
            f"projection={kind!r} is unknown; allowed are {sorted(PROJECTIONS)}"
        )
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating dtype, got {dtype}")
    for name, value in {"num_inputs": num_inputs, "order": order}.items():
        check_integer(name, value, 1)
    if kind == "none":
        return Projection(kind, num_inputs, num_inputs)
    wanted = max(1, johnson_lindenstrauss_min_dim(num_samples, eps))
    if num_outputs is not None:
        check_integer("num_outputs", num_outputs, 1)
        wanted = int(num_outputs)
    rounded = PROJECTIONS[kind].round_up(wanted, order)
    if rounded >= num_inputs:
        source = f"num_samples={num_samples}, eps={eps}"
        if num_outputs is not None:
            source = f"num_outputs={num_outputs}"
        warnings.warn(
            f"projection={kind!r} makes {rounded} numbers of {num_inputs} ({source}), "
            "which reduces nothing: use 'none', a larger eps or a smaller num_outputs",
            stacklevel=2,
        )
    generator = torch.Generator("cpu").manual_seed(seed)
    tables = PROJECTIONS[kind].build(rounded, num_inputs, order, generator, dtype)
    moved = tuple(table.to(device) for table in tables)
    return Projection(kind, num_inputs, rounded, moved)
