"""Operations that compute each number from a row, a column or all of a tensor."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from per_sample_grad.operations import rules

_OVER_DIMS = (
    "SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1", "NormBackward0",
    "NormBackward1", "LinalgVectorNormBackward0", "VarBackward0", "StdBackward0",
    "VarMeanBackward0", "AmaxBackward0", "AminBackward0", "LogsumexpBackward0",
    "DotBackward0", "VdotBackward0",
)  # fmt: skip
# Inner products, and under which name they save their second vector.
_INNER = {"DotBackward0": "tensor", "VdotBackward0": "other"}


def summed_dims(node: Node, slot: int) -> tuple[int, ...] | None:
    """Returns the input's dimensions that each number of the output is computed over.

    None: another operation.
    """
    name, rank = node.name(), len(rules.source_shape(node, slot))
    if name not in _OVER_DIMS:
        return None
    dims = getattr(node, "_saved_dim", None)
    if isinstance(dims, int):
        dims = [dims]
    return tuple(rules.signed(dim) % rank for dim in dims or range(rank))


class Derivative(NamedTuple):
    """That of an output whose numbers are each computed from others of the input.

    Attributes:
        matrix: Of the input's shape; None: ones.
        times: What it is multiplied by besides: a number, or one for each of the
            output's, in its shape.
    """

    matrix: torch.Tensor | None
    times: float | torch.Tensor = 1.0


def derivative_over(node: Node, slot: int) -> Derivative | None:
    """Returns the derivative of a sum, a mean, an inner product or a Euclidean norm.

    None: another operation, or one of complex numbers.
    """
    name = node.name()
    if name in ("SumBackward0", "SumBackward1"):
        return Derivative(None)
    if name in ("MeanBackward0", "MeanBackward1"):
        count = math.prod(rules.source_shape(node, slot))
        return Derivative(
            None, max(1, math.prod(rules.output_shape(node))) / max(1, count)
        )
    if name in _INNER:
        other: torch.Tensor = rules.saved(node, "self" if slot else _INNER[name])
        return None if other.is_complex() else Derivative(other)
    norms = euclidean_norms(node)
    if norms is None:
        return None
    # That of zeros is zero, as autograd has it.
    times = torch.where(norms == 0, 0, 1 / norms)
    return Derivative(rules.saved(node, "self"), times)


def euclidean_norms(node: Node) -> torch.Tensor | None:
    """Returns the Euclidean norms that a node has computed.

    None: another operation, or norms of complex numbers.
    """
    if node.name() != "LinalgVectorNormBackward0" or rules.saved(node, "ord") != 2:
        return None
    norms: torch.Tensor = rules.saved(node, "result")
    of = rules.saved(node, "self")
    return None if of.is_complex() or of.dtype != norms.dtype else norms
