"""A training script for members of a live run: every family, and a record of samples.

    python member.py FOLDER [--workers N] [--kind KIND] [...]

Its folder gets the log, the checkpoints, a file for every member that has ended well,
and a line for every update that a member has made with the samples that it ran for it.
If somebody writes a number into its file `end`, it ends after so many updates.
"""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler
from rigl_xla import RigLScheduler
from support.variable_batch_size.sharded import whole
from xla_replica.backends import overlapped_sum

NUM_SAMPLES, MINIBATCH = 384, 8
KINDS = ("plain", "adascale", "tokens", "projected", "group", "rigl")
TRACE = [8 * number for number in (1, 3, 6, 4, 2, 5)]


class Evaluation:
    """A collective of the user's own, after every seventh update."""

    def __init__(self, model: nn.Module, replica: xla_replica.Replica) -> None:
        self._weight, self._replica = replica.local(model[0].weight), replica

    def __call__(self, update: vbs.Update) -> None:
        if update.step % 7 == 0:
            self._replica.all_reduce_([self._weight.detach().sum().reshape(1)])


class Record:
    """Writes which samples this member runs for which attempt at a step."""

    def __init__(self, path: Path, optimizer: vbs.ElasticOptimizer) -> None:
        self._path, self._optimizer = path, optimizer
        self._replica, self._generation, self._num_dropped = optimizer.replica, "", 0

    def _write(self, step: int, **values: Any) -> None:
        met = getattr(self._replica, "met", None)
        generation = met.lineage if met else os.environ.get("MEMBER_GENERATION", "")
        if self._generation != generation:
            self._generation, self._num_dropped = generation, 0
        line = {"step": step, "generation": generation, **values}
        with self._path.open("a") as file:
            file.write(json.dumps({**line, "attempt": self._num_dropped}) + "\n")

    def run(self, samples: list[int]) -> None:
        if self._optimizer.is_padding:
            return
        epoch, step, _ = self._optimizer.place
        first = self._optimizer.sampler.schedule.steps(epoch).start
        self._write(first + step, samples=samples)

    def __call__(self, update: vbs.Update) -> None:
        self._write(update.step, batch_size=update.batch_size)
        self._num_dropped = 0

    def drop_step(self) -> None:
        self._num_dropped += 1


