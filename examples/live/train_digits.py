"""Trains digits by an ordinary loop, alone or as a member of a live run.

Nothing here knows of other members but `show`, which tells who they are. Started with
LIVE_LIGHTHOUSE in its environment, the script joins those that train already.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
import xla_replica

TRACE = Path(__file__).with_name("trace.csv")


def load():
    """Training samples, and images and labels to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    first, last = mixed[:1440], mixed[1440:]
    return TensorDataset(images[first], labels[first]), images[last], labels[last]


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2),
        nn.Flatten(), nn.Linear(16 * 6 * 6, 10),
    )  # fmt: skip


def accuracy(model, images, labels):
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def train(rank, args):
    replica = xla_replica.current()
    if replica.has_streams:  # all members compute the same bits of the same minibatch
        torch.use_deterministic_algorithms(True)
    training, images, labels = load()
    torch.manual_seed(0)
    model = build_model().to(replica.device)
    sampler = vbs.CustomSampler(training, TRACE, minibatch_size=16)
    loader = DataLoader(training, batch_sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(
        optimizer, sampler, ref_batchsize=48, exact=model
    )

    def show(update):
        names = replica.all_gather(torch.tensor([ord(args.name)]))
        if replica.is_primary:
            members = " ".join(map(chr, names.flatten().tolist()))
            print(f"update {update.step} is by {members}", flush=True)

    optimizer.attach(show)
    log = vbs.RunLog(args.folder / "run.jsonl", optimizer, log_steps=1)
    run = {"checkpoint": args.folder / "checkpoints", "log": log, "progress": False}
    for epoch in vbs.epochs(optimizer, loader, args.epochs, model=model, **run):
        for x, y in epoch:
            time.sleep(args.minibatch_seconds)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            epoch.add(loss)
            optimizer.step()
    if replica.is_primary:
        model.cpu()
        torch.save(model.state_dict(), args.folder / "weights.pt")
        percent = 100 * accuracy(model, images, labels)
        print(f"test accuracy {percent:.1f} %", flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="for checkpoints, log and weights")
    add("--name", default="A", help="a letter to show for this member (default: A)")
    add("--epochs", type=int, default=10, help="default: 10")
    help = "sleep for so long in every minibatch, as if it were a large one"
    add("--minibatch-seconds", type=float, default=0.0, help=help)
    return parser.parse_args()


if __name__ == "__main__":
    # It hangs if kill_and_join.py asks for it, as in a read from a lost file system.
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))
    torch.set_num_threads(1)  # all members need as many as each other
    xla_replica.launch(train, (parse(),))
