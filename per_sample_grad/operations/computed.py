"""What parameters get of each sample where a weight is computed from them.

A weight may be a parameter that is transposed, scaled, masked or normalised. Its
gradients are products of factors, and they stay that on the way down: an operation
that computes each number from the one in its place multiplies them by a matrix which
all samples share (a `Hadamard`), and one that sums over rows or columns needs the
factors alone. What a weight of unit rows gets, ``s ∘ (G - (G · v) v)``, is therefore a
product and a product times v. Through other operations the gradients are formed, and
taken down by autograd, vectorised over the samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

import xla_replica
from per_sample_grad.errors import Refusal
from per_sample_grad.factors import algebra, forms, plan
from per_sample_grad.factors.forms import (
    Contribution,
    Dense,
    Hadamard,
    Known,
    Lookup,
    Outer,
    Windows,
)
from per_sample_grad.operations import over_dims, products, rules
from per_sample_grad.operations.unit_rows import UnitRows, unit_rows

# How many operations are gone through by rules on the way down to parameters, at most:
# a tensor that is used again and again has as many ways down as it has uses.
_MOST_STEPS = 64
# What a tensor gets of each sample, on the way.
Found = Contribution | products.Arranged
_Inputs = Sequence[tuple[int, GradientEdge]]


def take_down(
    edge: GradientEdge, found: Contribution, wanted: Mapping[str, nn.Parameter]
) -> dict[str, list[Contribution]]:
    """Takes what a tensor gets of each sample to the parameters that it depends on.

    Returns what each of them gets, by name, to be added.
    """
    names = {id(param): name for name, param in wanted.items()}
    parts: dict[str, list[Contribution]] = defaultdict(list)
    stack: list[tuple[GradientEdge, Found]]
    stack = [(edge, products.Arranged(found) if isinstance(found, Outer) else found)]
    steps = 0
    while stack:
        edge, here = stack.pop()
        shape = tuple(edge.node._input_metadata[edge.output_nr].shape)
        variable = getattr(edge.node, "variable", None)
        if variable is not None:
            if id(variable) in names:
                parts[names[id(variable)]].append(_of_shape(here, shape))
            continue
        steps += 1
        below = _below(edge, shape, here, wanted) if steps < _MOST_STEPS else None
        if below is not None:
            stack += below
            continue
        for name, part in _by_autograd(edge, _of_shape(here, shape), wanted).items():
            parts[name].append(part)
    missing = [name for name in wanted if name not in parts]
    if missing:
        raise Refusal(f"it does not depend on {', '.join(missing)}")
    return dict(parts)


def _of_shape(found: Found, shape: tuple[int, ...]) -> Contribution:
    if isinstance(found, products.Arranged):
        return found.of(shape)
    if isinstance(found, Dense):
        return Dense(found.values.reshape(-1, *shape))
    return found


def _below(
    edge: GradientEdge,
    shape: tuple[int, ...],
    found: Found,
    wanted: Mapping[str, nn.Parameter],
) -> list[tuple[GradientEdge, Found]] | None:
    """Returns what a node's inputs get where it gets this; None: autograd knows."""
    node = edge.node
    name = node.name()
    inputs = [
        (slot, GradientEdge(below, number))
        for slot, (below, number) in enumerate(node.next_functions)
        if below is not None
    ]
    if name == "MmBackward0":
        matrix = _of_shape(found, shape)
        if not isinstance(matrix, Outer) or matrix.groups > 1:
            return None
        return [
            (below, products.through_product(node, slot, matrix))
            for slot, below in inputs
        ]
    unit = unit_rows(node)
    if unit is not None:
        return _through_unit_rows(unit, inputs, shape, found)
    times = [rules.times_of(node, slot) for slot, _ in inputs]
    if all(each is not None for each in times):
        return [
            (
                below,
                _through_factors(found, shape, each, rules.source_shape(node, slot)),
            )
            for (slot, below), each in zip(inputs, times)
            if each is not None
        ]
    if (
        rules.is_pointwise(node)
        and all(rules.source_shape(node, slot) == shape for slot, _ in inputs)
        and not _lead_to_each_other([each.node for _, each in inputs])
    ):
        factors = _derivatives(edge, inputs, wanted)
        return [
            (below, _multiplied(found, shape, each))
            for (_, below), each in zip(inputs, factors)
        ]
    if len(inputs) > 1:
        return None
    [(slot, below)] = inputs
    summed = over_dims.summed_dims(node, slot)
    if summed is not None and isinstance(found, Dense):
        derivative = over_dims.derivative_over(node, slot)
        if derivative is None:
            derivative = over_dims.Derivative(*_derivatives(edge, inputs, wanted))
        source = rules.source_shape(node, slot)
        here = _spread(found, derivative, source, summed)
    else:
        here = _through_one(node, slot, shape, found)
    return None if here is None else [(below, here)]


def _lead_to_each_other(nodes: Sequence[Node]) -> bool:
    """Returns whether the gradient of one of these is a part of another's."""
    return len(set(nodes)) < len(nodes) or any(
        len(rules.inside(node).intersection(nodes)) > 1 for node in nodes
    )


