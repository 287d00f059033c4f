"""grab-sampler's projections, which stay because orders of saved runs follow from them.

`per_sample_grad.Projection`, that of ``fidelity="projected"``, forms no gradient and is
what a new run should take. These project gradients that are formed.

Balancing only reads inner products of gradients. A random matrix P of K rows with
E[P^T P] = I keeps them up to an error of the order of sqrt(log n / K), whatever the
number of parameters (Johnson & Lindenstrauss 1984).

All random numbers come from a CPU generator seeded with ``seed``, so every replica,
device and resumed run has the same matrix, and there is no state to save. Shapes follow
from the arguments: a compiled backend builds one program per batch size.

Axes: B samples, D inputs, K outputs, S slots of the longest sparse row.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xla_replica import full_matmul_precision, traits
from xla_replica.common.arguments import check_choice, check_integer, check_number

Tables = tuple[Tensor, ...]

# How many numbers a sparse projection gathers at a time: a compromise between memory
# (64 MB in float32) and the number of pieces, each of which a compiled program repeats.
GATHERED_AT_ONCE = 2**24


class Kind(NamedTuple):
    """One way to project: ``apply`` maps rows and tables to ``(B, K)``.

    The rows are ``(B, D)``, as a list of their columns in one or more parts.

    ``build`` makes the tables of K, D, the ``order`` of 'kron', a generator and a
    dtype; it is None if nothing is projected. ``round_up`` maps the K that is asked for
    and ``order`` to the K that the kind can have.
    """

    build: Callable[[int, int, int, torch.Generator, torch.dtype], Tables] | None
    apply: Callable[..., Tensor]
    round_up: Callable[[int, int], int] = lambda num_outputs, order: num_outputs


def _gaussian(
    num_outputs: int, num_inputs: int, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """Returns ``(K, D)`` with entries N(0, 1 / K).

    Numbers are drawn in float64, because torch's float32 stream differs between CPUs
    with and without AVX2; row by row, so that not all of them are in memory.
    """
    matrix_KD = torch.empty(num_outputs, num_inputs, dtype=dtype)
    wide: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    for row_D in matrix_KD:
        row_D.copy_(torch.randn(num_inputs, **wide).div_(math.sqrt(num_outputs)))
    return matrix_KD


def _nonzeros(cells: int, density: float, generator: torch.Generator) -> Tensor:
    """Chooses each cell with this probability; returns them ascending, ``(nnz,)``."""
    if density >= 1:
        return torch.arange(cells)
    # Distances between chosen cells are geometric: one number for every chosen cell.
    # Six standard deviations more than expected: one round is nearly always enough.
    size = math.ceil(cells * density + 6 * math.sqrt(cells * density)) + 10
    last, found = -1, []
    while last < cells:
        gaps = torch.empty(size, dtype=torch.int64)
        gaps.geometric_(density, generator=generator)
        found.append(last + gaps.cumsum(0))
        last = int(found[-1][-1])
    places = torch.cat(found)
    return places[places < cells]


def _build_sparse(
    num_outputs: int,
    num_inputs: int,
    order: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Tables:
    """Returns column numbers and signs, ``(K, S)`` each, zero where a row has fewer."""
    places = _nonzeros(num_outputs * num_inputs, num_inputs**-0.5, generator)
    row = places // num_inputs
    counts_K = torch.bincount(row, minlength=num_outputs)
    slot = torch.arange(len(places)) - (counts_K.cumsum(0) - counts_K)[row]
    shape = (num_outputs, max(1, int(counts_K.max())))
    columns_KS = torch.zeros(shape, dtype=torch.int32)
    columns_KS[row, slot] = (places % num_inputs).to(torch.int32)
    signs_KS = torch.zeros(shape, dtype=dtype)
    coins = torch.randint(0, 2, (len(places),), generator=generator)
    signs_KS[row, slot] = (2 * coins - 1).to(dtype)
    return columns_KS, signs_KS


def _joined(parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    parts = [part.to(dtype) for part in parts] if dtype else parts
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)


def _apply_sparse(
    parts: Sequence[Tensor], columns_KS: Tensor, signs_KS: Tensor
) -> Tensor:
    rows_DB = _joined(parts, signs_KS.dtype).T.contiguous()
    # A bag is ten times as fast on a CPU, but XLA unrolls it entry by entry.
    if traits(rows_DB).is_lazy:
        sums_KB = _gather_and_sum(rows_DB, columns_KS, signs_KS)
    else:
        sums_KB = torch.nn.functional.embedding_bag(
            columns_KS, rows_DB, per_sample_weights=signs_KS, mode="sum"
        )
    # 1 / sqrt(K density) comes last, so that the table only holds -1, 0 and 1.
    return sums_KB.T * math.sqrt(math.sqrt(len(rows_DB)) / len(columns_KS))


def _gather_and_sum(rows_DB: Tensor, columns_KS: Tensor, signs_KS: Tensor) -> Tensor:
    """Sums bags for some outputs at a time, with what every backend compiles."""
    batch_size, (num_outputs, slots) = rows_DB.shape[1], columns_KS.shape
    step = max(1, GATHERED_AT_ONCE // max(1, slots * batch_size))
    pieces = []
    for k in range(0, num_outputs, step):
        columns_kS, signs_kS = columns_KS[k : k + step], signs_KS[k : k + step]
        gathered_kSB = rows_DB[columns_kS.flatten()].view(*columns_kS.shape, batch_size)
        pieces.append((signs_kS.unsqueeze(1) @ gathered_kSB).squeeze(1))
    return torch.cat(pieces)


def _root(number: int, order: int) -> int:
    """Returns the least r with r ** order >= number; 3125 ** (1 / 5) is above 5."""
    root: int = max(1, round(number ** (1 / order)) - 1)
    while root**order < number:
        root += 1
    return root


def _build_kron(num_outputs: int, num_inputs: int, order: int, *how: Any) -> Tables:
    """Returns ``order`` Gaussian factors, of the roots of K and (rounded up) of D."""
    shape = _root(num_outputs, order), _root(num_inputs, order)
    return tuple(_gaussian(*shape, *how) for _ in range(order))


def _apply_kron(parts: Sequence[Tensor], *factors: Tensor) -> Tensor:
    """Returns kron(P_last, ..., P_0) x for every row x, padded with zeros.

    x has one axis per factor, the last for P_0. Each factor contracts the last axis and
    puts its outputs before all others, so the next axis is last.
    """
    batch_size, dtype = len(parts[0]), factors[0].dtype
    left = factors[0].shape[1] ** len(factors)
    padding = left - sum(part.shape[1] for part in parts)
    if padding:
        parts = [*parts, parts[0].new_zeros(batch_size, padding)]
    rows = _joined(parts, dtype)
    # Numbers are explicit, because reshape cannot infer them for zero samples.
    for factor in factors:
        outputs, inputs = factor.shape
        left //= inputs
        rows = (factor @ rows.reshape(batch_size, left, inputs).mT).flatten(1)
        left *= outputs
    return rows


PROJECTIONS: dict[str, Kind] = {
    "none": Kind(None, _joined),
    # Gaussian: Dasgupta & Gupta 2003.
    "jl": Kind(
        lambda num_outputs, num_inputs, _, *how: (
            _gaussian(num_outputs, num_inputs, *how),
        ),
        lambda parts, matrix_KD: _joined(parts, matrix_KD.dtype) @ matrix_KD.T,
    ),
    # Entries +-1 / sqrt(K density) with density 1 / sqrt(D): Li, Hastie & Church 2006,
    # "Very Sparse Random Projections".
    "jl_sparse": Kind(_build_sparse, _apply_sparse),
    "kron": Kind(
        _build_kron, _apply_kron, lambda number, order: _root(number, order) ** order
    ),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Projection:
    """A fixed linear map of gradients, ``(B, num_inputs)`` to ``(B, num_outputs)``.

    ``kind`` is a key of `PROJECTIONS`; ``tables`` hold random numbers, on the device,
    and are empty if nothing is projected.
    """

    kind: str
    num_inputs: int
    num_outputs: int
    tables: Tables = ()

    def __call__(self, *parts: Tensor) -> Tensor:
        """Returns ``(B, K)`` in the tables' dtype for ``(B, D)`` of any floating dtype.

        The rows may be given as several parts of their columns, in order.
        ``kind="none"`` returns ``(B, D)``, a single part as it is.
        """
        with full_matmul_precision(parts[0].device):
            return PROJECTIONS[self.kind].apply(parts, *self.tables)


def johnson_lindenstrauss_min_dim(num_samples: int, eps: float) -> int:
    """Returns how many outputs keep all distances between n points up to 1 +- eps.

    4 ln n / (eps^2 / 2 - eps^3 / 3), rounded down: Dasgupta & Gupta 2003, "An
    Elementary Proof of a Theorem of Johnson and Lindenstrauss", Theorem 2.1, which
    holds for squared Euclidean distances and some map. Independent of the dimension.

    >>> johnson_lindenstrauss_min_dim(1000, eps=0.1)
    5920

    Raises:
        ValueError: There is no sample, or ``eps`` is not between 0 and 1, exclusive.
    """
    check_integer("num_samples", num_samples, 1)
    check_number("eps", eps, above=0, below=1)
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
    """Returns a random projection of gradients to fewer numbers, given by its seed.

    Args:
        kind: A key of `PROJECTIONS`. ``"none"`` projects nothing. ``"jl"`` is a dense
            Gaussian matrix of K D numbers. ``"jl_sparse"`` holds about 2 K sqrt(D).
            ``"kron"`` is a Kronecker product of ``order`` Gaussian factors and holds
            about ``order`` (K D) ** (1 / order); its K is rounded up to a power. The
            fewer numbers a kind holds, the more its error varies.
        num_inputs: D, the numbers in a gradient.
        num_samples: n, the number of samples whose distances are kept.
        eps: The factor by which distances may change, from which K follows; see
            `johnson_lindenstrauss_min_dim`.
        order: The number of factors of ``"kron"``; other kinds do not read it.
        seed: The seed of the matrix.
        dtype: The dtype of projections, to which the same numbers are rounded.
        device: The device of the gradients.
        num_outputs: K, instead of the one that follows from n and eps.

    Raises:
        ValueError: The kind is unknown, or a number is out of range.
        TypeError: A count is not an integer.

    Warns:
        UserWarning: K is not below D: the projection costs more than it saves.
    """
    check_choice("random_projection", kind, PROJECTIONS)
    check_integer("num_inputs", num_inputs, 1)
    check_integer("order", order, 1)
    build, _, round_up = PROJECTIONS[kind]
    if build is None:
        return Projection(kind, num_inputs, num_inputs)
    wanted = max(1, johnson_lindenstrauss_min_dim(num_samples, eps))
    source = f"num_samples={num_samples}, eps={eps}"
    if num_outputs is not None:
        wanted = check_integer("num_outputs", num_outputs, 1)
        source = f"num_outputs={num_outputs}"
    rounded = round_up(wanted, order)
    if rounded >= num_inputs:
        warnings.warn(
            f"random_projection={kind!r} makes {rounded} numbers of {num_inputs} "
            f"({source}), which reduces nothing: use 'none', a larger eps or a smaller "
            "num_outputs",
            stacklevel=2,
        )
    generator = torch.Generator("cpu").manual_seed(seed)
    tables = build(rounded, num_inputs, order, generator, dtype)
    moved = tuple(table.to(device) for table in tables)
    return Projection(kind, num_inputs, rounded, moved)
