"""How large is the gradient of every example of a pool? Four ways, side by side.

    python examples/pool/score_pool.py
    python examples/pool/score_pool.py --pool 2000 --batch-size 50 --layer conv2
    python examples/pool/score_pool.py --score egl --folder scores --output scores.csv

The question is an old one from a forum: a trained model, a large pool of unseen
examples, and the size of one layer's gradient wanted for each, inside an inner loop.
Its two answers are here, replicas of the layer and vmap, beside a loop and this
package. All four compute the same numbers; each runs in a process of its own, so that
its time and its memory are its own.

Then the whole model is scored as a product would do it: psg.score_pool streams the pool
in blocks of one size, in memory that does not grow with it. With --folder it goes on
where it was when it is called again after a kill.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import per_sample_grad as psg

Norms = Callable[[nn.Module, str, torch.Tensor, torch.Tensor], torch.Tensor]


class Network(nn.Module):
    """Two convolutions and a Linear, on images of 10 by 10."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 10, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(10, 20, 3, stride=2, padding=1, bias=False)
        self.fc = nn.Linear(20 * 5 * 5, num_classes, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv2(self.conv1(x)).flatten(1))


def loop(
    model: nn.Module, layer: str, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """One backward pass per example."""
    weight = model.get_submodule(layer).weight
    norms = []
    for i in range(len(x)):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        norms.append(torch.autograd.grad(loss, [weight])[0].norm())
    return torch.stack(norms)


class Replicated(nn.Module):
    """A copy of a layer for each example."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self.copies = nn.ModuleList(copy.deepcopy(layer) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.split(1)
        return torch.cat([own(row) for own, row in zip(self.copies, rows)])


def replicated_layers(
    model: nn.Module, layer: str, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """One backward pass through as many copies of the layer as there are examples."""
    model = copy.deepcopy(model)
    replicas = Replicated(model.get_submodule(layer), len(x))
    setattr(model, layer, replicas)
    losses = F.cross_entropy(model(x), y, reduction="none")
    grads = torch.autograd.grad(losses.sum(), [own.weight for own in replicas.copies])
    return torch.stack([one.norm() for one in grads])


def vectorised(
    model: nn.Module, layer: str, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """``vmap(grad(...))``."""
    params = {name: value.detach() for name, value in model.named_parameters()}
    own = {f"{layer}.weight": params.pop(f"{layer}.weight")}

    def loss(
        own: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        out = functional_call(model, {**params, **own}, (x.unsqueeze(0),))
        return F.cross_entropy(out, y.unsqueeze(0))

    (grads,) = vmap(grad(loss), (None, 0, 0))(own, x, y).values()
    return grads.flatten(1).norm(dim=1)


def ours(
    model: nn.Module, layer: str, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """One forward and one backward pass; no gradient of a weight."""
    with psg.capture(model, [f"{layer}.weight"]) as recorded:
        losses = F.cross_entropy(model(x), y, reduction="none")
    return recorded.backward(losses).norms()


WAYS: dict[str, Norms] = {
    "loop": loop,
    "replicated layers": replicated_layers,
    "vmap(grad)": vectorised,
    "per_sample_grad": ours,
}


class Found(NamedTuple):
    """What one way took for the whole pool."""

    norms: list[float]
    seconds: float
    mebibytes: float


def problem(count: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The same model and pool in every process."""
    torch.manual_seed(0)
    model = Network()
    return model, torch.rand(count, 3, 10, 10), torch.randint(0, 10, (count,))


def peak_mebibytes() -> float:
    """The largest memory that this process has had so far."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def measure(way: str, layer: str, count: int, batch_size: int) -> Found:
    """Norms of a pool in one way; memory beyond that of the model and the pool."""
    model, x, y = problem(count)
    WAYS[way](model, layer, x[:2], y[:2])  # warm up
    before, begin = peak_mebibytes(), time.perf_counter()
    norms = torch.cat(
        [
            WAYS[way](model, layer, *batch).detach()
            for batch in zip(x.split(batch_size), y.split(batch_size))
        ]
    )
    seconds = time.perf_counter() - begin
    return Found(norms.tolist(), seconds, peak_mebibytes() - before)


def in_a_process(*arguments: object) -> Found:
    """`measure` in a process that has done nothing else."""
    with multiprocessing.get_context("spawn").Pool(1) as processes:
        return processes.apply(measure, arguments)


def compare(options: argparse.Namespace) -> None:
    """One line for each way."""
    print(f"gradient norms of {options.layer}, {options.pool} examples")
    print(f"{'':<18} {'seconds':>8} {'times':>7} {'MiB':>8}  largest difference")
    first = None
    for way in WAYS:
        found = in_a_process(way, options.layer, options.pool, options.batch_size)
        first = first or found
        difference = max(abs(a - b) for a, b in zip(found.norms, first.norms))
        times = first.seconds / found.seconds
        print(
            f"{way:<18} {found.seconds:8.3f} {times:6.{1 if times >= 1 else 3}f}x "
            f"{found.mebibytes:8.1f}  {difference:.1e}"
        )


def score(options: argparse.Namespace) -> None:
    """Every parameter, as a product does it."""
    model, x, y = problem(options.pool)
    scores = psg.score_pool(
        model,
        TensorDataset(x, y),
        score=options.score,
        batch_size=options.batch_size,
        folder=options.folder,
    )
    highest = scores.top(min(5, options.pool))
    print(f"highest {options.score} of the whole model:", highest.tolist())
    if options.output is not None:
        parquet = options.output.endswith(".parquet")
        write = scores.to_parquet if parquet else scores.to_csv
        write(options.output)
        print("index and score of every example:", options.output)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pool", type=int, default=1000, help="number of examples (default 1000)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=50,
        help="examples that each way computes together, and that score_pool loads "
        "together: its scores are the same bits for any (default 50)",
    )
    parser.add_argument(
        "--layer",
        choices=["conv1", "conv2", "fc"],
        default="conv2",
        help="whose gradient the four ways measure (default conv2)",
    )
    parser.add_argument(
        "--score",
        choices=["grad_norm", "last_layer_grad_norm", "egl", "el2n", "loss"],
        default="grad_norm",
        help="what score_pool gives every example: the norm of its gradient in the "
        "whole model or in the last layer, the same expected over the model's own "
        "labels (egl), the error of its probabilities (el2n), its loss (default "
        "grad_norm)",
    )
    parser.add_argument(
        "--folder",
        help="keep scored parts here, and go on from there when called again",
    )
    parser.add_argument("--output", help="write scores to this .csv or .parquet file")
    options = parser.parse_args(arguments)
    if options.pool < 2 or options.batch_size < 1:
        parser.error("give a pool of at least 2 examples and a positive batch size")
    return options


def main() -> None:
    options = parse()
    compare(options)
    score(options)


if __name__ == "__main__":
    main()
