"""A small GPT of operations that vmap maps over samples on every device."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

NUM_BYTES = 256


class Attention(nn.Module):
    """Causal self-attention, spelt out: nothing here is fused or draws numbers."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        by_head = self.queries_keys_values(hidden_BTD).unflatten(
            -1, (3, self.num_heads, -1)
        )
        queries, keys, values = by_head.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, T, D)
        scores_BHTT = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
        place = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)
        is_later = place > place.unsqueeze(1)
        weights_BHTT = scores_BHTT.masked_fill(is_later, -math.inf).softmax(-1)
        return self.output((weights_BHTT @ values).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a two-layer network, each behind a LayerNorm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.network_norm = nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        hidden_BTD = hidden_BTD + self.attention(self.attention_norm(hidden_BTD))
        return hidden_BTD + self.network(self.network_norm(hidden_BTD))


class ByteGPT(nn.Module):
    """Predicts the next byte at every place of a window.

    A tied embedding is one parameter that is used twice, not two modules that share
    one: moving a model to an XLA device makes two of a shared one.

    Args:
        context: Bytes in a window.
        width: Of the hidden state, a multiple of ``num_heads``.
        num_layers: Blocks.
        num_heads: Of attention.
        tied: Whether logits come from the embedding.
    """

    def __init__(
        self, context: int, width: int, num_layers: int, num_heads: int, tied: bool
    ) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(
            *(Block(width, num_heads) for _ in range(num_layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, NUM_BYTES, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.places, std=0.02)

    def forward(self, windows_BT: torch.Tensor) -> torch.Tensor:
        places = self.places[: windows_BT.shape[1]]
        hidden_BTD = self.norm(self.blocks(self.bytes(windows_BT.long()) + places))
        if self.head is None:
            return F.linear(hidden_BTD, self.bytes.weight)
        return self.head(hidden_BTD)
