"""Embedding and EmbeddingBag: output gradients are added to rows that are looked up."""

import torch
from torch import nn

from per_sample_grad.errors import Refusal
from per_sample_grad.factors.forms import Contribution, Lookup
from per_sample_grad.layers.registry import Call, register_rule
from xla_replica import traits

COUNTS_OF_THE_BATCH = (
    "scale_grad_by_freq divides by counts over the whole batch, so that a sample has "
    "no gradient of its own; set it to False"
)


@register_rule(nn.Embedding, reads_module=False)
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


@register_rule(nn.EmbeddingBag, reads_module=False)
def embedding_bag(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``input`` ``(N, T)`` of integers, or all bags joined; ``grad`` ``(N, q)``.

    Sums, means and weighted sums; the row ``padding_idx`` counts in none of them.
    """
    module, index = call.module, call.input
    if module.scale_grad_by_freq:
        raise Refusal(COUNTS_OF_THE_BATCH)
    given = call.arguments
    offsets, weights = given.get("offsets"), given.get("per_sample_weights")
    if module.mode == "max" or (offsets is not None and traits(grad).is_lazy):
        raise Refusal("maxima, and offsets on a lazy device, are not known to the rule")
    counted = torch.ones_like(index, dtype=torch.bool)
    if module.padding_idx is not None:
        counted = index != module.padding_idx
    if offsets is not None:
        # As rows of the longest bag's length.
        ends = index.new_tensor([len(index)])
        ends = offsets if module.include_last_offset else torch.cat([offsets, ends])
        if module.include_last_offset and (last := int(ends[-1])) != len(index):
            raise Refusal(
                f"its last offset is {last} and its input has {len(index)}: beyond the "
                "last offset torch's own gradient may be any number"
            )
        sizes = ends.diff()[: len(grad)].unsqueeze(1)
        steps = torch.arange(max(1, int(sizes.max())), device=index.device)
        places = (ends[: len(grad), None] + steps).clamp(max=max(0, len(index) - 1))
        index, counted = index[places], counted[places] & (steps < sizes)
        weights = None if weights is None else weights[places]
    share = counted.to(grad.dtype)
    if module.mode == "mean":
        share = share / share.sum(1, keepdim=True).clamp(min=1)
    if weights is not None:
        share = share * weights
    return {"weight": Lookup(index, share.unsqueeze(2) * grad.unsqueeze(1))}
