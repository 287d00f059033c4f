"""Showing a run while it lasts: a progress bar and TensorBoard scalars."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from tqdm import tqdm

from xla_replica import Replica

# Columns of a row that are not measurements.
KEYS = ("order", "seed", "epoch")


class Display:
    """Shows a run on the primary replica; the others show nothing.

    Args:
        name: The name of the run.
        args: Options with ``logdir`` and ``progress``.
        num_steps: The number of updates of the whole run.
        done: The number of updates that a checkpoint already holds.
        replica: The replica that this display belongs to.

    Attributes:
        writer: The TensorBoard writer, for what else is logged; None unless the replica
            is the primary one.
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
        """Shows the mean loss of the latest updates, after ``num_steps`` in all."""
        self._bar.update(num_steps - self._bar.n)
        self._show(loss=f"{loss:.4f}")
        if self.writer:
            for name, value in {"train_loss": loss, **more}.items():
                self.writer.add_scalar(f"step/{name}", value, num_steps)

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Shows the row of an epoch."""
        self._show(test=f"{row['test_accuracy']:.2f} %")
        if self.writer:
            for name, value in row.items():
                if name not in KEYS:
                    self.writer.add_scalar(f"epoch/{name}", value, row["epoch"])

    def close(self, row: Mapping[str, Any]) -> None:
        """Ends the display of the run, whose last row this is."""
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
