"""Lightning's trainer under a trace, as a user builds it, on small data."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

import variable_batch_size as vbs
from support.outside import package
from tools.outside import models

if importlib.util.find_spec("lightning"):
    models.import_torchvision()
lightning = package("lightning.pytorch")
from variable_batch_size.integrations.lightning import ElasticStrategy  # noqa: E402


class Small(lightning.LightningModule):
    """One weight, whose gradients are chosen."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.how = how  # loss, as training_step logs it

    def training_step(self, batch, batch_idx):
        loss = self.weight * batch.float().mean()
        if self.how:
            self.log("loss", loss, sync_dist=True, **self.how)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)


def trainer_of(sampler: vbs.CustomSampler, strategy: Any = (), **options: Any) -> Any:
    """Returns a trainer; ``strategy`` has arguments of the strategy."""
    defaults = {"logger": False, "enable_checkpointing": False, "max_epochs": 2}
    return lightning.Trainer(
        strategy=ElasticStrategy(sampler, **dict(strategy)), accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, **defaults | options,
    )  # fmt: skip


def small_fit(
    module, trace=(4, 12, 8), validation: Any = None, ckpt: Any = None, **options: Any
) -> Any:
    """Returns the trainer after the one epoch of the trace; minibatches of four."""
    sampler = vbs.CustomSampler(range(24), [*trace], minibatch_size=4, verbose=False)
    loader = torch.utils.data.DataLoader(range(24), batch_sampler=sampler)
    strategy = {"rule": "constant", **options.pop("strategy", {})}
    trainer = trainer_of(sampler, strategy, **options)
    trainer.fit(module, loader, validation, ckpt_path=ckpt)
    return trainer
