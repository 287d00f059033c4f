"""What single operations contribute, where a parameter is used outside a known module.

What is computed from parameters alone, such as a transposed weight, a table of
positions, a normalised weight or ``1 + weight``, does not depend on samples. It meets
samples in an operation that broadcasts it over them, looks rows up in it or multiplies
with it. There the gradient still has rows for each sample. A rule takes that node of
the autograd graph and the gradient of its output, and returns what the tensor at one of
its inputs gets from every row. What the node has saved for its own backward pass is
enough, so that nothing is run again.

From there the contribution goes down to the parameters. Views, permutations, casts and
lookups are followed backwards by rules. From the first other operation on, as in a
weight that is normalised or a product of two parameters, the gradients are formed, and
autograd takes them down, vectorised over the samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge, Node

import xla_replica
from per_sample_grad.errors import Refusal
from per_sample_grad.factors import algebra, forms
from per_sample_grad.factors.forms import Contribution, Dense, Outer
from per_sample_grad.layers import embedding, registry
from per_sample_grad.layers.convolution import windows
from per_sample_grad.layers.normalisation import standardised
from per_sample_grad.layers.registry import Call, Owned
from per_sample_grad.operations import nodes
from per_sample_grad.operations.layouts import Rows
from per_sample_grad.operations.nodes import saved
from xla_replica.common.trees import tensors_in

# Nodes that return parts of a tensor along a dimension.
_SPLITS = ("SplitBackward0", "SplitWithSizesBackward0")
# From a node, the position of the tensor among its inputs, the gradient of its output
# with rows of samples first, ``(N, ...)``, and the dimension that they were in.
ContributionRule = Callable[[Node, int, torch.Tensor, int], Contribution]


def summed_to_source(values: torch.Tensor, node: Node, slot: int, axis: int) -> Dense:
    """Returns ``values`` of the output's shape, rows first, summed over positions."""
    shape = nodes.source(node, slot).shape
    if values.is_complex() and not nodes.source(node, slot).dtype.is_complex:
        values = values.real
    own = list(nodes.aligned(shape, nodes.output_shape(node)))
    own.pop(axis)
    kept = [dim for dim, size in enumerate(own, start=1) if size != 1]
    return Dense(registry.over_positions(values, kept).reshape(len(values), *shape))


def added(node: Node, slot: int, grad: torch.Tensor, axis: int) -> Contribution:
    """Returns the contribution to a term of a sum or difference."""
    found = summed_to_source(grad, node, slot, axis)
    if slot == 0:
        return found
    sign = -1 if node.name() == "SubBackward0" else 1
    return forms.multiplied(found, sign * float(saved(node, "alpha")))


def repeated(node: Node, slot: int, grad: torch.Tensor, axis: int) -> Contribution:
    """Returns the contribution to a tensor that was copied for the samples."""
    shape = nodes.source(node, slot).shape
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
    settings = {name: saved(node, name) for name in ("stride", "dilation", "groups")}
    layer = SimpleNamespace(kernel_size=nodes.source(node, slot).shape[2:], **settings)
    widths = [(width, width) for width in saved(node, "padding")]
    return windows(layer, grad, saved(node, "input"), widths, "zeros")


