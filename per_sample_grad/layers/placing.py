"""Projections that compiled loops write to where they belong, on a CPU with Numba."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from per_sample_grad.factors.projection import Fold, Projection
from per_sample_grad.layers.convolution import convolution, unfolding_of
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
        found = way(self, call, gradient, saved)
        if found is None:
            return False
        loop, arguments = found
        places = tuple(self._places.get(name, (0, 0)) for name in names_of(call))
        loop(*arguments, self._out.numpy(), places)
        return True

    def _fold(self, fold: Fold | None, count: int) -> tuple[np.ndarray, int]:
        """Returns a fold of ``count`` numbers as loops take it."""
        if fold is None:
            return np.ones(count, self._out.numpy().dtype), count
        return fold.signs.numpy(), fold.kept

    def _of_vector(self, name: str | None, like: torch.Tensor, count: int) -> Any:
        rows = None if name is None else self._projection.folds_like(name, like).rows
        return self._fold(rows, count)

    def _of_matrix(self, name: str, like: torch.Tensor) -> Any:
        folds = self._projection.folds_like(name, like)
        rows = self._fold(folds.rows, folds.num_rows)
        return (
            rows,
            self._fold(folds.columns, folds.num_columns),
            (folds.columns_come_first),
        )

    def _convolution(
        self, call: TakenCall, gradient: torch.Tensor, saved: Normalisations
    ) -> _Found:
        weight, bias = names_of(call)
        module, inputs = call.call.module, call.call.args[0]
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        rank = len(module.kernel_size)
        if weight is None or module.groups > 1 or inputs.dim() != 2 + rank:
            return None
        folds = self._projection.folds_like(weight, gradient)
        if folds.channels is None or folds.channels.kept > 1:
            return None
        unfolding = unfolding_of(module, gradient.shape[2:])
        if unfolding.mode != "zeros" and any(map(any, unfolding.widths)):
            return None

        def three(values: Iterable[int], missing: int = 1) -> tuple[int, ...]:
            return (*[missing] * (3 - rank), *values)

        geometry = (
            three(unfolding.kernel), three(unfolding.stride),
            three(unfolding.dilation),
            three([before for before, _ in unfolding.widths], 0),
            three(unfolding.positions),
        )  # fmt: skip
        source = inputs.contiguous().view(*inputs.shape[:2], *three(inputs.shape[2:]))
        arguments = (
            source.numpy(), gradient.flatten(2).contiguous().numpy(), geometry,
            folds.channels.signs.numpy(), *self._of_matrix(weight, gradient),
            self._of_vector(bias, gradient, gradient.shape[1]),
        )  # fmt: skip
        from per_sample_grad.layers.compiled_projections import project_convolution

        return project_convolution, arguments

    def _linear(
        self, call: TakenCall, gradient: torch.Tensor, saved: Normalisations
    ) -> _Found:
        weight, bias = names_of(call)
        inputs, p = call.call.args[0], gradient.shape[-1]
        if weight is None or inputs.dim() < 2 or gradient.numel() != len(gradient) * p:
            return None
        arguments = (
            inputs.reshape(-1, inputs.shape[-1]).contiguous().numpy(),
            gradient.reshape(-1, p).contiguous().numpy(),
            *self._of_matrix(weight, gradient), self._of_vector(bias, gradient, p),
        )  # fmt: skip
        from per_sample_grad.layers.compiled_projections import project_linear

        return project_linear, arguments

    def _group_norm(
        self, call: TakenCall, gradient: torch.Tensor, saved: Normalisations
    ) -> _Found:
        (weight, bias), kept = names_of(call), saved.saved_by(call)
        if kept is None:
            return None
        folds = [
            self._of_vector(name, gradient, gradient.shape[1])
            for name in (weight, bias)
        ]
        arguments = (
            *(
                each.reshape(*each.shape[:2], -1).contiguous().numpy()
                for each in (call.call.args[0], gradient)
            ),
            *(each.detach().contiguous().numpy() for each in kept), *folds,
        )  # fmt: skip
        from per_sample_grad.layers.compiled_projections import project_group_norm

        return project_group_norm, arguments


_Found = tuple[Callable[..., None], tuple[Any, ...]] | None
_Way = Callable[[Loops, TakenCall, torch.Tensor, Normalisations], _Found]
_WAYS: dict[Rule | None, _Way] = {
    linear: Loops._linear,
    convolution: Loops._convolution,
    group_norm: Loops._group_norm,
}
