"""Command line options that the examples share."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import variable_batch_size as vbs
from examples.common.replica_options import add_replicas, check_at_least_one
from grab_xla import BALANCE_TYPES, FIDELITIES, ordering_named

# Options of balance types that come from the command line.
ORDER_OPTIONS = ("batch_size", "depth")


def _option_names(order: str, required: bool = False) -> set[str]:
    return {
        field.name
        for field in dataclasses.fields(BALANCE_TYPES[order])
        if not required or field.default is dataclasses.MISSING
    }


# The other types need objects: the order itself, or the model and its loss.
ORDERS = tuple(
    name
    for name in BALANCE_TYPES
    if _option_names(name, required=True) <= set(ORDER_OPTIONS)
)
PROJECTIONS = ("none", "jl", "jl_sparse", "kron")

# Options that may change when a run is resumed.
MAY_CHANGE = {
    "order", "seed", "seeds", "epochs", "num_replicas", "device", "data_dir", "logdir",
    "checkpoint", "checkpoint_steps", "resume", "log_steps", "progress",
    "check_gradients", "eval_batch_size",
}  # fmt: skip


def add_shared(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Adds the options of both examples, with the ``defaults`` of the task."""
    _add_orders(parser.add_argument_group("orders"))
    _add_training(parser.add_argument_group("training"), defaults)
    _add_running(parser.add_argument_group("replicas, checkpoints, logs"))


def _add_orders(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--order",
        action="append",
        metavar="NAME[,NAME...]",
        help="orders to compare, separated by commas or by repeating the option: "
        f"{', '.join(ORDERS)} (default: rr,mean)",
    )
    add("--seeds", type=int, default=1, help="seeds for every order (default: 1)")
    add("--seed", type=int, default=0, help="the first seed (default: 0)")
    add("--depth", type=int, default=5, help="depth of 'recursive' (default: 5)")
    add(
        "--fidelity",
        choices=FIDELITIES,
        help="balance gradients, projections that no gradient is formed for, or mean "
        "gradients of minibatches that stay together (default: that of GraBSampler)",
    )
    add(
        "--projection-size",
        type=int,
        default=4096,
        help="numbers in such a projection (default: 4096)",
    )
    add(
        "--random-projection",
        choices=PROJECTIONS,
        default="none",
        help="balance random projections of the gradients (default: none)",
    )
    add(
        "--pi-eps",
        type=float,
        default=0.1,
        help="factor by which a projection may change distances (default: 0.1)",
    )
    add(
        "--normalize-grads",
        action="store_true",
        help="balance gradients of norm one",
    )
    add(
        "--prob-balance",
        action="store_true",
        help="draw signs by the self-balancing walk",
    )
    add(
        "--herding",
        choices=("exact", "running"),
        help="measure the herding of every epoch: 'exact' keeps all gradients of an "
        "epoch, 'running' centres by the mean of the previous epoch (default: no)",
    )


def _add_training(group: argparse._ArgumentGroup, defaults: dict[str, Any]) -> None:
    def add(name: str, help: str, **options: Any) -> None:
        value = defaults[name[2:].replace("-", "_")]
        group.add_argument(
            name, default=value, help=f"{help} (default: {value})", **options
        )

    add("--epochs", "number of passes over the data", type=int)
    add("--batch-size", "samples per step, over all replicas; with --trace those that "
        "--lr is for", type=int)  # fmt: skip
    add("--optimizer", "optimizer of torch.optim", choices=("sgd", "adamw"))
    add("--lr", "learning rate", type=float)
    add("--momentum", "momentum of sgd", type=float)
    add("--weight-decay", "weight decay of the optimizer", type=float)
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="CSV with the batch size of every step, as variable_batch_size reads it; "
        "the learning rate follows, linearly for sgd, by its root for adamw",
    )
    group.add_argument(
        "--minibatch-size",
        type=int,
        help="with --trace: samples that the model sees at a time, of which every "
        "batch size is a multiple (default: --batch-size)",
    )
    group.add_argument(
        "--bf16",
        action="store_true",
        help="compute forward passes in bfloat16 where torch.autocast does",
    )
    group.add_argument(
        "--eval-batch-size",
        type=int,
        default=256,
        help="samples per forward pass in evaluation, over all replicas (default: 256)",
    )
    group.add_argument(
        "--check-gradients",
        action=argparse.BooleanOptionalAction,
        help="compare the per-sample gradients of a few samples with autograd before "
        "training (default: where programs are compiled)",
    )


