"""Trains one model in several orders, from several seeds, on any number of replicas.

What `GraBSampler` asks of a training loop stands in `Run`, marked with `# order`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
import xla_replica
from examples.common.run_display import Display
from examples.ordering import per_sample
from examples.ordering.order_report import Row, report
from examples.ordering.training_options import (
    checkpoint_paths,
    lasting,
    order_options,
    sampler_options,
)
from grab_xla import Balancer, GraBSampler, ordering_named
from xla_replica import Replica

# A large model's first program may take this many seconds to compile.
TIMEOUT = 1800.0


class Splits(NamedTuple):
    """Inputs and targets, sample by sample."""

    train: TensorDataset
    test: TensorDataset


class Task(Protocol):
    """What is trained; sent to every replica.

    The model gives logits ``(B, ..., classes)``, targets are ``(B, ...)`` integers.
    """

    title: str

    def load(self) -> Splits: ...

    def build_model(self) -> nn.Module: ...


def train_and_report(task: Task, args: argparse.Namespace) -> int:
    """Runs everything that was asked for; the script's exit status."""
    num_replicas = args.num_replicas or xla_replica.default_num_replicas(args.device)
    results = xla_replica.launch(
        train_all, (task, args), num_replicas, args.device, timeout=TIMEOUT
    )
    if results[0] is not None:  # under torchrun, every process comes here
        report(results[0], task.title, args)
    return 0


def train_all(rank: int, task: Task, args: argparse.Namespace) -> list[Row] | None:
    """One replica's part of all runs: the history of all epochs, on the master."""
    replica = xla_replica.current()
    if args.batch_size % replica.num_replicas:
        raise ValueError(
            f"--batch-size {args.batch_size} is no multiple of the number of replicas, "
            f"{replica.num_replicas}"
        )
    splits = task.load()
    if args.check_gradients or (args.check_gradients is None and replica.is_lazy):
        with replica.seeded(args.seed):
            model = task.build_model()
        few = splits.train[: min(8, args.batch_size)]
        error = per_sample.check(model, *few, replica)
        if replica.is_primary:
            print(f"per-sample gradients are right to {error:.0e}", flush=True)
    history: list[Row] = []
    for seed in range(args.seed, args.seed + args.seeds):
        for order in args.order:
            history += Run(task, splits, order, seed, args, replica).train()
    return history if replica.is_primary else None


class Run:
    """One model, trained in one order from one seed.

    Orders that follow from gradients are trained with the mean of per-sample gradients;
    the others by an ordinary backward pass, so that their time is what it would be
    without a balancing sampler, unless their herding is to be measured.
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
        with replica.seeded(seed):  # the same weights on every replica, in every order
            model = task.build_model()
        self.model = model.to(replica.device)
        self.params = dict(self.model.named_parameters())
        self.optimizer = _optimizer(args, self.model)
        self.sampler = GraBSampler(  # order
            splits.train, self.params, order, seed=seed, **sampler_options(order, args)
        )
        self.loader = DataLoader(  # order: each replica is dealt its part
            splits.train, args.batch_size // replica.num_replicas, sampler=self.sampler
        )
        self.steps_per_epoch = len(self.loader)
        ordering = ordering_named(order, **order_options(order, args))
        self.balances = isinstance(ordering, Balancer) or args.herding is not None
        self.per_sample_grads = per_sample.form_for(self.model, replica)
        self.loss = torch.zeros(2, device=replica.device)  # sum and steps since logged
        self.epoch, self.step = 0, 0  # done: epochs, steps of the next one
        self.seconds = 0.0  # of training, without evaluation
        self.history: list[Row] = []
        self.settings = lasting(args) | {"task": task.title}
        self.path: Path | None = None
        if args.checkpoint:
            self.path = checkpoint_paths(args)[order, seed]

    def train(self) -> list[Row]:
        """Runs what is not done yet; one row for every epoch."""
        self._restore()
        total = self.args.epochs * self.steps_per_epoch
        self.display = Display(
            self.name, self.args, total, self._num_steps(), self.replica
        )
        if not self.history:
            self.history.append(self._measure())
        while self.epoch < self.args.epochs:
            self._train_epoch()
            self.history.append(self._measure())
            self.display.epoch(self.history[-1])
            self._save()
        self.display.close(self.history[-1])
        return self.history

    def _train_epoch(self) -> None:
        self.model.train()
        since = time.perf_counter()
        for inputs, targets in self.replica.loader(self.loader):
            self._update(inputs, targets)
            self.step += 1
            if self._num_steps() % self.args.log_steps == 0:
                self.display.steps(self._num_steps(), self._read_loss())
            every = self.args.checkpoint_steps
            if every and self.step % every == 0 and self.step < self.steps_per_epoch:
                self.seconds += time.perf_counter() - since
                self._save()
                since = time.perf_counter()
        self.replica.wait()
        self.seconds += time.perf_counter() - since
        self.epoch, self.step = self.epoch + 1, 0

    def _update(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        if self.balances:
            losses, grads = self.per_sample_grads(self.params, inputs, targets)
            self.sampler.step(grads)  # order: once per batch, on every replica
            loss = losses.mean()
            means = [grads[name].mean(0) for name in self.params]
        else:
            loss = per_sample.mean_loss(self.model(inputs), targets)
            means = list(xla_replica.grad(loss, list(self.params.values())))
            self.sampler.count(len(inputs))  # order: so that it can be saved here
        self.replica.all_reduce_(means)
        for param, mean in zip(self.params.values(), means):
            param.grad = mean / self.replica.num_replicas
        self.optimizer.step()
        self.loss += torch.stack([loss.detach(), torch.ones_like(loss.detach())])
        self.replica.sync()

    def _num_steps(self) -> int:
        return self.epoch * self.steps_per_epoch + self.step

    def _read_loss(self) -> float:
        """Mean since the last call, over all replicas."""
        total = self.loss.clone()
        self.replica.all_reduce_([total])
        self.loss.zero_()
        loss, steps = self.replica.fetch([total])[0].tolist()
        return loss / max(steps, 1)

    def _measure(self) -> Row:
        """What the weights are worth now, and how the last epoch was balanced."""
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
            row |= self.sampler.scalars()  # order: herding of the epoch that ended
        return row

    def _save(self) -> None:
        """Everything that the steps to come depend on. Collective."""
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

    def _restore(self) -> None:
        """Goes on where `_save` was called, on any number of replicas."""
        if self.path is None or not self.path.exists():
            return
        state = vbs.read_checkpoint(self.path, self.settings)
        self.epoch, self.step = state["epoch"], state["step"]
        self.seconds, self.history = state["seconds"], state["history"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.load_state_dict(state["sampler"])  # order
        torch.set_rng_state(state["generator"])


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
    """Mean loss and accuracy in per cent; replicas share the samples evenly."""
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
