"""Embedding: output gradients are added to the rows that were looked up."""

import torch
from torch import nn

from per_sample_grad.errors import Refusal
from per_sample_grad.factors.forms import Contribution, Lookup
from per_sample_grad.layers.registry import Call, register_rule

COUNTS_OF_THE_BATCH = (
    "scale_grad_by_freq divides by counts over the whole batch, so that a sample has "
    "no gradient of its own; set it to False"
)


@register_rule(nn.Embedding)
def embedding(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` ``(N, *)`` of integers and ``grad`` ``(N, *, q)``.

    The row ``padding_idx`` takes no gradient. ``max_norm`` changes rows before they
    are used and needs nothing here.
    """
    module, index = call.module, call.input
    if module.scale_grad_by_freq:
        raise Refusal(COUNTS_OF_THE_BATCH)
    return {"weight": rows(index, grad, module.padding_idx)}


def rows(index: torch.Tensor, grad: torch.Tensor, padding_idx: int | None) -> Lookup:
    """Returns what ``grad`` ``(N, *, q)`` adds at ``index`` ``(N, *)``."""
    index = index.reshape(len(index), -1)
    values = grad.reshape(*index.shape, grad.shape[-1])
    if padding_idx is not None:
        counts = (index != padding_idx).unsqueeze(-1)
        values = torch.where(counts, values, torch.zeros_like(values))
    return Lookup(index, values)
