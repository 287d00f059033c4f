"""MultiheadAttention, whose projections are not modules that are called.

The attention between the projections is computed again from the recorded inputs. The
gradients are those of four Linears; ``in_proj`` is three groups of rows.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import xla_replica
from per_sample_grad.errors import Refusal
from per_sample_grad.factors.forms import Contribution, Dense, Outer, accumulation_dtype
from per_sample_grad.layers.registry import Call, register_rule

_NAMES = ("q", "k", "v")


@register_rule(nn.MultiheadAttention)
def multihead_attention(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Takes ``query`` ``(N, L, E)``, ``key`` and ``value`` ``(N, S, *)``."""
    module = call.module
    given = call.arguments
    _refuse_unknown(module, call, given)
    dtype = accumulation_dtype(grad.dtype)
    inputs = [call.batch_first(given[n]).to(dtype) for n in ("query", "key", "value")]
    grad = grad.to(dtype)
    projected = _projected(module, inputs)
    mask = _mask(module, given, inputs, dtype)
    heads = (module.num_heads, -1)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        q, k, v = (x.unflatten(-1, heads).transpose(1, 2) for x in projected)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mixed = mixed.transpose(1, 2).flatten(2)
    at_mixed = grad @ module.out_proj.weight.detach().to(dtype)
    deltas = xla_replica.grad(mixed, projected, at_mixed)
    found: dict[str, Contribution] = {
        "out_proj.weight": Outer(grad.unsqueeze(1), mixed.detach().unsqueeze(1)),
        "out_proj.bias": Dense(grad.sum(1)),
        "in_proj_bias": Dense(torch.cat([delta.sum(1) for delta in deltas], 1)),
    }
    for name, delta, x in zip(_NAMES, deltas, inputs):
        found[f"{name}_proj_weight"] = Outer(delta.unsqueeze(1), x.unsqueeze(1))
    if module.in_proj_weight is not None:
        length = max(x.shape[1] for x in inputs)
        # Zeros after the positions of the shorter ones add nothing.
        alike = [F.pad(x, (0, 0, 0, length - x.shape[1])) for x in (*deltas, *inputs)]
        left, right = torch.stack(alike[:3], 1), torch.stack(alike[3:], 1)
        found["in_proj_weight"] = Outer(left, right)
    return found


def _refuse_unknown(
    module: nn.MultiheadAttention, call: Call, given: dict[str, Any]
) -> None:
    if given["query"].dim() != 3:
        raise Refusal(f"its query {tuple(given['query'].shape)} has no batch dimension")
    own = 0 if module.batch_first else 1
    if call.batch_dim != own:
        raise Refusal(
            f"its batch is dimension {own} (batch_first={module.batch_first}), not "
            f"{call.batch_dim}: say so for this module with batch_dim="
        )
    if module.dropout and module.training:
        raise Refusal(
            "its dropout mask cannot be drawn again: call eval() on the module"
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise Refusal("add_bias_kv and add_zero_attn are not known to the rule")


@torch.no_grad()
def _projected(
    module: nn.MultiheadAttention, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns query, key and value after their projections, as leaves of a graph."""
    weights: Any = [getattr(module, f"{name}_proj_weight") for name in _NAMES]
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    biases: Sequence[torch.Tensor | None] = [None, None, None]
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.to(inputs[0].dtype).chunk(3)
    return [
        F.linear(x, weight.to(x.dtype), bias).requires_grad_()
        for x, weight, bias in zip(inputs, weights, biases)
    ]


def _mask(
    module: nn.MultiheadAttention,
    given: dict[str, Any],
    inputs: list[torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Returns what is added to the scores: broadcasts to ``(N, heads, L, S)``."""
    total = None
    for name in ("attn_mask", "key_padding_mask"):
        mask = given.get(name)
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            zeros = torch.zeros_like(mask, dtype=dtype)
            mask = torch.where(mask, torch.full_like(zeros, -math.inf), zeros)
        mask = mask.to(dtype)
        if name == "key_padding_mask":
            mask = mask[:, None, None, :]
        elif mask.dim() == 3:
            mask = mask.unflatten(0, (len(inputs[0]), module.num_heads))
        total = mask if total is None else total + mask
    return total
