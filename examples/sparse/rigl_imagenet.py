"""Trains ImageNet with a sparse network whose connections move.

    python examples/sparse/rigl_imagenet.py --fake-data --model small --image-size 32 \\
        --num-classes 10 --epochs 3                      # a minute on a CPU
    python examples/sparse/rigl_imagenet.py --data imagenet  # ResNet-50, 80 %, ERK
    python examples/sparse/rigl_imagenet.py --data imagenet --sparsity 0.9 \\
        --epochs 500 --checkpoint saved  # RigL 5x; run again to resume
    python examples/sparse/rigl_imagenet.py --data imagenet --trace trace.csv
    python examples/sparse/rigl_imagenet.py --fake-data --num-replicas 2 --device xla
    PJRT_DEVICE=TPU python examples/sparse/rigl_imagenet.py --data imagenet
    torchrun --rdzv_backend c10d --nproc_per_node 4 \\
        examples/sparse/rigl_imagenet.py --data imagenet

--data is a folder with the folders train and val, and in each of them one folder of
images for every class. The defaults are those of the paper (arXiv:1911.11134): with
100 epochs it reports a top-1 accuracy of 76.8 % dense; 75.1 % and 73.0 % for 80 % and
90 % sparse with ERK, 74.6 % and 72.0 % with uniform sparsities, and up to a point and a
half more with five times as many epochs. The learning rate is --lr for --ref-batchsize
samples and scales with the batch size; with a trace, with that of every step.

Masked training runs dense kernels, so it is not faster. At the end the script prints
what hardware that skips zeros would save. The lines that make it sparse are marked
`# sparse`.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # a checkout that was not installed works too

import variable_batch_size as vbs  # noqa: E402
import xla_replica  # noqa: E402
from examples.common.image_models import image_model  # noqa: E402
from examples.common.run_display import Display  # noqa: E402
from examples.sparse import (  # noqa: E402
    imagenet_data,
    sparse_training,
)
from examples.sparse.imagenet_options import STEP_DECAY, lasting, parse  # noqa: E402
from rigl_xla import Report, RigLScheduler, operations_of  # noqa: E402
from xla_replica import Replica  # noqa: E402

# A large model's first program may take this many seconds to compile.
TIMEOUT = 1800.0

Images = imagenet_data.FakeImages | imagenet_data.FolderImages
Row = dict[str, Any]


class Pixels(nn.Module):
    """Turns 8-bit images into numbers of about mean 0 and variance 1."""

    def __init__(self) -> None:
        super().__init__()
        for name, rgb in {
            "mean": (0.485, 0.456, 0.406),
            "deviation": (0.229, 0.224, 0.225),
        }.items():
            values = 255 * torch.tensor(rgb).reshape(3, 1, 1)
            self.register_buffer(name, values, persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float() - self.mean) / self.deviation


def build_model(args: argparse.Namespace, num_classes: int) -> nn.Module:
    """Returns a model from ``(B, 3, side, side)`` uint8 to ``(B, num_classes)``."""
    if args.model == "small":
        return image_model("resnet18", 3, args.image_size, num_classes, args.width)
    from torchvision.models import get_model

    return nn.Sequential(Pixels(), get_model(args.model, num_classes=num_classes))


def load(args: argparse.Namespace) -> tuple[Images, Images]:
    """Returns training and validation images."""
    side, seed = args.image_size, args.seed
    if args.fake_data:
        few = max(1, args.num_samples // 10)
        classes = args.num_classes
        return (
            imagenet_data.FakeImages(args.num_samples, classes, side, 2 * seed),
            imagenet_data.FakeImages(few, classes, side, 2 * seed + 1),
        )
    return (
        imagenet_data.FolderImages(args.data / "train", side, seed),
        imagenet_data.FolderImages(args.data / "val", side, None),
    )


def lr_factor(warmup: float, decay: str, num_steps: int, step: int) -> float:
    """Returns the factor of the reference learning rate at a step.

    Args:
        warmup: Steps in which the factor rises from near 0 to 1.
        decay: ``'cosine'`` or ``'steps'``.
        num_steps: Steps of the whole run, of ``ref_batchsize`` samples each.
        step: The number of the step, from 0.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if decay == "steps":
        return 0.1 ** sum(step >= share * num_steps for share in STEP_DECAY)
    progress = min(1.0, (step - warmup) / max(1.0, num_steps - warmup))
    return (1 + math.cos(math.pi * progress)) / 2


