"""Trains one model in several orders, from several seeds, on any number of replicas.

What `GraBSampler` needs from a training loop is in `Run`, marked with `# order`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import per_sample_grad as psg
import variable_batch_size as vbs
import xla_replica
from examples.common.run_display import Display
from examples.ordering.order_report import Row, report
from examples.ordering.training_options import (
    checkpoint_paths,
    lasting,
    sampler_options,
)
from grab_xla import GraBSampler
from xla_replica import Replica

# A large model's first program may take this many seconds to compile.
TIMEOUT = 1800.0


class Splits(NamedTuple):
    """The inputs and targets of both halves of a data set."""

    train: TensorDataset
    test: TensorDataset


class Task(Protocol):
    """What is trained; every replica receives it.

    The model returns logits ``(B, ..., classes)``; targets are ``(B, ...)`` integers.
    """

    title: str

    def load(self) -> Splits: ...

    def build_model(self) -> nn.Module: ...


def train_and_report(task: Task, args: argparse.Namespace) -> int:
    """Trains in every order from every seed; returns the script's exit status."""
    num_replicas = args.num_replicas or xla_replica.default_num_replicas(args.device)
    try:
        results = xla_replica.launch(
            train_all, (task, args), num_replicas, args.device, timeout=TIMEOUT
        )
    except KeyboardInterrupt:
        what = "nothing was saved without --checkpoint DIR"
        if args.checkpoint:
            what = f"--resume continues what {args.checkpoint} has saved"
        print(f"interrupted; {what}", file=sys.stderr)
        return 130
    if results[0] is not None:  # Under torchrun, every process comes here.
        report(results[0], task.title, args)
    return 0


def train_all(rank: int, task: Task, args: argparse.Namespace) -> list[Row] | None:
    """Runs one replica's part; returns the history of all epochs on the primary."""
    replica = xla_replica.current()
    if not args.trace and args.batch_size % replica.num_replicas:
        raise ValueError(
            f"--batch-size {args.batch_size} is not a multiple of the number of "
            f"replicas, {replica.num_replicas}"
        )
    splits = task.load()
    if args.check_gradients or (args.check_gradients is None and replica.is_lazy):
        with replica.seeded(args.seed):
            model = task.build_model()
        few = splits.train[: min(8, args.batch_size)]
        error = check_gradients(model.to(replica.device), *replica.send(few))
        if replica.is_primary:
            print(f"per-sample gradients are right to {error:.0e}", flush=True)
    history: list[Row] = []
    kind = ElasticRun if args.trace else Run
    for seed in range(args.seed, args.seed + args.seeds):
        for order in args.order:
            history += kind(task, splits, order, seed, args, replica).train()
    return history if replica.is_primary else None


