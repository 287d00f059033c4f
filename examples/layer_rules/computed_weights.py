"""Rules for two layers whose weights are computed: masked, and normalised by row.

    python examples/layer_rules/computed_weights.py
    python examples/layer_rules/computed_weights.py --samples 64 --width 512

Without a rule autograd takes the gradients of such weights to their parameters, after
every capture's backward pass. A rule says what a sample contributes, at the moment when
the pass reaches the layer. The script compares norms by both rules with a loop of
autograd over the samples, and fails if they differ.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import per_sample_grad as psg

TOLERANCE = 1e-9  # in float64


class MaskedLinear(nn.Linear):
    """A Linear of which only the connections of a mask count."""

    def __init__(self, in_features: int, out_features: int, density: float) -> None:
        super().__init__(in_features, out_features)
        self.register_buffer("mask", torch.rand_like(self.weight) < density)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class NormedLinear(nn.Module):
    """A Linear of the weight ``g v / ‖v‖`` (Salimans and Kingma, arXiv:1602.07868)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(out_features, in_features))
        self.g = nn.Parameter(torch.ones(out_features, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.g * self.v / self.v.norm(dim=1, keepdim=True))


def of_weight(call: psg.Call, grad: torch.Tensor) -> torch.Tensor:
    """Returns what each sample adds to the computed weight, ``(N, p, q)``.

    ``grad`` is ``(N, *, p)`` and the layer's input ``(N, *, q)``.
    """
    left = grad.reshape(len(grad), -1, grad.shape[-1])
    right = call.input.reshape(len(grad), -1, call.input.shape[-1])
    return left.transpose(1, 2) @ right


@psg.register_rule(MaskedLinear)
def masked_linear(call: psg.Call, grad: torch.Tensor) -> dict[str, psg.Dense]:
    bias = grad.reshape(len(grad), -1, grad.shape[-1]).sum(1)
    weight = of_weight(call, grad) * call.module.mask
    return {"weight": psg.Dense(weight), "bias": psg.Dense(bias)}


@psg.register_rule(NormedLinear)
def normed_linear(call: psg.Call, grad: torch.Tensor) -> dict[str, psg.Dense]:
    v, g = call.module.v.detach(), call.module.g.detach()
    length = v.norm(dim=1, keepdim=True)
    found = of_weight(call, grad)
    along = (found * v / length).sum(2, keepdim=True)  # that of g
    across = found - along * v / length
    return {"g": psg.Dense(along), "v": psg.Dense(g / length * across)}


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).mean(1), y, reduction="none")


def looped_norms(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the norms by a backward pass for each sample, ``(B,)``."""
    params, norms = list(model.parameters()), []
    for i in range(len(x)):
        [loss] = losses_of(model, x[i : i + 1], y[i : i + 1])
        gradients = torch.autograd.grad(loss, params)
        norms.append(torch.cat([each.flatten() for each in gradients]).norm())
    return torch.stack(norms)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not at least 1")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("samples", 16), ("positions", 8), ("width", 64)):
        help_text = f"(default: {default})"
        parser.add_argument(f"--{name}", type=positive, default=default, help=help_text)
    options = parser.parse_args()
    torch.manual_seed(0)
    width = options.width
    x = torch.randn(options.samples, options.positions, width, dtype=torch.float64)
    y = torch.randint(0, 10, (options.samples,))
    for name, layer in (
        ("masked", MaskedLinear(width, width, density=0.1)),
        ("normalised", NormedLinear(width, width)),
    ):
        model = nn.Sequential(layer, nn.ReLU(), nn.Linear(width, 10)).double()
        norms = psg.per_sample_grad_norms(model, losses_of, (x, y))
        expected = looped_norms(model, x, y)
        error = float(((norms - expected) / expected).abs().max())
        print(f"{name}: norms differ from the loop's by {error:.1e} of themselves")
        if not error < TOLERANCE:
            sys.exit(f"error: more than {TOLERANCE}")


if __name__ == "__main__":
    main()
