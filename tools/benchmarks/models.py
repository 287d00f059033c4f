"""The models that per-sample gradients and GraB are measured on, and their losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tools.outside.models import import_torchvision

CLASSES = 10


class Power(nn.Module):
    """An activation with a parameter that no rule of a module accounts for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.exponent = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(x) ** self.exponent


class Distance(nn.Module):
    """An activation with a parameter in a function that no rule knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.randn(1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(x) * torch.cdist(x, self.centre)


class _Squashing(torch.autograd.Function):
    """A softened sign of ``scale * x``, with a derivative written by hand."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale, output = ctx.saved_tensors
        grad = grad * (1 - output.square())
        return grad * scale, (grad * x).sum_to_size(scale.shape)


class Squashed(nn.Module):
    """An activation with a parameter in a `torch.autograd.Function`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.squash = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Squashing.apply(x, self.squash)


class Halved(nn.Module):
    """A linear layer whose weight is computed from the parameter."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.doubled = nn.Parameter(2 * layer.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.doubled * 0.5)


class Masked(nn.Module):
    """A linear layer of which half of the weights are masked."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.unmasked = nn.Parameter(layer.weight.detach())
        self.register_buffer("mask", (torch.rand_like(self.unmasked) < 0.5).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.unmasked * self.mask)


def normalised(layer: nn.Linear) -> nn.Module:
    """Returns the layer with a weight that is normalised row by row."""
    return parametrizations.weight_norm(layer)


def of_norm_one(layer: nn.Linear) -> nn.Module:
    """Returns the layer with a weight over its largest singular value."""
    return parametrizations.spectral_norm(layer)


class UnitRows(nn.Module):
    """A linear layer whose weight's rows are over their norms, by an operation."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.unnormalised = nn.Parameter(layer.weight.detach())
        self.bias = nn.Parameter(layer.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, F.normalize(self.unnormalised, dim=1), self.bias)


class Bounded(nn.Module):
    """A linear layer whose weights are between -1 and 1."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.unbounded = nn.Parameter(layer.weight.detach().atanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.unbounded.tanh())


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


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "mlp": (mlp, lambda batch: torch.randn(batch, 1024)),
    "cnn": (cnn, lambda batch: torch.randn(batch, 3, 32, 32)),
    "transformer": (Transformer, lambda batch: torch.randint(0, 200, (batch, 64))),
    "mobilenet_v3_small": (mobilenet, lambda batch: torch.randn(batch, 3, 64, 64)),
}


class OwnExponent(nn.Sequential):
    """An MLP that uses such a parameter itself, after its first layer."""

    def __init__(self) -> None:
        super().__init__(*mlp())
        self.exponent = nn.Parameter(torch.ones(self[0].out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _, second, relu, head = list(self)
        return head(relu(second(F.softplus(first(x)) ** self.exponent)))


class TransformerWithExponent(Transformer):
    """A transformer that uses such a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.exponent = nn.Parameter(torch.ones(self.up.out_features))

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        return F.softplus(x) ** self.exponent


Activation = type[Power | Distance | Squashed]


def mlp_with_module(kind: Activation = Power) -> nn.Module:
    model = mlp()
    model[1] = kind(model[0].out_features)
    return model


def transformer_with_module(kind: Activation = Power) -> nn.Module:
    model = Transformer()
    model.up = nn.Sequential(model.up, kind(model.up.out_features))
    return model


Computing = Callable[[nn.Linear], nn.Module]


def mlp_with_computed_weight(computing: Computing) -> nn.Module:
    model = mlp()
    model[2] = computing(model[2])
    return model


def transformer_with_computed_weight(computing: Computing) -> nn.Module:
    model = Transformer()
    model.up = computing(model.up)
    return model


UNCOVERED: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "mlp": {
        "a small module's": mlp_with_module,
        "the model's own": OwnExponent,
        "a function's that runs once more": lambda: mlp_with_module(Distance),
        "a module's that runs once more": lambda: mlp_with_module(Squashed),
        "what a weight is half of": lambda: mlp_with_computed_weight(Halved),
        "a masked weight's": lambda: mlp_with_computed_weight(Masked),
        "a bounded weight's": lambda: mlp_with_computed_weight(Bounded),
        "a weight's with weight norm": lambda: mlp_with_computed_weight(normalised),
        "a weight's with spectral norm": lambda: mlp_with_computed_weight(of_norm_one),
        "a weight's of unit rows": lambda: mlp_with_computed_weight(UnitRows),
    },
    "transformer": {
        "a small module's": transformer_with_module,
        "the model's own": TransformerWithExponent,
        "a function's that runs once more": lambda: transformer_with_module(Distance),
        "a module's that runs once more": lambda: transformer_with_module(Squashed),
        "what a weight is half of": lambda: transformer_with_computed_weight(Halved),
        "a masked weight's": lambda: transformer_with_computed_weight(Masked),
        "a bounded weight's": lambda: transformer_with_computed_weight(Bounded),
        "a weight's with weight norm": lambda: transformer_with_computed_weight(
            normalised
        ),
        "a weight's with spectral norm": lambda: transformer_with_computed_weight(
            of_norm_one
        ),
        "a weight's of unit rows": lambda: transformer_with_computed_weight(UnitRows),
    },
}
# What the parameters that no rule of a module accounts for are called.
UNCOVERED_NAMES = (
    "exponent", "centre", "squash", "doubled", "unmasked", "unbounded", "original",
    "original0", "original1", "unnormalised",
)  # fmt: skip


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="none")
