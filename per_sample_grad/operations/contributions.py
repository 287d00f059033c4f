"""What single operations contribute, where a parameter is used outside a known module.

Each rule takes a node of the autograd graph and the gradient of its output, and returns
what the tensor at one of its inputs gets from every row. What the node has saved for
its own backward pass is enough, so that nothing is run again. The tensor is one that
does not depend on samples: a parameter, or what is computed from parameters alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.autograd.graph import Node

from per_sample_grad.errors import Refusal
from per_sample_grad.factors import forms
from per_sample_grad.factors.forms import Contribution, Dense, Outer
from per_sample_grad.layers import embedding, registry
from per_sample_grad.layers.convolution import windows
from per_sample_grad.layers.normalisation import standardised
from per_sample_grad.operations import nodes
from per_sample_grad.operations.nodes import saved

# From a node, the position of the tensor among its inputs, the gradient of its output
# with rows of samples first, ``(N, ...)``, and the dimension that they were in.
ContributionRule = Callable[[Node, int, torch.Tensor, int], Contribution]


def summed_to_source(values: torch.Tensor, node: Node, slot: int, axis: int) -> Dense:
    """Returns ``values`` of the output's shape, rows first, summed over positions."""
    shape = nodes.source_shape(node, slot)
    if values.is_complex() and not nodes.source(node, slot).dtype.is_complex:
        values = values.real
    own = list(nodes.aligned(shape, nodes.output_shape(node)))
    own.pop(axis)
    kept = [dim for dim, size in enumerate(own, start=1) if size != 1]
    found = registry.over_positions(values, kept)
    return Dense(found.reshape(len(values), *shape))


def added(node: Node, slot: int, grad: torch.Tensor, axis: int) -> Contribution:
    """Returns the contribution to a term of a sum or difference."""
    found = summed_to_source(grad, node, slot, axis)
    if slot == 0:
        return found
    sign = -1 if node.name() == "SubBackward0" else 1
    return forms.multiplied(found, sign * float(saved(node, "alpha")))


def repeated(node: Node, slot: int, grad: torch.Tensor, axis: int) -> Contribution:
    """Returns the contribution to a tensor that was copied for the samples."""
    shape = nodes.source_shape(node, slot)
    own = list(nodes.aligned(shape, nodes.output_shape(node)))
    rows = own.pop(axis)
    grad = grad.to(forms.accumulation_dtype(grad.dtype))
    for dim, size in enumerate(own, start=1):
        if grad.shape[dim] != size:
            grad = grad.unflatten(dim, (-1, size)).sum(dim)
    # (copies, rows, *), as the first dimensions.
    grad = grad.unflatten(0, (-1, rows)).movedim(1, axis + 1)
    return Dense(grad.reshape(len(grad), *shape))


def multiplied(node: Node, slot: int, grad: torch.Tensor, axis: int) -> Contribution:
    """Returns the contribution to a factor of a pointwise product."""
    other = saved(node, "self" if slot else "other")
    shape = nodes.aligned(other.shape, nodes.output_shape(node))
    other = other.reshape(shape).movedim(axis, 0)
    dtype = forms.accumulation_dtype(grad.dtype, other.dtype)
    return summed_to_source(grad * other.to(dtype).conj(), node, slot, axis)


def looked_up(node: Node, slot: int, grad: torch.Tensor, axis: int) -> Contribution:
    """Returns the contribution to a table in which rows were looked up."""
    return lookup(node, saved(node, "indices").movedim(axis, 0), grad)


def lookup(node: Node, index: torch.Tensor, grad: torch.Tensor) -> Contribution:
    """Returns what an embedding's node adds to its table at ``index`` ``(N, *)``."""
    if saved(node, "scale_grad_by_freq"):
        raise Refusal(embedding.COUNTS_OF_THE_BATCH)
    padding = saved(node, "padding_idx")
    return embedding.rows(index, grad, None if padding >= nodes.NEGATIVE else padding)


