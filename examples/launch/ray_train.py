"""Ray Train with 1 to 8 GPUs, as many as there are at the moment.

    python examples/launch/ray_train.py --checkpoint /shared/job

Ray starts the workers anew when one is lost or another can be had, and each run
continues from the newest checkpoint. Change `train`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

# What this imports is found from a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import xla_replica


def train(rank: int, folder: str) -> None:
    """Trains as one replica; yours goes on from the newest checkpoint in ``folder``."""
    print(f"{xla_replica.current()}, checkpoints in {folder}")


def worker(config: dict[str, Any]) -> None:
    """Is one of Ray's workers, which has joined the process group."""
    xla_replica.launch(train, (config["checkpoint"],))


def main() -> None:
    """Starts the workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint",
        default="/shared/job",
        help="folder that all hosts share (default: /shared/job)",
    )
    parser.add_argument(
        "--num-workers",
        type=int,
        nargs=2,
        default=(1, 8),
        metavar=("LEAST", "MOST"),
        help="GPUs to train on, as many as there are (default: 1 8)",
    )
    args = parser.parse_args()
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    num_workers = tuple(args.num_workers)
    TorchTrainer(
        worker,
        train_loop_config={"checkpoint": args.checkpoint},
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=True),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=100)),
    ).fit()


if __name__ == "__main__":
    main()
