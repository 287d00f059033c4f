"""The models that per-sample gradients and GraB are measured on, and their losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tools.outside.models import import_torchvision

CLASSES, TOKENS = 10, 20_000


class Transformer(nn.Module):
    """An embedding, one encoder layer made of Linears, and a head."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(200, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + self.down(self.activation(self.up(self.norm2(x))))
        return self.head(x.mean(1))

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)


class Attention(nn.Module):
    """A block of a transformer, written of Linears."""

    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Blocks of causal attention over sequences of ``length`` tokens."""

    def __init__(self, width: int, blocks: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(
            *(Attention(width, width // 32, True) for _ in range(blocks))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        h = self.tokens(x) + self.positions(places)
        return self.head(self.norm(self.blocks(h)))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
        nn.Linear(512, CLASSES),
    )  # fmt: skip


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(2048, CLASSES),
    )  # fmt: skip


def mobilenet() -> nn.Module:
    import_torchvision()
    from torchvision.models import mobilenet_v3_small

    # Statistics of the batch would make a sample's loss depend on the others.
    return mobilenet_v3_small(num_classes=CLASSES).eval()


class GPT2(nn.Module):
    """GPT-2 of 6 blocks of width 256: 10 million parameters, half of them of tokens."""

    sizes: ClassVar[dict[str, int]] = {
        "n_layer": 6, "n_embd": 256, "n_head": 8, "n_positions": 128,
    }  # fmt: skip
    num_tokens = TOKENS

    def __init__(self) -> None:
        super().__init__()
        import_torchvision()  # which transformers import
        from transformers import GPT2Config, GPT2LMHeadModel

        without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
        ends = {"vocab_size": self.num_tokens, "bos_token_id": 0, "eos_token_id": 0}
        self.model = GPT2LMHeadModel(GPT2Config(**self.sizes, **without, **ends))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=x, use_cache=False).logits


class GPT2Small(GPT2):
    """The smallest GPT-2 that was published: 124 million parameters."""

    sizes: ClassVar[dict[str, int]] = {}  # the defaults of transformers
    num_tokens = 50_257


def resnet18() -> nn.Module:
    """Returns torchvision's ResNet-18 with GroupNorm, 11 million parameters."""
    return _resnet("resnet18", CLASSES)


def resnet50() -> nn.Module:
    """Returns torchvision's ResNet-50 with GroupNorm, 26 million parameters."""
    return _resnet("resnet50", 1000)


def _resnet(name: str, num_classes: int) -> nn.Module:
    import_torchvision()
    from torchvision import models

    def norm(channels: int) -> nn.Module:
        return nn.GroupNorm(16, channels)

    return getattr(models, name)(num_classes=num_classes, norm_layer=norm)


def vit_tiny() -> nn.Module:
    """Returns timm's ViT tiny for images of 64 pixels, 5.4 million parameters."""
    import_torchvision()
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224", img_size=64, patch_size=8, num_classes=CLASSES
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "mlp": (mlp, lambda batch: torch.randn(batch, 1024)),
    "cnn": (cnn, lambda batch: torch.randn(batch, 3, 32, 32)),
    "transformer": (Transformer, lambda batch: torch.randint(0, 200, (batch, 64))),
    "mobilenet_v3_small": (mobilenet, lambda batch: torch.randn(batch, 3, 64, 64)),
    "resnet18": (resnet18, lambda batch: torch.randn(batch, 3, 64, 64)),
    "vit_tiny": (vit_tiny, lambda batch: torch.randn(batch, 3, 64, 64)),
}


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="none")
