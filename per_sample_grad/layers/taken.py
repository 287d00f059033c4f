"""What several ways of taking a call, in place of its rule, have in common.

A rule makes factors, which any answer can be computed from. Where only one answer is
asked for, it is made of a call's input and the gradient of its output in fewer
operations: see `projecting` and `norming`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from per_sample_grad.factors import loops
from per_sample_grad.factors.factors import Factors
from per_sample_grad.factors.forms import Contribution
from per_sample_grad.layers import summing
from per_sample_grad.layers.group_norm import group_norm
from per_sample_grad.layers.layer_norm import layer_norm
from per_sample_grad.layers.patches import Unfolding, padded
from per_sample_grad.layers.registry import Call, Rule
from xla_replica import traits

# The numbers of a temporary tensor that stay in a CPU's cache.
CACHED = 2**19


class TakenCall(Protocol):
    """A recorded call, as far as an answer depends on it."""

    @property
    def owner(self) -> _Owner: ...

    @property
    def call(self) -> Call: ...

    @property
    def region(self) -> _Region: ...

    @property
    def shape(self) -> torch.Size: ...


class _Owner(Protocol):
    @property
    def rule(self) -> Rule | None: ...

    @property
    def params(self) -> Mapping[str, str]: ...


class _Region(Protocol):
    @property
    def output(self) -> GradientEdge: ...


class Taker(Protocol):
    """Takes calls with the gradients of their outputs, in place of rules.

    Attributes:
        waiting: The bytes of inputs and gradients that wait until they are taken
            together. What Python does between a pass's large operations takes many
            times as long as elsewhere, since these have filled the caches.
    """

    waiting: int

    def prepare(self, call: TakenCall) -> bool:
        """Returns whether a call can wait until the graph has freed what it saved.

        It is asked before the pass.
        """

    def take(self, call: TakenCall, gradient: torch.Tensor) -> bool:
        """Takes a call with the gradient of its output; returns whether it did.

        It may keep both until `finish`.
        """

    def take_gradients(self, uses: Sequence[Contribution]) -> bool:
        """Takes all uses of a parameter, none of which it took; returns whether."""

    def finish(self) -> None:
        """Computes what depends on the calls that were taken, and lets go of them."""

    def receive(self, factors: Factors) -> None:
        """Takes the factors of some parameters, of calls that it has not taken."""

    def result(self, multiplier: float) -> torch.Tensor:
        """Returns the answer for gradients that are so many times as large."""


def names_of(call: TakenCall) -> tuple[str | None, str | None]:
    """Returns the names of a call's weight and bias, None for what nobody wants."""
    params = call.owner.params
    return params.get("weight"), params.get("bias")


def is_ordinary(call: Call, gradient: torch.Tensor, num_samples: int) -> bool:
    """Returns whether a call has one input, in the gradient's dtype, with a row each.

    The dtype is float32 or float64; that of an input of integers may be any.
    """
    if call.kwargs or call.batch_dim:
        return False
    inputs, dtype = call.args[0], gradient.dtype
    return (
        inputs.shape[:1] == gradient.shape[:1] == (num_samples,)
        and (dtype == torch.float32 or dtype == torch.float64)
        and (inputs.dtype == dtype or not inputs.is_floating_point())
    )


_Pair = tuple[torch.Tensor, torch.Tensor]


class Normalisations:
    """Gradients of normalisation layers from what their nodes have saved.

    Args:
        may_read_saved: Whether nodes may be asked for that.
    """

    def __init__(self, may_read_saved: bool) -> None:
        self._may_read_saved = may_read_saved
        self._saved: dict[int, _Pair] = {}

    def keep(self, call: TakenCall) -> None:
        """Keeps what the call's node has saved, if it is one of these layers."""
        kind = _NORMALISING.get(call.owner.rule)
        if kind is None or not self._may_read_saved:
            return
        node: Node = call.region.output.node
        if node.name() == kind[0]:
            # Mean and 1 / deviation.
            saved = node._saved_result1, node._saved_result2  # type: ignore[attr-defined]
            self._saved[id(call.call)] = saved

    def saved_by(self, call: TakenCall) -> _Pair | None:
        """Returns what the call's node has saved, until `gradients` was asked."""
        return self._saved.get(id(call.call))

    def gradients(self, call: TakenCall, gradient: torch.Tensor) -> _Pair | None:
        """Returns those of weight and bias, ``(B, n)``, once; None: ask its rule."""
        saved = self._saved.pop(id(call.call), None)
        if saved is None:
            return None
        return _NORMALISING[call.owner.rule][1](call.call, gradient, saved)


