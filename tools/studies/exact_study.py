"""Compares exact sums with sums of floats by what becomes of a training.

A byte-level GPT trains on the text of this repository, as in `language_model_study.py`,
but smaller, with five seeds: each time with sums of floats and with exact ones, from
the same weights on the same batches. Then Adam is given a gradient whose numbers lie
under the largest of their row by powers of two, until exact sums no longer tell them
from zero. It takes some minutes on two cores, seconds with --quick:

    python tools/studies/exact_study.py --output docs/benchmarks/exact_study.json
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
from tools.record import parser_with_output, save
from tools.studies import language_model_ways as ways
from tools.studies.language_model_study import interval

SIZES = ways.Sizes(64, 64, 2, 4, samples=1024, larger=8, lr=0.002, tested=128)
EXPONENTS = range(0, 29, 4)  # of two, under the largest number of the row
COLUMNS, UPDATES, MINIBATCHES, ROWS = 64, 100, 8, 4


def small_shares(model: nn.Module) -> list[float]:
    """Returns the shares of numbers 2^-20 and 2^-23 under their row's largest."""
    counts, total = np.zeros(2), 0
    for parameter in model.parameters():
        rows = parameter.grad.abs().reshape(len(parameter), -1)
        rows = rows if parameter.dim() > 1 else rows.T  # a vector has one row
        bounds = rows.amax(1, keepdim=True) * torch.tensor([2.0**-20, 2.0**-23])
        is_there = rows > 0
        counts += [
            int((is_there & (rows < bound)).sum()) for bound in bounds.split(1, 1)
        ]
        total += int(is_there.sum())
    return [*(counts / total)]


def train(seed: int, is_exact: bool, sizes: ways.Sizes) -> dict[str, Any]:
    """Returns the held-out loss after a training, and the shares of small numbers."""
    shares: list[list[float]] = []

    def prepare(model: nn.Module, optimizer: vbs.ElasticOptimizer) -> None:
        def look(*_: Any) -> None:
            shares.append(small_shares(model))

        optimizer.register_step_pre_hook(look)

    trace = ways.cut([sizes.larger], sizes.samples)
    options = {"is_exact": is_exact, "bfloat16": False}
    model = ways.train("larger", seed, sizes, trace, prepare, **options)
    loss = ways.held_out_loss(model, sizes, sizes.tested)
    return {"loss": loss, "small": np.mean(shares, 0).tolist()}


def with_adam(is_exact: bool) -> dict[str, torch.Tensor]:
    """Trains one row whose gradient has numbers of all sizes; returns what Adam has.

    Each tensor is ``(exponents, columns)``.
    """
    generator = torch.Generator().manual_seed(0)
    scale = 2.0 ** -torch.tensor([*EXPONENTS]).repeat_interleave(COLUMNS)
    number = UPDATES * MINIBATCHES * ROWS
    samples = torch.randn(number, len(scale), generator=generator) + 0.25
    model = nn.Linear(len(scale), 1, bias=False)
    nn.init.zeros_(model.weight)
    inner = torch.optim.Adam(model.parameters(), 1e-3)
    sampler = vbs.CustomSampler(
        samples, [MINIBATCHES * ROWS] * UPDATES, minibatch_size=ROWS, verbose=False
    )
    optimizer = vbs.ConstantOptimizer(inner, sampler, exact=model if is_exact else None)
    zeros = torch.zeros(1, len(scale))

    def count(*_: Any) -> None:
        zeros.add_(model.weight.grad == 0)

    optimizer.register_step_pre_hook(count)
    loader = DataLoader(samples * scale, batch_sampler=sampler)
    for epoch in vbs.epochs(optimizer, loader, 1, model=model, progress=False):
        for batch in epoch:
            model(batch).mean().backward()
            optimizer.step()
    [state] = inner.state.values()
    found = {
        "zero": zeros / UPDATES, "m": state["exp_avg"].abs(),
        "v": state["exp_avg_sq"], "moved": model.weight.detach().abs(),
    }  # fmt: skip
    return {name: value.view(len(EXPONENTS), COLUMNS) for name, value in found.items()}


def adam_rows() -> list[dict[str, float]]:
    """Returns by exponent how many are zero, and m, v and ways over those of floats."""
    exact, floats = with_adam(True), with_adam(False)
    rows = []
    for row, exponent in enumerate(EXPONENTS):
        ratios = {
            name: float(exact[name][row].sum() / floats[name][row].sum())
            for name in ("m", "v", "moved")
        }
        rows.append(
            {"exponent": -exponent, "zero": float(exact["zero"][row].mean()), **ratios}
        )
    return rows


def tell(result: dict[str, Any]) -> None:
    """Prints the figures of docs/exact_sums.md."""
    for name in ("float", "exact", "difference"):
        found = result[name]["interval"] if name != "difference" else result[name]
        mean, low, high = (f"{found[end]:.4f}" for end in ("mean", "low", "high"))
        print(f"{name}: {mean} ({low} to {high})")
    print(f"shares of small numbers: {result['small']}")
    for row in result["adam"]:
        print("| " + " | ".join(f"{value:.3g}" for value in row.values()) + " |")


def main(argv: list[str] | None = None) -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two seeds")
    options = parser.parse_args(argv)
    sizes, seeds = SIZES, range(options.seeds)
    if options.quick:
        sizes, seeds = ways.QUICK, range(2)
    todo = [(seed, is_exact) for seed in seeds for is_exact in (False, True)]
    one = functools.partial(train, sizes=sizes)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context) as pool:
        runs = [*tqdm(pool.map(one, *zip(*todo)), total=len(todo), unit="run")]
    losses = {
        name: [run["loss"] for run, (_, each) in zip(runs, todo) if each == is_exact]
        for name, is_exact in (("float", False), ("exact", True))
    }
    small = [run["small"] for run, (_, is_exact) in zip(runs, todo) if not is_exact]
    result = {
        "settings": dataclasses.asdict(sizes),
        **{n: {"losses": of, "interval": interval(of)} for n, of in losses.items()},
        "difference": interval(np.subtract(losses["exact"], losses["float"])),
        "small": np.mean(small, 0).tolist(),
        "adam": adam_rows(),
    }
    tell(result)
    save(options.output, result)


if __name__ == "__main__":
    main()
