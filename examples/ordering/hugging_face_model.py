"""A language model of the package transformers, with random weights.

It is GPT-NeoX, the architecture of Pythia: its parameters are all used by modules with
per-sample rules. docs/outside.md lists others.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import nn

from examples.ordering.language_model import NUM_BYTES


def is_installed() -> bool:
    """Returns whether the package transformers is there."""
    return importlib.util.find_spec("transformers") is not None


class GPTNeoX(nn.Module):
    """Predicts the next byte at every place of a window; arguments as for `ByteGPT`."""

    def __init__(
        self, context: int, width: int, num_layers: int, num_heads: int, tied: bool
    ) -> None:
        super().__init__()
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        config = GPTNeoXConfig(
            vocab_size=NUM_BYTES,
            hidden_size=width,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            intermediate_size=4 * width,
            max_position_embeddings=context,
            tie_word_embeddings=tied,
            attn_implementation="eager",
            use_cache=False,
        )
        self.model = GPTNeoXForCausalLM(config)

    def _apply(
        self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> GPTNeoX:
        """Moves or converts the model; `.to("xla")` makes two of a shared parameter."""
        super()._apply(function, recurse)
        self.model.tie_weights()
        return self

    def forward(self, windows_BT: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=windows_BT.long()).logits
