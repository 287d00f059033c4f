"""A run with a `Checkpointer`, as a user writes it."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

import variable_batch_size as vbs
import xla_replica
from support.variable_batch_size import elastic
from support.variable_batch_size.elastic import Case
from support.variable_batch_size.resuming import loss_of

# Steps of 1 to 9 minibatches, three epochs of 8 or 9 steps.
CASE = Case((4, 36, 8, 4, 12, 32, 20, 4), 3, "sgd-heavy-ball", exact=True)


@contextlib.contextmanager
def full_disk(room: int = 0) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Hostile(str):
    """What makes a file of this name where it is unpickled."""

    def __reduce__(self):
        return os.system, (f"touch {self}",)


class Part:
    """Something whose state is a value, which it goes on to use."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Order(Part):
    def __init__(self, size: int) -> None:
        super().__init__(0)
        self.size = size

    def __call__(self, epoch: int) -> torch.Tensor:
        return torch.arange(self.size).roll(self.value)

    def after_update(self, update: vbs.Update) -> None:
        self.value += 1


class Training(elastic.Training):
    """A run with a scheduler and a checkpointer that is not attached yet."""

    def __init__(self, folder: Path, case=CASE, dropout=0.0, **options) -> None:
        super().__init__(case, lambda m, x, y: loss_of(m, F.dropout(x, dropout), y))
        self.replica.seed(5)
        scheduler = CosineAnnealingLR(self.optimizer.inner, 30)
        self.optimizer.attach(scheduler)
        parts = {"model": self.model, "scheduler": scheduler}
        parts |= options.pop("parts", {})
        self.checkpointer = vbs.Checkpointer(
            folder, self.optimizer, **{"every_updates": 4} | options, **parts
        )

    def train(self) -> list[torch.Tensor]:
        self.optimizer.attach(self.checkpointer)
        return super().train()


def train(rank: int, folder: Path, ask_at=None, asked=(), **options):
    """Trains from the newest checkpoint to the end, or until asked to stop.

    The ranks ``asked`` are in the update of step ``ask_at``. Returns the weights, the
    updates that were made, and how many a checkpoint had.
    """
    training = Training(folder, **options)
    is_resumed = training.checkpointer.load() is not None
    num_restored = training.checkpointer.num_updates if is_resumed else None

    def ask(update: vbs.Update) -> None:
        if update.step == ask_at and rank in asked:
            xla_replica.request_stop("maintenance", 75)

    training.optimizer.attach(ask)
    weights = training.train()
    return weights, training.steps, num_restored


def counted(rank: int, folder: Path, runs: list[dict[str, Any]]):
    """Returns the compilations, transfers and fallbacks of three epochs of each run."""
    found = []
    for number, options in enumerate(runs):
        training = Training(folder / str(number), **options)
        training.optimizer.attach(training.checkpointer)
        found.append([training.counted_epoch(epoch) for epoch in range(3)])
    return found
