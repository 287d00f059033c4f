"""Ray Train with 1 to 8 GPUs, as many as there are at the moment.

    python examples/launch/ray_train.py

Ray starts the workers anew when one is lost or another can be had, and each run
continues from the newest checkpoint. Change `train`.
"""

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import xla_replica


def train(rank: int, folder: str) -> None:
    """Trains as one replica; yours goes on from the newest checkpoint in ``folder``."""
    replica = xla_replica.current()
    print(f"{replica}, checkpoints in {folder}")


def worker() -> None:
    """Is one of Ray's workers, which has joined the process group."""
    xla_replica.launch(train, ("/shared/job",))


def main() -> None:
    """Starts the workers."""
    TorchTrainer(
        worker,
        scaling_config=ScalingConfig(num_workers=(1, 8), use_gpu=True),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=100)),
    ).fit()


if __name__ == "__main__":
    main()
