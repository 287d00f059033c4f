"""What single operations contribute, where a parameter is used outside a known module.

Each rule takes a node of the autograd graph and the gradient of its output, and returns
what the tensor at one of its inputs gets from every sample. What the node has saved for
its own backward pass is enough, so that nothing is run again. The tensor is one that
does not depend on samples: a parameter, or what is computed from parameters alone.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node

from per_sample_grad.errors import Refusal
from per_sample_grad.factors import forms
from per_sample_grad.factors.forms import Contribution, Dense
from per_sample_grad.layers import embedding, registry
from per_sample_grad.layers.batch_norm import standardised
from per_sample_grad.layers.patches import Unfolding, windows

# torch gives an integer that may be negative without its sign.
_NEGATIVE = 2**63

# From a node, the position of the tensor among its inputs, the gradient of its output
# with the batch first, ``(N, ...)``, and the dimension that the batch was in.
OperationRule = Callable[[Node, int, torch.Tensor, int], Contribution]


@dataclasses.dataclass(frozen=True)
class Operation:
    """A row of `OPERATIONS`.

    Attributes:
        rule: Returns the contribution to one of the operation's inputs.
        slots: The inputs that the rule knows; None: all.
        broadcasts: The batch is a dimension that the input does not have, or that has
            one row. Elsewhere it is a dimension of the operation's other input.
        feature_dims: How many of the output's last dimensions are features.
        first: Samples are counted by the output's first dimension, or not at all.
        reads: Whether the rule reads what the operation has saved.
        runs: Whether the rule runs the node itself. A backward pass that is under way
            would not let it compute what the pass does not ask for.
    """

    rule: OperationRule
    slots: tuple[int, ...] | None = (0, 1)
    broadcasts: bool = True
    feature_dims: int = 0
    first: bool = False
    reads: bool = True
    runs: bool = False

    def meets_samples(
        self, node: Node, slot: int, num_samples: int, batch_dim: int
    ) -> bool:
        """Returns whether the input at ``slot`` meets tensors of samples here.

        Shapes decide; the comparison with autograd judges whether that was right.
        """
        output = output_shape(node)
        at = batch_dim if batch_dim >= 0 else batch_dim + len(output)
        if self.slots is not None and slot not in self.slots:
            return False
        if not 0 <= at < len(output) - self.feature_dims:
            return False
        if not output[at] or output[at] % num_samples or (self.first and at):
            return False
        return not self.broadcasts or aligned(source_shape(node, slot), output)[at] == 1


def output_shape(node: Node) -> tuple[int, ...]:
    """Returns the shape of the (first) tensor that the node's operation returned."""
    return tuple(node._input_metadata[0].shape)


def source(node: Node, slot: int) -> Any:
    """Returns the shape and dtype of the tensor that the operation took."""
    below, number = node.next_functions[slot]
    assert below is not None
    return below._input_metadata[number]


def source_shape(node: Node, slot: int) -> tuple[int, ...]:
    """Returns the shape of the tensor that the operation took."""
    return tuple(source(node, slot).shape)


