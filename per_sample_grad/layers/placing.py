"""Projections that compiled loops write to where they belong, on a CPU with Numba."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from per_sample_grad.factors.projection import Fold, Projection
from per_sample_grad.layers.convolution import convolution, padding_widths
from per_sample_grad.layers.group_norm import group_norm
from per_sample_grad.layers.linear import linear
from per_sample_grad.layers.registry import Rule
from per_sample_grad.layers.taken import Normalisations, TakenCall, names_of
from xla_replica import traits
from xla_replica.common.compiling import has_numba

# So many threads of torch take longer than the loops, which have one (measured).
_MOST_THREADS = 2


def available(out: torch.Tensor) -> bool:
    """Returns whether loops can write to this tensor, and take less time than torch."""
    if not (has_numba() and traits(out).is_host):
        return False
    floats = out.dtype == torch.float32 or out.dtype == torch.float64
    return floats and torch.get_num_threads() <= _MOST_THREADS


class Loops:
    """Takes calls of layers that a loop was written for.

    Args:
        projection: Of all these parameters.
        out: ``(B, k)``.
        places: The first column and how many, by the parameter's name.
    """

    def __init__(
        self,
        projection: Projection,
        out: torch.Tensor,
        places: Mapping[str, tuple[int, int]],
    ) -> None:
        self._projection, self._out, self._places = projection, out, places

    def take(
        self, call: TakenCall, gradient: torch.Tensor, saved: Normalisations
    ) -> bool:
        """Writes the projections of a call's parameters; returns whether it did.

        The call is ordinary (`is_ordinary`).
        """
        way = _WAYS.get(call.owner.rule)
        if way is None or gradient.dtype != self._out.dtype:
            return False
        found = way(call, gradient, self._folds(call, gradient), saved)
        if found is None:
            return False
        loop, arguments = found
        nowhere = (0, 0)
        places = tuple([self._places.get(name, nowhere) for name in names_of(call)])
        loop(*arguments, self._out.numpy(), places)
        return True

    def _folds(self, call: TakenCall, gradient: torch.Tensor) -> _Folds:
        """Returns the folds of a call's weight and bias as loops take them."""
        names, known = names_of(call), self._projection.for_loops
        key = (*names, gradient.dtype)
        found = known.get(key)
        if found is None:
            weight, bias = [
                None if name is None else self._projection.folds_like(name, gradient)
                for name in names
            ]
            found = known[key] = _Folds(
                None if weight is None else weight.channels,
                _of_axis(weight and weight.rows, weight and weight.num_rows, gradient),
                _of_axis(
                    weight and weight.columns, weight and weight.num_columns, gradient
                ),
                weight is not None and weight.columns_come_first,
                _of_axis(bias and bias.rows, bias and bias.num_rows, gradient),
            )
        assert isinstance(found, _Folds)
        return found


class _Folds(NamedTuple):
    """Folds of a weight and a bias, those of all numbers if there is none."""

    channels: Fold | None
    rows: tuple[np.ndarray, int]
    columns: tuple[np.ndarray, int]
    by_column: bool
    of_bias: tuple[np.ndarray, int]


def _of_axis(
    fold: Fold | None, count: int | None, like: torch.Tensor
) -> tuple[np.ndarray, int]:
    """Returns a fold of ``count`` numbers; None: nobody wants them."""
    if fold is not None:
        return fold.signs.numpy(), fold.kept
    return np.ones(count or 1, like.new_empty(0).numpy().dtype), count or 1


_Found = tuple[Callable[..., None], tuple[Any, ...]] | None
_Way = Callable[[TakenCall, torch.Tensor, _Folds, Normalisations], _Found]


def _convolution(
    call: TakenCall, gradient: torch.Tensor, folds: _Folds, saved: Normalisations
) -> _Found:
    module, inputs = call.call.module, call.call.args[0]
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    rank, channels = len(module.kernel_size), folds.channels
    if channels is None or channels.kept > 1:
        return None
    if module.groups > 1 or inputs.dim() != 2 + rank:
        return None
    if module.padding_mode != "zeros" and any(map(any, padding_widths(module))):
        return None
    geometry = _geometry(
        module.kernel_size, module.stride, module.dilation,
        tuple([before for before, _ in padding_widths(module)]), gradient.shape[2:],
    )  # fmt: skip
    source = inputs.contiguous()
    if rank < 3:
        source = source.view(*inputs.shape[:2], *[1] * (3 - rank), *inputs.shape[2:])
    from per_sample_grad.layers.compiled_projections import project_convolution

    return project_convolution, (
        source.numpy(), gradient.flatten(2).contiguous().numpy(), geometry,
        channels.signs.numpy(), *folds[1:],
    )  # fmt: skip


@functools.lru_cache
def _geometry(
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    before: Sequence[int],
    positions: Sequence[int],
) -> tuple[tuple[int, ...], ...]:
    """Returns the same of three dimensions."""

    def three(values: Sequence[int], missing: int = 1) -> tuple[int, ...]:
        return (*[missing] * (3 - len(kernel)), *values)

    first = three(kernel), three(strides), three(dilations)
    return (*first, three(before, 0), three(positions))


def _linear(
    call: TakenCall, gradient: torch.Tensor, folds: _Folds, saved: Normalisations
) -> _Found:
    inputs, p = call.call.args[0], gradient.shape[-1]
    weight, _ = names_of(call)
    if weight is None or inputs.dim() < 2 or gradient.numel() != len(gradient) * p:
        return None
    from per_sample_grad.layers.compiled_projections import project_linear

    return project_linear, (
        inputs.reshape(-1, inputs.shape[-1]).contiguous().numpy(),
        gradient.reshape(-1, p).contiguous().numpy(), *folds[1:],
    )  # fmt: skip


def _group_norm(
    call: TakenCall, gradient: torch.Tensor, folds: _Folds, saved: Normalisations
) -> _Found:
    kept = saved.saved_by(call)
    if kept is None:
        return None
    from per_sample_grad.layers.compiled_projections import project_group_norm

    shape = (*gradient.shape[:2], -1)
    return project_group_norm, (
        call.call.args[0].reshape(shape).contiguous().numpy(),
        gradient.reshape(shape).contiguous().numpy(),
        *[each.detach().contiguous().numpy() for each in kept],
        folds.rows, folds.of_bias,
    )  # fmt: skip


_WAYS: dict[Rule | None, _Way] = {
    linear: _linear,
    convolution: _convolution,
    group_norm: _group_norm,
}
