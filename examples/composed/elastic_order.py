"""Trains digits with a changing batch size, in the order that GraB chooses.

`variable_batch_size` cuts the steps of a trace out of the order that `grab_xla` makes
of every sample's gradient. Run it in its folder, and again to resume, on any number of
replicas. docs/tutorial.md comes to this script in four stages.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler


def load():
    """Training samples, and images and labels to test with."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    first, last = mixed[:1440], mixed[1440:]
    return TensorDataset(images[first], labels[first]), images[last], labels[last]


def build_model():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def accuracy(model, images, labels):
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def train(rank, args):
    replica = xla_replica.current()
    training, images, labels = load()
    images, labels = replica.send((images, labels))
    with replica.seeded(0):  # the same weights in every run
        model = build_model()
    replica.setup(model)
    grab = GraBSampler(training, dict(model.named_parameters()))
    sampler = vbs.CustomSampler(
        training, args.trace, minibatch_size=32, on_end="cycle", order=grab
    )
    loader = DataLoader(training, batch_sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(optimizer, sampler, ref_batchsize=32)
    run = {"checkpoint": args.checkpoint, "log": f"{args.checkpoint}/run.jsonl"}
    run["settings"] = {"lr": args.lr}
    for epoch in vbs.epochs(optimizer, loader, args.epochs, model=model, **run):
        for x, y in epoch:
            with grab.record(model):
                losses = F.cross_entropy(model(x), y, reduction="none")
            grab.backward(losses)
            epoch.add(losses.mean())
            optimizer.step()
        percent = 100 * accuracy(model, images, labels)
        if replica.is_primary:
            print(f"epoch {epoch.number}: test accuracy {percent:.2f} %", flush=True)
        epoch.write(accuracy=percent)


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="default: 10")
    add("--lr", type=float, default=0.02, help="for 32 samples (default: 0.02)")
    add("--trace", default="trace.csv", help="default: trace.csv")
    add("--checkpoint", default="checkpoints", help="default: checkpoints")
    add("--num-replicas", type=int, help="default: all chips or GPUs, else 1")
    add("--device", choices=xla_replica.DEVICES, help="default: the best there is")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse()
    xla_replica.launch(train, (args,), args.num_replicas, args.device)
