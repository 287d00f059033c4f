"""What can be seen of a run while it lasts: a progress bar and TensorBoard scalars."""

from __future__ import annotations

import argparse
from pathlib import Path

from order_report import Row
from tensorboardX import SummaryWriter
from tqdm import tqdm

from xla_replica import Replica

# Columns of a row that are no measurement.
KEYS = ("order", "seed", "epoch")


class Display:
    """Shows a run on the master; other replicas show nothing.

    Args:
        name: Of the run.
        args: With ``logdir``, ``epochs`` and ``progress``.
        steps_per_epoch: Updates of an epoch.
        done: Updates that a checkpoint already holds.
        replica: Whose display it is.
    """

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        steps_per_epoch: int,
        done: int,
        replica: Replica,
    ) -> None:
        self._name = name
        self._writer = (
            SummaryWriter(str(Path(args.logdir, name))) if replica.is_master else None
        )
        self._bar = tqdm(
            desc=name,
            initial=done,
            total=args.epochs * steps_per_epoch,
            unit="step",
            disable=not (replica.is_master and args.progress),
        )
        self._shown: dict[str, str] = {}

    def steps(self, num_steps: int, loss: float) -> None:
        """After ``num_steps`` updates, with the mean loss of the last ones."""
        self._bar.update(num_steps - self._bar.n)
        self._show(loss=f"{loss:.4f}")
        if self._writer:
            self._writer.add_scalar("step/train_loss", loss, num_steps)

    def epoch(self, row: Row) -> None:
        """After an epoch."""
        self._show(test=f"{row['test_accuracy']:.2f} %")
        if self._writer:
            for name, value in row.items():
                if name not in KEYS:
                    self._writer.add_scalar(f"epoch/{name}", value, row["epoch"])

    def close(self, row: Row) -> None:
        """After the run, with its last row."""
        self._bar.update((self._bar.total or 0) - self._bar.n)
        self._bar.close()
        if self._writer:
            self._writer.close()
            print(
                f"{self._name}: training loss {row['train_loss']:.5f}, "
                f"test accuracy {row['test_accuracy']:.2f} % after "
                f"{row['epoch']} epochs in {row['seconds']:.1f} s",
                flush=True,
            )

    def _show(self, **shown: str) -> None:
        self._shown |= shown
        self._bar.set_postfix(self._shown, refresh=False)
