"""What happens in a training run: a progress bar, TensorBoard logs and a history."""

from __future__ import annotations

import sys
import time

import torch
from tensorboardX import SummaryWriter
from tqdm import tqdm

import variable_batch_size as vbs
from xla_replica import Replica


class Recorder:
    """Is called after every update on every replica; replica 0 shows and keeps it.

    Args:
        replica: The replica that the caller runs in.
        noise: The optimizer's noise meter, if it has one.
        logdir: The folder of the TensorBoard logs.
        log_steps: Read the loss and write logs once every so many updates.
        num_steps: Updates of the whole run, if that is known: the bar's length.
        title: What the first line names, such as the dataset.
        progress: Whether to show the bar.

    Attributes:
        loss: ``(2,)``, to be added to by the loop: the sum of this replica's losses and
            their number, since the last update that was logged.
        rows: One dict for each update; a value that was not measured is missing.
    """

    def __init__(
        self,
        replica: Replica,
        noise: vbs.NoiseMeter | None,
        *,
        logdir: str,
        log_steps: int,
        num_steps: int | None,
        title: str,
        progress: bool,
    ) -> None:
        self.replica = replica
        self.noise = noise
        self.loss = torch.zeros(2, device=replica.device)
        self.rows: list[dict[str, float]] = []
        # Rows whose learning rate is still on the device, where AdaScale computes it.
        self._unread: list[tuple[dict[str, float], torch.Tensor]] = []
        self._log_steps = log_steps
        self._logdir = logdir
        self._samples, self._since = 0, time.perf_counter()
        self._written = 0  # rows that TensorBoard has
        self._shown: dict[str, object] = {}
        self._writer: SummaryWriter | None = None
        self._bar = tqdm(
            total=num_steps,
            unit="step",
            disable=not (replica.is_primary and progress),
        )
        if replica.is_primary:
            self._bar.write(f"{title}, on {replica}", sys.stderr)

    def begin(self) -> None:
        """Begins after the restored history: TensorBoard drops what came after it."""
        self._written = len(self.rows)
        self._bar.update(len(self.rows))
        self._since = time.perf_counter()
        if self.replica.is_primary:
            self._writer = SummaryWriter(self._logdir, purge_step=len(self.rows))

    def state_dict(self) -> dict[str, object]:
        """Returns the history until now. Collective."""
        self._read_lrs()
        loss = self.loss.clone()
        self.replica.all_reduce_([loss])
        return {"rows": self.rows, "loss": loss, "samples": self._samples}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.rows = [dict(row) for row in state["rows"]]
        self._samples = state["samples"]
        if self.replica.is_primary:  # it is the sum of all: the others begin with zero
            self.loss.copy_(state["loss"])

    def __call__(self, update: vbs.Update) -> None:
        row = {"step": update.step, "batch_size": update.batch_size}
        if isinstance(update.lr[0], torch.Tensor):
            self._unread.append((row, update.lr[0]))
        else:
            row["lr"] = update.lr[0]
        self.rows.append(row)
        self._samples += update.batch_size
        if update.step % self._log_steps == 0:
            row |= self._measure()  # the only host round trip, on logging steps
            self._read_lrs()
            self._write()
        self._shown["batch"] = update.batch_size
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update()

    def accuracy(self, epoch: int, percent: float) -> None:
        """Records the test accuracy after an epoch."""
        if self.rows:
            self.rows[-1]["accuracy"] = percent
        if self._writer:
            self._writer.add_scalar("test/accuracy", percent, self.rows[-1]["step"])
            self._bar.write(f"epoch {epoch}: test accuracy {percent:.2f} %", sys.stderr)

    def close(self) -> None:
        """Completes the rows and closes the bar and the logs."""
        self._read_lrs()
        self._bar.close()
        if self._writer:
            self._writer.close()

    def _measure(self) -> dict[str, float]:
        total = self.loss.clone()
        self.replica.all_reduce_([total])
        self.loss.zero_()
        loss, minibatches = self.replica.fetch([total])[0].tolist()
        now = time.perf_counter()
        rate = self._samples / (now - self._since)
        self._samples, self._since = 0, now
        found = {"loss": loss / max(minibatches, 1), "samples_per_second": rate}
        if self.noise and self.replica.is_primary:
            found |= self.noise.measure()._asdict()
        return found

    def _read_lrs(self) -> None:
        lrs = self.replica.fetch([lr for _, lr in self._unread])
        for (row, _), lr in zip(self._unread, lrs):
            row["lr"] = lr.item()
        self._unread = []

    def _write(self) -> None:
        """Writes the rows since the last logging step to TensorBoard."""
        if not self._writer:
            return
        for row in self.rows[self._written :]:
            for name in row.keys() - {"step", "accuracy"}:
                self._writer.add_scalar(f"train/{name}", row[name], row["step"])
        self._written = len(self.rows)
        self._shown |= {
            "lr": f"{row['lr']:.4f}",
            "loss": f"{row['loss']:.4f}",
            "samples/s": f"{row['samples_per_second']:.0f}",
        }
        if "gain" in row:
            self._shown["gain"] = f"{row['gain']:.2f}"
