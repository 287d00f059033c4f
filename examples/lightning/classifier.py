"""An ordinary LightningModule, and scikit-learn's digits to train it with."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import variable_batch_size as vbs


class Classifier(L.LightningModule):
    """Classifies digits; ``lr`` is that of the reference batch size."""

    def __init__(self, lr: float, num_updates: int) -> None:
        super().__init__()
        self.lr, self.num_updates = lr, num_updates
        self.layers = nn.Sequential(
            nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        hits = self.layers(images).argmax(1) == labels
        self.log("accuracy", 100 * hits.float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.num_updates)
        return [optimizer], [{"scheduler": decay, "interval": "step"}]


class Log(L.Callback):
    """Keeps a run log, for the table at the end: a resumed run goes on with it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_start(self, trainer, module):
        optimizer = trainer.strategy.optimizer
        self.run = vbs.RunLog(self.path, optimizer, log_steps=5)
        optimizer.attach(self.run)

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            self.run.write(accuracy=trainer.callback_metrics["accuracy"].item())

    def on_fit_end(self, trainer, module):
        self.run.close()


def load() -> tuple[TensorDataset, TensorDataset]:
    """Returns 1440 digits to train with, and 357 others."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    first, last = mixed[:1440], mixed[1440:]
    return TensorDataset(images[first], labels[first]), TensorDataset(
        images[last], labels[last]
    )