class Monitor:
    """Follows the loss on every replica, and shows it on the primary replica."""

    def __init__(
        self,
        replica: Replica,
        display: Display,
        report: Callable[[], Report],
        every: int,
    ) -> None:
        self._replica, self._display, self._every = replica, display, every
        self.report = report
        self.rows: list[Row] = []  # of the epochs that are done
        # Sum of losses and number of minibatches, since the last log and in the epoch.
        self._recent, self._total = torch.zeros(2, 2, device=replica.device)

    def minibatch(self, loss: torch.Tensor) -> None:
        """Adds a minibatch's loss, on the device."""
        one = torch.stack([loss.detach(), torch.ones_like(loss.detach())])
        self._recent += one
        self._total += one

    def __call__(self, update: vbs.Update) -> None:
        if (update.step + 1) % self._every == 0:
            loss = self._mean(self._recent)
            more = {"lr": float(update.lr[0]), "batch_size": update.batch_size}
            self._display.steps(update.step + 1, loss, **more)
            if self._display.writer:  # sparse: the device has just been read
                report = self.report()
                for name, value in report.scalars().items():
                    self._display.writer.add_scalar(f"rigl/{name}", value, report.step)

    def epoch_loss(self) -> float:
        """Returns the mean over all minibatches since the last call. Collective."""
        return self._mean(self._total)

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums over all replicas. Collective."""
        sums = torch.stack([self._recent, self._total])
        self._replica.all_reduce_([sums])
        return {"rows": self.rows, "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = list(state["rows"])
        if self._replica.is_primary:  # the others begin with zeros
            self._recent.copy_(state["sums"][0])
            self._total.copy_(state["sums"][1])

    def _mean(self, sums: torch.Tensor) -> float:
        total = sums.clone()
        self._replica.all_reduce_([total])
        sums.zero_()
        loss, minibatches = self._replica.fetch([total])[0].tolist()
        return loss / max(minibatches, 1)


class Parts(NamedTuple):
    """The parts of a run."""

    model: nn.Module
    batches: DataLoader[Any]
    optimizer: vbs.ElasticOptimizer
    pruner: RigLScheduler
    display: Display
    monitor: Monitor
    log: vbs.RunLog
    checkpointer: vbs.Checkpointer | None


def build(args: argparse.Namespace, training: Images, replica: Replica) -> Parts:
    """Returns a run at its beginning, or at the position of its checkpoint."""
    with replica.seeded(args.seed):
        model = build_model(args, training.num_classes)
    image = torch.zeros(1, 3, args.image_size, args.image_size, dtype=torch.uint8)
    operations = operations_of(model, image)  # sparse
    model.to(replica.device)
    replica.seed(args.seed)  # dropout
    sampler = vbs.CustomSampler(
        training,
        args.trace,
        args.seed,
        minibatch_size=args.minibatch_size,
        on_end="cycle",
        verbose=False,
    )
    batches = DataLoader(
        training,
        batch_sampler=sampler,
        num_workers=args.num_workers,
        generator=torch.Generator(),  # so that it draws none of the model's numbers
    )
    sgd = torch.optim.SGD(
        model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay
    )
    optimizer = vbs.LinearRuleOptimizer(sgd, sampler, args.ref_batchsize)
    scheduler = lr_scheduler(args, sampler, optimizer)
    num_updates = sparse_training.num_updates(sampler, args.epochs)
    pruner = sparse_training.pruner_for(args, model, optimizer, num_updates)  # sparse
    display = Display("train", args, num_updates, 0, replica)
    report = functools.partial(pruner.report, operations, num_updates)  # sparse
    monitor = Monitor(replica, display, report, args.log_steps)
    optimizer.attach(monitor)
    log = vbs.RunLog(
        Path(args.logdir, "train", "run.jsonl"),
        optimizer,
        log_steps=args.log_steps,
        settings=vars(args),
    )
    optimizer.attach(log)
    parts = {"scheduler": scheduler, "pruner": pruner, "monitor": monitor, "log": log}
    checkpointer = checkpointer_for(args, optimizer, model=model, **parts)
    return Parts(model, batches, optimizer, pruner, display, monitor, log, checkpointer)


def checkpointer_for(
    args: argparse.Namespace, optimizer: vbs.ElasticOptimizer, **parts: Any
) -> vbs.Checkpointer | None:
    """Returns a checkpointer that has loaded its folder; None without a folder."""
    if not args.checkpoint:
        return None
    checkpointer = vbs.Checkpointer(
        args.checkpoint, optimizer, best="max", settings=lasting(args), **parts
    )
    checkpointer.load()
    optimizer.attach(checkpointer)
    return checkpointer


def train(rank: int, args: argparse.Namespace) -> list[Row] | None:
    """Trains on one replica; returns a row for every epoch on the primary one."""
    replica = xla_replica.current()
    training, validation = load(args)
    run = build(args, training, replica)
    rows = run.monitor.rows
    for epoch in range(len(rows), args.epochs):
        since = time.perf_counter()
        run_epoch(epoch, run, replica, args.label_smoothing)
        seconds = time.perf_counter() - since
        run.optimizer.average_buffers(run.model)
        run.pruner.check_replicas()  # sparse: raises if masks differ
        loss, accuracy = evaluate(run.model, validation, args, replica)
        rows.append({
            "epoch": epoch + 1, "train_loss": run.monitor.epoch_loss(),
            "test_loss": loss, "test_accuracy": accuracy,
            "seconds": seconds + (rows[-1]["seconds"] if rows else 0.0),
        })  # fmt: skip
        run.display.epoch(rows[-1])
        run.log.write(accuracy=accuracy)
        if run.checkpointer:
            run.checkpointer.save(metric=accuracy)
    run.log.close()
    run.display.close(rows[-1])
    if replica.is_primary:
        print(run.monitor.report())  # sparse
    run.pruner.close()
    return rows if replica.is_primary else None


def lr_scheduler(
    args: argparse.Namespace, sampler: vbs.CustomSampler, optimizer: Any
) -> torch.optim.lr_scheduler.LambdaLR:
    """Returns a scheduler that steps once for every ``ref_batchsize`` samples."""
    steps_per_epoch = sampler.schedule.num_samples / args.ref_batchsize
    num_steps = max(1, int(args.epochs * steps_per_epoch))
    warmup = args.warmup_epochs * steps_per_epoch
    factor = functools.partial(lr_factor, warmup, args.decay, num_steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    optimizer.attach(scheduler, unit="samples", every=args.ref_batchsize)
    return scheduler


def run_epoch(epoch: int, run: Parts, replica: Replica, label_smoothing: float) -> None:
    """Runs this replica's minibatches of an epoch, and updates the weights."""
    run.model.train()
    run.batches.dataset.epoch = epoch
    run.batches.batch_sampler.set_epoch(epoch)
    run.optimizer.set_epoch(epoch)
    for images, labels in replica.loader(run.batches):
        logits = run.model(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
        loss.backward()
        run.monitor.minibatch(loss)
        run.log.add(loss)
        if run.pruner():  # sparse
            run.optimizer.step()
    replica.wait()


@torch.no_grad()
def evaluate(
    model: nn.Module, data: Images, args: argparse.Namespace, replica: Replica
) -> tuple[float, float]:
    """Returns mean loss and top-1 accuracy in percent, over all replicas' samples."""
    mine = np.arange(replica.rank, len(data), replica.num_replicas)
    share = -(-len(data) // replica.num_replicas)
    size = min(args.eval_batch_size, share)
    rows = np.resize(mine if len(mine) else np.zeros(1, int), -(-share // size) * size)
    real = (torch.arange(len(rows)) < len(mine)).float()
    loader = DataLoader(
        data,
        batch_sampler=rows.reshape(-1, size).tolist(),
        num_workers=args.num_workers,
    )

    def batches() -> Iterator[tuple[torch.Tensor, ...]]:
        for (images, labels), weights in zip(loader, real.split(size)):
            yield images, labels, weights

    total = torch.zeros(2, device=replica.device)
    model.eval()
    for images, labels, weights in replica.loader(batches()):
        logits = model(images)
        losses = F.cross_entropy(logits, labels, reduction="none")
        hits = (logits.argmax(1) == labels).float()
        total += torch.stack([(losses * weights).sum(), (hits * weights).sum()])
        replica.sync()
    replica.all_reduce_([total])
    loss, hits = (replica.fetch([total])[0] / len(data)).tolist()
    return loss, 100 * hits


def main(argv: list[str] | None = None) -> list[Row] | None:
    args = parse(argv, __doc__)
    args.logdir = args.logdir or f"runs/imagenet-{time.strftime('%Y%m%d-%H%M%S')}"
    num_replicas = args.num_replicas or xla_replica.default_num_replicas(args.device)
    return xla_replica.launch(
        train, (args,), num_replicas, args.device, timeout=TIMEOUT
    )[0]


if __name__ == "__main__":
    main()