def by_its_node(node: Node, slot: int, grad: torch.Tensor, axis: int) -> Contribution:
    """Runs a pointwise operation's node, whose formula has a number for each one.

    What it returns is summed over positions by the engine, not by it. A backward pass
    that is under way would not let the node compute what the pass does not ask for.
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


@dataclasses.dataclass(frozen=True)
class OperationCall(Call):
    """An operation as a `Call`, which `by_operation` is the rule of.

    Attributes:
        node: The operation.
        contribution: Its rule.
        rows: Where its output has the samples.
        params: By input, the parameters that it may be computed from, by name.
        num_samples: B.
    """

    node: Node
    contribution: ContributionRule
    rows: Rows
    params: Mapping[int, Mapping[str, nn.Parameter]]
    num_samples: int


def by_operation(call: Call, grad: torch.Tensor) -> dict[str, list[Contribution]]:
    """Returns what an operation contributes to parameters, as a layer rule does."""
    assert isinstance(call, OperationCall)
    parts: dict[str, list[Contribution]] = defaultdict(list)
    for slot, params in call.params.items():
        found = call.contribution(call.node, slot, grad, call.batch_dim)
        found = _by_sample(forms.widened(found), call.rows.before, call.num_samples)
        below, number = call.node.next_functions[slot]
        assert below is not None
        for name, each in take_down(GradientEdge(below, number), found, params).items():
            parts[name].append(each)
    return dict(parts)


def _by_sample(found: Contribution, before: int, num_samples: int) -> Contribution:
    """Returns it by sample, whose rows follow one another ``before`` times."""
    if before != 1:
        turned = {
            name: each.unflatten(0, (before, -1)).transpose(0, 1).flatten(0, 1)
            for name, each in forms.tensors_of(found).items()
        }
        found = dataclasses.replace(found, **turned)
    return forms.regroup(found, num_samples)


def is_known(node: Node, known: Owned, also_indices: bool = False) -> bool:
    """Returns whether what an operation has saved can be told from samples.

    That are single numbers, integers but for ``also_indices``, and what the model owns.
    What has a graph is looked at elsewhere, and what the operation has computed depends
    on nothing else than what it took.
    """
    names = nodes.saved_names(type(node))
    saved = [getattr(node, n) for n in names if not n.startswith("_saved_result")]
    return all(
        each.requires_grad
        or (not also_indices and (each.numel() == 1 or not each.is_floating_point()))
        or each in known
        for each in tensors_in(saved)
    )


def take_down(
    edge: GradientEdge, found: Contribution, wanted: Mapping[str, nn.Parameter]
) -> dict[str, Contribution]:
    """Returns the contributions to parameters of what a tensor gets of each sample.

    Args:
        edge: The tensor.
        found: What it gets.
        wanted: The parameters that it is computed from, by name.

    Raises:
        Refusal: It does not depend on one of them.
    """
    while (below := _below(edge, found)) is not None:
        edge, found = below
    variable = getattr(edge.node, "variable", None)
    if variable is None:
        parts = _by_autograd(edge, found, wanted)
    else:
        reached = [name for name, param in wanted.items() if param is variable]
        shape = nodes.output_shape(edge.node, edge.output_nr)
        parts = dict.fromkeys(reached, _of_shape(found, shape))
    if missing := [name for name in wanted if name not in parts]:
        raise Refusal(f"it does not depend on {', '.join(missing)}")
    return parts


def _of_shape(found: Contribution, shape: tuple[int, ...]) -> Contribution:
    """Returns a contribution to a tensor of this shape, formed where it must be.

    An `Outer` on its way may be that of another view of the tensor as a matrix.
    """
    is_other = isinstance(found, Outer) and forms.matrix_shape(shape) != _sides(found)
    is_formed = is_other or isinstance(found, Dense)
    return Dense(algebra.gradients([found], shape)) if is_formed else found


def _sides(found: Outer) -> tuple[int, int]:
    return found.groups * found.left.shape[3], found.width


def _below(
    edge: GradientEdge, found: Contribution
) -> tuple[GradientEdge, Contribution] | None:
    """Returns the one input of a node and what it gets; None: without a rule here."""
    node, shape = edge.node, nodes.output_shape(edge.node, edge.output_nr)
    inputs = [(n, number) for n, number in node.next_functions if n is not None]
    if len(inputs) != 1:
        return None
    if node.name() in _SPLITS and isinstance(found, Outer) and found.groups == 1:
        here: Contribution | None = _in_whole(edge, found)
    elif node.name() == "EmbeddingBackward0":
        values, index = algebra.gradients([found], shape), nodes.saved(node, "indices")
        index = index.expand(len(values), *index.shape)
        here = lookup(node, index, values)
    else:
        here = _through_view(node, shape, found)
    return None if here is None else (GradientEdge(*inputs[0]), here)


def _in_whole(edge: GradientEdge, found: Outer) -> Outer | None:
    """Returns what a matrix gets of a part of its rows; None: of columns."""
    node, shape = edge.node, nodes.output_shape(edge.node, edge.output_nr)
    dim = nodes.signed(nodes.saved(node, "dim")) % len(shape)
    if dim or forms.matrix_shape(shape) != _sides(found):
        return None
    before = sum(data.shape[0] for data in node._input_metadata[: edge.output_nr])
    after = nodes.source(node, 0).shape[0] - before - shape[0]
    return Outer(F.pad(found.left, (before, after)), found.right)


def _through_view(
    node: Node, shape: tuple[int, ...], found: Contribution
) -> Contribution | None:
    """Returns what the input of a view or a permutation gets; None: not known."""
    if node.name() in nodes.UNCHANGED:
        source = nodes.source(node, 0)
        if node._input_metadata[0].dtype.is_complex != source.dtype.is_complex:
            return None  # real numbers that become complex get a part of the gradient
        in_any_view = isinstance(found, (Dense, Outer))
        same = forms.matrix_shape(source.shape) == forms.matrix_shape(shape)
        return found if in_any_view or same else None
    order = nodes.order_of(node)
    if order is None:
        return None
    before = [order.index(dim) for dim in range(len(order))]
    if isinstance(found, Outer) and (turned := _turned(found, shape, before)):
        return turned
    values = algebra.gradients([found], shape)
    return Dense(values.permute(0, *(1 + dim for dim in before)))


def _turned(found: Outer, shape: tuple[int, ...], order: list[int]) -> Outer | None:
    """Returns products whose dimensions come in another order; None: they are none.

    They are products where the order stays, or where the left factor's dimensions and
    the right one's change places.
    """
    order = [dim for dim in order if shape[dim] != 1]
    if order == sorted(order):
        return found
    first = order.index(min(order))
    turned = order[first:] + order[:first]
    height = math.prod(shape[dim] for dim in order[first:])
    if turned == sorted(order) and height == _sides(found)[0] and found.groups == 1:
        return Outer(found.right, found.left)
    return None


def _by_autograd(
    edge: GradientEdge, found: Contribution, wanted: Mapping[str, nn.Parameter]
) -> dict[str, Contribution]:
    """Returns the contributions by one vectorised backward pass to the parameters."""
    data = edge.node._input_metadata[edge.output_nr]
    values = algebra.gradients([found], data.shape).to(data.dtype)
    inputs = list(wanted.values())
    with xla_replica.AccumulationHook.paused(inputs):
        rows = torch.autograd.grad(
            [edge], inputs, [values], True, allow_unused=True, is_grads_batched=True
        )
    return {name: Dense(each) for name, each in zip(wanted, rows) if each is not None}
