"""Measures what ways to per-sample gradients cost, side by side, as ratios to training.

    python tools/benchmarks/bench_per_sample.py
    python tools/benchmarks/bench_per_sample.py --models cnn --output result.json

A multilayer perceptron, a convolutional network, a small transformer and torchvision's
mobilenet_v3_small with frozen statistics (64 by 64 images); norms, Gram matrices and
the gradients themselves; by a loop over samples, ``vmap(grad)``, Opacus (hooks, ghost
norms), TorchJD's engine, and this package. Norms are also written by hand, of torch's
operations, and the forward pass and the gradients of activations run alone. Opacus and
TorchJD are installed into a temporary folder. What another library refuses is noted.

Every way of a model runs once in every round, in an order that changes from round to
round, in one process on one thread. Its time in a round is divided by the ordinary
training step's in the same round; the median of these ratios is reported, because a
busy machine disturbs it least. Times are processor times. Memory is the most that
torch's allocator held during a step beyond what it held before, as the profiler counts
it (without the memory that a matrix library takes for itself), divided by that of
training: forward pass, backward pass and the gradients. The tool fails if two ways
disagree about the answer.
"""

from __future__ import annotations

import importlib.metadata
import os
import random
import statistics
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides the profiler's remarks

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import per_sample_grad as psg
from tools.benchmarks.models import (
    CLASSES,
    MODELS,
    losses_of,
)
from tools.peak_memory import peak_memory
from tools.record import parser_with_output, row, save
from tools.references.norms_by_hand import (
    LAYERS,
    UnknownParametersError,
    norms_by_hand,
)
from tools.references.published import fetch

Step = Callable[[], torch.Tensor]
THEIRS = ("opacus==1.6.0", "torchjd==0.18.0", "opt_einsum==3.4.0")


def norms_of(grads: Any) -> torch.Tensor:
    return sum(g.flatten(1).square().sum(1) for g in grads).sqrt()


def flat(grads: Any) -> torch.Tensor:
    return torch.cat([g.flatten(1) for g in grads], 1)


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    def step() -> torch.Tensor:
        model.zero_grad()
        losses = losses_of(model, x, y)
        losses.sum().backward()
        return losses.detach()

    return step


def loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    def norm(i: int) -> torch.Tensor:
        loss = losses_of(model, x[i : i + 1], y[i : i + 1]).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        return sum(g.square().sum() for g in grads).sqrt()

    return lambda: torch.stack([norm(i) for i in range(len(x))])


# The gradients themselves are the answer: nothing is computed from them.
def grads_loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    def step() -> list[torch.Tensor]:
        rows = []
        for i in range(len(x)):
            loss = losses_of(model, x[i : i + 1], y[i : i + 1]).sum()
            rows.append(torch.autograd.grad(loss, list(model.parameters())))
        return [torch.stack(column) for column in zip(*rows)]

    return step


