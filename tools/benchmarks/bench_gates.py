"""Measures what the packages may cost over training, at the sizes that users have.

    python tools/benchmarks/bench_gates.py
    python tools/benchmarks/bench_gates.py --rounds 24 --output result.json

A convolutional network, a GPT and a vision transformer whose training steps take 30 ms
and more on one thread, a multilayer perceptron of a millisecond, with and without
parameters that no layer's rule accounts for, and three public models of 5 to 11 million
parameters (`--cases gpt2 resnet18 vit_tiny`, which need transformers, torchvision and
timm). Two models of sizes that people train on a GPU, GPT-2 of 124 million parameters
and ResNet-50, are for one. Every way runs once in each round, in an
order that changes, between two training steps, over whose processor time its own is
taken; the median over rounds is compared with the gate. The exit status is 1 if one is
missed. Only ratios mean anything, and only on a quiet machine.

    python tools/benchmarks/bench_gates.py --device cuda --bf16 --cases gpt2_124m
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import grab_xla
import per_sample_grad as psg
from tools.benchmarks.models import (
    GPT,
    GPT2,
    MODELS,
    TOKENS,
    Attention,
    GPT2Small,
    losses_of,
    resnet50,
)
from tools.peak_memory import peak_memory
from tools.record import parser_with_output, row, save
from tools.side_by_side import Step, side_by_side
from xla_replica import LocalReplica

BATCH, CLASSES, VOCABULARY, LENGTH = 32, 10, 200, 64
LARGE = {
    "norms": 1.45, "project": 1.15, "exact": 2.0, "projected": 1.25, "group": 1.06,
}  # fmt: skip
SMALL = {"norms": 2.0}
WITH_FREE_PARAMETERS = {"norms": 2.5}
PUBLIC = {"norms": 1.35, "project": 1.15, "group": 1.03, "projected": 1.1}
MEMORY = {"exact": 1.5, "projected": 1.15, "group": 1.1}


class ViT(nn.Module):
    """Four blocks of width 96, a class token and positions of its own."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width) / 10)
        self.positions = nn.Parameter(torch.randn(1, 65, width) / 10)
        self.blocks = nn.Sequential(*(Attention(width, 4, False) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions
        return self.head(self.norm(self.blocks(h))[:, 0])


class FreeMLP(nn.Module):
    """Layers with a gain and an offset that are parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_mlp()
        self.gain, self.offset = (
            nn.Parameter(torch.ones(256)), nn.Parameter(torch.zeros(256)),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.gain + self.offset)


def small_mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
        nn.Linear(512, CLASSES),
    )  # fmt: skip


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH))


def images() -> torch.Tensor:
    return torch.randn(BATCH, 3, 32, 32)


def vectors() -> torch.Tensor:
    return torch.randn(BATCH, 256)


def long_tokens() -> torch.Tensor:
    return torch.randint(0, TOKENS, (BATCH // 2, LENGTH))


def large_images() -> torch.Tensor:
    return torch.randn(BATCH // 2, 3, 64, 64)


def book_tokens() -> torch.Tensor:
    return torch.randint(0, TOKENS, (BATCH // 4, 1024))


def photographs() -> torch.Tensor:
    return torch.randn(BATCH, 3, 224, 224)


# The model, its inputs, and by a way's name the most that it may take over training.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable, dict[str, float]]] = {
    "cnn": (MODELS["cnn"][0], images, LARGE),
    "gpt": (lambda: GPT(128, 4, VOCABULARY, LENGTH), tokens, LARGE),
    "vit": (ViT, images, LARGE),
    "mlp": (small_mlp, vectors, SMALL),
    "mlp, free parameters": (FreeMLP, vectors, WITH_FREE_PARAMETERS),
    "gpt2": (GPT2, long_tokens, PUBLIC | {"exact": 1.7}),
    "resnet18": (MODELS["resnet18"][0], large_images, PUBLIC | {"exact": 2.2}),
    "vit_tiny": (MODELS["vit_tiny"][0], large_images, {"norms": PUBLIC["norms"]}),
    "gpt2_124m": (GPT2Small, book_tokens, PUBLIC | {"exact": 1.7}),
    "resnet50": (resnet50, photographs, PUBLIC | {"exact": 2.2}),
}


def losses_in_float32(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Returns each sample's loss, ``(B,)``, for a language model the mean of tokens."""
    if isinstance(model, GPT | GPT2):
        return psg.token_cross_entropy(model(x), x)
    return losses_of(model, x, y)


def steps_of(
    build: Callable[[], nn.Module], x: torch.Tensor, options: argparse.Namespace
) -> dict[str, Step]:
    """Returns a step of training, and of every way to compare with it."""
    torch.manual_seed(0)
    x = x.to(options.device)
    y = torch.randint(0, CLASSES, (len(x),)).to(options.device)

    def losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=options.bf16):
            return losses_in_float32(model, x, y)

    def train(model: nn.Module) -> Step:
        def step() -> None:
            model.zero_grad()
            losses(model, x, y).mean().backward()

        return step

    def norms(model: nn.Module) -> Step:
        def step() -> torch.Tensor:
            with psg.capture(model) as recorded:
                found = losses(model, x, y)
            return recorded.norms(found)

        return step

    def project(model: nn.Module) -> Step:
        projection = psg.Projection(dict(model.named_parameters()), 4096)

        def step() -> torch.Tensor:
            with psg.capture(model) as recorded:
                found = losses(model, x, y)
            return recorded.project(found, projection)

        return step

    def balanced(fidelity: str) -> Callable[[nn.Module], Step]:
        def way(model: nn.Module) -> Step:
            size = {"group_size": len(x)} if fidelity == "group" else {}
            sampler = grab_xla.GraBSampler(
                range(len(x) * 10_000), dict(model.named_parameters()), "mean",
                fidelity=fidelity, **size,
            )  # fmt: skip
            list(sampler)  # begins an epoch

            def step() -> None:
                model.zero_grad()
                with sampler.record(model):
                    found = losses(model, x, y)
                sampler.backward(found)

            return step

        return way

    ways = {"train": train, "norms": norms, "project": project}
    ways |= {name: balanced(name) for name in ("exact", "projected", "group")}
    return {name: way(build().to(options.device)) for name, way in ways.items()}


def measure(
    case: str, options: argparse.Namespace
) -> tuple[str, float, list[dict[str, Any]]]:
    """Returns a name, milliseconds of training, and every way's ratios to it."""
    build, draw, gates = CASES[case]
    case += f" x {options.times}" if options.times > 1 else ""
    inputs = torch.cat([draw() for _ in range(options.times)])
    steps = steps_of(build, inputs, options)
    train = steps.pop("train")
    steps = {name: step for name, step in steps.items() if name in gates}
    found = side_by_side(train, steps, options.rounds, case, device=options.device)
    lines = [
        row(f"{name} over training: {case}", ratios, at_most=gates[name])
        for name, ratios in found.rounds.items()
    ]
    if gates.keys() >= PUBLIC.keys():
        least = peak_memory(train, options.device)
        lines += [
            row(f"{name}, memory over training's: {case}", ratio, at_most=goal)
            for name, goal in MEMORY.items()
            if (ratio := peak_memory(steps[name], options.device) / least)
        ]
    return case, 1000 * found.plain_seconds, lines


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=12, help="how often every way runs; default 12"
    )
    parser.add_argument(
        "--cases", nargs="*", choices=CASES, default=list(CASES)[:5],
        help="which models; default: those of this file",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="default: cpu")
    text = "run forward passes in bfloat16 where torch's autocast does"
    parser.add_argument("--bf16", action="store_true", help=text)
    text = "how many times as many samples a step has, for a GPU; default 1"
    parser.add_argument("--times", type=int, default=1, help=text)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    milliseconds, rows = {}, []
    for case in arguments.cases:
        name, milliseconds[name], lines = measure(case, arguments)
        rows += lines
    found = {
        "device": LocalReplica(arguments.device).device_model,
        "bf16": arguments.bf16,
    }
    save(arguments.output, found | {"training, ms": milliseconds, "rows": rows})
    missed = [row["work"] for row in rows if row["median"] > row["at_most"]]
    sys.exit(f"missed: {'; '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
