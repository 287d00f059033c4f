"""How often a forward pass uses each weight, as watched in one pass."""

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
    """How often one call applies a weight to a vector, and places of its output."""

    positions: float
    outputs: float


@torch.no_grad()
def costs_of(model: nn.Module, *inputs: Any, **named: Any) -> dict[str, LayerCost]:
    """Returns the cost of every weight that can be sparse, per sample of the inputs.

    Runs one forward pass in evaluation mode and watches the modules that are called. A
    shared weight costs what all of them do; an embedding that looks it up costs
    nothing, and neither does a use that is not a call of the weight's module, such as
    by a function of `torch.nn.functional`.

    Args:
        model: Any module.
        inputs, named: The arguments of a call; the first tensor among them has samples
            along its first dimension.

    Returns:
        Costs by parameter name, in order of registration; layers that the pass does
        not reach cost nothing.

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
    with contextlib.ExitStack() as hooks:
        for weight in weights:
            for module, attribute in multipliers_of(model, weight):
                watch = _watch(found[weight.name], module, attribute)
                called = _caller(model, module)
                handle = called.register_forward_hook(watch, with_kwargs=True)
                hooks.enter_context(handle)
        with evaluating(model):
            model(*inputs, **named)
    return {w.name: cost_of(w, found[w.name], num_samples) for w in weights}


def cost_of(
    weight: Weight, uses: Sequence[_Use] = (), num_samples: int = 1
) -> LayerCost:
    """Returns the cost of a weight that ``num_samples`` samples have used so."""
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
    """Returns a forward hook that notes the use of a module's weight."""

    def watch(called: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = inspect.signature(called.forward).bind(*args, **kwargs).arguments
        first = next(iter(given.values()))
        if isinstance(called, nn.MultiheadAttention):
            positions = _attention_positions(given, attribute)
        elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            steps = first.data if isinstance(first, PackedSequence) else first
            positions = _num_vectors(steps)
        elif isinstance(module, _ConvNd):
            pixels = output.numel() / module.out_channels
            if module.transposed:  # every input pixel meets the whole kernel
                uses.append(_Use(first.numel() / module.in_channels, pixels))
                return
            positions = pixels
        else:
            positions = _num_vectors(output)
        uses.append(_Use(positions, positions))

    return watch


def _attention_positions(given: dict[str, Any], attribute: str) -> float:
    """Returns how many tokens meet a projection, or on average a third of a joint one.

    The output's projection, a module inside, meets as many as the queries'.
    """
    tokens = {k: _num_vectors(given[k]) for k in ("query", "key", "value")}
    if attribute == "in_proj_weight":
        return sum(tokens.values()) / 3
    which = {"k_proj_weight": "key", "v_proj_weight": "value"}.get(attribute, "query")
    return tokens[which]


def _num_vectors(tensor: torch.Tensor) -> float:
    return tensor.numel() / tensor.shape[-1]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode without fast paths, which call nothing to be watched."""
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
    """Returns the module whose call uses the weight: attention calls no projection."""
    for parent in model.modules():
        if isinstance(parent, nn.MultiheadAttention) and parent.out_proj is module:
            return parent
    return module
