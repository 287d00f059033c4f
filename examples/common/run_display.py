"""What can be seen of a run while it lasts: a progress bar and TensorBoard scalars."""

from __future__ import annotations

import argparse
from pathlib import Path

from tensorboardX import SummaryWriter
from tqdm import tqdm

from examples.ordering.order_report import Row
from xla_replica import Replica

# Columns of a row that are no measurement.
KEYS = ("order", "seed", "epoch")


class Display:
    """Shows a run on the master; other replicas show nothing.

    Args:
        name: Of the run.
        args: With ``logdir`` and ``progress``.
        num_steps: Updates of the whole run.
        done: Updates that a checkpoint already holds.
        replica: Whose display it is.
    """

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        num_steps: int,
        done: int,
        replica: Replica,
    ) -> None:
        self._name = name
        # TensorBoard's, for what else there is to log; None but on the master.
        self.writer = (
            SummaryWriter(str(Path(args.logdir, name))) if replica.is_primary else None
        )
        self._bar = tqdm(
            desc=name,
            initial=done,
            total=num_steps,
            unit="step",
            disable=not (replica.is_primary and args.progress),
        )
        self._shown: dict[str, str] = {}

    def steps(self, num_steps: int, loss: float, **more: float) -> None:
        """After ``num_steps`` updates, with the mean loss of the last ones."""
        self._bar.update(num_steps - self._bar.n)
        self._show(loss=f"{loss:.4f}")
        if self.writer:
            for name, value in {"train_loss": loss, **more}.items():
                self.writer.add_scalar(f"step/{name}", value, num_steps)

    def epoch(self, row: Row) -> None:
        """After an epoch."""
        self._show(test=f"{row['test_accuracy']:.2f} %")
        if self.writer:
            for name, value in row.items():
                if name not in KEYS:
                    self.writer.add_scalar(f"epoch/{name}", value, row["epoch"])

    def close(self, row: Row) -> None:
        """After the run, with its last row."""
        self._bar.update((self._bar.total or 0) - self._bar.n)
        self._bar.close()
        if self.writer:
            self.writer.close()
            print(
                f"{self._name}: training loss {row['train_loss']:.5f}, "
                f"test accuracy {row['test_accuracy']:.2f} % after "
                f"{row['epoch']} epochs in {row['seconds']:.1f} s",
                flush=True,
            )

    def _show(self, **shown: str) -> None:
        self._shown |= shown
        self._bar.set_postfix(self._shown, refresh=False)