def sample_losses(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Returns every sample's cross entropy, averaged over its targets, ``(B,)``."""
    return psg.token_cross_entropy(model(inputs), targets.long())


def check_gradients(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> float:
    """Returns the largest relative difference of a parameter from autograd.

    Raises:
        RuntimeError: The per-sample gradients of this model are wrong; the message is
            a table of its parameters.
    """
    report = psg.coverage(model, sample_losses, (inputs, targets))
    if not report.complete:
        raise RuntimeError(
            f"per-sample gradients on {inputs.device} are wrong:\n{report}\n"
            "Write the layer with other modules, or see per_sample_grad.register_rule"
        )
    return max(found.error for found in report.parameters.values())


class Run:
    """One model, trained in one order from one seed.

    Orders that follow from gradients are balanced out of the backward pass. The others
    are trained by an ordinary one, so that they take the time of training without a
    balancing sampler, unless their herding is measured.
    """

    def __init__(
        self,
        task: Task,
        splits: Splits,
        order: str,
        seed: int,
        args: argparse.Namespace,
        replica: Replica,
    ) -> None:
        self.order, self.seed, self.args = order, seed, args
        self.splits, self.replica = splits, replica
        self.name = f"{order}-seed{seed}"
        with replica.seeded(
            seed
        ):  # The same weights on every replica and in every order.
            model = task.build_model()
        self.model = model.to(replica.device)
        self.params = dict(self.model.named_parameters())
        self.optimizer = _optimizer(args, self.model)
        size = args.minibatch_size if args.trace else args.batch_size
        self.minibatch_size = size if args.trace else size // replica.num_replicas
        self.sampler = GraBSampler(  # order
            splits.train, self.params, order, seed=seed,
            **sampler_options(order, args, self.minibatch_size),
        )  # fmt: skip
        self._deal()
        self.loss = torch.zeros(2, device=replica.device)  # Sum and steps since logged.
        self.epoch, self.step = 0, 0  # Finished epochs, and steps of the next one.
        self.seconds = 0.0  # Training time, without evaluation.
        self.history: list[Row] = []
        self.settings = lasting(args) | {"task": task.title}
        self.path: Path | None = None
        if args.checkpoint:
            self.path = checkpoint_paths(args)[order, seed]

    def _deal(self) -> None:
        """Makes the loader of this replica's part of every batch."""
        self.loader = DataLoader(
            self.splits.train, self.minibatch_size, sampler=self.sampler
        )
        self.steps_per_epoch = len(self.loader)

    def _steps(self, epoch: int) -> range:
        """Returns the numbers of the steps of an epoch."""
        return range(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch)

    def train(self) -> list[Row]:
        """Trains the epochs that are left; returns one row for every epoch."""
        self._restore()
        total = self._steps(self.args.epochs).start
        self.display = Display(
            self.name, self.args, total, self._num_steps(), self.replica
        )
        self.log = vbs.RunFile(
            Path(self.args.logdir, self.name, "run.jsonl"),
            vars(self.args),
            replica=str(self.replica),
        )
        if self.replica.is_primary:
            self.log.begin(self._num_steps())
        if not self.history:
            self.history.append(self._measure())
        while self.epoch < self.args.epochs:
            self._train_epoch()
            row = self._measure()
            self.history.append(row)
            self.display.epoch(row)
            self._tell(train_loss=row["train_loss"], accuracy=row["test_accuracy"])
            self._save()
        if self.replica.is_primary:
            self.log.event("stop", self._num_steps(), reason="the run has ended")
        self.display.close(self.history[-1])
        return self.history

    def _tell(self, **numbers: float) -> None:
        """Tells the log what is known after the latest step."""
        if self.replica.is_primary:
            now = {"step": self._num_steps() - 1, "time": round(time.time(), 3)}
            self.log.write(now | numbers)

    def _train_epoch(self) -> None:
        self.model.train()
        self.since = time.perf_counter()
        self._begin_epoch()
        for inputs, targets in self.replica.loader(self.loader):
            self._update(inputs, targets)
        self.replica.wait()
        self.seconds += time.perf_counter() - self.since
        self.epoch, self.step = self.epoch + 1, 0

    def _begin_epoch(self) -> None:
        """Does what the samplers need before an epoch; nothing but for a trace."""

    def _update(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self._backward(inputs, targets)
        gradients = [param.grad for param in self.params.values()]
        self.replica.all_reduce_(gradients)
        for gradient in gradients:
            gradient /= self.replica.num_replicas
        self.optimizer.step()
        self.replica.sync()
        self._count_step(self.args.batch_size)

    def _backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Computes the gradients of this replica's samples, and balances them."""
        # order: of every batch's losses
        with self.sampler.record(self.model), self._autocast():
            losses = sample_losses(self.model, inputs, targets)
        self.sampler.backward(losses)  # order: for losses.mean().backward()
        loss = losses.mean().detach().float()
        self.loss += torch.stack([loss, torch.ones_like(loss)])

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        if not self.args.bf16:
            return contextlib.nullcontext()
        return torch.autocast(self.replica.device.type, torch.bfloat16)

    def _count_step(self, batch_size: int) -> None:
        """Counts an update, and logs and saves when it is time. Collective."""
        self.step += 1
        if self._num_steps() % self.args.log_steps == 0:
            loss = self._read_loss()
            self.display.steps(self._num_steps(), loss)
            self._tell(epoch=self.epoch, batch_size=batch_size, loss=loss)
        every = self.args.checkpoint_steps
        is_last = self.step == len(self._steps(self.epoch))
        if every and self.step % every == 0 and not is_last:
            self.seconds += time.perf_counter() - self.since
            self._save()
            self.since = time.perf_counter()

    def _num_steps(self) -> int:
        return self._steps(self.epoch).start + self.step

    def _read_loss(self) -> float:
        """Returns the mean loss since the last call, over all replicas."""
        total = self.loss.clone()
        self.replica.all_reduce_([total])
        self.loss.zero_()
        loss, steps = self.replica.fetch([total])[0].tolist()
        return loss / max(steps, 1)

    def _measure(self) -> Row:
        """Evaluates the weights and measures how the last epoch was balanced."""
        row: Row = {
            "order": self.order,
            "seed": self.seed,
            "epoch": self.epoch,
            "seconds": self.seconds,
        }
        for name, data in self.splits._asdict().items():
            row[f"{name}_loss"], row[f"{name}_accuracy"] = evaluate(
                self.model, data, self.args.eval_batch_size, self.replica
            )
        if self.args.herding and self.epoch:
            row |= self.sampler.scalars()  # order: herding of the last epoch
        return row

    def _save(self) -> None:
        """Saves everything that the next steps depend on. Collective."""
        if self.path is None:
            return
        state = {
            "settings": self.settings,
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.sampler.state_dict(),  # order
            "generator": torch.get_rng_state(),
        }
        state = self.replica.to_host(state)
        if self.replica.is_primary:
            vbs.write_checkpoint(self.path, state)
            self.log.event("checkpoint", self._num_steps())

    def _restore(self) -> None:
        """Continues where `_save` was called, on any number of replicas."""
        if self.path is None or not self.path.exists():
            return
        state = vbs.read_checkpoint(self.path, self.settings)
        self.epoch, self.step = state["epoch"], state["step"]
        self.seconds, self.history = state["seconds"], state["history"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.load_state_dict(state["sampler"])  # order
        torch.set_rng_state(state["generator"])


class ElasticRun(Run):
    """One model whose batch size follows a trace."""

    def _deal(self) -> None:
        args = self.args
        self.dealt = vbs.CustomSampler(
            self.splits.train, args.trace, minibatch_size=self.minibatch_size,
            on_end="cycle", order=self.sampler, verbose=False,
        )  # fmt: skip
        self.loader = DataLoader(self.splits.train, batch_sampler=self.dealt)
        # Adam's steps are not proportional to the gradient.
        rule = "linear" if args.optimizer == "sgd" else "root"
        self.optimizer = vbs.ElasticOptimizer(
            self.optimizer, self.dealt, rule, args.batch_size
        )
        self.optimizer.attach(self.sampler.after_update)  # order
        self.optimizer.attach(lambda update: self._count_step(update.batch_size))

    def _steps(self, epoch: int) -> range:
        return self.dealt.schedule.steps(epoch)

    def _begin_epoch(self) -> None:
        self.dealt.set_epoch(self.epoch)
        self.optimizer.set_epoch(self.epoch)

    def _update(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self._backward(inputs, targets)
        self.optimizer.step()


def _optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    decay = args.weight_decay
    if args.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), args.lr, weight_decay=decay)
    return torch.optim.SGD(
        model.parameters(), args.lr, args.momentum, weight_decay=decay
    )


def evaluate(
    model: nn.Module, data: TensorDataset, batch_size: int, replica: Replica
) -> tuple[float, float]:
    """Returns mean loss and accuracy in per cent; replicas share the samples evenly."""
    mine = np.arange(replica.rank, len(data), replica.num_replicas)
    batch_size = max(1, batch_size // replica.num_replicas)
    share = -(-len(data) // replica.num_replicas)
    padded_size = -(-share // batch_size) * batch_size
    padded = torch.from_numpy(np.resize(mine, padded_size))
    real = (torch.arange(padded_size) < len(mine)).float()
    total = torch.zeros(2, device=replica.device)
    model.eval()
    with torch.no_grad():
        for rows, weights in zip(padded.split(batch_size), real.split(batch_size)):
            inputs, targets, weights = replica.send((*data[rows], weights))
            outputs = model(inputs).flatten(0, -2)
            labels = targets.flatten().long()
            losses = F.cross_entropy(outputs, labels, reduction="none")
            hits = (outputs.argmax(-1) == labels).float()
            for place, values in enumerate((losses, hits)):
                total[place] += (values.reshape(len(rows), -1).mean(1) * weights).sum()
            replica.sync()
        replica.all_reduce_([total])
    loss, hits = (replica.fetch([total])[0] / len(data)).tolist()
    return loss, 100 * hits
