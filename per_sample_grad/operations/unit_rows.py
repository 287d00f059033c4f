"""Weights whose rows are over their norms, by one operation or several."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from per_sample_grad.operations import over_dims, rules

# What may be done with a norm before it is divided by, as `F.normalize` does.
_CLAMPED = "ClampMinBackward0"
_BETWEEN = ("ExpandBackward0", _CLAMPED)


class UnitRows(NamedTuple):
    """A weight of rows ``scale v``, where the scale is a gain over the norm of v.

    Numbers of rows are of the shape ``(r, 1, ...)``.

    Attributes:
        v: The tensor, ``(r, ...)``.
        norms: ``‖v‖`` of each row.
        scale: What each row is multiplied by.
        turns: Rows that are over their own norm; others are over a least norm. None:
            all are over their own.
        gained: Whether the gain is the node's second input; otherwise it is 1.
    """

    v: torch.Tensor
    norms: torch.Tensor
    scale: torch.Tensor
    turns: torch.Tensor | None = None
    gained: bool = False


def unit_rows(node: Node) -> UnitRows | None:
    """Returns what a node has made of its first input, if that is such a weight."""
    name = node.name()
    if name == "WeightNormInterfaceBackward0":
        if rules.saved(node, "dim") != 0:
            return None
        v, g, norms = (rules.saved(node, name) for name in ("v", "g", "result1"))
        return UnitRows(v, norms, g / norms, gained=True)
    if name != "DivBackward0" or len(node.next_functions) != 2:
        return None
    own, (norm, _) = node.next_functions
    between = []
    while norm is not None and norm.name() in _BETWEEN:
        between.append(norm.name())
        norm, _ = norm.next_functions[0]
    if norm is None or norm.next_functions != (own,):
        return None
    norms, over = over_dims.euclidean_norms(norm), over_dims.summed_dims(norm, 0)
    if norms is None or over is None:
        return None
    v = rules.saved(node, "self")
    if v.dim() < 2 or sorted(over) != list(range(1, v.dim())):
        return None
    norms = norms.reshape(-1, *[1] * (v.dim() - 1))
    divisor = rules.not_expanded(rules.saved(node, "other"))
    if divisor.shape != norms.shape:
        return None
    turns = divisor == norms if _CLAMPED in between else None
    return UnitRows(v, norms, 1 / divisor, turns)
