"""How often a forward pass uses each weight, watched in one."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.rnn import PackedSequence

from rigl_xla.layers.weights import Weight, multipliers_of, weights_of
from rigl_xla.report.costs import LayerCost
from rigl_xla.topology.structure import outputs_first_shape


class _Use(NamedTuple):
    """Of a weight in one call: applications to a vector, and places of its output."""

    positions: float
    outputs: float


@torch.no_grad()
def costs_of(model: nn.Module, *inputs: Any, **named: Any) -> dict[str, LayerCost]:
    """The cost of every weight that can be sparse, per sample of the inputs.

    Runs one forward pass in evaluation mode and watches the modules that are called. A
    shared weight costs what all of them do, but an embedding that looks it up nothing.
    A weight that is used otherwise than by a call of its module, as by a function of
    `torch.nn.functional`, costs nothing.

    Args:
        model: Any module.
        inputs, named: What it is called with; the first tensor among them has samples
            along its first dimension.

    Returns:
        By parameter name, in order of registration; layers that the pass does not
        reach cost nothing.

    Raises:
        ValueError: No input is a tensor.
    """
    tensors = [x for x in (*inputs, *named.values()) if isinstance(x, torch.Tensor)]
    if not tensors or tensors[0].dim() == 0:
        raise ValueError(
            "costs_of needs what the model is called with; the first tensor of it "
            "counts samples along its first dimension, but there is none"
        )
    num_samples = tensors[0].shape[0]
    weights = weights_of(model)
    found: dict[str, list[_Use]] = defaultdict(list)
    handles = []
    try:
        for weight in weights:
            for module, attribute in multipliers_of(model, weight):
                watch = _watch(found[weight.name], module, attribute)
                called = _caller(model, module)
                handles.append(called.register_forward_hook(watch, with_kwargs=True))
        with evaluating(model):
            model(*inputs, **named)
    finally:
        for handle in handles:
            handle.remove()
    return {w.name: cost_of(w, found[w.name], num_samples) for w in weights}


def cost_of(
    weight: Weight, uses: Sequence[_Use] = (), num_samples: int = 1
) -> LayerCost:
    """Of a weight that was used so for so many samples."""
    shape = tuple(weight.parameter.shape)
    positions = sum(use.positions for use in uses) / num_samples
    if weight.transposed is None:
        return LayerCost(shape, positions)
    channels = outputs_first_shape(shape, weight.transposed)[0]
    outputs = sum(use.outputs for use in uses) / num_samples
    return LayerCost(shape, positions, channels, outputs)


def _watch(
    uses: list[_Use], module: nn.Module, attribute: str
) -> Callable[[nn.Module, Any, Any, Any], None]:
    def watch(called: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = inspect.signature(called.forward).bind(*args, **kwargs).arguments
        if isinstance(called, nn.MultiheadAttention):
            uses.append(_attention_use(given, module, attribute))
        else:
            uses.append(_use(module, list(given.values()), output))

    return watch


def _use(module: nn.Module, given: list[Any], output: Any) -> _Use:
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        steps = given[0].data if isinstance(given[0], PackedSequence) else given[0]
        return _same(_num_vectors(steps))
    if isinstance(module, _ConvNd):
        pixels = output.numel() / module.out_channels
        if module.transposed:  # every input pixel meets the whole kernel
            return _Use(given[0].numel() / module.in_channels, pixels)
        return _same(pixels)
    return _same(_num_vectors(output))


def _attention_use(given: dict[str, Any], module: nn.Module, attribute: str) -> _Use:
    """Queries, keys and values are projected each by its own, or by a third each."""
    tokens = {k: _num_vectors(given[k]) for k in ("query", "key", "value")}
    if attribute == "in_proj_weight":
        return _same(sum(tokens.values()) / 3)
    # The output's projection, a module inside, meets as many tokens as the queries'.
    which = {"k_proj_weight": "key", "v_proj_weight": "value"}.get(attribute, "query")
    return _same(tokens[which])


def _same(positions: float) -> _Use:
    return _Use(positions, positions)


def _num_vectors(tensor: torch.Tensor) -> float:
    return tensor.numel() / tensor.shape[-1]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without fast paths, which call nothing that can be watched."""
    training = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in training.items():
            module.training = mode


def _caller(model: nn.Module, module: nn.Module) -> nn.Module:
    """The module whose call uses the weight: attention projects by itself."""
    for parent in model.modules():
        if isinstance(parent, nn.MultiheadAttention) and parent.out_proj is module:
            return parent
    return module
