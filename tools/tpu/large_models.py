"""Models as people train them, whose costs on a TPU the compiler tells.

They are not run here: `tracing` writes down their programs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tools.references.resnet50 import resnet50

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 50257, 1024, 768, 12, 12


class GPT2Block(nn.Module):
    """Causal attention and a perceptron, each after a LayerNorm, beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.outputs = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        heads = self.inputs(self.first(tokens)).unflatten(2, (3, HEADS, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        tokens = tokens + self.outputs(mixed.transpose(1, 2).flatten(2))
        return tokens + self.perceptron(self.second(tokens))


class GPT2(nn.Module):
    """The smallest GPT-2: 124 million parameters, its embedding and head being one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[GPT2Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("places", torch.arange(LENGTH), persistent=False)
        self.tie()

    def tie(self) -> None:
        """Makes head and embedding one, which a lazy device has made two."""
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits, ``(B, vocabulary, T)``."""
        at = self.positions(self.places.expand_as(tokens))
        logits = self.head(self.norm(self.blocks(self.embedding(tokens) + at)))
        return logits.transpose(1, 2)


def gpt2() -> nn.Module:
    return GPT2()


def resnet() -> nn.Module:
    return resnet50()