def _of_layer_norm(call: Call, gradient: torch.Tensor, saved: _Pair) -> _Pair | None:
    """Returns the gradients ``(B, q)`` of weight and bias.

    ``Σ_t x̂_t δ_t = Σ_t r_t (x_t δ_t) - Σ_t r_t m_t δ_t``, which with ``Σ_t δ_t`` are
    products of rows. None: of this layer they are not.
    """
    module = call.module
    assert isinstance(module, nn.LayerNorm)
    if len(module.normalized_shape) > 1:
        return None
    q = gradient.shape[-1]
    x, left = (each.reshape(len(each), -1, q) for each in (call.args[0], gradient))
    if loops.available(left):
        of_rows = [each.detach().reshape(len(x), -1) for each in saved]
        return summing.of_layer_norm(x, left, *of_rows)
    # (B, 1, T)
    mean, scale = (each.reshape(len(x), 1, -1) for each in saved)
    rows = torch.cat([-mean * scale, torch.ones_like(scale)], 1) @ left
    size = max(1, CACHED // max(1, x[0].numel()))
    products = [
        r @ (some * deltas)
        for r, some, deltas in zip(scale.split(size), x.split(size), left.split(size))
    ]
    total = products[0] if len(products) == 1 else torch.cat(products)
    return total[:, 0] + rows[:, 0], rows[:, 1]


def _of_group_norm(call: Call, gradient: torch.Tensor, saved: _Pair) -> _Pair | None:
    """Returns the gradients ``(B, C)`` of weight and bias, each sample's apart.

    torch sums over the positions of channels: a group of each sample is a group of one
    long sample. None: these tensors are not laid out so.
    """
    inputs = call.args[0]
    if not traits(inputs).is_host:
        return None
    if not (inputs.is_contiguous() and gradient.is_contiguous()):
        return None
    num_samples, channels = gradient.shape[:2]
    mean, scale = (each.reshape(1, -1) for each in saved)
    flat = [each.view(1, num_samples * channels, -1) for each in (gradient, inputs)]
    sizes = (1, num_samples * channels, flat[0].shape[2], mean.shape[1])
    _, of_weight, of_bias = torch.ops.aten.native_group_norm_backward(
        *flat, mean, scale, scale.new_ones(sizes[1]), *sizes, [False, True, True]
    )
    shape = (num_samples, channels)
    return of_weight.view(shape), of_bias.view(shape)


# The node of a layer, and what makes gradients of what it has saved.
_NORMALISING: dict[
    Rule | None, tuple[str, Callable[[Call, torch.Tensor, _Pair], _Pair | None]]
] = {
    layer_norm: ("NativeLayerNormBackward0", _of_layer_norm),
    group_norm: ("NativeGroupNormBackward0", _of_group_norm),
}


def patches_and_ones(
    unfolding: Unfolding, inputs: torch.Tensor, with_ones: bool
) -> torch.Tensor:
    """Returns what a kernel sees of ``(n, C, *S)``: ``(n, C K, P)``, and a row of ones.

    A product with the ones is the sum that the gradient of a bias is.
    """
    seen = unfolding.windows(padded(inputs, unfolding.widths, unfolding.mode))
    num_rows = math.prod(seen.shape[1 : -len(unfolding.positions)])
    num_positions = math.prod(unfolding.positions)
    found = seen.new_empty(len(seen), num_rows + with_ones, num_positions)
    found[:, :num_rows].view(seen.shape).copy_(seen)
    if with_ones:
        found[:, num_rows:] = 1
    return found
