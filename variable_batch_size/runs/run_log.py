"""`RunLog`: what every update of a run was, in a file for programs."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from variable_batch_size.data.schedule import Cursor
from variable_batch_size.device_scalars import dtype_for
from variable_batch_size.gradient_noise.meter import Measurements
from variable_batch_size.runs.run_file import RunFile
from variable_batch_size.step.attached import Update
from xla_replica.common.arguments import check_function, check_integer, check_type

if TYPE_CHECKING:
    from variable_batch_size.optimizer import ElasticOptimizer

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """A function that logs numbers by name, and takes the step that they are of.

    ``run.log`` of a Weights & Biases run, ``mlflow.log_metrics`` and ``log_metrics`` of
    a Lightning logger are such functions as they are.
    """

    def __call__(self, values: dict[str, float], /, *, step: int) -> Any:
        """Logs numbers. ``step`` never falls in a run; a resumed run repeats a few."""


# What lines are known by, and numbers that are told anyway.
_OWN = {
    "step", "event", "time", "epoch", "batch_size", "samples", "seconds",
    "idle_seconds", "weight", "loss", *Measurements._fields,
}  # fmt: skip
# What sinks have as an axis of their own, or get as rates.
_OF_FILES = ("step", "time", "seconds", "idle_seconds")
_SUMMED = ("batch_size", "seconds", "idle_seconds", "weight")


class RunLog:
    """Writes one line of JSON for every update, on the primary replica.

    Attach it, and give it the loss of every minibatch::

        log = vbs.RunLog("runs/a/run.jsonl", optimizer)
        optimizer.attach(log)
        for x, y in loader:
            loss = loss_of(model(x), y)
            loss.backward()
            log.add(loss)
            optimizer.step()
        log.close()

    A line has ``step``, ``epoch``, ``batch_size``, ``samples`` (of the run so far),
    ``lr`` (the effective one; ``lr_1`` and so on are those of further parameter
    groups), ``seconds`` (since the update before), ``idle_seconds`` (the sum over
    replicas of the time in which the plan has no minibatch for them), ``time`` (Unix
    time in seconds), and ``weight`` where minibatches have weights. On logging steps it
    also has ``loss``, the mean since the last one, and what the noise meter measures
    (``gain``, ``noise_scale``, ...). The device is read there alone, so that the sum of
    ``seconds`` from one logging step to the next is exact, also where the host runs
    ahead of the device. What needs no reading is written then too: a kill loses the
    updates since the last logging step.

    `read_run` reads the file. Other loggers get the numbers of logging steps: see
    ``sinks``. Pass this to `Checkpointer`, as ``log=log``, so that checkpoints and the
    stop are told and a resumed run continues the mean of the loss.

    Args:
        path: The file, to which a resumed run appends; None for sinks alone.
        optimizer: The wrapper whose updates are told.
        log_steps: Read the loss once every so many updates.
        settings: Of the run, by name, for the header.
        shows: A function that gets all lines, a list of dicts, when they are written,
            on the primary replica: for a progress bar or TensorBoard.
        sinks: Functions such as `Sink`, called on the primary replica: on every logging
            step with the numbers of its line, and with ``samples_per_second`` and
            ``idle_share`` (of the replicas' time) since the last one; and with what
            `write` is given. An exception in one ends the run.
        max_nonfinite: After so many logging steps in a row whose loss is not finite the
            run ends, on all replicas, with a FloatingPointError. None: one warning.

    Attributes:
        updates_of: The optimizer, the only one that this may be attached to.

    Raises:
        ValueError, TypeError: ``log_steps`` or ``max_nonfinite`` is not an integer
            above zero, or a sink is not a function.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        optimizer: ElasticOptimizer,
        *,
        log_steps: int = 10,
        settings: Mapping[str, Any] | None = None,
        shows: Callable[[list[dict[str, Any]]], Any] | None = None,
        sinks: Sequence[Sink] = (),
        max_nonfinite: int | None = None,
    ) -> None:
        self._log_steps = check_integer("log_steps", log_steps, least=1)
        if max_nonfinite is not None:
            check_integer("max_nonfinite", max_nonfinite, least=1)
        self._max_nonfinite, self._num_nonfinite = max_nonfinite, 0
        for sink in sinks:
            check_function("each sink, which takes (values, step=step),", sink)
        self._sinks, self._shows = list(sinks), shows
        self.updates_of = self._optimizer = optimizer
        self._replica, self._sampler = optimizer.replica, optimizer.sampler
        self._file: RunFile | None = None
        if path is not None:
            self._file = RunFile(
                path,
                settings,
                num_replicas=self._replica.num_replicas,
                replica=str(self._replica),
                rule=optimizer.rule.name,
                ref_batchsize=optimizer.ref_batchsize,
                **self._sampler.fingerprint(),
            )
        dtype = dtype_for(p for g in optimizer.param_groups for p in g["params"])
        # Sums of losses, and their numbers: this replica's that are not shared yet, and
        # those of all that are. Two zeros, or an idle replica had another program.
        zeros = torch.zeros(2, dtype=dtype, device=self._replica.device)
        self._nothing, self._nothing_shared = zeros, zeros.clone()
        self._loss = self._loss_of_updates = self._nothing  # the latter at an update
        self._shared_loss = self._nothing_shared
        self._pending: list[dict[str, Any]] = []  # lines; numbers may be on the device
        self._untold: list[dict[str, Any]] = []  # the last that another replica tells
        self._sums: Counter[str] = Counter()  # of numbers since the last logging step
        self._step: int | None = None  # of the last update
        self._begun = self._closed = False
        self._added_at: Cursor | None = None  # the first minibatch
        self._since = time.perf_counter()

    @property
    def path(self) -> Path | None:
        """The file, if there is one."""
        return self._file.path if self._file else None

    def add(self, loss: torch.Tensor) -> None:
        """Adds the loss of the minibatch under way, before `step`; nothing is read.

        It is that of the backward pass, a mean or a sum. Padding is left out.

        Raises TypeError or ValueError if it is not a tensor of one number, and
        ValueError if updates were made that this was not told of.
        """
        check_type("add: loss", loss, torch.Tensor, "a tensor, which is not read")
        if loss.numel() != 1:
            raise ValueError(
                f"add: a loss is one number, got a tensor of shape {tuple(loss.shape)}"
            )
        if self._step is None:
            cursor = self._sampler.cursor
            self._added_at = self._added_at or cursor
            if cursor.step > 0 and cursor != self._added_at:
                raise ValueError(
                    "add: the optimizer has made updates that this RunLog was not told "
                    "of: call optimizer.attach(log) before training"
                )
        if not self._optimizer.is_padding:
            loss = loss.detach().reshape(()).to(self._loss.dtype)
            self._loss = self._loss + torch.stack([loss, torch.ones_like(loss)])

    def drop_step(self) -> None:
        """Forgets the losses since the last update, whose step is run again."""
        self._loss = self._loss_of_updates

    def __call__(self, update: Update) -> None:
        """Tells of an update; `ElasticOptimizer.attach` has it called."""
        is_due = update.step % self._log_steps == 0
        if is_due or self._replica.is_live:  # where who has them may be lost
            self._share_losses()  # first, since it runs again then
        self._begin(update.step)
        self._step, self._closed = update.step, False
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        num_replicas = self._replica.num_replicas
        num_minibatches = -(-update.batch_size // update.minibatch_size)
        num_substeps = -(-num_minibatches // num_replicas)
        rates = {f"lr_{group}": lr for group, lr in enumerate(update.lr)}
        line = {
            "step": update.step,
            "epoch": update.epoch,
            "batch_size": update.batch_size,
            "samples": self._sampler.schedule.samples_before(update.step + 1),
            "seconds": seconds,
            "idle_seconds": seconds * (num_replicas - num_minibatches / num_substeps),
            "time": round(time.time(), 3),
            "lr": rates.pop("lr_0"),
            **rates,
        }
        if update.weight is not None:
            line["weight"] = update.weight
        self._pending.append(line)
        if is_due:
            self._write(is_due=True)
        self._loss_of_updates = self._loss

    def write(self, **values: float) -> None:
        """Tells more of the last update, such as ``accuracy=`` after an evaluation.

        The seconds of the next update begin here.
        """
        for name, value in values.items():
            if name in _OWN or re.fullmatch(r"lr(_\d+)?", name):
                raise ValueError(
                    f"write: {name}= is what the log itself tells: rename {value!r}"
                )
            check_type(f"write: {name}", value, (int, float, np.number), "a number")
        step = self._next_step() - 1
        if step < 0:
            raise ValueError("write: there has been no update that it could tell of")
        self.flush()
        self._tell([{"step": step, **values}])
        self._send(values, step)
        self._since = time.perf_counter()

    def event(self, name: str, **values: Any) -> None:
        """Tells that something happened after the last update."""
        self.flush()
        if self._file and self._replica.is_primary:
            self._file.event(name, self._next_step(), **values)

    def flush(self) -> None:
        """Writes what is not written yet; reads learning rates that the device has.

        The loss is not among it: a mean over replicas is made on logging steps.
        """
        self._begin(self._next_step())
        self._write(is_due=False)

    def close(self, reason: str = "the script has ended") -> None:
        """Writes the rest and the event ``stop``, unless that was told already.

        `Checkpointer` calls it where the run is asked to stop, if it has this log.
        """
        if not self._closed:
            self.event("stop", reason=reason)
        self._closed = True

    def state_dict(self) -> dict[str, Any]:
        """Returns the losses since the last logging step. Collective if not live."""
        if not self._replica.is_live:  # where it may be for a member that joins
            self._share_losses()
        return {"loss": self._shared_loss, "weight": self._sums["weight"]}

    def change_members(self, generation: int) -> None:
        """Tells that other members of a live run train than before.

        And once more what the member that writes may have died with.
        """
        step, number = self._next_step(), self._replica.num_replicas
        self._begin(step)
        if self._file and self._replica.is_primary:
            event = {"generation": generation, "num_replicas": number}
            self._file.event("members", step, **event)
            self._file.write(*self._untold)
            self._untold = []

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues the mean of the loss; the file shows by itself what was lost."""
        if self._replica.is_live and self._pending:  # of updates that were made
            self._write(is_due=False)
        self._begun = self._begun and self._replica.is_live
        self._step, self._pending = None, []
        self._added_at = None
        self._sums = Counter(weight=state["weight"])
        self._loss = self._loss_of_updates = self._nothing
        self._shared_loss = state["loss"].to(self._loss)

    def _begin(self, step: int) -> None:
        """Writes the header, once, before anything else."""
        if not self._begun and self._file and self._replica.is_primary:
            self._file.begin(step)
        self._begun = True

    def _next_step(self) -> int:
        if self._step is not None:
            return self._step + 1
        cursor, schedule = self._sampler.cursor, self._sampler.schedule
        return schedule.steps(cursor.epoch).start + cursor.step

    def _share_losses(self) -> None:
        """Adds up the losses of all replicas, so that each has what one alone had."""
        total = self._loss.clone()
        self._replica.all_reduce_([total])
        self._shared_loss = self._shared_loss + total
        self._loss = self._loss_of_updates = self._nothing

    def _write(self, is_due: bool) -> None:
        """Writes the pending lines, after one read of what is on the device.

        On a logging step, also the mean loss and the gradient noise.
        """
        losses = [self._shared_loss] if is_due else []
        lines, losses = self._replica.to_host((self._pending, losses))
        self._pending = []
        for line in lines:
            values = line.items()
            read = {name: n.item() for name, n in values if isinstance(n, torch.Tensor)}
            line.update(read)
        if is_due:  # the device was waited for, which is time of the last update
            line, now = lines[-1], time.perf_counter()
            longer = 1 + (now - self._since) / line["seconds"]
            line |= {name: line[name] * longer for name in ("seconds", "idle_seconds")}
            self._since = now
        for line in lines:
            self._sums.update({name: line.get(name, 0) for name in _SUMMED})
        if not is_due:
            return self._tell(lines)
        sums, self._sums = self._sums, Counter()
        self._shared_loss = self._nothing_shared
        loss, num = losses[0].tolist()
        if num:
            line["loss"] = loss / (sums["weight"] or num)
        noise = self._optimizer.noise
        if noise and self._replica.is_primary:
            line |= noise.measure()._asdict()
        self._tell(lines)
        # What the noise meter does not know yet is NaN; a loss that is, is news.
        values = {
            name: value
            for name, value in line.items()
            if name not in _OF_FILES and (value == value or name == "loss")
        }
        values["samples_per_second"] = sums["batch_size"] / sums["seconds"]
        share = sums["idle_seconds"] / sums["seconds"] / self._replica.num_replicas
        self._send(values | {"idle_share": share}, line["step"])
        self._check_finite(line)

    def _check_finite(self, line: dict[str, Any]) -> None:
        """Warns of a loss that is not finite; raises FloatingPointError of several."""
        if math.isfinite(loss := line.get("loss", 0.0)):
            self._num_nonfinite = 0
            return
        self._num_nonfinite += 1
        text = f"the mean loss on the logging step {line['step']} is {loss}"
        if self._num_nonfinite == self._max_nonfinite:
            raise FloatingPointError(
                f"{text}, as on {self._num_nonfinite} logging steps in a row: resume "
                "from a checkpoint before these, with a smaller learning rate or "
                "max_grad_norm="
            )
        if self._num_nonfinite == 1 and self._replica.is_primary:
            logger.warning(f"{text}; RunLog(max_nonfinite=) ends a run for that")

    def _tell(self, lines: list[dict[str, Any]]) -> None:
        """Tells of lines in the file, and to who shows them."""
        if not (lines and self._replica.is_primary):
            self._untold = lines or self._untold
            return
        if self._file:
            self._file.write(*lines)
        if self._shows:
            self._shows(lines)

    def _send(self, values: Mapping[str, float], step: int) -> None:
        for sink in self._sinks if self._replica.is_primary else ():
            sink(dict(values), step=step)


def tensorboard(writer: Any) -> Sink:
    """Returns a sink that adds one scalar per name to a TensorBoard writer.

    The writer is a ``SummaryWriter`` of tensorboardX or of torch.
    """

    def log(values: Mapping[str, float], /, *, step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log
