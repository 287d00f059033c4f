"""Command line options about where a script runs, and checks that scripts share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import xla_replica


def add_replicas(group: argparse._ArgumentGroup) -> None:
    """Adds how many replicas there are, and what they run on."""
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
    """Numbers below one end the script; those that were not given may be None."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
