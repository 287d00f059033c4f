"""What would break a run of Lightning under a trace is refused, and says what to do."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from support.variable_batch_size.lightning_runs import (
    CASE,
    ElasticStrategy,
    Module,
    Small,
    lightning,
    loader_of,
    sampler_of,
    small_fit,
    trainer_of,
)
from support.xla_replica.replicas import Backend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import variable_batch_size as vbs
import xla_replica

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]


class Hooked(Small):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Skips(Small):
    def training_step(self, batch, batch_idx):
        return None


def refusals() -> dict[str, tuple[type[Small], dict[str, Any], str]]:
    """Returns modules and options for the trainer, and what must be said."""
    callbacks = lightning.callbacks
    scaled = lightning.plugins.MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu")
    )
    accumulates = callbacks.GradientAccumulationScheduler({0: 2})
    return {
        "accumulation": (Small, {"accumulate_grad_batches": 2}, "the trace says"),
        "accumulation later": (Small, {"callbacks": [accumulates]}, "the trace says"),
        "clipping": (Small, {"gradient_clip_val": 1.0}, "pass max_grad_norm="),
        "scaling": (Small, {"plugins": [scaled]}, "use 'bf16-mixed'"),
        "manual": (Manual, {}, "let training_step return the loss"),
        "limit": (Small, {"limit_train_batches": 2}, "shorten the trace"),
        "overfit": (Small, {"overfit_batches": 1}, "replaces the sampler"),
        "batchnorm": (Small, {"sync_batchnorm": True}, "statistics are averaged"),
        "hook": (Hooked, {}, "use on_after_batch_transfer"),
        "devices": (Small, {"devices": 2}, "start the processes with torchrun"),
        "skipped": (Skips, {}, "A minibatch cannot be skipped"),
    }


@pytest.mark.parametrize("name", refusals())
def test_what_would_break_a_promise_is_refused(name):
    module, options, message = refusals()[name]
    with pytest.raises((ValueError, TypeError), match=message):
        small_fit(module(), **options)


def fit_sharded(rank: int) -> None:
    """Fits a module that shards itself where Lightning's pages say so."""

    class Sharded(Module):
        def configure_model(self):
            mesh = init_device_mesh("cpu", (xla_replica.current().num_replicas,))
            fully_shard(self.model, mesh=mesh)

    sampler = sampler_of()
    trainer = trainer_of(ElasticStrategy(sampler, CASE.rule, CASE.ref_batchsize))
    message = "fully_shard has sharded.*write a loop with ElasticOptimizer"
    with pytest.raises(ValueError, match=message):
        trainer.fit(Sharded(), loader_of(sampler))


def test_sharded_models_are_refused():
    Backend("cpu", 2).run(fit_sharded)


def test_replicas_on_xla_are_refused(monkeypatch):
    sampler = vbs.CustomSampler(range(8), [4, 4], minibatch_size=4, verbose=False)
    lazy = types.SimpleNamespace(is_lazy=True)
    monkeypatch.setattr(xla_replica, "current", lambda: lazy)
    with pytest.raises(ValueError, match="replicas that are processes on CPUs or GPUs"):
        ElasticStrategy(sampler)


def test_batches_of_another_sampler_are_refused():
    sampler = vbs.CustomSampler(range(8), [4, 4], minibatch_size=4, verbose=False)
    trainer = trainer_of(ElasticStrategy(sampler, "constant"))
    with pytest.raises(ValueError, match="that the strategy's sampler has not dealt"):
        trainer.fit(Small(), torch.utils.data.DataLoader(range(8), batch_size=4))


@pytest.mark.parametrize(("every", "says"), [(2, "at batch 2"), (None, "epoch 1")])
def test_a_checkpoint_of_another_strategy_is_refused(tmp_path, every, says):
    loader = torch.utils.data.DataLoader(range(24), batch_size=8)
    saves = lightning.callbacks.ModelCheckpoint(
        tmp_path, "plain", every_n_train_steps=every
    )
    plain = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[saves],
    )  # fmt: skip
    plain.fit(Small(), loader)
    sampler = vbs.CustomSampler(range(24), [8] * 6, minibatch_size=4, verbose=False)
    trainer = trainer_of(ElasticStrategy(sampler, "constant"))
    loader = torch.utils.data.DataLoader(range(24), batch_sampler=sampler)
    with pytest.raises(ValueError, match=says):
        trainer.fit(Small(), loader, ckpt_path=tmp_path / "plain.ckpt")


def test_a_controller_within_an_epoch_is_refused():
    class Changes(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.strategy.optimizer.change_batch_size(8)

    sampler = vbs.CustomSampler(
        range(24), [4], minibatch_size=4, on_end="hold", verbose=False
    )
    loader = torch.utils.data.DataLoader(range(24), batch_sampler=sampler)
    trainer = trainer_of(ElasticStrategy(sampler, "constant"), callbacks=[Changes()])
    with pytest.raises(ValueError, match="batch sizes changed within an epoch"):
        trainer.fit(Small(), loader)
