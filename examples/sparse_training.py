"""What the examples of sparse training share: options, the pruner, checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import run_checkpoint
from torch import nn
from torch.optim import Optimizer

import variable_batch_size as vbs
from rigl_xla import DISTRIBUTIONS, METHODS, RigLScheduler
from xla_replica import Replica


def add_sparse(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Adds what decides about connections; ``defaults`` are those of the task."""
    group = parser.add_argument_group("sparse training")

    def add(name: str, help: str, **options: Any) -> None:
        value = defaults[name[2:].replace("-", "_")]
        group.add_argument(
            name, default=value, help=f"{help} (default: {value})", **options
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
        "'rescale' or 'fan-in': for networks without norms that are very sparse",
        choices=("rescale", "fan-in"),
    )


def pruner_for(
    args: argparse.Namespace, model: nn.Module, optimizer: Optimizer, num_updates: int
) -> RigLScheduler:
    """The pruner that `add_sparse`'s options ask for, for a run of ``num_updates``."""
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
        skip_step=False,  # the elastic optimizer says when a step ends
    )


def trace_of(text: str) -> list[int] | str:
    """A trace as `CustomSampler` takes it: batch sizes with commas, or a CSV file."""
    if text.replace(",", "").isdecimal():
        return [int(size) for size in text.split(",")]
    return text


def num_updates(sampler: vbs.CustomSampler, epochs: int) -> int:
    """Updates of the weights in a run of so many epochs."""
    plans = (sampler.schedule.plan(e, sampler.num_replicas) for e in range(epochs))
    return sum(plan.num_steps for plan in plans)


def save(
    parts: Mapping[str, Any],
    path: Path | None,
    replica: Replica,
    settings: Mapping[str, Any],
    **progress: Any,
) -> None:
    """Writes a checkpoint that any number of replicas can resume. Collective.

    Args:
        parts: Whatever has a state, by name.
        path: The file; None writes nothing.
        replica: The caller's.
        settings: What a continuation must share.
        progress: Plain values that `restore` gives back.
    """
    if path is None:
        return
    state = {name: dict(part.state_dict()) for name, part in parts.items()}
    state = run_checkpoint.fetched(state, replica)
    if replica.is_master:
        whole = {**state, "settings": dict(settings), "progress": progress}
        run_checkpoint.write(whole, path)
    replica.barrier()  # nobody goes on to a run that could not be resumed


def restore(
    parts: Mapping[str, Any], path: Path | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Loads a checkpoint if there is one; what `save` was told, or nothing.

    Raises:
        ValueError: It is a run with other settings.
    """
    if path is None or not path.exists():
        return {}
    state = run_checkpoint.read(path, settings)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return state["progress"]
