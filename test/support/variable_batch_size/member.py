"""A training script for members of a live run: every family, and a record of samples.

    python member.py FOLDER [--workers N] [--kind plain|grab|rigl] [...]

Its folder gets the log, the checkpoints, a file for every member that has ended well,
and a line for every update that a member has made with the samples that it ran for it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler
from rigl_xla import RigLScheduler

NUM_SAMPLES, MINIBATCH = 384, 8
TRACE = [8 * number for number in (1, 3, 6, 4, 2, 5)]


class Samples(Dataset):
    """Small images, labels and the numbers of the samples."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(NUM_SAMPLES, 1, 6, 6, generator=generator)
        self.labels = (self.images.mean((1, 2, 3)) > 0).long()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int):
        return self.images[index], self.labels[index], index


def main() -> None:
    """Trains, from wherever the others are."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--kind", choices=("plain", "grab", "rigl"), default="plain")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minibatch-seconds", type=float, default=0.0)
    parser.add_argument("--save-every", type=int, default=5)
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(message)s"
    )
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    replica = xla_replica.current()
    data = Samples()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
        nn.Flatten(), nn.Linear(128, 2),
    )  # fmt: skip
    if options.kind == "grab":  # whose gradients are those of single samples
        model[1] = nn.GroupNorm(2, 8)
    model.to(replica.device)
    grab = None
    if options.kind == "grab":
        grab = GraBSampler(
            data, dict(model.named_parameters()), fidelity="projected",
            projection_size=24, scheme="gather", exact=True,
        )  # fmt: skip
    sampler = vbs.CustomSampler(
        data, TRACE, minibatch_size=MINIBATCH, on_end="cycle", order=grab
    )
    optimizer = vbs.LinearRuleOptimizer(
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), sampler,
        ref_batchsize=16, exact=model, max_grad_norm=1.0,
    )  # fmt: skip
    parts = {"model": model, "log": vbs.RunLog(options.folder / "run.jsonl", optimizer)}
    if grab is not None:
        parts["grab"] = grab
    if options.kind == "rigl":
        parts["pruner"] = RigLScheduler(
            model, optimizer, dense_allocation=0.3, T_end=40, delta=4, skip_step=False,
            dense_first=False, ignore_linear_layers=False,
        )  # fmt: skip
    checkpointer = vbs.Checkpointer(
        options.folder / "checkpoints", optimizer, every_updates=options.save_every,
        **parts,
    )  # fmt: skip
    checkpointer.load()
    (options.folder / f"{os.getpid()}.ready").touch()
    ran: list[int] = []

    def evaluate(update: vbs.Update) -> None:
        """Is a collective of the user's own."""
        if update.step % 7 == 0:
            total = model[0].weight.detach().sum().reshape(1)
            replica.all_reduce_([total])

    def record(update: vbs.Update) -> None:
        line = {"step": update.step, "samples": sorted(ran), "member": os.getpid()}
        ran.clear()
        with (options.folder / f"{os.getpid()}.samples").open("a") as file:
            file.write(json.dumps(line) + "\n")

    record.drop_step = ran.clear
    optimizer.attach(torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9))
    if grab is not None:
        optimizer.attach(grab.after_update)
    for target in (record, evaluate, parts["log"], checkpointer):
        optimizer.attach(target)
    loader = replica.loader(
        DataLoader(data, batch_sampler=sampler, num_workers=options.workers)
    )
    for epoch in range(sampler.epoch, options.epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for images, labels, indices in loader:
            time.sleep(options.minibatch_seconds)
            ran += indices.tolist()
            if grab is None:
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
            else:
                with grab.record(model):
                    losses = nn.functional.cross_entropy(
                        model(images), labels, reduction="none"
                    )
                grab.backward(losses, indices=indices)
                loss = losses.mean()
            parts["log"].add(loss)
            optimizer.step()
    parts["log"].close()
    values = [*model.state_dict().values()]
    if options.kind == "grab":
        values.append(torch.tensor(grab.order))
    if options.kind == "rigl":
        values += parts["pruner"].masks.values()
    values = [value.detach() for value in values]
    content = b"".join(value.numpy().tobytes() for value in replica.fetch(values))
    result = {
        "hash": hashlib.sha256(content).hexdigest()[:16],
        "num_updates": checkpointer.num_updates,
    }
    (options.folder / f"{os.getpid()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