def _through_one(
    node: Node, slot: int, shape: tuple[int, ...], found: Found
) -> Found | None:
    """Returns what a node's only input gets where it gets this; None: not known."""
    name, order = node.name(), rules.order_of(node)
    if name == "MvBackward0" and isinstance(found, Dense):
        left = found.values[:, None, None]
        right = rules.saved(node, "vec").to(left.dtype).expand(*left.shape[:3], -1)
        return products.Arranged(Outer(left, right))
    if order is not None:
        if isinstance(found, products.Arranged):
            return found.permuted(shape, order)
        if isinstance(found, Dense):
            before = [1 + order.index(dim) for dim in range(len(order))]
            values = found.values.reshape(-1, *shape)
            return Dense(values.permute(0, *before))
        return None
    if name == "EmbeddingBackward0" and isinstance(found, Dense):
        index = rules.saved(node, "indices")
        index = index.expand(len(found.values), *index.shape)
        values = found.values.reshape(*index.shape, -1)
        return rules.lookup(node, index, values)
    if name in rules.UNCHANGED:
        source = rules.source_shape(node, slot)
        anywhere = isinstance(found, (Dense, products.Arranged))
        if anywhere or forms.matrix_shape(source) == forms.matrix_shape(shape):
            return found
    return None


def _through_factors(
    found: Found,
    shape: tuple[int, ...],
    factors: Sequence[float | torch.Tensor],
    source: tuple[int, ...],
) -> Found:
    """Returns what an operand of this ``source`` shape gets of a product with factors.

    The product gets ``found``, which is of this ``shape``.
    """
    for times in factors:
        found = _multiplied(found, shape, times)
    return found if source == shape else _summed(_of_shape(found, shape), shape, source)


def _multiplied(
    found: Found, shape: tuple[int, ...], times: float | torch.Tensor
) -> Found:
    """Returns gradients of this shape times a number or a tensor."""
    if isinstance(times, float):
        if isinstance(found, products.Arranged):
            return found.multiplied(times)
        return forms.multiplied(found, times)
    found = _of_shape(found, shape)
    times = times.to(forms.float_factor(found).dtype)
    own = rules.aligned(tuple(times.shape), shape) or (1,)
    of_rows, of_columns = math.prod(own) == own[0], own[0] == 1
    if isinstance(found, Outer) and (of_rows or of_columns):
        return products.Arranged(products.scaled(found, times.reshape(own)))
    if of_rows and isinstance(found, Windows):
        return products.scaled(found, times.reshape(own))
    if of_rows and isinstance(found, Hadamard):
        scaled = products.scaled(found.products, times.reshape(own))
        return dataclasses.replace(found, products=scaled)
    if isinstance(found, Dense):
        return Dense(found.values * times)
    matrix = times.expand(shape).reshape(forms.matrix_shape(shape))
    if isinstance(found, Lookup):
        rows = matrix.index_select(0, found.index.flatten().long())
        return Lookup(found.index, found.values * rows.view_as(found.values))
    if isinstance(found, Hadamard):
        return Hadamard(found.products, found.matrix * matrix)
    return Hadamard(found, matrix)


def _summed(
    found: Contribution, shape: tuple[int, ...], source: tuple[int, ...]
) -> Dense:
    """Returns gradients of this shape, summed to an operand that was broadcast.

    Where there is a number for each row or each column, products are not formed:
    ``Σ_j u_i z_j m_ij = u_i (m z)_i``.
    """
    own, count = rules.aligned(source, shape), forms.num_rows(found)
    outer = found.products if isinstance(found, Hadamard) else found
    if isinstance(outer, Outer) and outer.groups == 1:
        left, right = outer.left[:, 0], outer.right[:, 0]
        if math.prod(own[1:]) == 1:
            through = _along(right, found, 0)
            values = (left * through).sum(1)
            values = values if own[0] > 1 else values.sum(1)
            return Dense(values.reshape(count, *source))
        if own == (1, *shape[1:]):
            through = _along(left, found, 1)
            return Dense((right * through).sum(1).reshape(count, *source))
    if isinstance(found, Hadamard):
        parts = found.formed_parts(plan.default_budget(0, outer.left.device))
    else:
        parts = [Dense(algebra.formed(found, shape))]
    dims = [dim for dim, size in enumerate(own, start=1) if size != shape[dim - 1]]
    return Dense(
        torch.cat([_over(dims, part, shape).reshape(-1, *source) for part in parts])
    )


def _along(factor: torch.Tensor, found: Contribution, dim: int) -> torch.Tensor:
    """Returns products of a factor ``(N, T, *)`` with a matrix, along its dimension."""
    if not isinstance(found, Hadamard):  # all ones
        return factor.sum(2, keepdim=True)
    matrix = found.matrix.T if dim == 0 else found.matrix
    # Of three dimensions torch might make a product for each sample.
    return (factor.flatten(0, 1) @ matrix).unflatten(0, factor.shape[:2])


