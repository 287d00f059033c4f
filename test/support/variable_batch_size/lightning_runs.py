"""Lightning's trainer under a trace, as a user builds it, on small data."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

import variable_batch_size as vbs
from support.outside import package
from support.variable_batch_size import elastic
from support.variable_batch_size.elastic import OPTIMIZERS, Case, make
from support.variable_batch_size.resuming import loss_of
from tools.outside import models

if importlib.util.find_spec("lightning"):
    models.import_torchvision()
lightning = package("lightning.pytorch")
from variable_batch_size.integrations.lightning import ElasticStrategy  # noqa: E402

# Two epochs of different numbers of steps, of 1 to 9 minibatches: some replicas are
# idle in some steps, the first and the last of an epoch among them.
CASE = Case((4, 36, 8, 4, 12, 32, 20, 4, 48, 40, 4), 2, "sgd-heavy-ball", exact=True)
DECAY = 2**-3
MILESTONES = (4, 9)


class Samples(torch.utils.data.Dataset):
    """Samples that say which they are."""

    def __init__(self, case: Case = CASE) -> None:
        _, self.inputs, self.targets = make(case)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int):
        return number, self.inputs[number], self.targets[number]


class Module(lightning.LightningModule):
    """What a user writes; ``told`` is called with the samples of every minibatch."""

    def __init__(self, told=lambda *_: None) -> None:
        super().__init__()
        self.model, _, _ = make(CASE)
        self.told = told

    def training_step(self, batch, batch_idx):
        numbers, x, y = batch
        loss = loss_of(self.model, x, y)
        self.told(self.trainer.global_step, loss.item(), numbers.tolist())
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        _, x, y = batch
        self.log("val", ((self.model(x)[:, 0] - y) ** 2).mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = OPTIMIZERS[CASE.optimizer](self.parameters(), CASE.lr)
        decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, MILESTONES, DECAY)
        return [optimizer], [{"scheduler": decay, "interval": "step"}]


def loader_of(sampler: vbs.CustomSampler, **options: Any):
    return torch.utils.data.DataLoader(Samples(), batch_sampler=sampler, **options)


def sampler_of() -> vbs.CustomSampler:
    return elastic.sampler_of(CASE, Samples())


def trainer_of(strategy: ElasticStrategy, **options: Any):
    defaults = {"logger": False, "enable_checkpointing": False}
    options = {"max_epochs": CASE.epochs, **defaults, **options}
    return lightning.Trainer(
        strategy=strategy, accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


class Small(lightning.LightningModule):
    """One weight, whose gradients are chosen; ``options`` go to the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return self.weight * batch.float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)


def small_fit(
    module, trace=(4, 12, 8), num_samples: int = 24, options: Any = None, **trainer: Any
) -> Any:
    """Returns the trainer after the one epoch of the trace; minibatches of four."""
    sampler = vbs.CustomSampler(
        range(num_samples), list(trace), minibatch_size=4, verbose=False
    )
    strategy = ElasticStrategy(sampler, "constant", **(options or {}))
    loader = torch.utils.data.DataLoader(range(num_samples), batch_sampler=sampler)
    result = trainer_of(strategy, **trainer)
    result.fit(module, loader)
    return result
