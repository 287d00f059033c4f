"""Projections of all gradients of a pool: searched and multiplied in bounded memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
import torch

from per_sample_grad.pool.parts import (
    INDEXED,
    OPENED,
    Parts,
    check_folder,
    listed,
    listed_differences,
    read_description,
)
from xla_replica.common.arguments import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from xla_replica.common.files import unfinished_name, write_whole

# Projections, ``(m, size)``.
Rows: TypeAlias = "np.ndarray | torch.Tensor | GradientIndex"
MEASURES = ("inner_product", "cosine")
# Begins the names under which a description has each parameter's rows and columns.
KEPT = "kept."
# What two indices must share for inner products between them to mean something.
_COMPARED = ("size", "seed", "projection version", "kept", "model", "params")
# Bytes of projections, and of products with them, that are worked on at a time.
_BLOCK_BYTES = 2**24


class SearchResult(NamedTuple):
    """The samples whose gradients are most similar to each query's, best first.

    Attributes:
        indices: ``(Q, top)`` int64, of the pool; ties are in the order of the pool.
        values: ``(Q, top)`` float32, the inner products or cosines.
    """

    indices: np.ndarray
    values: np.ndarray


class GradientIndex:
    """One projected gradient per sample of a pool; `index_pool` makes it.

    Rows are read from the files of a folder when they are asked for, mapped into
    memory. ``index[rows]`` is a copy of some, ``(m, size)`` float32.

    Attributes:
        size: How many numbers a projection has.
        columns: Which of them are a parameter's, by name.
        description: What the projections depend on, as the folder has it.
    """

    def __init__(
        self,
        description: dict[str, Any],
        part_size: int,
        part: Callable[[int], np.ndarray],
        count: int,
    ) -> None:
        """Makes an index; ``part`` returns the rows of a part."""
        self.description = description
        self._part_size, self._part, self._count = part_size, part, count
        self.columns: dict[str, slice] = {}
        self.size = 0
        for name, value in description.items():
            if name.startswith(KEPT):
                after = self.size + value[0] * value[1]
                self.columns[name.removeprefix(KEPT)] = slice(self.size, after)
                self.size = after

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return (
            f"GradientIndex of {len(self)} samples, {self.size} numbers each, seed "
            f"{self.description['seed']}"
        )

    def __getitem__(self, rows: Sequence[int] | np.ndarray | slice) -> np.ndarray:
        """Returns a copy of some rows, ``(m, size)`` float32.

        Raises:
            IndexError: A row is not a sample.
        """
        wanted = np.arange(len(self))[rows]
        if wanted.ndim != 1:
            raise IndexError(
                f"an index of {len(self)} samples is indexed by a slice or a sequence "
                f"of integers, got {rows!r}"
            )
        found = np.empty((len(wanted), self.size), dtype=np.float32)
        parts = wanted // self._part_size
        for number in np.unique(parts):
            of_part = parts == number
            places = wanted[of_part] - number * self._part_size
            found[of_part] = self._part(int(number))[places]
        return found

    def search(
        self,
        queries: Rows,
        *,
        top: int = 10,
        by: str = "inner_product",
        skip_nan: bool = False,
    ) -> SearchResult:
        """Returns the samples whose projections are most similar to each query.

        Memory is that of the queries, the result, and some blocks of 16 MiB. Search
        with ``-queries`` for the least similar ones.

        Args:
            queries: ``(Q, size)``; or another index of the same model and projection.
            top: How many samples per query.
            by: ``"inner_product"``; or ``"cosine"``, which is 0 for a zero gradient.
            skip_nan: Whether to leave out samples whose projection is not finite.

        Raises:
            ValueError: Queries have another size, are not finite, or are of another
                model, size or seed; a projection is not finite; there are not ``top``
                samples.
        """
        check_choice("search: by", by, MEASURES)
        check_integer("search: top", top, least=1, most=len(self))
        check_flag("search: skip_nan", skip_nan)
        asked = self._queries(queries)
        if by == "cosine":
            asked = asked / _norms(asked)
        indices = np.empty((len(asked), 0), dtype=np.int64)
        values = np.empty((len(asked), 0), dtype=np.float32)
        each = max(1, _BLOCK_BYTES // (4 * max(1, len(asked))))
        for start, block in self._blocks(each):
            rows, block = self._finite(start, block, skip_nan)
            if by == "cosine":
                block = block / _norms(block)
            with np.errstate(over="ignore", invalid="ignore"):  # found below
                products = asked @ block.T
            if not np.isfinite(products).all():
                raise ValueError(
                    f"search: products with samples {start} to {start + len(block) - 1}"
                    ' are beyond float32; use by="cosine", or smaller queries'
                )
            rows = np.broadcast_to(rows, products.shape)
            indices = np.concatenate([indices, rows], axis=1)
            values = np.concatenate([values, products], axis=1)
            # Sorting keeps the order of the pool among those that are equal.
            best = np.argsort(-values, axis=1, kind="stable")[:, :top]
            indices = np.take_along_axis(indices, best, 1)
            values = np.take_along_axis(values, best, 1)
        if values.shape[1] < top:
            raise ValueError(
                f"search: top is {top}, but only {values.shape[1]} samples have finite "
                "projections"
            )
        return SearchResult(indices, values)

    def gram(self, rows: Sequence[int] | np.ndarray | slice) -> np.ndarray:
        """Returns inner products of every two of these rows, ``(m, m)`` float32."""
        found = self[rows]
        return np.asarray(found @ found.T)

    def preconditioner(
        self, *, damping: float = 0.1, by_parameter: bool = True, skip_nan: bool = False
    ) -> Preconditioner:
        """Returns the inverse of the damped Gauss-Newton matrix of the projections.

        ``(F + λ I)⁻¹`` with ``F = Σ_i p_i p_iᵀ / n`` over the pool and λ = ``damping``
        times the mean of F's eigenvalues (LoGra: Choe et al., arXiv:2405.13954). With
        the pool's own labels F is the empirical Fisher matrix; it is the Gauss-Newton
        matrix in expectation where labels are drawn from the model's predictions.

        Args:
            damping: λ over the mean eigenvalue.
            by_parameter: Whether products of different parameters count as zero: then
                the matrices are as small as the parameters' shares of ``size``, and
                otherwise one of ``8 size²`` bytes.
            skip_nan: Whether to leave out samples whose projection is not finite.

        Raises:
            ValueError: A projection is not finite, or none is.
        """
        check_number("preconditioner: damping", damping, above=0)
        check_flag("preconditioner: by_parameter", by_parameter)
        check_flag("preconditioner: skip_nan", skip_nan)
        blocks = [*self.columns.values()] if by_parameter else [slice(0, self.size)]
        sides = [block.stop - block.start for block in blocks]
        totals = [torch.zeros(n, n, dtype=torch.float64) for n in sides]
        count = 0
        for start, block in self._blocks():
            _, rows = self._finite(start, block, skip_nan)
            count += len(rows)
            for total, columns in zip(totals, blocks):
                part = torch.from_numpy(rows[:, columns])
                total += part.T @ part
        if not count:
            raise ValueError(
                f"preconditioner: none of the {len(self)} projections is finite"
            )
        return Preconditioner(
            self.size, blocks, [_inverse(total / count, damping) for total in totals]
        )

    def self_influence(
        self, preconditioner: Preconditioner | None = None
    ) -> np.ndarray:
        """Returns ``⟨p_i, H⁻¹ p_i⟩`` of all samples, ``(n,)`` float32.

        Without a preconditioner that is the squared norm of the projected gradient. It
        is NaN where a projection is.
        """
        found = np.empty(len(self), dtype=np.float32)
        for start, rows in self._blocks():
            others = rows if preconditioner is None else preconditioner(rows)
            found[start : start + len(rows)] = np.einsum("ij,ij->i", rows, others)
        return found

    def to_npy(self, path: str | os.PathLike[str]) -> None:
        """Writes all projections as one file of NumPy, ``(n, size)``, in blocks.

        ``np.load(path, mmap_mode="r")`` maps it into memory.
        """

        def write(file: BinaryIO) -> None:
            header = {
                "descr": "<f4",
                "fortran_order": False,
                "shape": (len(self), self.size),
            }
            np.lib.format.write_array_header_1_0(file, header)
            for _, rows in self._blocks():
                file.write(rows.tobytes())

        write_whole(unfinished_name(Path(path)), write, Path(path))

    def _blocks(self, rows: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the first row and the rows of blocks of 16 MiB, or so many rows."""
        most = max(1, _BLOCK_BYTES // (4 * self.size))
        each = most if rows is None else min(rows, most)
        for first in range(0, len(self), self._part_size):
            part = self._part(first // self._part_size)
            for start in range(0, len(part), each):
                # A copy: what is mapped would be read from the disk once per use.
                yield first + start, np.array(part[start : start + each])

    def _finite(
        self, start: int, block: np.ndarray, skip: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers and the projections of the samples that are finite."""
        remedy = "" if skip else "leave these samples out with skip_nan=True"
        finite = which_finite(start, block, remedy)
        rows = start + np.arange(len(block))
        return (rows, block) if finite.all() else (rows[finite], block[finite])

    def _queries(self, queries: Rows) -> np.ndarray:
        """Returns queries as ``(Q, size)`` float32."""
        if isinstance(queries, GradientIndex):
            self._check_same(queries)
        queries = _rows("search: queries", queries, "Q", self.size)
        wrong = np.flatnonzero(~np.isfinite(queries).all(axis=1))
        if len(wrong):
            raise ValueError(f"search: queries {listed(wrong)} are not finite")
        return queries

    def _check_same(self, other: GradientIndex) -> None:
        """Raises ValueError unless the other index has the same model and map."""
        names = {**self.description, **other.description}
        compared = [name for name in names if re.split("[.[]", name)[0] in _COMPARED]
        found = listed_differences(self.description, other.description, compared)
        if found:
            raise ValueError(
                "search: the queries are of another model or projection than the "
                f"index: {found}. Index both with the same model, params, size and seed"
            )


class Preconditioner:
    """``(F + λ I)⁻¹`` in the space of projections; call it with rows ``(m, size)``.

    Inner products ``⟨q, H⁻¹ p⟩`` are those of preconditioned queries, so that an index
    stays as it is: ``index.search(preconditioner(queries))``.
    """

    def __init__(
        self, size: int, columns: Sequence[slice], inverses: Sequence[torch.Tensor]
    ) -> None:
        self._size, self._columns, self._inverses = size, columns, inverses

    def __call__(self, rows: Rows) -> np.ndarray:
        """Returns ``H⁻¹ p`` for every row, ``(m, size)`` float32."""
        given = torch.from_numpy(_rows("preconditioner: rows", rows, "m", self._size))
        found = np.empty(tuple(given.shape), dtype=np.float32)
        for columns, inverse in zip(self._columns, self._inverses):
            found[:, columns] = given[:, columns].to(inverse.dtype) @ inverse
        return found


def which_finite(first: int, rows: np.ndarray, remedy: str) -> np.ndarray:
    """Returns which projections are finite, ``(m,)`` bool, of samples from ``first``.

    Raises ValueError with a ``remedy`` if there is one, and some are not.
    """
    finite: np.ndarray = np.isfinite(rows).all(axis=1)
    if remedy and not finite.all():
        samples = first + np.flatnonzero(~finite)
        raise ValueError(
            f"the projections of samples {listed(samples)} are not finite: the model's "
            f"output, its loss or their gradient is not. Repair that, or {remedy}"
        )
    return finite


def _rows(what: str, rows: object, count: str, size: int) -> np.ndarray:
    """Returns rows ``(count, size)`` of an index, an array or a tensor, as float32."""
    if isinstance(rows, GradientIndex):
        rows = rows[:]
    if isinstance(rows, torch.Tensor) and not rows.is_complex():
        rows = rows.detach().cpu().float().numpy()
    if not isinstance(rows, np.ndarray):
        kind = f"{rows.dtype} " if isinstance(rows, torch.Tensor) else ""
        raise TypeError(
            f"{what} must be an array, a tensor or an index, of real numbers; got a "
            f"{kind}{type(rows).__name__}"
        )
    if not np.can_cast(rows.dtype, np.float64, "same_kind"):
        raise TypeError(f"{what} must be real numbers, got an array of {rows.dtype}")
    if rows.ndim != 2 or rows.shape[1] != size:
        raise ValueError(
            f"{what} must have shape ({count}, {size}), got {rows.shape}: project them "
            "with index_pool, as the pool was"
        )
    return np.ascontiguousarray(rows, dtype=np.float32)


def open_index(folder: str | os.PathLike[str], *, verify: bool = True) -> GradientIndex:
    """Returns the finished index in a folder, which `index_pool` has written.

    Args:
        folder: The folder.
        verify: Whether to compute the checksum of every part, which reads all of it
            once.

    Raises:
        FileNotFoundError: The folder has no index, or a part of it is missing.
        ValueError: The folder has something else, such as scores, or a part is damaged.
    """
    check_flag("open_index: verify", verify)
    path = check_folder(folder)
    try:
        saved = read_description(path, INDEXED, OPENED, "Give the folder of an index.")
    except OSError as error:
        raise FileNotFoundError(
            error.errno,
            "there is no index in this folder; index_pool writes one",
            str(path),
        ) from error
    parts = Parts(saved.pop("count"), saved.pop("part_size"), path, saved, INDEXED)
    return checked_index(parts, verify)


def checked_index(parts: Parts, verify: bool) -> GradientIndex:
    """Returns the index of a folder's parts, none of which is missing or damaged."""
    index = GradientIndex(parts.description, parts.size, parts.mapped, parts.count)
    missing = np.flatnonzero(~parts.kept())
    if len(missing):
        raise FileNotFoundError(
            f"{parts.folder}: {len(missing)} of {len(parts)} parts are missing "
            f"({listed(missing)}). Call index_pool again with this folder, which "
            "computes what is missing; all replicas must see the same folder"
        )
    damaged = []
    for number in range(len(parts)):
        start, stop = parts.interval(number)
        try:
            is_intact = parts.mapped(number).shape == (stop - start, index.size)
            is_intact = is_intact and (not verify or parts.is_intact(number))
        except (ValueError, EOFError):  # how NumPy finds a damaged header
            is_intact = False
        if not is_intact:
            damaged.append(number)
    if damaged:
        raise ValueError(
            f"{parts.folder}: {len(damaged)} of {len(parts)} parts are damaged "
            f"({listed(damaged)}): their content is not what was written. Call "
            "index_pool again with this folder, which computes them again"
        )
    return index


def _norms(rows: np.ndarray) -> np.ndarray:
    """Returns the norms of rows, ``(m, 1)``; infinity for zero."""
    scale = np.abs(rows).max(axis=1, keepdims=True, initial=0)
    scale[scale == 0] = 1
    found: np.ndarray = scale * np.linalg.norm(rows / scale, axis=1, keepdims=True)
    found[found == 0] = np.inf
    return found


def _inverse(matrix: torch.Tensor, damping: float) -> torch.Tensor:
    """Returns the inverse of a damped matrix; zeros where the matrix is zero."""
    mean = float(matrix.diagonal().mean())
    if mean == 0:
        return matrix
    matrix.diagonal().add_(damping * mean)
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix))