def aligned(shape: tuple[int, ...], output: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape with as many dimensions as the output's."""
    return (1,) * (len(output) - len(shape)) + shape


def below(nodes: Iterable[Node | None]) -> Iterator[Node | None]:
    """Yields these nodes and all that they depend on; None for inputs without one."""
    stack = list(nodes)
    seen = set(stack)
    while stack:
        current = stack.pop()
        yield current
        new = set() if current is None else {n for n, _ in current.next_functions}
        stack.extend(new - seen)
        seen |= new


def order_of(node: Node) -> tuple[int, ...] | None:
    """Returns the input's dimensions in the output's order; None: another operation."""
    name, rank = node.name(), len(output_shape(node))
    if name == "PermuteBackward0":
        return tuple(dim % rank for dim in map(signed, saved(node, "dims")))
    if name == "TransposeBackward0":
        first, second = (signed(saved(node, f"dim{n}")) % rank for n in (0, 1))
    elif name == "TBackward0" and rank == 2:
        first, second = 0, 1
    else:
        return None
    order = list(range(rank))
    order[first], order[second] = second, first
    return tuple(order)


def signed(dim: int) -> int:
    """Returns a dimension as it was given, from what torch has saved of it."""
    return dim - 2 * _NEGATIVE if dim >= _NEGATIVE else dim


def saved(node: Node, name: str) -> Any:
    """Returns what an operation has saved under this name."""
    value = getattr(node, f"_saved_{name}")
    return value.detach() if isinstance(value, torch.Tensor) else value


def summed_to_source(
    values: torch.Tensor, node: Node, slot: int, batch_dim: int
) -> Dense:
    """Returns ``values`` of the output's shape, batch first, summed over positions."""
    shape = source_shape(node, slot)
    if values.is_complex() and not source(node, slot).dtype.is_complex:
        values = values.real
    own = list(aligned(shape, output_shape(node)))
    own.pop(batch_dim)
    kept = [dim for dim, size in enumerate(own, start=1) if size != 1]
    found = registry.over_positions(values, kept)
    return Dense(found.reshape(len(values), *shape))


def _added(node: Node, slot: int, grad: torch.Tensor, batch_dim: int) -> Contribution:
    """Returns those of a sum, or of ``alpha`` times what is added or subtracted."""
    found = summed_to_source(grad, node, slot, batch_dim)
    if slot == 0:
        return found
    sign = -1 if node.name() == "SubBackward0" else 1
    return forms.multiplied(found, sign * float(saved(node, "alpha")))


def copies_for_samples(node: Node, slot: int, num_samples: int, batch_dim: int) -> bool:
    """Returns whether a repetition makes copies of several rows, some for each sample.

    Rows that are broadcast are seen by `Operation.meets_samples`.
    """
    output = output_shape(node)
    at = batch_dim if batch_dim >= 0 else batch_dim + len(output)
    if node.name() != "RepeatBackward0" or not 0 <= at < len(output):
        return False
    rows = aligned(source_shape(node, slot), output)[at]
    return rows > 1 and output[at] // rows % num_samples == 0 < output[at]


def _repeated(
    node: Node, slot: int, grad: torch.Tensor, batch_dim: int
) -> Contribution:
    shape = source_shape(node, slot)
    own = list(aligned(shape, output_shape(node)))
    rows = own.pop(batch_dim)
    grad = grad.to(forms.accumulation_dtype(grad.dtype))
    for dim, size in enumerate(own, start=1):
        if grad.shape[dim] != size:
            grad = grad.unflatten(dim, (-1, size)).sum(dim)
    # (copies, rows, *), as the first dimensions.
    grad = grad.unflatten(0, (-1, rows)).movedim(1, batch_dim % (len(own) + 1) + 1)
    return Dense(grad.reshape(len(grad), *shape))


def _multiplied(
    node: Node, slot: int, grad: torch.Tensor, batch_dim: int
) -> Contribution:
    other = saved(node, "self" if slot else "other")
    shape = aligned(tuple(other.shape), output_shape(node))
    other = other.reshape(shape).movedim(batch_dim, 0)
    dtype = forms.accumulation_dtype(grad.dtype, other.dtype)
    return summed_to_source(grad * other.to(dtype).conj(), node, slot, batch_dim)


def _looked_up(
    node: Node, slot: int, grad: torch.Tensor, batch_dim: int
) -> Contribution:
    return lookup(node, saved(node, "indices").movedim(batch_dim, 0), grad)


def lookup(node: Node, index: torch.Tensor, grad: torch.Tensor) -> Contribution:
    """Returns what an embedding's node adds to its table at ``index`` ``(N, *)``."""
    if saved(node, "scale_grad_by_freq"):
        raise Refusal(embedding.COUNTS_OF_THE_BATCH)
    padding = saved(node, "padding_idx")
    return embedding.rows(index, grad, None if padding >= _NEGATIVE else padding)


def _of_layer(node: Node, inputs: torch.Tensor) -> torch.Tensor:
    return (inputs - saved(node, "result1")) * saved(node, "result2")


def _of_groups(node: Node, inputs: torch.Tensor) -> torch.Tensor:
    mean, rstd = (saved(node, name).unsqueeze(2) for name in ("result1", "result2"))
    groups = inputs.reshape(*mean.shape[:2], -1)
    return ((groups - mean) * rstd).view(inputs.shape)


def _of_running_statistics(node: Node, inputs: torch.Tensor) -> torch.Tensor:
    if saved(node, "training"):
        raise Refusal("it normalises by statistics of the batch")
    names = ("running_mean", "running_var", "eps")
    return standardised(inputs, *[saved(node, name) for name in names])


def _normalizing(
    normalize: Callable[[Node, torch.Tensor], torch.Tensor], by_channel: bool
) -> Operation:
    """Returns what is known of ``weight * x̂ + bias``: they get ``Σ x̂ ⊙ δ`` and ``Σ δ``.

    ``normalize`` maps the inputs to x̂. Weight and bias are of channels, the second
    dimension, or of the last dimensions.
    """

    def rule(node: Node, slot: int, grad: torch.Tensor, batch_dim: int) -> Contribution:
        if slot == 1:
            inputs = saved(node, "input")
            dtype = forms.accumulation_dtype(inputs.dtype, grad.dtype)
            grad = grad * normalize(node, inputs.to(dtype)).movedim(batch_dim, 0)
        if by_channel:
            return Dense(registry.over_positions(grad, kept=[1]))
        return summed_to_source(grad, node, slot, batch_dim)

    return Operation(rule, (1, 2), broadcasts=False, feature_dims=1, first=by_channel)


def _convolved(
    node: Node, slot: int, grad: torch.Tensor, batch_dim: int
) -> Contribution:
    if saved(node, "transposed"):
        raise Refusal("it is a transposed convolution of a weight that is computed")
    if slot == 2:
        return Dense(registry.over_positions(grad, kept=[1]))
    stride, padding, dilation = (
        tuple(saved(node, name)) for name in ("stride", "padding", "dilation")
    )
    kernel = source_shape(node, slot)[2:]
    widths = [(width, width) for width in padding]
    unfolding = Unfolding(
        widths, "zeros", kernel, stride, dilation, grad.shape[2:],
        saved(node, "groups"),
    )  # fmt: skip
    return windows(grad, saved(node, "input"), unfolding)


def _by_its_node(
    node: Node, slot: int, grad: torch.Tensor, batch_dim: int
) -> Contribution:
    """Runs the node: what it returns is summed over rows by the engine, not by it."""
    found = _unsummed(node, slot, grad.movedim(0, batch_dim))
    if found is None:
        raise Refusal(f"{node.name()} sums over the samples itself")
    return summed_to_source(found.movedim(batch_dim, 0), node, slot, batch_dim)


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


@functools.cache
def is_pointwise(node: str) -> bool:
    """Returns whether an operation computes each number from those in its place.

    Of some names there are overloads for numbers alone, which have no tags.
    """
    found = re.fullmatch(r"(\w+)Backward\d+", node)
    if found is None:
        return False
    names = _operations_by_node().get(found[1], ())
    every = [getattr(torch.ops.aten, name) for name in names]
    return found[1] in _POINTWISE or any(
        torch.Tag.pointwise in getattr(operation, overload).tags
        for operation in every
        for overload in operation.overloads()
    )


@functools.cache
def _operations_by_node() -> dict[str, list[str]]:
    """Returns the names of torch's operations, as their nodes write them."""
    every = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    found: dict[str, list[str]] = {}
    for name in {name.partition(".")[0] for space, _, name in every if space == "aten"}:
        found.setdefault(name.title().replace("_", ""), []).append(name)
    return found


def operation_of(node: Node) -> Operation | None:
    """Returns what is known of a node's operation; None: nothing."""
    name = node.name()
    if name in OPERATIONS:
        return OPERATIONS[name]
    return _AS_AUTOGRAD_DOES if is_pointwise(name) else None


# By the name of the node. Channels are the second dimension, so that the batch of
# operations on channels is the first one; of products it is among the rows.
OPERATIONS: dict[str, Operation] = {
    "AddBackward0": Operation(_added, reads=False),
    "SubBackward0": Operation(_added, reads=False),
    "ExpandBackward0": Operation(_added, reads=False),
    "RepeatBackward0": Operation(_repeated, reads=False),
    "MulBackward0": Operation(_multiplied),
    "EmbeddingBackward0": Operation(_looked_up, (0,), broadcasts=False, feature_dims=1),
    "NativeLayerNormBackward0": _normalizing(_of_layer, by_channel=False),
    "NativeGroupNormBackward0": _normalizing(_of_groups, by_channel=True),
    "NativeBatchNormBackward0": _normalizing(_of_running_statistics, by_channel=True),
    "ConvolutionBackward0": Operation(
        _convolved, (1, 2), broadcasts=False, feature_dims=2, first=True
    ),
}
# Nodes that change a tensor's shape, and neither its numbers nor their order; and its
# dtype.
UNCHANGED = (
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0",
    "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "AliasBackward0",
    "CloneBackward0", "ToCopyBackward0",
)  # fmt: skip
# Of other operations that compute each number from those in its place autograd's own
# formula has a row for each sample.
_AS_AUTOGRAD_DOES = Operation(_by_its_node, slots=None, runs=True)
_POINTWISE = ("PreluKernel",)  # which torch does not say of these
