"""Per-sample gradients: what each way costs, as ratios to ordinary training.

    python tools/bench_per_sample.py
    python tools/bench_per_sample.py --models cnn --batch-size 64 --repeats 20

Ways: a loop over samples, ``vmap(grad)``, Opacus (hooks and ghost norms) and TorchJD's
engine for Gram matrices where they are installed, and this package. Every way runs in
a process of its own, so that peak memory is its own. Times are processor times of the
best repeat on one thread, which a busy machine disturbs least; memory is what the
process grew by, the first call's comparison with autograd included. Both are divided
by those of one forward and backward pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

import per_sample_grad as psg

Step = Callable[[], object]
CLASSES = 10


class Transformer(nn.Module):
    """Embedding, one encoder layer with Linears of its own, head."""

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
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x.mean(1))


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


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "mlp": (mlp, lambda batch: torch.randn(batch, 1024)),
    "cnn": (cnn, lambda batch: torch.randn(batch, 3, 32, 32)),
    "transformer": (Transformer, lambda batch: torch.randint(0, 200, (batch, 64))),
}


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    def step() -> None:
        model.zero_grad()
        losses_of(model, x, y).mean().backward()

    return step


def loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    def norm(i: int) -> torch.Tensor:
        loss = losses_of(model, x[i : i + 1], y[i : i + 1]).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        return sum(g.square().sum() for g in grads).sqrt()

    return lambda: torch.stack([norm(i) for i in range(len(x))])


def vectorised(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    params = {name: value.detach() for name, value in model.named_parameters()}

    def loss(params: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = functional_call(model, params, (x.unsqueeze(0),))
        return F.cross_entropy(out, y.unsqueeze(0))

    def step() -> torch.Tensor:
        grads = vmap(grad(loss), (None, 0, 0))(params, x, y)
        return sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()

    return step


def opacus(mode: str) -> Callable[..., Step]:
    def make(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
        from opacus import grad_sample

        kind = {
            "hooks": grad_sample.GradSampleModule,
            "ghost": grad_sample.GradSampleModuleFastGradientClipping,
        }[mode]
        options = {"max_grad_norm": 1.0} if mode == "ghost" else {}
        wrapped = kind(model, loss_reduction="sum", **options)

        def step() -> torch.Tensor:
            wrapped.zero_grad()
            losses_of(wrapped, x, y).sum().backward()
            if mode == "ghost":
                return wrapped.get_norm_sample()
            grads = [p.grad_sample for p in wrapped.parameters()]
            return sum(g.flatten(1).square().sum(1) for g in grads).sqrt()

        return step

    return make


def torchjd(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    from torchjd.autogram import Engine

    engine = Engine(model, batch_dim=0)
    return lambda: engine.compute_gramian(losses_of(model, x, y))


def ours(answer: Callable[[psg.Factors], object]) -> Callable[..., Step]:
    def make(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
        return lambda: answer(psg.per_sample_factors(model, losses_of, (x, y)))

    return make


WAYS: dict[str, tuple[str | None, Callable[..., Step]]] = {
    "train": (None, train),
    "norms: loop": (None, loop),
    "norms: vmap": (None, vectorised),
    "norms: opacus hooks": ("opacus", opacus("hooks")),
    "norms: opacus ghost": ("opacus", opacus("ghost")),
    "norms: per_sample_grad": (None, ours(lambda factors: factors.norms())),
    "gram: torchjd": ("torchjd", torchjd),
    "gram: per_sample_grad": (None, ours(lambda factors: factors.gram())),
    "sum: per_sample_grad": (
        None,
        ours(lambda factors: factors.weighted_sum(torch.ones(len(factors)))),
    ),
}


def measure(model: str, way: str, batch: int, repeats: int) -> dict[str, float]:
    """Milliseconds of processor time and MiB of growth, in this very process."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    build, draw = MODELS[model]
    network, x, y = build(), draw(batch), torch.randint(0, CLASSES, (batch,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = WAYS[way][1](network, x, y)
    step()
    step()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        step()
        times.append(time.process_time() - begin)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"ms": 1e3 * min(times), "mib": (after - before) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="write all numbers here")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        found = measure(*options.one, options.batch_size, options.repeats)
        print(json.dumps(found))
        return
    sizes = ["--batch-size", str(options.batch_size), "--repeats", str(options.repeats)]
    result: dict[str, object] = {
        "torch": torch.__version__, "machine": platform.machine(),
        "batch_size": options.batch_size,
    }  # fmt: skip
    for model in options.models:
        rows: dict[str, dict[str, float]] = {}
        print(f"{model}: time and memory of ordinary training = 1")
        for way, (needs, _) in WAYS.items():
            if needs is not None and importlib.util.find_spec(needs) is None:
                print(f"  {way:<24} {needs} is not installed")
                continue
            command = [sys.executable, __file__, "--one", model, way, *sizes]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                print(f"  {way:<24} failed: {run.stderr.strip().splitlines()[-1]}")
                continue
            rows[way] = json.loads(run.stdout)
            time_ratio = rows[way]["ms"] / rows["train"]["ms"]
            memory = rows[way]["mib"] / max(rows["train"]["mib"], 1e-9)
            print(
                f"  {way:<24} {time_ratio:7.2f} x {memory:7.2f} x   "
                f"({rows[way]['ms']:.1f} ms, {rows[way]['mib']:.0f} MiB)"
            )
        result[model] = rows
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
