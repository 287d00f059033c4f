"""Kinds of random projection: a registry of how to build one and how to apply it.

Every kind is a matrix P of K rows and D columns with E[P^T P] = I. All random numbers
come from the generator that `Kind.build` gets, and all shapes follow from its other
arguments and the tables: a compiled backend builds one program per batch size.

Axes: B samples, D inputs, K outputs, S slots of the longest sparse row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

Tensor = torch.Tensor
Tables = tuple[Tensor, ...]

# Numbers that a sparse projection gathers at a time: a compromise between memory (64 MB
# in float32) and the number of pieces, each of which a compiled program repeats.
GATHERED_AT_ONCE = 2**24


class Kind(NamedTuple):
    """One way to project, without a state.

    Attributes:
        round_up: From (K asked for, order) to the K this kind can have.
        build: From (K, D, order, generator) to the random tables, float ones in the
            dtype of the last argument.
        apply: From rows ``(B, D)``, K and the tables to ``(B, K)``.
    """

    round_up: Callable[[int, int], int]
    build: Callable[[int, int, int, torch.Generator, torch.dtype], Tables]
    apply: Callable[..., Tensor]


def _gaussian(
    num_outputs: int, num_inputs: int, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """``(K, D)``, entries N(0, 1 / K).

    Drawn in float64: torch's float32 stream differs between CPUs with and without
    AVX2. Row by row, so that the wide numbers never stand in memory all at once.
    """
    matrix_KD = torch.empty(num_outputs, num_inputs, dtype=dtype)
    for row_D in matrix_KD:
        row_D.copy_(
            torch.randn(num_inputs, dtype=torch.float64, generator=generator).div_(
                math.sqrt(num_outputs)
            )
        )
    return matrix_KD


def _build_dense(
    num_outputs: int,
    num_inputs: int,
    order: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Tables:
    del order
    return (_gaussian(num_outputs, num_inputs, generator, dtype),)


def _apply_dense(rows_BD: Tensor, num_outputs: int, matrix_KD: Tensor) -> Tensor:
    del num_outputs
    return rows_BD.to(matrix_KD.dtype) @ matrix_KD.T


def _nonzeros(cells: int, density: float, generator: torch.Generator) -> Tensor:
    """``(nnz,)``, ascending: each of ``cells`` cells is chosen with this probability.

    Distances between chosen cells are geometric, so this draws as many numbers as there
    are nonzeros, not cells.
    """
    if density >= 1:
        return torch.arange(cells)
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
    """Column numbers ``(K, S)`` and signs ``(K, S)``, zero where a row has fewer."""
    del order
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


def _apply_sparse(
    rows_BD: Tensor, num_outputs: int, columns_KS: Tensor, signs_KS: Tensor
) -> Tensor:
    rows_DB = rows_BD.to(signs_KS.dtype).T.contiguous()
    # A bag is ten times as fast on a CPU, but XLA unrolls it entry by entry.
    eager = rows_BD.device.type in ("cpu", "cuda")
    sums_KB = (_sum_bags if eager else _gather_and_sum)(rows_DB, columns_KS, signs_KS)
    # 1 / sqrt(K density): afterwards, so that the table holds nothing but -1, 0 and 1.
    return sums_KB.T * math.sqrt(math.sqrt(rows_BD.shape[1]) / num_outputs)


def _sum_bags(rows_DB: Tensor, columns_KS: Tensor, signs_KS: Tensor) -> Tensor:
    return torch.nn.functional.embedding_bag(
        columns_KS, rows_DB, per_sample_weights=signs_KS, mode="sum"
    )


def _gather_and_sum(rows_DB: Tensor, columns_KS: Tensor, signs_KS: Tensor) -> Tensor:
    """The same, some outputs at a time, with what every backend compiles."""
    batch_size, (num_outputs, slots) = rows_DB.shape[1], columns_KS.shape
    step = max(1, GATHERED_AT_ONCE // max(1, slots * batch_size))
    pieces = []
    for k in range(0, num_outputs, step):
        columns_kS, signs_kS = columns_KS[k : k + step], signs_KS[k : k + step]
        gathered_kSB = rows_DB[columns_kS.flatten()].view(*columns_kS.shape, batch_size)
        pieces.append((signs_kS.unsqueeze(1) @ gathered_kSB).squeeze(1))
    return torch.cat(pieces)


def _root(number: int, order: int) -> int:
    """The least r with r ** order >= number; in integers: 3125 ** (1 / 5) > 5."""
    root = max(1, round(number ** (1 / order)) - 1)
    while root**order < number:
        root += 1
    return root


def _build_kron(
    num_outputs: int,
    num_inputs: int,
    order: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Tables:
    """``order`` Gaussian factors, each of the roots of K and (rounded up) of D."""
    shape = _root(num_outputs, order), _root(num_inputs, order)
    return tuple(_gaussian(*shape, generator, dtype) for _ in range(order))


def _apply_kron(rows_BD: Tensor, num_outputs: int, *factors: Tensor) -> Tensor:
    """kron(P_last, ..., P_0) x for every row x, padded with zeros.

    x is a tensor with one axis per factor, the last axis for P_0. Each factor contracts
    the last axis and puts its outputs before all others, so the next axis is last.
    """
    batch_size, num_inputs = rows_BD.shape
    padding = factors[0].shape[1] ** len(factors) - num_inputs
    rows = torch.nn.functional.pad(rows_BD.to(factors[0].dtype), (0, padding))
    left = rows.shape[1]  # spelt out: reshape cannot infer it for no samples
    for factor in factors:
        outputs, inputs = factor.shape
        left //= inputs
        rows = (factor @ rows.reshape(batch_size, left, inputs).mT).flatten(1)
        left *= outputs
    return rows


def _as_it_is(number: int, order: int) -> int:
    del order
    return number


def _to_a_power(number: int, order: int) -> int:
    return _root(number, order) ** order


def _build_nothing(*_: object) -> Tables:
    return ()


def _apply_nothing(rows_BD: Tensor, num_outputs: int) -> Tensor:
    del num_outputs
    return rows_BD


PROJECTIONS: dict[str, Kind] = {
    "none": Kind(_as_it_is, _build_nothing, _apply_nothing),
    # Gaussian: Dasgupta & Gupta 2003.
    "jl": Kind(_as_it_is, _build_dense, _apply_dense),
    # Entries +-1 / sqrt(K density) with density 1 / sqrt(D): Li, Hastie & Church 2006,
    # "Very Sparse Random Projections".
    "jl_sparse": Kind(_as_it_is, _build_sparse, _apply_sparse),
    "kron": Kind(_to_a_power, _build_kron, _apply_kron),
}
