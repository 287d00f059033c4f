"""Options of other libraries' trainers that would break a run, and what to do instead.

Each is an error when the run begins. A row has a function that says whether the option
is set so, and the end of the error's message.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

Refusals = dict[str, tuple[Callable[[Any], bool], str]]

# What both say.
_ACCUMULATED = "the trace says how many minibatches a step has"
_SHARDED = (
    "write a loop with ElasticOptimizer, which supports fully_shard, and Checkpointer"
)
_UNSCALED = (
    "which needs no loss scaling: GradScaler would unscale gradients that are "
    "accumulated, on each process separately"
)

# By the name of an argument of `transformers.TrainingArguments`; its value is asked.
_OF_ACCELERATE = ("split_batches", "dispatch_batches", "gradient_accumulation_kwargs")
HUGGING_FACE: Refusals = {
    "gradient_accumulation_steps": (
        lambda value: value != 1,
        f"leave it at 1: {_ACCUMULATED}, each of per_device_train_batch_size samples",
    ),
    "accelerator_config": (
        lambda value: any(getattr(value, name) for name in _OF_ACCELERATE),
        "leave out split_batches, dispatch_batches and gradient_accumulation_kwargs: "
        "CustomSampler deals minibatches, and the optimizer accumulates them",
    ),
    "train_sampling_strategy": (
        lambda value: value != "random",
        "leave it at 'random' and pass ElasticTrainer(order=...), which any number of "
        "processes resumes",
    ),
    "dataloader_in_order": (
        operator.not_,
        "leave it at True: a step's minibatches are those that come next",
    ),
    "ignore_data_skip": (
        bool,
        "leave it at False: a resumed run continues at its sample, and skipping costs "
        "nothing, since nothing that was seen is loaded",
    ),
    "auto_find_batch_size": (
        bool,
        "choose per_device_train_batch_size yourself: processes would find different "
        "ones, and a trace must divide by it",
    ),
    "fp16": (bool, f"train with bf16=True, {_UNSCALED}"),
    "fsdp": (bool, f"leave it out: for a sharded model {_SHARDED}"),
    "deepspeed": (bool, "leave it out: its engine accumulates, sums and steps itself"),
    "parallelism_config": (
        lambda value: value is not None,
        "leave it out: every process must have a whole model",
    ),
    "enable_jit_checkpoint": (
        bool,
        "leave it out: on SIGTERM and SIGINT ElasticTrainer saves after an update that "
        "all processes agree on, and raises xla_replica.Stopped",
    ),
    "include_num_input_tokens_seen": (
        lambda value: value != "no",
        "leave it at 'no': it is a collective between the last backward pass and the "
        "update, whose sums are under way; attach a function to trainer.optimizer that "
        "adds up update.weight",
    ),
    "optim": (
        lambda value: "lomo" in value or "layerwise" in value,
        "choose an optimizer whose step() makes the update, such as 'adamw_torch': "
        "this one updates weights within every backward pass",
    ),
}


def _gets_whole_steps(strategy: Any) -> bool:
    """Returns whether Lightning would call the user's ``on_before_batch_transfer``."""
    from lightning.pytorch.utilities.model_helpers import is_overridden

    hook, data = "on_before_batch_transfer", _trainer(strategy).datamodule
    return is_overridden(hook, strategy.lightning_module) or bool(
        data and is_overridden(hook, data)
    )


def _has_many_devices(strategy: Any) -> bool:
    """Returns whether a job of one process was asked to use several devices."""
    trainer = _trainer(strategy)
    num_devices = len(trainer._accelerator_connector._parallel_devices)
    return strategy.world_size == 1 and num_devices * trainer.num_nodes > 1


def _trainer(strategy: Any) -> Any:
    return strategy.lightning_module.trainer


# By what the user has written; an `ElasticStrategy` that is set up is asked.
LIGHTNING: Refusals = {
    "Trainer(accumulate_grad_batches=...)": (
        lambda strategy: _trainer(strategy).accumulate_grad_batches != 1,
        f"leave it out: {_ACCUMULATED}",
    ),
    "Trainer(gradient_clip_val=...)": (
        lambda strategy: bool(_trainer(strategy).gradient_clip_val),
        "it would clip a part of a step's gradient: pass max_grad_norm= to "
        "ElasticStrategy",
    ),
    "Trainer(precision='16-mixed')": (
        lambda strategy: getattr(strategy.precision_plugin, "scaler", None) is not None,
        f"use 'bf16-mixed', {_UNSCALED}",
    ),
    "manual optimization (automatic_optimization=False)": (
        lambda strategy: not strategy.lightning_module.automatic_optimization,
        "let training_step return the loss",
    ),
    "Trainer(limit_train_batches=...)": (
        lambda strategy: (
            _trainer(strategy).limit_train_batches != 1.0
            and not _trainer(strategy).fast_dev_run
        ),
        "shorten the trace",
    ),
    "Trainer(overfit_batches=...)": (
        lambda strategy: _trainer(strategy).overfit_batches > 0,
        "leave it out: it replaces the sampler. Give the sampler a small dataset",
    ),
    "Trainer(sync_batchnorm=True)": (
        lambda strategy: strategy._layer_sync is not None,
        "leave it out, since replicas run different numbers of minibatches: "
        "statistics are averaged before validation and checkpoints",
    ),
    "the hook on_before_batch_transfer": (
        _gets_whole_steps,
        "it would get a whole step: use on_after_batch_transfer or the loader's "
        "collate_fn",
    ),
    "a model that fully_shard has sharded, as in configure_model": (
        lambda strategy: strategy.replica.is_sharded(
            [*strategy.lightning_module.parameters()]
        ),
        "Lightning would save one process's shards, and cannot move what the "
        f"optimizer holds: {_SHARDED}",
    ),
    "Trainer(devices=...) with several devices in a job of one process": (
        _has_many_devices,
        "start the processes with torchrun, or pass devices=1",
    ),
}
