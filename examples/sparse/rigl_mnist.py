"""Trains handwritten digits with a sparse network whose connections move.

    python examples/sparse/rigl_mnist.py                             # 98 % sparse, RigL
    python examples/sparse/rigl_mnist.py --method static             # a fixed topology
    python examples/sparse/rigl_mnist.py --checkpoint digits  # run again to resume
    python examples/sparse/rigl_mnist.py --num-replicas 3 --trace 96,192
    torchrun --rdzv_backend c10d --nproc_per_node 2 examples/sparse/rigl_mnist.py

The digits are MNIST's if torchvision and a network are there, else those inside
scikit-learn. The lines that make it sparse are marked with `# sparse`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # not installed either

import variable_batch_size as vbs
import xla_replica
from examples.common import replica_options
from examples.sparse import sparse_training
from rigl_xla import RigLScheduler


class Split(NamedTuple):
    """Pixels ``(N, D)`` float32 in [0, 1] and labels ``(N,)`` int64."""

    inputs: torch.Tensor
    labels: torch.Tensor


def load(name: str, folder: str) -> tuple[Split, Split]:
    """Returns training and test digits; ``name`` is 'mnist', 'digits' or 'auto'."""
    if name != "digits":
        try:
            from torchvision.datasets import MNIST

            sets = [
                MNIST(folder, train=train, download=True) for train in (True, False)
            ]
            return tuple(
                Split(s.data.flatten(1).float() / 255, s.targets) for s in sets
            )
        except (ImportError, OSError, RuntimeError) as error:
            if name == "mnist":
                raise
            print(f"no MNIST ({error}); using scikit-learn's digits", file=sys.stderr)
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs = torch.from_numpy(digits.data / 16).float()
    labels = torch.from_numpy(digits.target).to(torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]
    return Split(inputs[train], labels[train]), Split(inputs[test], labels[test])


class Parts(NamedTuple):
    """The parts of a run."""

    model: nn.Module
    sampler: vbs.CustomSampler
    optimizer: vbs.ElasticOptimizer
    pruner: RigLScheduler
    log: vbs.RunLog
    checkpointer: vbs.Checkpointer | None


def build(
    args: argparse.Namespace, training: Split, replica: xla_replica.Replica
) -> Parts:
    """Returns a run at its beginning, or at the position of its checkpoint."""
    width = training.inputs.shape[1]
    with replica.seeded(args.seed):
        model = nn.Sequential(
            nn.Linear(width, 300),
            nn.ReLU(),
            nn.Linear(300, 100),
            nn.ReLU(),
            nn.Linear(100, 10),
        )
    model.to(replica.device)
    trace = sparse_training.trace_of(args.trace)
    sampler = vbs.CustomSampler(
        training.labels,
        trace,
        args.seed,
        minibatch_size=args.minibatch_size,
        on_end="cycle",
        verbose=False,
    )
    sgd = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    optimizer = vbs.LinearRuleOptimizer(sgd, sampler, sampler.plan.batch_size(0))
    num_updates = sparse_training.num_updates(sampler, args.epochs)
    pruner = sparse_training.pruner_for(args, model, optimizer, num_updates)  # sparse
    file = args.checkpoint and args.checkpoint / "run.jsonl"
    log = vbs.RunLog(file, optimizer, settings=vars(args))
    optimizer.attach(log)
    checkpointer = None
    if args.checkpoint:
        checkpointer = vbs.Checkpointer(
            args.checkpoint,
            optimizer,
            best="max",
            settings=lasting(args),
            model=model,
            pruner=pruner,
            log=log,
        )
        last_update = pruner.T_end
        checkpointer.load()
        optimizer.attach(checkpointer)
        if replica.is_primary and pruner.T_end != last_update:
            print(
                f"the topology stays from update {pruner.T_end} on, as this run began; "
                f"a new one of {args.epochs} epochs would stop at {last_update}: for "
                "that give another --checkpoint"
            )
    return Parts(model, sampler, optimizer, pruner, log, checkpointer)


def train(rank: int, args: argparse.Namespace) -> float:
    """Trains on one replica; returns the test accuracy in percent."""
    replica = xla_replica.current()
    training, test = load(args.dataset, args.data)
    model, sampler, optimizer, pruner, log, checkpointer = build(
        args, training, replica
    )
    accuracy = evaluate(model, test, replica)
    if sampler.epoch >= args.epochs and replica.is_primary:
        print(
            f"complete: {sampler.epoch} epochs, test accuracy {accuracy:.2f} %; "
            "continue with more --epochs, or begin another --checkpoint"
        )
    for epoch in range(sampler.epoch, args.epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        batches = ((training.inputs[i], training.labels[i]) for i in sampler)
        for inputs, labels in replica.loader(batches):
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            log.add(loss)
            if pruner():  # sparse
                optimizer.step()
        pruner.check_replicas()
        accuracy = evaluate(model, test, replica)
        log.write(accuracy=accuracy)
        if checkpointer:
            checkpointer.save(metric=accuracy)
        if replica.is_primary:
            report = pruner.report()
            print(
                f"epoch {epoch}: test accuracy {accuracy:.2f} %, "
                f"{report.num_updates} topology updates, the last one moved "
                f"{report.churn:.1%} of the connections; "
                f"{report.exploration_rate:.1%} of all weights were ever active"
            )
    log.close()
    if replica.is_primary:
        print(pruner)
    pruner.close()
    return accuracy


@torch.no_grad()
def evaluate(model: nn.Module, test: Split, replica: xla_replica.Replica) -> float:
    """Returns the percentage of test digits that are recognised."""
    inputs, labels = replica.send(tuple(test))
    right = (model(inputs).argmax(1) == labels).float().mean().reshape(1)
    return 100 * replica.fetch([right])[0].item()


def lasting(args: argparse.Namespace) -> dict[str, object]:
    """Returns the options that a run and its continuation must share."""
    may_change = {"data", "epochs", "replicas", "device", "checkpoint"}
    return {name: value for name, value in vars(args).items() if name not in may_change}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dataset",
        choices=["auto", "mnist", "digits"],
        default="auto",
        help="digits to train on; 'auto': MNIST if it is available (default: auto)",
    )
    parser.add_argument(
        "--data", default="data", help="folder of MNIST (default: data)"
    )
    sparse_training.add_sparse(
        parser, sparsity=0.98, distribution="erk", method="rigl", delta=20, alpha=0.3,
        t_end_fraction=0.75, initial_weights="rescale",
    )  # fmt: skip
    parser.add_argument(
        "--epochs",
        type=int,
        default=40,
        help="passes over the digits; a run that is resumed with more of them keeps "
        "the end of topology updates that it began with (default: 40)",
    )
    parser.add_argument(
        "--trace",
        default="96",
        help="batch sizes of the steps, with commas, or a CSV file (default: 96)",
    )
    parser.add_argument(
        "--minibatch-size",
        type=int,
        default=32,
        help="samples in one forward pass of one replica (default: 32)",
    )
    parser.add_argument(
        "--lr", type=float, default=0.1, help="learning rate (default: 0.1)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of weights, masks and order (default: 0)",
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="folder that a run is saved in and resumed from"
    )
    replica_options.add_replicas(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> float:
    args = arguments(argv)
    results = xla_replica.launch(train, (args,), args.num_replicas, args.device)
    return results[0]


if __name__ == "__main__":
    main()
