"""How far an order's prefix sums stray from a straight line: what GraB makes small.

The herding of vectors z_1 ... z_n with mean m in the order s is

    max over k of || sum_(t <= k) (z_s(t) - m) ||,

which grows like the square root of n for random orders and hardly for balanced ones.
How fast an order converges depends on it: Lu, Guo and De Sa 2022 (arXiv:2205.10733).

Pure functions of tensors; nothing reads a device. `herding` has the whole set before
it, `RunningHerding` sees it batch by batch and keeps three tensors.

    B rows of a batch, D columns (those of this shard, where columns are sharded)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

Tensor = torch.Tensor

# Of a chunk: large enough that Python's share is small, small beside any set of vectors
# that is worth cutting.
MAX_ROWS = 1024
MAX_ELEMENTS = 2**20


class Herding(NamedTuple):
    """The largest norm of a prefix sum; tensors of shape ``(1,)`` on the device.

    Attributes:
        infinity: In the infinity norm, the one of the GraB papers.
        euclidean: In the 2-norm.
    """

    infinity: Tensor
    euclidean: Tensor


class PrefixNorms(NamedTuple):
    """Norms of the prefix sums that end at each row of a batch, over some columns.

    Of several shards of the columns, those of all columns are the maximum of their
    ``infinity`` and the sum of their ``squares``, row by row. (Not of their herdings:
    the prefix that is longest in all columns may be longest in none.)

    Attributes:
        infinity: ``(B,)``: infinity norms.
        squares: ``(B,)``: squared 2-norms.
    """

    infinity: Tensor
    squares: Tensor


@dataclasses.dataclass(frozen=True)
class RunningHerding:
    """Herding around a given centre, from one batch after another, in O(D) memory.

    The centre must be known before the epoch, so it is an estimate: the mean of the
    epoch before. With the epoch's own mean the result is that of `herding`. It does not
    depend on how the epoch is cut into batches. A state is a dict of three tensors, to
    be saved as any other.

    >>> running = RunningHerding()
    >>> state = running.init(num_columns=2)
    >>> for rows in torch.tensor([[[3.0, 0.0]], [[0.0, 4.0]], [[-3.0, -4.0]]]):
    ...     state = running.update(state, rows, mean=torch.zeros(2))
    >>> running.result(state)
    Herding(infinity=tensor([4.]), euclidean=tensor([5.]))

    **Sharded columns.** Every shard takes its own columns, of rows and of the mean,
    through `advance`; shards then complete the norms of the rows, see `PrefixNorms`,
    and `record` them. They may do so once per epoch, with all batches' norms
    concatenated: 2 numbers per row.

    Attributes:
        dtype: Of the state; rows are converted to it.
        device: Of the state.
    """

    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def init(self, num_columns: int) -> dict[str, Tensor]:
        """The state at the beginning of an epoch.

        Returns:
            ``prefix``, ``(D,)``: the sum of all centred rows so far; ``infinity`` and
            ``squares``, ``(1,)``: the largest infinity norm and squared 2-norm so far.
        """
        sizes = {"prefix": num_columns, "infinity": 1, "squares": 1}
        return {
            key: torch.zeros(size, dtype=self.dtype, device=self.device)
            for key, size in sizes.items()
        }

    def update(
        self, state: dict[str, Tensor], rows: Tensor, mean: Tensor
    ) -> dict[str, Tensor]:
        """The state after a batch; the one given stays as it is.

        Args:
            state: What `init`, or the previous call, returned.
            rows: ``(B, D)``, B >= 1, any float dtype: vectors in the order visited.
                Rows equal to the mean change nothing: they may fill up a last batch.
            mean: ``(D,)``: the centre, the same in all calls of an epoch.

        Raises:
            ValueError: A shape does not fit the state.
        """
        state, norms = self.advance(state, rows, mean)
        return self.record(state, norms)

    @torch.no_grad()
    def advance(
        self, state: dict[str, Tensor], rows: Tensor, mean: Tensor
    ) -> tuple[dict[str, Tensor], PrefixNorms]:
        """The first half of `update`: moves the prefix sum, leaves the maxima.

        Returns:
            The state after the batch, and the norms to be completed over shards.
        """
        prefix = state["prefix"]
        _check_batch(prefix, rows, mean)
        # What came before is a sum of centred rows, as what follows is. The sum runs
        # through both, so that the result does not depend on where batches end.
        prefixes_BD = rows.to(self.dtype) - mean.to(self.dtype)
        prefixes_BD[:1] += prefix
        prefixes_BD = prefixes_BD.cumsum(0)
        norms = PrefixNorms(prefixes_BD.abs().amax(1), prefixes_BD.square().sum(1))
        return {**state, "prefix": prefixes_BD[-1].clone()}, norms

    @torch.no_grad()
    def record(self, state: dict[str, Tensor], norms: PrefixNorms) -> dict[str, Tensor]:
        """The second half of `update`: a state whose maxima include these norms.

        Args:
            state: Its prefix does not matter.
            norms: ``(B,)`` each, of all columns; of one batch, or of several.
        """
        maxima = {
            key: torch.maximum(state[key], values.amax(0, keepdim=True))
            for key, values in zip(norms._fields, norms)
        }
        return {**state, **maxima}

    def result(self, state: dict[str, Tensor]) -> Herding:
        """The herding of all batches so far."""
        return Herding(state["infinity"], state["squares"].sqrt())


def herding(
    vectors: Tensor,
    order: Tensor | Sequence[int] | None = None,
    mean: Tensor | None = None,
) -> Herding:
    """The largest norm of a prefix sum of centred vectors; NaN if one holds a NaN.

    In chunks: memory beside the vectors does not grow with their number. On a lazy
    backend all chunks are one graph.

    >>> vectors = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> herding(vectors).infinity, herding(vectors, order=[0, 3, 1, 2]).infinity
    (tensor([2.]), tensor([1.5000]))

    Args:
        vectors: ``(n, D)``, n and D >= 1, any float dtype and device; float32 or wider
            is what sums are in.
        order: ``(m,)`` integers in [0, n), m >= 1: which vector comes when, as a tensor
            or a list. Default: as they stand.
        mean: ``(D,)``: what to subtract. Default: the mean of all n vectors, whichever
            of them the order names.

    Returns:
        In the infinity norm and the 2-norm, ``(1,)`` each, on the vectors' device.

    Raises:
        TypeError: Vectors are not of floats, or an order not of integers.
        ValueError: A shape, or an order on the host, is none of the above.
    """
    _check_vectors(vectors)
    num_vectors, num_columns = vectors.shape
    chunk = max(1, min(MAX_ROWS, MAX_ELEMENTS // num_columns))
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    running = RunningHerding(dtype, vectors.device)
    state = running.init(num_columns)
    if mean is None:
        # Not vectors.mean(0, dtype), which on a CPU converts all of them first.
        total = state["prefix"]
        for rows in vectors.detach().split(chunk):
            total = total + rows.sum(0, dtype=dtype)
        mean = total / num_vectors
    if order is None:
        batches = vectors.detach().split(chunk)
    else:
        order = _checked_order(order, num_vectors).to(vectors.device)
        batches = (vectors.detach()[indices] for indices in order.split(chunk))
    for rows in batches:
        state = running.update(state, rows, mean)
    return running.result(state)


def _check_vectors(vectors: Tensor) -> None:
    if not vectors.is_floating_point():
        raise TypeError(
            f"Herding needs vectors of floats, not {vectors.dtype}: convert them first."
        )
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise ValueError(
            f"Herding needs vectors of shape (n, d), both at least 1, not "
            f"{tuple(vectors.shape)}: flatten all but the first axis."
        )


def _checked_order(order: Tensor | Sequence[int], num_vectors: int) -> Tensor:
    order = torch.as_tensor(order)
    if order.is_floating_point() or order.is_complex() or order.dtype == torch.bool:
        raise TypeError(f"An order is of integers, not {order.dtype}.")
    if order.ndim != 1 or len(order) == 0:
        raise ValueError(
            f"An order has the shape (m,), m at least 1, not {tuple(order.shape)}."
        )
    # One on a device is not read: that would be a transfer.
    if order.device.type == "cpu":
        lowest, highest = (int(index) for index in order.aminmax())
        if lowest < 0 or highest >= num_vectors:
            raise ValueError(
                f"An order of {num_vectors} vectors holds indices from 0 to "
                f"{num_vectors - 1}; this one goes from {lowest} to {highest}."
            )
    return order.long()


def _check_batch(prefix: Tensor, rows: Tensor, mean: Tensor) -> None:
    num_columns = len(prefix)
    if rows.ndim != 2 or rows.shape[1] != num_columns or len(rows) == 0:
        raise ValueError(
            f"This state is of rows of {num_columns} columns: a batch has the shape "
            f"(B, {num_columns}), B at least 1, not {tuple(rows.shape)}."
        )
    if mean.shape != prefix.shape:
        raise ValueError(
            f"The mean of rows of {num_columns} columns has the shape "
            f"({num_columns},), not {tuple(mean.shape)}."
        )
