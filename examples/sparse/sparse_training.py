"""What the examples of sparse training share: their options and the pruner."""

from __future__ import annotations

import argparse
from typing import Any

from torch import nn
from torch.optim import Optimizer

import variable_batch_size as vbs
from rigl_xla import DISTRIBUTIONS, METHODS, RigLScheduler


def add_sparse(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Adds the options of sparse training, with the task's ``defaults``."""
    group = parser.add_argument_group("sparse training")

    def add(name: str, help: str, **options: Any) -> None:
        value = defaults[name[2:].replace("-", "_")]
        shown = "the model's own" if value is None else value
        group.add_argument(
            name, default=value, help=f"{help} (default: {shown})", **options
        )

    add("--sparsity", "share of weights that are inactive, from 0 to below 1",
        type=float)  # fmt: skip
    add(
        "--distribution",
        "how sparse each layer is: 'erk' spares small layers and costs about twice the "
        "operations of 'uniform', for one to two points of accuracy on ImageNet",
        choices=sorted(DISTRIBUTIONS),
    )
    add("--method", "how connections move; 'static' leaves them where they began",
        choices=sorted(METHODS))  # fmt: skip
    add("--delta", "updates of the weights from one of the topology to the next",
        type=int)  # fmt: skip
    add("--alpha", "share of connections that the first update moves", type=float)
    add(
        "--t-end-fraction",
        "share of training after which the topology stays",
        type=float,
    )
    add(
        "--initial-weights",
        "initial weights of very sparse networks without norms: the model's own "
        "over the root of the density ('rescale'), or new ones ('fan-in')",
        choices=("rescale", "fan-in"),
    )


def pruner_for(
    args: argparse.Namespace, model: nn.Module, optimizer: Optimizer, num_updates: int
) -> RigLScheduler:
    """Returns the pruner of `add_sparse`'s options for a run of ``num_updates``."""
    return RigLScheduler(
        model,
        optimizer,
        dense_allocation=1 - args.sparsity,
        T_end=max(1, int(args.t_end_fraction * num_updates)),
        sparsity_distribution=args.distribution,
        ignore_linear_layers=False,
        delta=args.delta,
        alpha=args.alpha,
        method=args.method,
        initial_weights=args.initial_weights,
        seed=args.seed,
        skip_step=False,  # the elastic optimizer decides when a step ends
    )


def trace_of(text: str) -> list[int] | str:
    """Returns a trace for `CustomSampler`: the name of a CSV file, or batch sizes."""
    if text.replace(",", "").isdecimal():
        return [int(size) for size in text.split(",")]
    return text


def num_updates(sampler: vbs.CustomSampler, epochs: int) -> int:
    """Returns the number of updates of the weights in a run of ``epochs`` epochs."""
    plans = (sampler.schedule.plan(e, sampler.num_replicas) for e in range(epochs))
    return sum(plan.num_steps for plan in plans)
