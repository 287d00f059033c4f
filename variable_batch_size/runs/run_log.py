"""`RunLog`: what every update of a run was, in a file for programs."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from variable_batch_size.device_scalars import dtype_for
from variable_batch_size.gradient_noise.meter import Measurements
from variable_batch_size.runs.run_file import RunFile
from variable_batch_size.step.attached import Update
from xla_replica.common.arguments import check_fields, check_type, checked
from xla_replica.common.trees import map_tensors

if TYPE_CHECKING:
    from variable_batch_size.optimizer import ElasticOptimizer

logger = logging.getLogger(__name__)


# What lines are known by, and numbers that are told anyway.
_OWN = {
    "step", "event", "time", "epoch", "batch_size", "samples", "seconds",
    "idle_seconds", "weight", "loss", *Measurements._fields,
}  # fmt: skip
# What sinks have as an axis of their own, or get as rates.
_OF_FILES = ("step", "time", "seconds", "idle_seconds")


@dataclasses.dataclass(eq=False, repr=False)
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
        sinks: Functions ``log(values, step=step)``, such as ``run.log`` of Weights &
            Biases, called on the primary replica: on every logging step with the
            numbers of its line, and with ``samples_per_second`` and
            ``idle_share`` (of the replicas' time) since the last one; and with what
            `write` is given. An exception in one ends the run.
        max_nonfinite: After so many logging steps in a row whose loss is not finite the
            run ends, on all replicas, with a FloatingPointError. None: one warning.

    Attributes:
        path: The file, or None.
        updates_of: The optimizer, the only one that this may be attached to.
        newest: What sinks were last given on a logging step, on every replica.

    Raises:
        ValueError, TypeError: ``log_steps`` or ``max_nonfinite`` is not an integer
            above zero.
    """

    path: str | os.PathLike[str] | None
    optimizer: ElasticOptimizer
    _: dataclasses.KW_ONLY
    log_steps: int = checked(10, least=1)
    settings: Mapping[str, Any] | None = None
    sinks: Sequence[Callable[..., Any]] = ()
    max_nonfinite: int | None = checked(None, least=1)

    def __post_init__(self) -> None:
        check_fields(self)
        self.newest: dict[str, Any] = {}
        self.updates_of = optimizer = self.optimizer
        self._replica, self._sampler = optimizer.replica, optimizer.sampler
        header: dict[str, Any] = {
            "num_replicas": self._replica.num_replicas,
            "replica": str(self._replica),
            "rule": optimizer.rule.name,
            "ref_batchsize": optimizer.ref_batchsize,
            **self._sampler.fingerprint(),
        }
        self._file: RunFile | None = None
        if self.path is not None:
            self._file = RunFile(self.path, self.settings, **header)
            self.path = self._file.path
        dtype = dtype_for(p for g in optimizer.param_groups for p in g["params"])
        # Sums of losses, and their numbers: this replica's that are not shared yet, and
        # those of all that are. Two zeros, or an idle replica had another program.
        zeros = torch.zeros(2, dtype=dtype, device=self._replica.device)
        self._nothing, self._nothing_shared = zeros, zeros.clone()
        self._loss = self._loss_of_updates = self._nothing  # the latter at an update
        self._shared_loss, self._share_steps = self._nothing_shared, self.log_steps
        # Of the updates since the last logging step, the first so many told. Until they
        # are, numbers may be on the device.
        self._lines: list[dict[str, Any]] = []
        self._num_told = 0
        self._newest: list[dict[str, Any]] = []  # the last that were told, perhaps lost
        self._next_step = -1  # unknown before the first `add`
        self._begun = self._closed = False
        self._num_nonfinite = 0  # logging steps, one after another
        self._since = time.perf_counter()

    def add(self, loss: torch.Tensor) -> None:
        """Adds the loss of the minibatch under way, before `step`; nothing is read.

        It is that of the backward pass, a mean or a sum. Padding is left out.

        Raises RuntimeError if it is not one number, and ValueError if updates were made
        that this was not told of.
        """
        step = self._sampler.ledger.global_step
        if self._next_step < 0:
            self._next_step = step
        if step > self._next_step and self._sampler.cursor.step > 0:
            raise ValueError(
                "add: the optimizer has made updates that this RunLog was not told of: "
                "call optimizer.attach(log) before training"
            )
        if not self.optimizer.is_padding:
            loss = loss.detach().reshape(()).to(self._loss.dtype)
            self._loss = self._loss + torch.stack([loss, torch.ones_like(loss)])

    def drop_step(self) -> None:
        """Forgets the losses since the last update, whose step is run again."""
        self._loss = self._loss_of_updates

    def __call__(self, update: Update) -> None:
        """Tells of an update; `ElasticOptimizer.attach` has it called."""
        if update.step % self._share_steps == 0:
            self._share_losses()  # first: where a member is lost in it, it runs again
        self._begin(update.step)
        self._next_step, self._closed = update.step + 1, False
        line = {
            "step": update.step,
            "epoch": update.epoch,
            "batch_size": update.batch_size,
            "samples": self._sampler.schedule.samples_before(update.step + 1),
            **{f"lr_{n}" if n else "lr": lr for n, lr in enumerate(update.lr)},
        }
        if update.weight is not None:
            line["weight"] = update.weight
        self._lines.append(line)
        is_due = update.step % self.log_steps == 0
        losses: Any = self._read(self._shared_loss) if is_due else ()
        # To wait for the device takes time of this update.
        now, num_replicas = time.perf_counter(), self._replica.num_replicas
        seconds, self._since = now - self._since, now
        num_minibatches = -(-update.batch_size // update.minibatch_size)
        num_substeps = -(-num_minibatches // num_replicas)
        self._lines[-1] |= {
            "seconds": seconds,
            "idle_seconds": seconds * (num_replicas - num_minibatches / num_substeps),
            "time": round(time.time(), 3),
        }
        if is_due:
            self._end_window(*losses[0].tolist())
        self._loss_of_updates = self._loss

    def write(self, **values: float) -> None:
        """Tells more of the last update, such as ``accuracy=`` after an evaluation.

        The seconds of the next update begin here.
        """
        for name, value in values.items():
            if name in _OWN or re.fullmatch(r"lr(_\d+)?", name):
                raise ValueError(
                    f"write: {name}= is what the log itself tells: give {value!r} "
                    f"another name, such as val_{name}= (docs/runs.md#run-log)"
                )
            check_type(f"write: {name}", value, (int, float, np.number), "a number")
        step = self._sampler.ledger.global_step - 1
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
            self._file.event(name, self._sampler.ledger.global_step, **values)

    def flush(self) -> None:
        """Writes what is not written yet; reads learning rates that the device has.

        The loss is not among it: a mean over replicas is made on logging steps.
        """
        self._begin(self._sampler.ledger.global_step)
        self._read()
        untold, self._num_told = self._lines[self._num_told :], len(self._lines)
        self._tell(untold)

    def close(self, reason: str = "the script has ended") -> None:
        """Writes the rest and the event ``stop``, unless that was told already.

        `Checkpointer` calls it where the run is asked to stop, if it has this log.
        """
        if not self._closed:
            self.event("stop", reason=reason)
        self._closed = True

    def state_dict(self) -> dict[str, Any]:
        """Returns the losses since the last logging step. Collective if not live."""
        if self._share_steps > 1:  # else there are none that are not shared
            self._share_losses()
        self.flush()  # a member that joins has no lines of before
        return {"loss": self._shared_loss, "weight": self._sum("weight")}

    def change_members(self, generation: int) -> None:
        """Tells that other members of a live run train than before.

        And once more what the member that writes may have died with.
        """
        self._share_steps = 1  # a member may be lost with the losses that it alone has
        step, num = self._sampler.ledger.global_step, self._replica.num_replicas
        self._begin(step)
        if self._file and self._replica.is_primary:
            self._file.event("members", step, generation=generation, num_replicas=num)
            self._file.write(*self._newest)
        self.flush()  # to this member alone they may be known

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues the mean of the loss; the file shows by itself what was lost."""
        if self._num_told < len(self._lines):
            self.flush()
        # A run that goes back begins anew in the file.
        self._begun &= self._sampler.ledger.global_step >= self._next_step
        self._lines, self._num_told = [{"weight": state["weight"]}], 1
        self._next_step = -1
        self._loss = self._loss_of_updates = self._nothing
        self._shared_loss = state["loss"].to(self._loss)

    def _begin(self, step: int) -> None:
        """Writes the header, once, before anything else."""
        if not self._begun and self._file and self._replica.is_primary:
            self._file.begin(step)
        self._begun = True

    def _sum(self, name: str) -> float:
        """Returns a sum over the updates since the last logging step."""
        return float(sum(line.get(name, 0) for line in self._lines))

    def _share_losses(self) -> None:
        """Adds up the losses of all replicas, so that each has what one alone had."""
        total = self._loss.clone()
        self._replica.all_reduce_([total])
        self._shared_loss = self._shared_loss + total
        self._loss = self._loss_of_updates = self._nothing

    def _read(self, *tensors: torch.Tensor) -> Any:
        """Returns tensors on the host, and reads what lines have on the device."""
        lines, found = self._replica.to_host((self._lines, tensors))
        self._lines = map_tensors(lines, torch.Tensor.item)
        return found

    def _end_window(self, loss: float, number: float) -> None:
        """Tells of a logging step: the mean loss, too, and the gradient noise."""
        line = self._lines[-1]
        if number:
            line["loss"] = loss / (self._sum("weight") or number)
        noise = self.optimizer.noise
        if noise and self._replica.is_primary:
            line |= noise.measure()._asdict()
        self.flush()
        numbers = {name: line[name] for name in line if name not in _OF_FILES}
        # What the noise meter does not know yet is NaN; a loss that is, is news.
        values = {n: v for n, v in numbers.items() if v == v or n == "loss"}
        seconds = self._sum("seconds")
        values["samples_per_second"] = self._sum("batch_size") / seconds
        idle = self._sum("idle_seconds") / self._replica.num_replicas
        self.newest = values | {"idle_share": idle / seconds}
        self._send(self.newest, line["step"])
        self._lines, self._num_told = [], 0
        self._shared_loss = self._nothing_shared
        self._check_finite(line["step"], line.get("loss", 0.0))

    def _check_finite(self, step: int, loss: float) -> None:
        """Warns of a loss that is not finite; raises FloatingPointError of several."""
        number = 0 if math.isfinite(loss) else self._num_nonfinite + 1
        self._num_nonfinite = number
        text = f"the mean loss on the logging step {step} is {loss}"
        if number and number == self.max_nonfinite:
            raise FloatingPointError(
                f"{text}, as on {number} logging steps in a row: resume from a "
                "checkpoint before these, with a smaller lr or max_grad_norm="
            )
        if number == 1 and self._replica.is_primary:
            logger.warning(f"{text}; RunLog(max_nonfinite=) ends a run for that")

    def _tell(self, lines: list[dict[str, Any]]) -> None:
        """Tells of lines in the file."""
        self._newest = lines or self._newest
        if lines and self._file and self._replica.is_primary:
            self._file.write(*lines)

    def _send(self, values: Mapping[str, float], step: int) -> None:
        for sink in self.sinks if self._replica.is_primary else ():
            sink(dict(values), step=step)


def tensorboard(writer: Any) -> Callable[..., None]:
    """Returns a sink that adds one scalar per name to a TensorBoard writer.

    Args:
        writer: A ``SummaryWriter`` of tensorboardX or of torch.
    """

    def log(values: Mapping[str, float], /, *, step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log
