"""A small GPT whose parameters are all used by modules with per-sample rules."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

NUM_BYTES = 256


class Attention(nn.Module):
    """Causal self-attention in plain operations: not fused, without dropout."""

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
    """Attention and a two-layer network, each after a LayerNorm."""

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

    Args:
        context: The number of bytes in a window.
        width: The width of the hidden state, a multiple of ``num_heads``.
        num_layers: The number of blocks.
        num_heads: The number of attention heads.
        tied: Whether the embedding is also the matrix of the logits.
    """

    def __init__(
        self, context: int, width: int, num_layers: int, num_heads: int, tied: bool
    ) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.places = nn.Embedding.from_pretrained(
            torch.zeros(context, width), freeze=False
        )
        self.blocks = nn.Sequential(
            *(Block(width, num_heads) for _ in range(num_layers))
        )
        self.norm = nn.LayerNorm(width)
        device = "meta" if tied else None
        self.head = nn.Linear(width, NUM_BYTES, bias=False, device=device)
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.tied = tied
        self._tie()

    def _tie(self) -> None:
        if self.tied:
            self.head.weight = self.bytes.weight

    def _apply(
        self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> ByteGPT:
        """Moves or converts the model; `.to("xla")` makes two of a shared parameter."""
        super()._apply(function, recurse)
        self._tie()
        return self

    def forward(self, windows_BT: torch.Tensor) -> torch.Tensor:
        # Every sample looks up its places: a rule needs the batch dimension.
        places_T = torch.arange(windows_BT.shape[1], device=windows_BT.device)
        places_BTD = self.places(places_T.expand(windows_BT.shape))
        hidden_BTD = self.blocks(self.bytes(windows_BT.long()) + places_BTD)
        return self.head(self.norm(hidden_BTD))
