"""Whether Hugging Face's trainer can run under a trace; errors say what to change.

Its version, its arguments, the trainer that was built of them, and the processes that
it finds.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import Trainer, TrainingArguments

from variable_batch_size.integrations.refusals import HUGGING_FACE
from variable_batch_size.optimizer import ElasticOptimizer
from xla_replica import Replica

# Methods of the trainer that are overridden and not public.
_OVERRIDDEN = (
    "_clip_grad_norm",
    "_finalize_training",
    "_get_grad_norm",
    "_get_num_items_in_batch",
    "_init_training_state",
    "_load_rng_state",
    "_maybe_log_save_evaluate",
    "_run_epoch",
    "_save_checkpoint",
    "_save_rng_state",
    "_wrap_model",
)


def check_library() -> None:
    """Raises ImportError if this trainer cannot be made elastic."""
    missing = [name for name in _OVERRIDDEN if not hasattr(Trainer, name)]
    if missing:
        raise ImportError(
            "ElasticTrainer is written for transformers 5.23, and the Trainer of this "
            f"version has no {', '.join(missing)}: pip install transformers==5.23.0"
        )


def check_arguments(args: TrainingArguments) -> None:
    """Raises ValueError or TypeError if a trainer's argument would break the run."""
    for name, (is_wrong, remedy) in HUGGING_FACE.items():
        value = getattr(args, name)
        if is_wrong(value):
            raise ValueError(
                f"TrainingArguments({name}={value!r}) does not work with "
                f"ElasticTrainer: {remedy}"
            )
    if args.device.type == "xla":
        raise TypeError(
            "on XLA devices Accelerate's optimizer sums gradients itself: write a loop "
            "with ElasticOptimizer, or use an environment in which the trainer finds "
            "none"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"this process sees {args.n_gpu} GPUs, which the trainer would use through "
            "DataParallel: start one process for each, by torchrun or "
            "xla_replica.launch"
        )


def check_trainer(trainer: Any) -> None:
    """Raises ValueError or TypeError unless the trainer that was built can be elastic.

    Some of what it is built of comes from ``accelerate launch``.
    """
    for name, is_enabled in {
        "fp16": trainer.accelerator.scaler is not None,
        "fsdp": trainer.is_fsdp_enabled,
        "deepspeed": trainer.is_deepspeed_enabled,
    }.items():
        if is_enabled:
            raise ValueError(f"{name}: {HUGGING_FACE[name][1]}")
    if trainer.is_model_parallel or trainer.is_distributed_loading_by_transformers:
        raise ValueError(
            "the model is spread over devices (device_map, DistributedConfig): "
            "load it without them; every process must have a whole model"
        )
    if isinstance(trainer.optimizer, ElasticOptimizer):
        raise TypeError("optimizers=: pass a torch optimizer; ElasticTrainer wraps it")
    dataset = trainer.train_dataset
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"train_dataset={dataset!r} has no length or no indices, and a trace "
            "is dealt from a dataset that has both"
        )


def tell_accelerate(args: TrainingArguments, replica: Replica) -> None:
    """Makes Accelerate find the process group that `xla_replica.launch` has joined.

    Raises ValueError if the trainer would run elsewhere, or on its own.
    """
    if args.world_size == 1 and replica.num_replicas > 1:
        rank, number = str(replica.rank), str(replica.num_replicas)
        os.environ |= {"RANK": rank, "WORLD_SIZE": number}
        os.environ.setdefault("LOCAL_RANK", rank)  # launch starts them on one host
        os.environ.setdefault("LOCAL_WORLD_SIZE", number)
        vars(args).pop("_setup_devices")
    there = args.device.type, args.world_size, args.process_index
    here = replica.device.type, replica.num_replicas, replica.rank
    if there != here:
        raise ValueError(
            f"the trainer would run on {there[0]} as process {there[2]} of {there[1]}, "
            f"but this is {replica}: on a CPU pass TrainingArguments(use_cpu=True), "
            "and start processes by torchrun or xla_replica.launch"
        )