def _over(dims: list[int], part: Dense, shape: tuple[int, ...]) -> torch.Tensor:
    values = part.values.reshape(-1, *shape)
    return values.sum(dims) if dims else values


def _spread(
    found: Dense,
    derivative: over_dims.Derivative,
    shape: tuple[int, ...],
    summed: Sequence[int],
) -> Found | None:
    """Returns what a tensor gets where numbers were computed from its rows or columns.

    None where they are neither of rows nor of columns.

    Args:
        found: What the numbers get.
        derivative: That of the numbers.
        shape: That of the tensor.
        summed: The dimensions of the tensor that the numbers are computed over.
    """
    matrix, times = derivative
    count, values = len(found.values), found.values
    own = [1 if dim in summed else size for dim, size in enumerate(shape)]
    values = values.reshape(count, *own)
    if isinstance(times, torch.Tensor):
        values = values * times.to(values.dtype).reshape(own)
    elif times != 1:
        values = values * times
    rows, columns = forms.matrix_shape(shape)
    if columns == 1:
        return Dense(
            values.expand(count, *shape) if matrix is None else values * matrix
        )
    if math.prod(own[1:]) == 1:
        left = values.reshape(count, 1, 1, -1).expand(-1, -1, -1, rows)
        right = left.new_ones(1, 1, 1, 1).expand(count, -1, -1, columns)
    elif own == [1, *shape[1:]]:
        right = values.reshape(count, 1, 1, -1)
        left = right.new_ones(1, 1, 1, 1).expand(count, -1, -1, rows)
    else:
        return None
    if matrix is None:
        return products.Arranged(Outer(left, right))
    return Hadamard(Outer(left, right), matrix.reshape(rows, columns).to(left.dtype))


def _through_unit_rows(
    unit: UnitRows, inputs: _Inputs, shape: tuple[int, ...], found: Found
) -> list[tuple[GradientEdge, Found]]:
    """Returns what v gets, and g if there is one, of ``g v / ‖v‖`` in each row."""
    found = _of_shape(found, shape)
    dtype = forms.float_factor(found).dtype
    matrix = unit.v.to(dtype).flatten(1)
    lengths, scale = unit.norms.to(dtype).flatten(), unit.scale.to(dtype).flatten()
    known = None
    if isinstance(found, Outer) and found.groups == 1:
        # Of four dimensions torch might make a product for each sample.
        through = (found.right.flatten(0, 2) @ matrix.T).view_as(found.left)
        known = Known(found.right, through, lengths)
        along = found.left * through
        along = along[:, 0, 0] if along.shape[2] == 1 else along.sum((1, 2))
        straight: Contribution = Outer(found.left * scale, found.right)
    else:
        with_v = _of_shape(_multiplied(found, shape, unit.v), shape)
        along = _summed(with_v, shape, tuple(unit.norms.shape)).values.flatten(1)
        rows = _multiplied(found, shape, unit.scale)
        straight = _of_shape(rows, shape)
    # Less what is along v, which does not change the quotient.
    times = scale / lengths.square().neg_()
    if unit.turns is not None:
        times = torch.where(unit.turns.flatten(), times, 0)
    left = (along * times)[:, None, None]
    right = left.new_ones(1, 1, 1, 1).expand(len(left), -1, -1, matrix.shape[1])
    turned = Hadamard(Outer(left, right), matrix, known)
    below: list[tuple[GradientEdge, Found]] = []
    for slot, edge in inputs:
        if slot == 0:
            is_outer = isinstance(straight, Outer)
            below.append((edge, products.Arranged(straight) if is_outer else straight))
            below.append((edge, turned))
        elif unit.gained:
            of_gain = (along / lengths).view(-1, *unit.norms.shape)
            below.append((edge, Dense(of_gain)))
    return below


def _derivatives(
    edge: GradientEdge, inputs: _Inputs, wanted: Mapping[str, nn.Parameter]
) -> Sequence[torch.Tensor]:
    """Returns the derivative of a node's output by each number of its inputs.

    Each of these is a part of one number of the output alone.
    """
    data = edge.node._input_metadata[edge.output_nr]
    # Expanded, as new memory takes a CPU longer than what is computed.
    ones = torch.ones((), dtype=data.dtype, device=data.device).expand(data.shape)
    below = [each for _, each in inputs]
    with xla_replica.AccumulationHook.paused(list(wanted.values())):
        return torch.autograd.grad([edge], below, [ones], retain_graph=True)


def _by_autograd(
    edge: GradientEdge, found: Contribution, wanted: Mapping[str, nn.Parameter]
) -> dict[str, Contribution]:
    data = edge.node._input_metadata[edge.output_nr]
    values = algebra.formed(found, tuple(data.shape)).to(data.dtype)
    inputs = list(wanted.values())
    with xla_replica.AccumulationHook.paused(inputs):
        gradients = torch.autograd.grad(
            [edge],
            inputs,
            [values],
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=True,
        )
    return {n: Dense(grad) for n, grad in zip(wanted, gradients) if grad is not None}
