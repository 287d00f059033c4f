"""What a training run shows while it lasts: a progress bar and TensorBoard logs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from tqdm import tqdm

import variable_batch_size as vbs
from xla_replica import Replica


class Recorder:
    """Is called after every update on every replica; replica 0 shows the run.

    As a context it surrounds the training: what it has opened is closed however the
    training ends, also where the run is asked to stop.

    Args:
        replica: The replica that the caller runs in.
        optimizer: Its optimizer.
        args: Options with ``logdir``, ``log_steps``, ``progress`` and ``dataset``.
        num_steps: Updates of the whole run, if that is known: the bar's length.

    Attributes:
        log: The run's log, to which the loop gives its losses.
    """

    def __init__(
        self,
        replica: Replica,
        optimizer: vbs.ElasticOptimizer,
        args: argparse.Namespace,
        num_steps: int | None,
    ) -> None:
        self.log = vbs.RunLog(
            Path(args.logdir, "run.jsonl"), optimizer, log_steps=args.log_steps,
            settings=vars(args), sinks=[self._show],
        )  # fmt: skip
        self._logdir, self._is_primary = args.logdir, replica.is_primary
        self._writer: SummaryWriter | None = None
        is_shown = replica.is_primary and args.progress
        self._bar = tqdm(total=num_steps, unit="step", disable=not is_shown)
        if replica.is_primary:
            self._bar.write(f"{args.dataset}, on {replica}", sys.stderr)

    def begin(self, num_updates: int) -> Recorder:
        """Begins after so many updates: TensorBoard drops what came after them."""
        self._bar.update(num_updates)
        if self._is_primary:
            self._writer = SummaryWriter(self._logdir, purge_step=num_updates)
        return self

    def __enter__(self) -> Recorder:
        return self

    def __call__(self, update: vbs.Update) -> None:
        self.log(update)
        self._bar.update()

    def accuracy(self, epoch: int, percent: float) -> None:
        """Records the test accuracy after an epoch."""
        self.log.write(accuracy=percent)
        if self._is_primary:
            self._bar.write(f"epoch {epoch}: test accuracy {percent:.2f} %", sys.stderr)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Closes the bar and the logs; only a run that ended by itself says so."""
        if kind is None:
            self.log.close()
        self._bar.close()
        if self._writer:
            self._writer.close()

    def _show(self, values: dict[str, Any], *, step: int) -> None:
        """Writes the numbers of a logging step, or the accuracy, to TensorBoard."""
        assert self._writer is not None
        for name in values.keys() - {"samples", "epoch"}:  # axes
            folder = "test" if name == "accuracy" else "train"
            self._writer.add_scalar(f"{folder}/{name}", values[name], step)
        if "loss" in values:
            shown = {"step": step, "batch": values["batch_size"]}
            shown |= {n: f"{values[n]:.4f}" for n in ("lr", "loss")}
            if "gain" in values:
                shown["gain"] = f"{values['gain']:.2f}"
            self._bar.set_postfix(shown, refresh=False)
