"""Command line options of `rigl_imagenet.py`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from examples.common import replica_options
from examples.sparse import sparse_training

STEP_DECAY = (0.3, 0.7, 0.9)  # shares of the run after which 'steps' divides by ten
# Options that may differ between a run and its continuation.
MAY_CHANGE = {"data", "num_workers", "num_replicas", "device", "checkpoint", "logdir",
              "log_steps", "eval_batch_size", "progress"}  # fmt: skip


def lasting(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that a run and its continuation must share."""
    return {name: value for name, value in vars(args).items() if name not in MAY_CHANGE}


def parse(argv: list[str] | None, description: str | None) -> argparse.Namespace:
    """Returns the checked command line; a mistake ends the script."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data(parser.add_argument_group("data and model"))
    sparse_training.add_sparse(
        parser, sparsity=0.8, distribution="erk", method="rigl", delta=100, alpha=0.3,
        t_end_fraction=0.75, initial_weights=None,
    )  # fmt: skip
    add_training(parser.add_argument_group("training"))
    add_running(parser.add_argument_group("replicas, checkpoints, logs"))
    args = parser.parse_args(argv)
    positive = ("epochs", "num_samples", "num_classes", "image_size", "batch_size",
                "minibatch_size", "ref_batchsize", "eval_batch_size", "log_steps",
                "delta", "num_replicas")  # fmt: skip
    replica_options.check_at_least_one(parser, args, positive)
    if not args.fake_data and args.data is None:
        parser.error("give --data DIR, or --fake-data to try it without ImageNet")
    if not args.fake_data and not (args.data / "train").is_dir():
        parser.error(f"--data {args.data} has no folder train; it must have train, val")
    args.trace = sparse_training.trace_of(args.trace or str(args.batch_size))
    return args


def add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of ImageNet, with the folders train and val",
    )
    add(
        "--fake-data",
        action="store_true",
        help="train on made-up images, always the same, of classes that can be learnt",
    )
    add(
        "--num-samples",
        type=int,
        default=5120,
        help="number of fake images (default: 5120)",
    )
    add(
        "--num-classes",
        type=int,
        default=1000,
        help="number of classes of fake images (default: 1000)",
    )
    add(
        "--model",
        default="resnet50",
        help="any classifier of torchvision, or 'small', a ResNet-18 with GroupNorm "
        "for small images that needs no torchvision (default: resnet50)",
    )
    add(
        "--width",
        type=int,
        default=64,
        help="channels of the first stage of 'small', a multiple of 8 (default: 64)",
    )
    add(
        "--image-size",
        type=int,
        default=224,
        help="height and width in pixels (default: 224)",
    )
    add(
        "--num-workers",
        type=int,
        default=0,
        help="processes that load images (default: 0)",
    )


def add_training(group: argparse._ArgumentGroup) -> None:
    def add(name: str, value: Any, help: str, **options: Any) -> None:
        kind = {} if "choices" in options else {"type": type(value)}
        text = f"{help} (default: {value})"
        group.add_argument(name, default=value, help=text, **kind, **options)

    add("--epochs", 100, "passes over the samples")
    add("--batch-size", 256, "samples per update, over all replicas")
    group.add_argument(
        "--trace",
        help="batch size of every step instead: a CSV file with columns step,batchsize "
        "or numbers with commas; begins again when it ends",
    )
    add("--minibatch-size", 32, "samples in one forward pass of one replica")
    add("--ref-batchsize", 256, "batch size at which --lr was tuned")
    add("--lr", 0.1, "learning rate after the warm-up")
    add("--warmup-epochs", 5.0, "epochs in which the learning rate rises")
    add(
        "--decay",
        "steps",
        "how the learning rate falls: 'steps' divides it by ten after "
        f"{', '.join(map(str, STEP_DECAY))} of the run",
        choices=("steps", "cosine"),
    )
    add("--momentum", 0.9, "momentum of SGD")
    add("--weight-decay", 1e-4, "weight decay of SGD")
    add("--label-smoothing", 0.1, "share of the target that is spread over all classes")
    add("--seed", 0, "seed of weights, masks, order and augmentation")


def add_running(group: argparse._ArgumentGroup) -> None:
    replica_options.add_replicas(group)
    add = group.add_argument
    add(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="save the run in this folder after every epoch, every 10 minutes, and on "
        "SIGTERM and Ctrl-C; a run that is there is resumed, on any number of replicas",
    )
    add(
        "--eval-batch-size",
        type=int,
        default=64,
        help="samples in one forward pass of an evaluation (default: 64)",
    )
    add(
        "--log-steps",
        type=int,
        default=10,
        help="updates from one reading of the loss to the next (default: 10)",
    )
    add("--logdir", help="folder of TensorBoard logs (default: runs/imagenet-TIME)")
    add(
        "--no-progress",
        dest="progress",
        action="store_false",
        help="show no progress bar",
    )
