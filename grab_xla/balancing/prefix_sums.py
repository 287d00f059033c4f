"""The herding of an order: how far its prefix sums are from a straight line.

The herding of vectors z_1 ... z_n with mean m in the order s is

    max over k of || sum_(t <= k) (z_s(t) - m) ||,

which grows like the square root of n for random orders and hardly grows for balanced
ones. It determines how fast training in that order converges: Lu, Guo and De Sa 2022
(arXiv:2205.10733).

Nothing reads a device. `herding` takes the whole set at once, `RunningHerding` batch by
batch.

Axes: B rows of a batch, D columns (of this shard, where columns are sharded).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# The largest chunk of vectors: large enough that Python's share of the time is small,
# small beside any set of vectors that is worth cutting.
MAX_ROWS = 1024
MAX_ELEMENTS = 2**20


class Herding(NamedTuple):
    """The largest norm of a prefix sum; tensors of shape ``(1,)`` on the device.

    Attributes:
        infinity: The infinity norm, as in the GraB papers.
        euclidean: The 2-norm.
    """

    infinity: Tensor
    euclidean: Tensor


class PrefixNorms(NamedTuple):
    """Norms of the prefix sums that end at each row of a batch, over some columns.

    Where columns are sharded, the norms over all columns are the maximum of the shards'
    ``infinity`` and the sum of their ``squares``, row by row. (The herdings cannot be
    combined: the prefix that is longest in all columns may be longest in no shard.)

    Attributes:
        infinity: ``(B,)`` infinity norms.
        squares: ``(B,)`` squared 2-norms.
    """

    infinity: Tensor
    squares: Tensor


@dataclasses.dataclass(frozen=True)
class RunningHerding:
    """Herding around a given centre, from one batch after another, in O(D) memory.

    The centre must be known before the epoch, so it is an estimate: the mean of the
    previous epoch. With the epoch's own mean the result equals that of `herding`. It
    does not depend on how the epoch is cut into batches. A state is a dict of tensors.

    >>> running = RunningHerding()
    >>> state = running.init(num_columns=2)
    >>> for rows in torch.tensor([[[3.0, 0.0]], [[0.0, 4.0]], [[-3.0, -4.0]]]):
    ...     state = running.update(state, rows, mean=torch.zeros(2))
    >>> running.result(state)
    Herding(infinity=tensor([4.]), euclidean=tensor([5.]))

    **Sharded columns.** Every shard passes its own columns of rows and mean to
    `advance`; the shards then complete the norms of the rows, see `PrefixNorms`, and
    `record` them. Once per epoch is enough, with the norms of all batches concatenated:
    2 numbers per row.

    Args:
        dtype: That of the state, to which rows are converted.
        device: That of the state and of the rows.
    """

    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def init(self, num_columns: int) -> dict[str, Tensor]:
        """Returns the state at the beginning of an epoch.

        It holds ``prefix``, ``(D,)``, the sum of all centred rows so far; ``infinity``
        and ``squares``, ``(1,)``, the largest infinity norm and squared 2-norm so far.
        """
        prefix = torch.zeros(num_columns, dtype=self.dtype, device=self.device)
        return {
            "prefix": prefix,
            "infinity": prefix.new_zeros(1),
            "squares": prefix.new_zeros(1),
        }

    def update(
        self, state: dict[str, Tensor], rows: Tensor, mean: Tensor
    ) -> dict[str, Tensor]:
        """Returns the state after a batch; ``state`` itself does not change.

        Args:
            state: What `init`, or the previous call, returned.
            rows: ``(B, D)``, B >= 1, any float dtype: vectors in the order visited.
                Rows equal to the mean do not affect it, so they may fill a last batch.
            mean: ``(D,)``, the centre, the same in all calls of an epoch.

        Raises:
            ValueError: A shape does not fit the state.
        """
        state, norms = self.advance(state, rows, mean)
        return self.record(state, norms)

    @torch.no_grad()
    def advance(
        self, state: dict[str, Tensor], rows: Tensor, mean: Tensor
    ) -> tuple[dict[str, Tensor], PrefixNorms]:
        """Returns the state with a new prefix sum, and norms to complete over shards.

        This is the first half of `update`: the maxima do not change.
        """
        prefix = state["prefix"]
        fits = rows.shape[1:] == mean.shape == prefix.shape
        if not fits or len(rows) == 0:
            raise ValueError(
                "rows must be (B, d), B at least 1, and mean (d,), with the "
                f"{len(prefix)} columns of this state, got {tuple(rows.shape)} and "
                f"{tuple(mean.shape)}"
            )
        # One sum runs through all batches, so that the result does not depend on where
        # they end.
        prefixes_BD = rows.to(self.dtype) - mean.to(self.dtype)
        prefixes_BD[:1] += prefix
        prefixes_BD = prefixes_BD.cumsum(0)
        norms = PrefixNorms(prefixes_BD.abs().amax(1), prefixes_BD.square().sum(1))
        return {**state, "prefix": prefixes_BD[-1].clone()}, norms

    @torch.no_grad()
    def record(self, state: dict[str, Tensor], norms: PrefixNorms) -> dict[str, Tensor]:
        """Returns the state whose maxima include these norms over all columns.

        This is the second half of `update`. It does not read the state's prefix; the
        norms may be those of several batches.
        """
        maxima = {
            key: torch.maximum(state[key], values.amax(0, keepdim=True))
            for key, values in zip(norms._fields, norms)
        }
        return {**state, **maxima}

    def result(self, state: dict[str, Tensor]) -> Herding:
        """Returns the herding of all batches so far."""
        return Herding(state["infinity"], state["squares"].sqrt())


def herding(
    vectors: Tensor,
    order: Tensor | Sequence[int] | None = None,
    mean: Tensor | None = None,
) -> Herding:
    """Returns the largest norm of a prefix sum; NaN if a vector contains a NaN.

    Memory does not grow with the number of vectors: it works in chunks, which are one
    graph on a lazy backend.

    >>> vectors = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> herding(vectors).infinity, herding(vectors, order=[0, 3, 1, 2]).infinity
    (tensor([2.]), tensor([1.5000]))

    Args:
        vectors: ``(n, D)``, n and D >= 1, any dtype and device; sums are in float32 or
            wider.
        order: ``(m,)`` integers in [0, n), m >= 1. Default: 0, 1, ..., n - 1.
        mean: ``(D,)``, what to subtract. Default: the mean of all n vectors, even if
            the order does not contain all of them.

    Raises:
        TypeError: The order does not hold integers.
        ValueError: A shape is wrong.
    """
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise ValueError(
            "herding needs vectors of shape (n, d), both at least 1, got "
            f"{tuple(vectors.shape)}: flatten all but the first axis"
        )
    num_vectors, num_columns = vectors.shape
    chunk = max(1, min(MAX_ROWS, MAX_ELEMENTS // num_columns))
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    running = RunningHerding(dtype, vectors.device)
    state = running.init(num_columns)
    if mean is None:
        # vectors.mean(0, dtype) would convert all of them first on a CPU.
        total = state["prefix"]
        for rows in vectors.detach().split(chunk):
            total = total + rows.sum(0, dtype=dtype)
        mean = total / num_vectors
    if order is None:
        batches = vectors.detach().split(chunk)
    else:
        order = _checked_order(order).to(vectors.device)
        batches = (vectors.detach()[indices] for indices in order.split(chunk))
    for rows in batches:
        state = running.update(state, rows, mean)
    return running.result(state)


def _checked_order(order: Tensor | Sequence[int]) -> Tensor:
    order = torch.as_tensor(order)
    if order.is_floating_point() or order.is_complex() or order.dtype == torch.bool:
        raise TypeError(f"order must hold integers, got {order.dtype}")
    return order.long()
