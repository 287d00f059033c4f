"""Command line options that say where a script runs, and checks of options."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import xla_replica


def add_replicas(group: argparse._ActionsContainer) -> None:
    """Adds --num-replicas and --device."""
    group.add_argument(
        "--num-replicas",
        type=int,
        help="default: every chip, GPU or torchrun process there is; 1 on a CPU",
    )
    group.add_argument(
        "--device",
        choices=xla_replica.DEVICES,
        help="default: a TPU, else GPUs, else this CPU",
    )


def check_at_least_one(
    parser: argparse.ArgumentParser, args: argparse.Namespace, names: Iterable[str]
) -> None:
    """Ends the script with an error if a number is below one; None is allowed."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
