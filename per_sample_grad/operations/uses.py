"""A use of parameters outside known modules, as an operation in which samples meet it.

What is computed from parameters alone, such as a transposed weight, a table of
positions, a normalised weight or ``1 + weight``, does not depend on samples. It meets
samples in an operation that broadcasts it over them, looks rows up in it or multiplies
with it. There the gradient still has rows for each sample, and the operation's row in
the `table` says what each contributes.

From there the contribution goes down to the parameters. Views, permutations, casts and
lookups are followed backwards by rules. From the first other operation on, as in a
weight that is normalised or a product of two parameters, the gradients are formed, and
autograd takes them down, vectorised over the samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

import xla_replica
from per_sample_grad.errors import Refusal
from per_sample_grad.factors import algebra, forms
from per_sample_grad.factors.forms import Contribution, Dense, Outer
from per_sample_grad.layers.registry import Call, Owned
from per_sample_grad.operations import contributions, nodes
from per_sample_grad.operations.layouts import Rows
from per_sample_grad.operations.table import operation_of
from xla_replica.common.trees import tensors_in


@dataclasses.dataclass(frozen=True)
class OperationCall(Call):
    """An operation as a `Call`, which `by_operation` is the rule of.

    Attributes:
        node: The operation.
        rows: Where its output has the samples.
        params: By input, the parameters that it may be computed from, by name.
        num_samples: B.
    """

    node: Node
    rows: Rows
    params: Mapping[int, Mapping[str, nn.Parameter]]
    num_samples: int

    @property
    def runs_nodes(self) -> bool:  # type: ignore[override]
        """Whether the rule runs the node itself."""
        operation = operation_of(self.node)
        return operation is not None and operation.runs


def by_operation(call: Call, grad: torch.Tensor) -> dict[str, list[Contribution]]:
    """Returns what an operation contributes to parameters, as a layer rule does."""
    assert isinstance(call, OperationCall)
    parts: dict[str, list[Contribution]] = defaultdict(list)
    operation = operation_of(call.node)
    assert operation is not None
    assert operation.contribution is not None
    for slot, params in call.params.items():
        found = operation.contribution(call.node, slot, grad, call.batch_dim)
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


def is_own(node: Node, known: Owned) -> bool:
    """Returns whether all that an operation has saved is what the model owns."""
    saved = [getattr(node, name) for name in nodes.saved_names(type(node))]
    return all(each in known for each in tensors_in(saved))


def is_known(node: Node, known: Owned) -> bool:
    """Returns whether what an operation has saved can be told from samples.

    That are single numbers, integers, and what the model owns. What has a graph is
    looked at elsewhere, and what the operation has computed depends on nothing else
    than what it took.
    """
    names = nodes.saved_names(type(node))
    saved = (getattr(node, n) for n in names if not n.startswith("_saved_result"))
    return all(
        each.numel() == 1
        or each.requires_grad
        or not each.is_floating_point()
        or each in known
        for each in saved
        if isinstance(each, torch.Tensor)
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
    while (variable := getattr(edge.node, "variable", None)) is None:
        below = _below(edge, found)
        if below is None:
            break
        edge, found = below
    if variable is None:
        parts = _by_autograd(edge, found, wanted)
    else:
        reached = [name for name, param in wanted.items() if param is variable]
        parts = dict.fromkeys(reached, _of_shape(found, _shape(edge)))
    if missing := [name for name in wanted if name not in parts]:
        raise Refusal(f"it does not depend on {', '.join(missing)}")
    return parts


def _shape(edge: GradientEdge) -> tuple[int, ...]:
    return tuple(edge.node._input_metadata[edge.output_nr].shape)


def _of_shape(found: Contribution, shape: tuple[int, ...]) -> Contribution:
    """Returns a contribution to a tensor of this shape, formed where it must be.

    An `Outer` on its way may be that of another view of the tensor as a matrix.
    """
    if isinstance(found, Outer) and forms.matrix_shape(shape) != _sides(found):
        return Dense(_formed(found, shape))
    if isinstance(found, Dense):
        return Dense(found.values.reshape(-1, *shape))
    return found


def _sides(found: Outer) -> tuple[int, int]:
    return found.groups * found.left.shape[3], found.width


def _formed(found: Contribution, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the gradients of a tensor of this shape, ``(N, *shape)``."""
    count = forms.num_rows(found)
    if isinstance(found, Outer):
        found = Dense(algebra.gradients([found], _sides(found), count))
    return algebra.gradients([found], shape, count)


def _below(
    edge: GradientEdge, found: Contribution
) -> tuple[GradientEdge, Contribution] | None:
    """Returns the one input of a node and what it gets; None: without a rule here."""
    node, shape = edge.node, _shape(edge)
    slots = [slot for slot, (n, _) in enumerate(node.next_functions) if n is not None]
    if len(slots) != 1:
        return None
    [slot] = slots
    source = nodes.source_shape(node, slot)
    here = _through_view(node, shape, source, found)
    if here is None and node.name() == "EmbeddingBackward0":
        values = _formed(found, shape)
        index = nodes.saved(node, "indices")
        here = contributions.lookup(
            node, index.expand(len(values), *index.shape), values
        )
    if here is None:
        return None
    below, number = node.next_functions[slot]
    assert below is not None
    return GradientEdge(below, number), here


def _through_view(
    node: Node, shape: tuple[int, ...], source: tuple[int, ...], found: Contribution
) -> Contribution | None:
    """Returns what the input of a view or a permutation gets; None: not known."""
    if node.name() in nodes.UNCHANGED:
        is_complex = node._input_metadata[0].dtype.is_complex
        if is_complex != nodes.source(node, 0).dtype.is_complex:
            return None  # real numbers that become complex get a part of the gradient
        in_any_view = isinstance(found, (Dense, Outer))
        same = forms.matrix_shape(source) == forms.matrix_shape(shape)
        return found if in_any_view or same else None
    order = nodes.order_of(node)
    if order is None:
        return None
    before = [order.index(dim) for dim in range(len(order))]
    if isinstance(found, Outer):
        turned = _turned(found, shape, before)
        if turned is not None:
            return turned
    values = _formed(found, shape)
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
    values = _formed(found, tuple(data.shape)).to(data.dtype)
    inputs = list(wanted.values())
    with xla_replica.AccumulationHook.paused(inputs):
        rows = torch.autograd.grad(
            [edge], inputs, [values], True, allow_unused=True, is_grads_batched=True
        )
    return {name: Dense(each) for name, each in zip(wanted, rows) if each is not None}