def vectorised(reduce: Callable[[Any], Any]) -> Callable[..., Step]:
    def make(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
        params = {name: value.detach() for name, value in model.named_parameters()}

        def loss(params: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = functional_call(model, params, (x.unsqueeze(0),))
            return F.cross_entropy(out, y.unsqueeze(0))

        per_sample = vmap(grad(loss), (None, 0, 0))
        return lambda: reduce(per_sample(params, x, y).values())

    return make


def opacus_hooks(reduce: Callable[[Any], Any]) -> Callable[..., Step]:
    def make(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
        from opacus.grad_sample import GradSampleModule

        wrapped = GradSampleModule(model, loss_reduction="sum")

        def step() -> Any:
            wrapped.zero_grad()
            losses_of(wrapped, x, y).sum().backward()
            return reduce([p.grad_sample for p in wrapped.parameters()])

        return step

    return make


def opacus_ghost(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=1.0
    )

    def step() -> torch.Tensor:
        wrapped.zero_grad()
        losses_of(wrapped, x, y).sum().backward()
        return wrapped.get_norm_sample()

    return step


def torchjd(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    from torchjd.autogram import Engine

    engine = Engine(model, batch_dim=0)
    return lambda: engine.compute_gramian(losses_of(model, x, y))


def ours(one_shot: Callable[..., Any]) -> Callable[..., Step]:
    def make(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
        return lambda: one_shot(model, losses_of, (x, y))

    return make


def by_hand(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    return lambda: norms_by_hand(model, losses_of, x, y)


def of_activations(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    """A forward pass, and a backward pass to the first layer's output: no norms."""
    first = next(each for each in model.modules() if isinstance(each, LAYERS))

    def step() -> torch.Tensor:
        found: list[Any] = []

        def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            found.append(torch.autograd.graph.get_gradient_edge(output))

        handle = first.register_forward_hook(keep)
        losses = losses_of(model, x, y)
        handle.remove()
        torch.autograd.grad(losses.sum(), found)
        return losses.detach()

    return step


def gram_of(grads: Any) -> torch.Tensor:
    rows = flat(grads)
    return rows @ rows.T


WAYS: dict[str, dict[str, Callable[..., Step]]] = {
    "norms": {
        "loop": loop,
        "vmap": vectorised(norms_of),
        "Opacus hooks": opacus_hooks(norms_of),
        "Opacus ghost": opacus_ghost,
        "by hand": by_hand,
        "per_sample_grad": ours(psg.per_sample_grad_norms),
    },
    "gram": {
        "vmap": vectorised(gram_of),
        "Opacus hooks": opacus_hooks(gram_of),
        "TorchJD": torchjd,
        "per_sample_grad": ours(psg.per_sample_gram),
    },
    "gradients": {
        "loop": grads_loop,
        "vmap": vectorised(list),
        "Opacus hooks": opacus_hooks(list),
        "per_sample_grad": ours(lambda *a: list(psg.per_sample_grads(*a).values())),
    },
}
OWN = ("per_sample_grad", "by hand")
# Steps of 30 ms and more, and those of a millisecond or two.
NORM_GOALS = dict.fromkeys(MODELS, 1.45) | {"mlp": 2.0}
TIME_GOAL, MEMORY_GOAL = 1.05, 1.2  # over the fastest other way; over training


def check(steps: dict[tuple[str, str], Step]) -> dict[str, str]:
    """Raises RuntimeError unless all ways give the same answer.

    Removes what other libraries refuse, and returns why.
    """
    answers: dict[str, torch.Tensor] = {}
    refused: dict[str, str] = {}
    for (quantity, way), step in list(steps.items()):
        try:
            found = step()
        except Exception as error:
            if way in OWN and not isinstance(error, UnknownParametersError):
                raise
            why = textwrap.shorten(str(error), 160)
            refused[f"{quantity}: {way}"] = f"{type(error).__name__}: {why}"
            del steps[quantity, way]
            continue
        found = flat(found) if isinstance(found, list) else found.detach()
        expected = answers.setdefault(quantity, found)
        off = float((found - expected).norm() / expected.norm())
        if off > 1e-4:
            raise RuntimeError(f"{quantity} by {way}: off by {off:.1e}")
    return refused


def measure(
    name: str, batch: int, rounds: int, quantities: list[str]
) -> dict[str, Any]:
    """Returns every way's ratios to training, and milliseconds and MiB of training."""
    build, draw = MODELS[name]
    torch.manual_seed(0)
    origin = build()
    state, x, y = origin.state_dict(), draw(batch), torch.randint(0, CLASSES, (batch,))

    def made(make: Callable[..., Step]) -> Step:
        model = build()  # some ways change the model that they are given
        model.load_state_dict(state)
        return make(model, x, y)

    def later(make: Callable[..., Step]) -> Step:
        """Returns a way that is made when it first runs, which may refuse the model."""
        kept: list[Step] = []

        def step() -> Any:
            if not kept:
                kept.append(made(make))
            return kept[0]()

        return step

    steps = {
        (quantity, way): later(make)
        for quantity in quantities
        for way, make in WAYS[quantity].items()
    }
    refused = check(steps)
    training, activations = made(train), made(of_activations)
    training()
    activations()
    peaks = {key: peak_memory(step) for key, step in steps.items()}
    first = {
        ("norms", "first call"): peak_memory(made(ours(psg.per_sample_grad_norms))),
    }
    base = peak_memory(training)
    gradients = sum(p.numel() * 4 for p in origin.parameters())
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    plain: list[float] = []
    without: list[float] = []
    generator = random.Random(0)
    for _ in range(rounds):
        turn = [*steps]
        generator.shuffle(turn)
        before = timed(training)
        found = {key: timed(steps[key]) for key in turn}
        own = (before + timed(training)) / 2
        plain.append(own)
        without.append(timed(activations) / own)
        for key, value in found.items():
            times[key].append(value / own)
    rows = {
        f"{quantity}: {way}": {
            "time": statistics.median(times[quantity, way]),
            "rounds": times[quantity, way],
            "memory": peaks[quantity, way] / base,
        }
        for quantity, way in steps
    }
    rows["forward pass and gradients of activations"] = {
        "time": statistics.median(without),
        "memory": peak_memory(activations) / base,
    }
    return {
        "training": {
            "ms": 1e3 * statistics.median(plain),
            "MiB": base / 2**20,
            "gradients MiB": gradients / 2**20,
        },
        "ways": rows,
        "norms, the first call: memory": first["norms", "first call"] / base,
        "refused": refused,
    }


def timed(step: Step) -> float:
    """Returns the seconds of a step after another of its kind, as they come in a loop.

    One after a step of another library finds nothing of its own in the caches.
    """
    step()
    begin = time.process_time()
    step()
    return time.process_time() - begin


def compared(
    name: str, ways: dict[str, dict[str, float]], quantities: list[str]
) -> list[dict[str, Any]]:
    """Returns rows of the package beside the fastest other way, and of its memory."""
    rows = []
    for quantity in quantities:
        own = ways[f"{quantity}: per_sample_grad"]
        others = {
            way: ways[f"{quantity}: {way}"]["time"]
            for way in WAYS[quantity]
            if way not in OWN and f"{quantity}: {way}" in ways
        }
        fastest = min(others, key=lambda way: others[way])
        work = f"{quantity}, over {fastest}: {name}"
        rows.append(row(work, own["time"] / others[fastest], at_most=TIME_GOAL))
        if quantity != "gradients":
            work = f"{quantity}, memory over training's: {name}"
            rows.append(row(work, own["memory"], at_most=MEMORY_GOAL))
    return rows


def install(folder: str) -> None:
    """Installs the other libraries, or exits: without them nothing is measured."""
    error = fetch(Path(folder), *THEIRS)
    if error is not None:
        sys.exit(f"{', '.join(THEIRS)} are not available: {error}")
    sys.path.append(folder)


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        help="what is trained (default: all)",
    )
    parser.add_argument(
        "--quantities",
        nargs="+",
        choices=WAYS,
        default=list(WAYS),
        help="what is computed (default: all)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, help="samples of a step (default: 32)"
    )
    parser.add_argument(
        "--rounds", type=int, default=40, help="how often all are timed (default: 40)"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        install(folder)
        result = {
            "others": {
                name: importlib.metadata.version(name) for name in ("opacus", "torchjd")
            },
            "batch_size": options.batch_size,
            "rounds": options.rounds,
            "models": {},
            "rows": [],
        }
        for name in options.models:
            found = measure(
                name, options.batch_size, options.rounds, options.quantities
            )
            result["models"][name] = found
            for way, numbers in found["ways"].items():
                ratios = numbers.pop("rounds", numbers["time"])
                own = way == "norms: per_sample_grad"
                goal = NORM_GOALS[name] if own else None
                line = row(f"{way}, over training: {name}", ratios, at_most=goal)
                result["rows"].append(line)
            result["rows"] += compared(name, found["ways"], options.quantities)
    save(options.output, result)


if __name__ == "__main__":
    main()
