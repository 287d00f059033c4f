"""Projections that compiled loops write to where they belong, on a CPU with Numba.

What Python does between a pass's large operations takes many times as long as
elsewhere, since these have filled the caches. So what of a call depends on shapes and
settings alone is kept with the projection, and several calls are one call of a loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from torch import nn

from per_sample_grad.factors.projection import Columns, Fold, Folds, Projection
from per_sample_grad.layers.convolution import convolution, padding_widths
from per_sample_grad.layers.embedding import embedding
from per_sample_grad.layers.group_norm import group_norm
from per_sample_grad.layers.layer_norm import layer_norm
from per_sample_grad.layers.linear import linear
from per_sample_grad.layers.registry import Rule
from per_sample_grad.layers.taken import Normalisations, TakenCall, names_of

# A loop folds a side of a matrix first to no more than this; torch has better products.
_MOST_FOLDED_FIRST = 8


@dataclasses.dataclass(frozen=True, eq=False)
class _Row:
    """What loops are told about a call, but for the addresses of its tensors.

    Attributes:
        numbers: A row of `compiled_projections.project_calls`, zero for the addresses.
        kept: What has the memory of other addresses in it.
    """

    numbers: tuple[int, ...]
    kept: tuple[Any, ...]


class Loops:
    """Takes calls of layers that a loop was written for.

    Args:
        projection: Of all these parameters.
        columns: Where their numbers belong.
        out: ``(B, k)``.
    """

    def __init__(
        self, projection: Projection, columns: Columns, out: torch.Tensor
    ) -> None:
        self._projection, self._columns, self._out = projection, columns, out
        # What waits: rows, four addresses for each, and the tensors there.
        self._rows: list[_Row] = []
        self._addresses: list[tuple[int, ...]] = []
        self._tensors: list[torch.Tensor] = []

    def take(
        self, call: TakenCall, gradient: torch.Tensor, saved: Normalisations
    ) -> bool:
        """Takes a call if it can; `run` writes the projections of its parameters.

        The call is ordinary (`is_ordinary`). Returns whether it has taken it.
        """
        rule = call.owner.rule
        way = _WAYS.get(rule)
        if way is None or gradient.dtype != self._out.dtype:
            return False
        inputs, known = call.call.args[0], self._columns.for_loops
        tensors, of_saved = [inputs, gradient], None
        if way.takes_saved:
            pair = saved.saved_by(call)
            if pair is None or pair[0].dtype != gradient.dtype:
                return False
            of_saved = pair[0].shape
            tensors += pair
        key = (
            rule, names_of(call), way.settings(call.call.module), inputs.shape,
            gradient.shape, of_saved, inputs.dtype, gradient.dtype,
        )  # fmt: skip
        if key not in known:
            known[key] = self._row(way, call, gradient, of_saved)
        row = known[key]
        if row is None:
            return False
        assert isinstance(row, _Row)
        tensors = [each.contiguous() for each in tensors]
        addresses = tuple([each.data_ptr() for each in tensors])
        self._rows.append(row)
        self._addresses.append(addresses if way.takes_saved else (*addresses, 0, 0))
        self._tensors += tensors
        return True

    def run(self) -> None:
        """Writes the projections of all calls that were taken."""
        if not self._rows:
            return
        key, known = tuple(self._rows), self._columns.for_loops
        if key not in known:
            known[key] = np.array([row.numbers for row in key], np.int64)
        rows = known[key].copy()
        rows[:, 1:5] = self._addresses
        _compiled().project_calls(rows, _whole_rows(self._out))
        self._rows, self._addresses, self._tensors = [], [], []

    def _row(
        self,
        way: _Way,
        call: TakenCall,
        gradient: torch.Tensor,
        of_saved: torch.Size | None,
    ) -> _Row | None:
        """Returns what loops are told about calls like this; None: torch takes them."""
        compiled, names = _compiled(), names_of(call)
        weight, bias = [
            None if name is None else self._projection.folds_like(name, gradient)
            for name in names
        ]
        module, inputs = call.call.module, call.call.args[0]
        found = way.describe(module, inputs, gradient, weight, of_saved)
        if found is None:
            return None
        kind, matrix, sizes = found
        folds = []
        for each, axis in ((weight, "rows"), (weight, "columns"), (bias, "rows")):
            fold, count = None, 1  # nobody wants them
            if each is not None:
                fold, count = getattr(each, axis), getattr(each, f"num_{axis}")
            folds.append(_of_axis(fold, count, gradient))
        nowhere = (0, 0)
        rest: list[int] = [getattr(compiled, kind), 0, 0, 0, 0]
        for name in names:
            rest += self._columns.places.get(name, nowhere) if name else nowhere
        for signs, kept in folds:
            rest += signs.ctypes.data, len(signs), kept
        rest.append(weight is not None and weight.columns_come_first)
        shape = (0, 0, 0)
        if matrix is not None:
            shape = (matrix.data_ptr(), *matrix.shape, *[0] * (2 - matrix.dim()))
        rest += *shape, *sizes
        rest += [0] * (compiled.WIDTH - len(rest))
        return _Row(tuple(map(int, rest)), (folds, matrix))


def is_in_rows(out: torch.Tensor) -> bool:
    """Returns whether a matrix has the numbers of each row next to one another."""
    return out.stride(1) == 1 and (len(out) < 2 or out.stride(0) >= out.shape[1])


def _whole_rows(out: torch.Tensor) -> np.ndarray:
    """Returns ``out`` as a contiguous array, whose rows go on to where the next begins.

    Loops are compiled once and not for every layout, so that numbers do not depend on
    where they are written. What belongs to others is not touched.
    """
    array = out.numpy()
    width = max(out.stride(0), out.shape[1])
    shape, strides = (len(out), width), (width * out.itemsize, out.itemsize)
    return np.lib.stride_tricks.as_strided(array, shape, strides)


@functools.cache
def _compiled() -> Any:
    """Returns what imports Numba."""
    from per_sample_grad.factors import compiled_projections

    return compiled_projections


def _of_axis(
    fold: Fold | None, count: int, like: torch.Tensor
) -> tuple[np.ndarray, int]:
    """Returns a fold of ``count`` numbers; None: all of them stay."""
    if fold is not None:
        return fold.signs.numpy(), fold.kept
    return np.ones(count, like.new_empty(0).numpy().dtype), count


# The name of a kind, what channels or the side that is folded first are multiplied by,
# and the sizes in a row.
_Described = tuple[str, torch.Tensor | None, tuple[int, ...]] | None


@dataclasses.dataclass(frozen=True)
class _Way:
    """How a layer is described to loops.

    Attributes:
        settings: All of the module that `describe` depends on, by which it is kept.
        describe: From module, input, gradient, folds of the weight, and the shape of
            what the node has saved. It returns None where no loop can do it.
        takes_saved: Whether what the node has saved is needed.
    """

    settings: Callable[[Any], Hashable]
    describe: Callable[
        [Any, torch.Tensor, torch.Tensor, Folds | None, torch.Size | None], _Described
    ]
    takes_saved: bool = False


def _convolution(
    module: nn.Conv1d | nn.Conv2d | nn.Conv3d,
    inputs: torch.Tensor,
    gradient: torch.Tensor,
    weight: Folds | None,
    saved: torch.Size | None,
) -> _Described:
    rank = len(module.kernel_size)
    channels = None if weight is None else weight.channels
    if channels is None or channels.kept > 1:
        return None
    if module.groups > 1 or inputs.dim() != 2 + rank:
        return None
    if module.padding_mode != "zeros" and any(map(any, padding_widths(module))):
        return None
    missing = 3 - rank
    before = [width for width, _ in padding_widths(module)]
    sizes = (
        *[1] * missing, *inputs.shape[2:], *[1] * missing, *gradient.shape[2:],
        *[1] * missing, *module.kernel_size, *[1] * missing, *module.stride,
        *[1] * missing, *module.dilation, *[0] * missing, *before,
    )  # fmt: skip
    return "CONVOLUTION", channels.signs, sizes


def _linear(
    module: nn.Linear,
    inputs: torch.Tensor,
    gradient: torch.Tensor,
    weight: Folds | None,
    saved: torch.Size | None,
) -> _Described:
    if weight is None or inputs.dim() < 2:
        return None
    num_positions = gradient[0].numel() // gradient.shape[-1]
    if num_positions == 1:
        return "LINEAR", None, ()
    few = weight.columns if weight.columns_come_first else weight.rows
    if few is None or few.matrix is None or few.kept > _MOST_FOLDED_FIRST:
        return None
    return "POSITIONS", few.matrix.contiguous(), (num_positions,)


def _embedding(
    module: nn.Embedding,
    inputs: torch.Tensor,
    gradient: torch.Tensor,
    weight: Folds | None,
    saved: torch.Size | None,
) -> _Described:
    if module.scale_grad_by_freq or inputs.dtype != torch.int64 or weight is None:
        return None
    columns, padding = weight.columns, module.padding_idx
    if columns is None or columns.matrix is None:
        return None
    num_positions = gradient[0].numel() // gradient.shape[-1]
    sizes = (num_positions, -1 if padding is None else padding)
    return "EMBEDDING", columns.matrix.contiguous(), sizes


def _group_norm(
    module: nn.GroupNorm,
    inputs: torch.Tensor,
    gradient: torch.Tensor,
    weight: Folds | None,
    saved: torch.Size | None,
) -> _Described:
    assert saved is not None
    num_channels = gradient.shape[1]
    num_positions = gradient[0].numel() // max(1, num_channels)
    return "GROUP_NORM", None, (num_positions, saved[1], num_channels)


def _layer_norm(
    module: nn.LayerNorm,
    inputs: torch.Tensor,
    gradient: torch.Tensor,
    weight: Folds | None,
    saved: torch.Size | None,
) -> _Described:
    if len(module.normalized_shape) > 1:
        return None
    width = gradient.shape[-1]
    return "LAYER_NORM", None, (gradient[0].numel() // max(1, width), 0, width)


def _settings_of_convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Hashable:
    return (
        module.kernel_size, module.stride, module.padding, module.dilation,
        module.groups, module.padding_mode,
    )  # fmt: skip


_WAYS: dict[Rule | None, _Way] = {
    convolution: _Way(_settings_of_convolution, _convolution),
    linear: _Way(lambda module: None, _linear),
    embedding: _Way(lambda m: (m.scale_grad_by_freq, m.padding_idx), _embedding),
    group_norm: _Way(lambda module: None, _group_norm, takes_saved=True),
    layer_norm: _Way(lambda module: module.normalized_shape, _layer_norm, True),
}
