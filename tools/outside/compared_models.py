"""Finds the models whose norms are compared with autograd in every pass, and the price.

    python tools/outside/compared_models.py
    python tools/outside/compared_models.py --output result.json

A comparison of one pass holds for later ones if every operation is known to keep
samples apart whatever the data; else each pass is compared, for one more backward pass.
So is a parameter whose gradient was zero, as the bias of keys in attention, until it
has one. Every model of the sweep (`sweep_models.py`) has two passes here, in float32;
what is compared in the second one is told with its reason.

The price is measured on larger configurations (eight samples of 64 tokens, four layers
of width 256) as the median of ratios of processor time, on one thread: norms over
ordinary training, and for a model that needs no comparison with and without one. Needs
transformers, timm and torchvision: pip install -e '.[outside]'.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import per_sample_grad as psg
from tools.outside import models
from tools.outside.models import LIBRARIES, SMALL, Case
from tools.record import parser_with_output, save

BY_DATA = "samples may meet, as far as the operations tell"
BY_ZERO = "some gradient is zero"
LARGER = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
# Options of a capture, by the column of the table of prices.
PRICED: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {"once": {}, "every pass": {"check": "always"}},
    "bloom": {"every pass": {}},
    "xlnet": {"every pass": {}},
    "mixtral": {"every pass": {"fallback": "loop"}},
}


def norms(case: Case, model: nn.Module, batch: tuple, **options: Any) -> bool:
    """Returns whether a pass for norms was compared."""
    with psg.capture(model, **case.options, **options) as recorded:
        losses = case.losses(model, *batch)
    recorded.norms(losses)
    return recorded.compared


def reason_of(case: Case) -> str | None:
    """Returns why the second pass of a model is compared; None: it is not."""
    model, batch = case.built(torch.float32)
    fallback = {}
    try:
        norms(case, model, batch)
    except psg.CoverageError:
        fallback = {"fallback": "loop"}
        norms(case, model, batch, **fallback)
    if not norms(case, model, batch, **fallback):
        return None
    case.losses(model, *batch).sum().backward()
    sizes = {
        n: p.grad.norm() for n, p in model.named_parameters() if p.grad is not None
    }
    least = 1e-2 * max(sizes.values())
    large = [name for name, size in sizes.items() if size > least]
    again = [norms(case, model, batch, params=large, **fallback) for _ in range(2)]
    return BY_DATA if again[1] else BY_ZERO


def larger(name: str) -> tuple[Case, nn.Module, tuple]:
    """Returns a case with its model and batch in a larger configuration."""
    with (
        mock.patch.dict(SMALL, LARGER),
        mock.patch.multiple(models, BATCH_SIZE=8, NUM_TOKENS=64, NUM_CLASSES=8),
        mock.patch.dict(SMALL, {"max_position_embeddings": 64, "num_labels": 8}),
        mock.patch.dict(models.ENCODERS["xlnet"], {"d_inner": 512, "d_head": 64}),
    ):
        case = LIBRARIES["transformers"]()[name]
        return case, *case.built(torch.float32)


def prices(name: str, rounds: int) -> dict[str, float]:
    """Returns the ratios of one model, and milliseconds of its training step."""
    case, model, batch = larger(name)

    def train() -> None:
        model.zero_grad()
        case.losses(model, *batch).sum().backward()

    steps: dict[str, Callable[[], Any]] = {"training": train}
    for column, options in PRICED[name].items():
        steps[column] = lambda options=options: norms(case, model, batch, **options)
    times: dict[str, list[float]] = {column: [] for column in steps}
    for step in (*steps.values(), *steps.values()):
        step()
    for _ in range(rounds):
        for column in random.sample(sorted(steps), len(steps)):
            begun = time.process_time()
            steps[column]()
            times[column].append(time.process_time() - begun)
    training = times.pop("training")
    return {"training_ms": round(1e3 * statistics.median(training), 1)} | {
        column: round(statistics.median(a / b for a, b in zip(each, training)), 2)
        for column, each in times.items()
    }


def main() -> None:
    """Finds and measures, and prints both."""
    parser = parser_with_output(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of each measurement")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    for library, cases in LIBRARIES.items():
        for name, case in cases().items():
            reason = reason_of(case)
            if reason is not None:
                found[f"{library}/{name}"] = reason
                print(f"{library}/{name}: {reason}", flush=True)
    measured = {name: prices(name, arguments.rounds) for name in PRICED}
    for name, each in measured.items():
        print(name, each)
    save(arguments.output, {"compared": found, "prices": measured})


if __name__ == "__main__":
    main()