def _add_running(group: argparse._ArgumentGroup) -> None:
    add_replicas(group)
    add = group.add_argument
    add("--checkpoint", metavar="DIR", help="save every run there after every epoch")
    add(
        "--checkpoint-steps",
        type=int,
        help="also save after every so many steps of an epoch",
    )
    add("--resume", action="store_true", help="resume from what --checkpoint DIR holds")
    add(
        "--logdir",
        help="folder of TensorBoard logs, tables and the picture "
        "(default: runs/NAME-TIME)",
    )
    add(
        "--log-steps",
        type=int,
        default=10,
        help="read the loss back every so many steps (default: 10)",
    )
    add("--no-progress", dest="progress", action="store_false", help="no progress bars")


def finish(
    parser: argparse.ArgumentParser, args: argparse.Namespace, name: str
) -> None:
    """Completes and checks the options of `add_shared`; a mistake ends the script."""
    args.order = [o for text in args.order or ["rr,mean"] for o in text.split(",")]
    args.order = list(dict.fromkeys(args.order))
    args.logdir = args.logdir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    at_least_one = ("seeds", "epochs", "batch_size", "eval_batch_size", "num_replicas",
                    "checkpoint_steps", "log_steps", "minibatch_size")  # fmt: skip
    check_at_least_one(parser, args, at_least_one)
    if args.minibatch_size and not args.trace:
        parser.error("--minibatch-size needs --trace FILE")
    if args.trace:
        args.minibatch_size = args.minibatch_size or args.batch_size
        try:
            vbs.Trace(args.trace)
        except (OSError, vbs.TraceError) as error:
            parser.error(f"--trace: {error}")
    elif args.batch_size % (args.num_replicas or 1):
        parser.error(
            f"--batch-size {args.batch_size} is not a multiple of --num-replicas "
            f"{args.num_replicas}"
        )
    if (args.resume or args.checkpoint_steps) and not args.checkpoint:
        parser.error("--resume and --checkpoint-steps need --checkpoint DIR")
    for order in args.order:
        if order not in ORDERS:
            parser.error(f"--order {order}: allowed are {', '.join(ORDERS)}")
        try:
            ordering_named(order, **order_options(order, args))
        except (TypeError, ValueError) as error:
            parser.error(f"--order {order}: {error}")
    if args.checkpoint and not args.resume:
        for path in checkpoint_paths(args).values():
            if path.exists():
                parser.error(
                    f"{path} holds a run: add --resume to continue it, or choose "
                    "another --checkpoint"
                )


def checkpoint_paths(args: argparse.Namespace) -> dict[tuple[str, int], Path]:
    """Returns the file of every run, by its order and seed."""
    return {
        (order, seed): Path(args.checkpoint, f"{order}-seed{seed}.pt")
        for order in args.order
        for seed in range(args.seed, args.seed + args.seeds)
    }


def order_options(order: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of the balance type."""
    names = _option_names(order) & set(ORDER_OPTIONS)
    return {name: getattr(args, name) for name in names}


def balances(order: str, args: argparse.Namespace) -> bool:
    """Returns whether a run needs gradients for its order, or to measure it."""
    return BALANCE_TYPES[order].needs_gradients or args.herding is not None


def sampler_options(
    order: str, args: argparse.Namespace, minibatch_size: int
) -> dict[str, Any]:
    """Returns all options of the `GraBSampler` except the seed."""
    options = order_options(order, args)
    # Other orders are of samples: random reshuffling of groups is another baseline.
    if args.fidelity and balances(order, args):
        options["fidelity"] = args.fidelity
        if args.fidelity == "group":
            options["group_size"] = minibatch_size
    return options | {
        "projection_size": args.projection_size,
        "random_projection": args.random_projection,
        "pi_eps": args.pi_eps,
        "normalize_grads": args.normalize_grads,
        "prob_balance": args.prob_balance,
        "record_herding": args.herding is not None,
        "stale_mean_herding": args.herding == "running",
    }


def lasting(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that must not change when a run is resumed."""
    return {name: value for name, value in vars(args).items() if name not in MAY_CHANGE}