class Over(Exception):
    """The run has made the updates that it was told to make."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="plain")
    for name, default in (("workers", 0), ("epochs", 3), ("save-every", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--minibatch-seconds", type=float, default=0.0)
    parser.add_argument("--float", action="store_true", help="sums of float64")
    parser.add_argument("--shards", action="store_true", help="sharded in a member")
    parser.add_argument("--follow", action="store_true", help="batches follow members")
    parser.add_argument("--log-steps", type=int, default=1)
    parser.add_argument("--save-last", action="store_true", help="after the loop")
    parser.add_argument("--trace", type=Path, help="what such a run has decided")
    parser.add_argument("--hashes", action="store_true", help="after every update")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(message)s"
    )
    torch.set_num_threads(1)
    if options.float:
        if "PJRT_DEVICE" not in os.environ:
            torch.set_default_dtype(torch.float64)
        # Several sums are under way at once.
        overlapped_sum.FIRST_BUCKET_BYTES = overlapped_sum.BUCKET_BYTES = 512
    torch.manual_seed(0)
    replica, folder = xla_replica.current(), options.folder
    name = os.environ.get("MEMBER_NAME", "alone")
    # Small images, labels and the numbers of the samples.
    differs = os.environ.get("MEMBER_DIFFERS")  # this member alone, in this
    generator = torch.Generator().manual_seed(int(differs == "data"))
    images = torch.randn(NUM_SAMPLES, 1, 6, 6, generator=generator)
    labels = (images.mean((1, 2, 3)) > 0).long()
    data = TensorDataset(images, labels, torch.arange(NUM_SAMPLES))
    is_group, are_sums = options.kind == "group", options.kind == "tokens"
    orders = is_group or options.kind == "projected"  # by gradients of single samples
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8) if orders else nn.BatchNorm2d(8),
        nn.ReLU(), nn.Dropout(0.2 if differs == "dropout" else 0.1), nn.Flatten(),
        nn.Linear(128, 2),
    ).to(replica.device)  # fmt: skip
    if options.shards and torch.distributed.is_initialized():
        for module in (model[5], model):
            fully_shard(module)
    grab = orders and GraBSampler(
        data, dict(model.named_parameters()), fidelity=options.kind,
        scheme="gather", exact=True, projection_size=None if is_group else 24,
        group_size=MINIBATCH if is_group else None,
    )  # fmt: skip
    sampler = vbs.CustomSampler(
        data, options.trace or ([16] if options.follow else TRACE),
        minibatch_size=MINIBATCH, order=grab or None,
        on_end="hold" if options.follow or options.trace else "cycle",
        seed=int(os.environ.get("MEMBER_SEED", "0")),
    )  # fmt: skip
    optimizer = vbs.ElasticOptimizer(
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), sampler,
        "adascale" if options.kind == "adascale" else "linear", 16,
        exact=None if options.float else model, compare_every=10,
        max_grad_norm=1.0, reduction="sum" if are_sums else "mean",
    )  # fmt: skip
    log = vbs.RunLog(folder / "run.jsonl", optimizer, log_steps=options.log_steps)
    parts = {"model": model, "log": log, **({"grab": grab} if grab else {})}
    if options.kind == "rigl":
        parts["pruner"] = RigLScheduler(
            model, optimizer, dense_allocation=0.3, T_end=40, delta=4, skip_step=False,
            dense_first=False, ignore_linear_layers=False,
        )  # fmt: skip
    checkpointer = vbs.Checkpointer(
        folder / "checkpoints", optimizer, every_updates=options.save_every, **parts
    )
    record = Record(folder / f"{name}.samples", optimizer)
    decay = 0.8 if differs == "scheduler" else 0.9
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: decay ** (n // 10)
    )
    for target in (record, Evaluation(model, replica), scheduler):
        optimizer.attach(target)  # the rest once the run has been joined
    checkpointer.num_epochs = options.epochs + (differs == "epochs")  # as vbs.epochs
    checkpointer.load()
    (folder / f"{name}.ready").touch()
    if differs == "attached":
        optimizer.attach(print)
    if grab:
        optimizer.attach(grab.after_update)
    if options.follow:
        controller = vbs.BatchSizeController(
            optimizer, least=8, most=64, factor=1.01, policy=vbs.per_replica(8),
            trace_file=folder / "decided.csv", log=log,
        )  # fmt: skip
        optimizer.attach(controller)

    def found() -> list[torch.Tensor]:
        values = whole(model.state_dict().values())
        if grab:
            values.append(torch.tensor(grab.order))
        if options.kind == "rigl":
            values += parts["pruner"].masks.values()
        return replica.fetch([value.detach() for value in values])

    def digest() -> str:
        content = b"".join(value.numpy().tobytes() for value in found())
        return hashlib.sha256(content).hexdigest()[:16]

    hashes: dict[int, str] = {}  # by number of updates

    def end_where_told(update: vbs.Update | None = None) -> None:
        end, number = folder / "end", checkpointer.num_updates
        if options.hashes:
            hashes[number] = digest()
        if end.exists() and number == int(end.read_text()):
            raise Over

    for target in (log, checkpointer, end_where_told):
        optimizer.attach(target)
    loader = replica.loader(
        DataLoader(data, batch_sampler=sampler, num_workers=options.workers)
    )

    def train(epoch: int) -> None:
        optimizer.set_epoch(epoch)
        for images, labels, indices in loader:
            time.sleep(options.minibatch_seconds)
            record.run(indices.tolist())
            tokens = indices % 3 + 1  # as if samples were texts
            images, labels, weights = replica.send((images, labels, tokens.float()))
            with grab.record(model) if grab else contextlib.nullcontext():
                losses = nn.functional.cross_entropy(
                    model(images), labels, reduction="none"
                )
            loss = (losses * weights).sum() if are_sums else losses.mean()
            if grab:
                grab.backward(losses, indices=indices)
            else:
                loss.backward()
            log.add(loss)
            optimizer.step(weight=int(tokens.sum()) if are_sums else None)

    num_compilations = []  # by epoch
    alone = getattr(replica, "_inner", replica)  # whose barriers wait for nobody
    with contextlib.suppress(Over):
        end_where_told()
        for epoch in range(sampler.epoch, options.epochs):
            sampler.set_epoch(epoch)
            with xla_replica.count(alone) as count, contextlib.suppress(Over):
                train(epoch)
            num_compilations.append(count.compilations)
            end_where_told()
    if options.save_last:
        checkpointer.save()
    log.close()
    result = {"hash": digest(), "num_updates": checkpointer.num_updates}
    if options.hashes:
        result["hashes"] = hashes
    if options.float:
        torch.save(found(), folder / f"{name}.values")
    (folder / f"{name}.compilations").write_text(json.dumps(num_compilations))
    written = folder / f"{name}-{replica.rank}.result"
    written.write_text(json.dumps(result))
    written.rename(written.with_suffix(".json"))  # whole, for who looks meanwhile


if __name__ == "__main__":
    main()