def product(node: Node, slot: int, grad: torch.Tensor, axis: int) -> Contribution:
    """Returns the contribution to a matrix of a product, or to a bias.

    The other matrix has the rows of samples. Its factors are the gradient's: no row's
    gradient is formed.
    """
    name = node.name()
    is_sum, is_linear = name == "AddmmBackward0", name == "LinearBackward0"
    if (is_sum and slot == 0) or (is_linear and slot == 2):
        bias = summed_to_source(grad, node, slot, axis)
        return forms.multiplied(bias, float(saved(node, "beta")) if is_sum else 1.0)
    on_the_left = is_linear or slot == int(is_sum)
    if is_linear:
        other = saved(node, "input")
    elif on_the_left:  # the other's columns are the rows of samples
        other = saved(node, "mat2").transpose(-1, -2)
    else:
        other = saved(node, "mat1" if is_sum else "self")
    other = other.movedim(axis if is_linear else -2, 0).conj_physical()
    if name == "MvBackward0":
        grad = grad.unsqueeze(1)
    # Of (N, *, p): further dimensions are positions, or matrices of their own.
    grad, other = (x.reshape(len(x), -1, x.shape[-1]) for x in (grad, other))
    at = 1 if is_linear else 2
    factors = other.unsqueeze(at), grad.unsqueeze(at)
    found = Outer(*(reversed(factors) if on_the_left else factors))
    return forms.multiplied(found, float(saved(node, "alpha")) if is_sum else 1.0)


def of_layer(node: Node, inputs: torch.Tensor) -> torch.Tensor:
    """Returns x̂ of a layer norm, by the statistics that it has saved."""
    return (inputs - saved(node, "result1")) * saved(node, "result2")


def of_groups(node: Node, inputs: torch.Tensor) -> torch.Tensor:
    """Returns x̂ of a group norm, by the statistics that it has saved."""
    mean, rstd = (saved(node, name).unsqueeze(2) for name in ("result1", "result2"))
    groups = inputs.reshape(*mean.shape[:2], -1)
    return ((groups - mean) * rstd).view(inputs.shape)


def of_running_statistics(node: Node, inputs: torch.Tensor) -> torch.Tensor:
    """Returns x̂ of a batch norm that does not use the batch's statistics."""
    if saved(node, "training"):
        raise Refusal("it normalises by statistics of the batch")
    names = ("running_mean", "running_var", "eps")
    return standardised(inputs, *[saved(node, name) for name in names])


def normalizing(
    normalize: Callable[[Node, torch.Tensor], torch.Tensor],
) -> ContributionRule:
    """Returns the rule of ``weight * x̂ + bias``: they get ``Σ x̂ ⊙ δ`` and ``Σ δ``.

    ``normalize`` maps the inputs to x̂. Weight and bias are of channels, the second
    dimension, or of the last dimensions.
    """

    def rule(node: Node, slot: int, grad: torch.Tensor, axis: int) -> Contribution:
        if slot == 1:
            inputs = saved(node, "input")
            dtype = forms.accumulation_dtype(inputs.dtype, grad.dtype)
            grad = grad * normalize(node, inputs.to(dtype)).movedim(axis, 0)
        if normalize is not of_layer:
            return Dense(registry.over_positions(grad, kept=[1]))
        return summed_to_source(grad, node, slot, axis)

    return rule


def convolved(node: Node, slot: int, grad: torch.Tensor, axis: int) -> Contribution:
    """Returns the contribution to the filters or the bias of a convolution."""
    if saved(node, "transposed"):
        raise Refusal("it is a transposed convolution of a weight that is computed")
    if slot == 2:
        return Dense(registry.over_positions(grad, kept=[1]))
    layer = SimpleNamespace(kernel_size=nodes.source_shape(node, slot)[2:])
    for name in ("stride", "dilation", "groups"):
        setattr(layer, name, saved(node, name))
    widths = [(width, width) for width in saved(node, "padding")]
    return windows(layer, grad, saved(node, "input"), widths, "zeros")


def by_its_node(node: Node, slot: int, grad: torch.Tensor, axis: int) -> Contribution:
    """Runs a pointwise operation's node, whose formula has a number for each one.

    What it returns is summed over positions by the engine, not by it.
    """
    found = _unsummed(node, slot, grad.movedim(0, axis))
    if found is None:
        raise Refusal(f"{node.name()} sums over the samples itself")
    return summed_to_source(found.movedim(axis, 0), node, slot, axis)


def _unsummed(node: Node, slot: int, grad: torch.Tensor) -> torch.Tensor | None:
    """Returns what a node gives its input in the output's shape; None: in another."""
    with torch.no_grad():
        found = node(grad)
    one = found[slot] if isinstance(found, tuple) else found
    return None if one is None or one.shape != grad.shape else one


def keeps_rows(node: Node, slot: int) -> bool:
    """Returns whether running a pointwise operation's node gives rows for samples.

    A few nodes sum over the rows of their output themselves. That is tried.
    """
    data = node._input_metadata
    if len(data) != 1:
        return False
    grad = torch.zeros(data[0].shape, dtype=data[0].dtype, device=data[0].device)
    try:
        return _unsummed(node, slot, grad) is not None
    except RuntimeError:  # torch has no derivative, or what was saved has changed
        return False
