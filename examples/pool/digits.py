"""Scikit-learn's handwritten digits, small networks trained at once, and their rows."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils.data import Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import per_sample_grad as psg
import xla_replica

CLASSES = 10


@functools.cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.from_numpy(pixels / 16).float(), torch.from_numpy(labels).long()


def digits(seed: int, *counts: int) -> list[TensorDataset]:
    """Returns disjoint random sets of so many digits: pixels ``(n, 64)`` and labels."""
    pixels, labels = _digits()
    if sum(counts) > len(labels):
        asked = " + ".join(map(str, counts))
        sys.exit(f"error: {asked} digits are needed, and there are {len(labels)}")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return [
        TensorDataset(pixels[i], labels[i])
        for i in order.split([*counts, len(order) - sum(counts)])[:-1]
    ]


def network() -> nn.Sequential:
    """Returns a new network of 64, 32 and 10 units."""
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def logits_of(models: Sequence[nn.Module], pixels: torch.Tensor) -> torch.Tensor:
    """Returns the logits of every model, ``(M, n, 10)``, without a graph."""
    pixels = pixels.to(next(models[0].parameters()).device)
    with torch.no_grad():
        return torch.stack([model(pixels) for model in models]).cpu()


def losses_of(models: Sequence[nn.Module], data: TensorDataset) -> torch.Tensor:
    """Returns every model's loss of every sample, ``(M, n)``."""
    pixels, labels = data.tensors
    logits = logits_of(models, pixels).transpose(1, 2)
    return F.cross_entropy(logits, labels.expand(len(models), -1), reduction="none")


def trained(
    weights: torch.Tensor, data: TensorDataset, seed: int, steps: int = 200
) -> list[nn.Module]:
    """Returns M networks with one beginning, trained at once on weighted samples.

    They are trained on the host, and then moved to where this replica computes.

    Args:
        weights: ``(M, n)``, the weight of every sample for every network; 0 leaves it
            out. Each loss is a weighted mean, with weight decay.
        data: n samples.
        seed: The seed of the first weights, which all networks share.
        steps: Steps of Adam on the whole set.
    """
    torch.manual_seed(seed)
    base = network()
    models = [network() for _ in weights]
    for model in models:
        model.load_state_dict(base.state_dict())
    params, _ = stack_module_state(models)
    pixels, labels = data.tensors
    forward = vmap(lambda p: functional_call(base, p, (pixels,)))
    optimizer = torch.optim.Adam(params.values(), lr=0.01)
    shares = weights / weights.sum(1, keepdim=True)
    for _ in range(steps):
        losses = F.cross_entropy(
            forward(params).transpose(1, 2),
            labels.expand(len(weights), -1),
            reduction="none",
        )
        decay = sum(value.square().sum() for value in params.values())
        optimizer.zero_grad()
        ((losses * shares).sum() + 1e-3 * decay).backward()
        optimizer.step()
    for number, model in enumerate(models):
        model.load_state_dict({n: p[number].detach() for n, p in params.items()})
    return [model.to(xla_replica.current().device) for model in models]


def rows_of(
    model: nn.Module, pool: Dataset, size: int = 1024, layer: str = "", **options: str
) -> np.ndarray:
    """Returns every sample's gradient in a layer, projected, ``(n, k)``."""
    params = {n: p for n, p in model.named_parameters() if n.startswith(layer)}
    projection = psg.Projection(params, size)
    return psg.score_pool(
        model, pool, score=projection, params=[*params], progress=False, **options
    ).scores


def preconditioned(rows: np.ndarray, pool: np.ndarray) -> np.ndarray:
    """Returns ``H⁻¹ r`` of every row; H is the damped mean of the pool's ``p pᵀ``."""
    matrix = pool.T.astype(float) @ pool / len(pool)
    damping = 0.1 * np.trace(matrix) / len(matrix)
    return np.linalg.solve(matrix + damping * np.eye(len(matrix)), rows.T).T


def chosen(count: int, *rows: Iterable[int]) -> torch.Tensor:
    """Returns weights ``(M, count)``: 1 for the samples in each row, 0 for others."""
    weights = torch.zeros(len(rows), count)
    for weight, row in zip(weights, rows):
        weight[torch.as_tensor(np.array(row))] = 1
    return weights


def table(title: str, columns: Sequence[str], found: Mapping[str, np.ndarray]) -> None:
    """Prints means and standard errors of rows ``(seeds, columns)`` by name."""
    width = max(map(len, [*found, title]))
    print(f"{title:<{width}}  " + "  ".join(f"{column:>18}" for column in columns))
    for name, rows in found.items():
        cells = [f"{mean:9.3f}" for mean in rows.mean(0)]
        if len(rows) > 1:  # of one seed nobody knows
            errors = rows.std(0, ddof=1) / len(rows) ** 0.5
            cells = [f"{cell} ± {e:.3f}" for cell, e in zip(cells, errors)]
        print(f"{name:<{width}}  " + "  ".join(f"{cell:>18}" for cell in cells))


def count(text: str) -> int:
    """Returns the integer of an option, of at least one; argparse tells of others."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


class _Help(
    argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
):
    """Shows a docstring as it is, and the default of every option."""


def parser(
    description: str | None, seeds: int, counts: Iterable[tuple[str, int, str]] = ()
) -> argparse.ArgumentParser:
    """Returns a parser whose help is the script's docstring, with --seeds.

    ``counts`` are more options whose values are at least one: name, default and help.
    """
    found = argparse.ArgumentParser(description=description, formatter_class=_Help)
    of_seeds = ("seeds", seeds, "runs, each with its own samples and first weights")
    for name, default, text in (of_seeds, *counts):
        found.add_argument(f"--{name}", type=count, default=default, help=text)
    return found
