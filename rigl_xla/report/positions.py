"""How often a forward pass uses each weight, as watched in one pass."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.rnn import PackedSequence

from rigl_xla.layers.weights import Weight, multipliers_of, weights_of
from rigl_xla.report.costs import LayerCost
from rigl_xla.topology.structure import outputs_first_shape

# How often one call applies a weight to a vector, and how many places its output has.
_Use = tuple[float, float]


@torch.no_grad()
def costs_of(model: nn.Module, *inputs: Any, **named: Any) -> dict[str, LayerCost]:
    """Returns the cost of every weight that can be sparse, per sample of the inputs.

    Watches the modules that one forward pass in evaluation mode calls. A shared weight
    costs what all of them do; an embedding that looks it up costs nothing, and neither
    does a use without a call of its module, as by `torch.nn.functional`.

    Args:
        model: Any module.
        inputs, named: The arguments of a call; the first tensor among them has samples
            along its first dimension.

    Returns:
        Costs by parameter name, in order of registration; those not reached are 0.

    Raises:
        ValueError: No input is a tensor, or the first has no sample.
        TypeError: ``model`` is not a module.
    """
    tensors = [x for x in (*inputs, *named.values()) if isinstance(x, torch.Tensor)]
    weights = weights_of(model)
    if not tensors or tensors[0].dim() == 0 or not len(tensors[0]):
        raise ValueError(
            "costs_of needs what the model is called with; the first tensor of it "
            "counts samples along its first dimension, but there is none"
        )
    num_samples = len(tensors[0])
    uses: dict[str, list[_Use]] = defaultdict(list)
    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    # Attention does not call its projection.
    callers: dict[nn.Module, nn.Module] = {a.out_proj: a for a in attentions}
    with _evaluating(model), contextlib.ExitStack() as hooks:
        for weight in weights:
            for module, attribute in multipliers_of(model, weight):
                called = callers.get(module, module)
                watch = _watch(uses[weight.name], module, attribute)
                handle = called.register_forward_hook(watch, with_kwargs=True)
                hooks.enter_context(handle)
        model(*inputs, **named)
    return {w.name: cost_of(w, uses[w.name], num_samples) for w in weights}


def cost_of(
    weight: Weight, uses: Sequence[_Use] = (), num_samples: int = 1
) -> LayerCost:
    """Returns the cost of a weight that ``num_samples`` samples have used so."""
    shape = tuple(weight.parameter.shape)
    positions = sum(positions for positions, _ in uses) / num_samples
    if weight.transposed is None:
        return LayerCost(shape, positions)
    channels = outputs_first_shape(shape, weight.transposed)[0]
    outputs = sum(outputs for _, outputs in uses) / num_samples
    return LayerCost(shape, positions, channels, outputs)


def _watch(
    uses: list[_Use], module: nn.Module, attribute: str
) -> Callable[[nn.Module, Any, Any, Any], None]:
    """Returns a forward hook that notes the use of a module's weight."""

    def watch(called: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = inspect.signature(called.forward).bind(*args, **kwargs).arguments
        first = next(iter(given.values()))
        if isinstance(called, nn.MultiheadAttention):
            tokens = {k: _num_vectors(given[k]) for k in ("query", "key", "value")}
            # The output's projection, a module inside, meets as many as the queries'.
            which = {"k_proj_weight": "key", "v_proj_weight": "value"}
            positions = tokens[which.get(attribute, "query")]
            if attribute == "in_proj_weight":  # of each, it is a third
                positions = sum(tokens.values()) / 3
        elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            steps = first.data if isinstance(first, PackedSequence) else first
            positions = _num_vectors(steps)
        elif isinstance(module, _ConvNd):
            pixels = output.numel() / module.out_channels
            if module.transposed:  # every input pixel meets the whole kernel
                uses.append((first.numel() / module.in_channels, pixels))
                return
            positions = pixels
        else:
            positions = _num_vectors(output)
        uses.append((positions, positions))

    return watch


def _num_vectors(tensor: torch.Tensor) -> float:
    return tensor.numel() / tensor.shape[-1]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
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
