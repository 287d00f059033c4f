"""A run with a `Checkpointer`, as a user writes it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import variable_batch_size as vbs
import xla_replica
from support.variable_batch_size.elastic import Case, make, optimizer_of, sampler_of
from support.variable_batch_size.resuming import loss_of

# Steps of 1 to 9 minibatches, three epochs of 8 or 9 steps.
CASE = Case(
    (4, 36, 8, 4, 12, 32, 20, 4), epochs=3, exact=True, optimizer="sgd-heavy-ball"
)


class Training:
    """A run with a scheduler and a checkpointer that is not attached yet."""

    def __init__(
        self, folder: Path, case: Case = CASE, dropout: float = 0.0, **options
    ) -> None:
        self.replica = xla_replica.current()
        self.case = case
        model, self.inputs, self.targets = make(case)
        self.model = nn.Sequential(nn.Dropout(dropout), model).to(self.replica.device)
        self.replica.seed(5)
        self.sampler = sampler_of(case, self.inputs)
        self.optimizer = optimizer_of(case, self.model.parameters(), self.sampler)
        scheduler = CosineAnnealingLR(self.optimizer.inner, 30)
        self.optimizer.attach(scheduler)
        self.updates: list[int] = []
        self.optimizer.attach(lambda update: self.updates.append(update.step))
        parts = {"model": self.model, "scheduler": scheduler}
        parts |= options.pop("parts", {})
        self.checkpointer = vbs.Checkpointer(
            folder, self.optimizer, **{"every_updates": 4} | options, **parts
        )

    def train(self) -> list[torch.Tensor]:
        self.optimizer.attach(self.checkpointer)
        for epoch in range(self.sampler.epoch, self.case.epochs):
            self.train_epoch(epoch)
        return self.replica.fetch([p.detach() for p in self.model.parameters()])

    def train_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)
        self.optimizer.set_epoch(epoch)
        for rows in self.sampler:
            x, y = self.replica.send((self.inputs[rows], self.targets[rows]))
            loss_of(self.model, x, y).backward()
            self.optimizer.step()


def train(rank: int, folder: Path, ask_at=None, asked=(), **options):
    """Trains from the newest checkpoint to the end, or until asked to stop.

    Args:
        rank: This replica.
        folder: The folder of the checkpoints.
        ask_at: The step in whose update replicas are asked to stop, if any.
        asked: The ranks that are asked.
        **options: See `Training`.

    Returns:
        The weights, the updates that were made, and how many a checkpoint had.
    """
    training = Training(folder, **options)
    restored = training.checkpointer.load()

    def ask(update: vbs.Update) -> None:
        if update.step == ask_at and rank in asked:
            xla_replica.request_stop("maintenance", 75)

    training.optimizer.attach(ask)
    weights = training.train()
    return weights, training.updates, restored and restored.num_updates
