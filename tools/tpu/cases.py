"""Short runs of what the packages do, whose programs are compiled for TPUs.

Every case runs on emulated replicas, and torch_xla writes what it gives to XLA. Run as
a script, it runs some cases one after the other:

    XLA_SAVE_TENSORS_FILE=programs XLA_SAVE_TENSORS_FMT=hlo \\
        python tools/tpu/cases.py --num-replicas 8 "elastic step, linear"
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import per_sample_grad as psg
import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler
from rigl_xla import RigLScheduler
from tools.tpu import large_models
from tools.tpu.program_checks import CASE_MARK, LAST_STEP_MARK
from tools.tpu.tracing import tracing

CLASSES = 10
Run = Callable[[], None]


def cnn() -> nn.Module:
    """Returns two convolutions with BatchNorm, and a classifier, for 28 x 28 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 49, CLASSES),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
        nn.Linear(512, CLASSES),
    )  # fmt: skip


class Block(nn.Module):
    """Attention and a perceptron, each after a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        heads = self.inputs(self.first(tokens)).unflatten(2, (3, self.num_heads, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        scores = queries @ keys.transpose(2, 3) / queries.shape[3] ** 0.5
        mixed = (scores.softmax(3) @ values).transpose(1, 2).flatten(2)
        tokens = tokens + self.outputs(mixed)
        return tokens + self.perceptron(self.second(tokens))


class VisionTransformer(nn.Module):
    """A classifier of patches of 4 x 4 pixels (Dosovitskiy et al., arXiv:2010.11929).

    Without a class token: the mean of the last block's tokens is classified.
    """

    def __init__(self, width: int, num_heads: int, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 64, width))
        blocks = [Block(width, num_heads) for _ in range(num_blocks)]
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(width))
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.embedding(images).flatten(2).transpose(1, 2) + self.positions
        return self.classifier(self.blocks(tokens).mean(1))


def vision_transformer() -> nn.Module:
    """Returns 4 blocks of width 256 for 32 x 32 pixels: 3.2 million parameters."""
    return VisionTransformer(256, 4, 4)


class Work(NamedTuple):
    """A model, the shape of its images or tokens, and the minibatch of a replica.

    Inputs of one dimension are tokens, each of which is classified.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (1, 28, 28)
    minibatch: int = 32
    optimizer: str = "sgd"
    autocast: bool = False


GPT2 = Work(large_models.gpt2, (large_models.LENGTH,), 8, "adamw", True)
RESNET = Work(large_models.resnet, (3, 224, 224), 32, autocast=True)
CNN, MLP = Work(cnn), Work(mlp)
TRANSFORMER = Work(vision_transformer, (3, 32, 32), 16)


class Setting:
    """A model, data for some minibatches per replica, and an optimizer."""

    def __init__(self, work: Work, optimizer: str = "", minibatches: int = 4):
        self.replica = xla_replica.current()
        self.minibatch = work.minibatch
        size = minibatches * work.minibatch * self.replica.num_replicas
        with self.replica.seeded(0):
            self.model = work.make().to(self.replica.device)
            self.images = torch.randn(size, *work.shape)
            self.labels = torch.randint(0, CLASSES, (size,))
            if len(work.shape) == 1:
                self.images = self.labels = torch.randint(10, (size, *work.shape))
        if hasattr(self.model, "tie"):
            self.model.tie()
        self.autocast = work.autocast
        parameters = [*self.model.parameters()]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        if (optimizer or work.optimizer) == "adamw":
            self.inner: torch.optim.Optimizer = torch.optim.AdamW(parameters, 1e-3)
        else:
            self.inner = torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=1e-4)

    def losses(self, rows: Any) -> torch.Tensor:
        images, labels = self.replica.send((self.images[rows], self.labels[rows]))
        with torch.autocast("xla", torch.bfloat16, enabled=self.autocast):
            found = self.model(images)
        losses = F.cross_entropy(found.float(), labels, reduction="none")
        return losses.mean(1) if losses.dim() == 2 else losses

    def batches(self, count: int) -> Iterator[slice]:
        """Yields the rows of so many minibatches, the last of which is marked."""
        for n in range(count):
            if n == count - 1:
                self.mark_last_step()
            yield slice(n * self.minibatch, (n + 1) * self.minibatch)

    def mark_last_step(self) -> None:
        self.replica.sync()
        write_mark(LAST_STEP_MARK)


def write_mark(mark: str) -> None:
    """Writes a line between the programs that torch_xla writes for this replica."""
    if path := os.environ.get("XLA_SAVE_TENSORS_FILE"):
        rank = xla_replica.current().rank
        with open(f"{path}.{rank}", "a", encoding="utf-8") as log:
            log.write(f"\n{mark}\n")


def plain(work: Work) -> None:
    """Trains two steps without these packages, but for the sum over replicas."""
    setting = Setting(work)
    for rows in setting.batches(3):
        setting.losses(rows).mean().backward()
        gradients = [p.grad for p in setting.model.parameters()]
        setting.replica.all_reduce_(gradients)
        for gradient in gradients:
            gradient.div_(setting.replica.num_replicas)
        setting.inner.step()
        setting.inner.zero_grad(set_to_none=False)
        setting.replica.sync()


def elastic(
    rule: str,
    optimizer: str,
    work: Work,
    last: int = 1,
    exact: bool = False,
    **options: Any,
) -> None:
    """Trains an epoch with a rule, whose last step has ``last`` minibatches."""
    setting = Setting(work, optimizer, minibatches=3 + last)
    options["exact"] = setting.model if exact else None
    size = setting.minibatch * setting.replica.num_replicas
    sampler = vbs.CustomSampler(
        setting.images, [size, 2 * size, last * size],
        minibatch_size=setting.minibatch, on_end="cycle", verbose=False,
    )  # fmt: skip
    wrapped = vbs.ElasticOptimizer(setting.inner, sampler, rule, size, **options)
    sampler.set_epoch(0)
    wrapped.set_epoch(0)
    made = 0
    for rows in sampler:
        if made == sampler.plan.num_steps - 1:
            setting.mark_last_step()
            made += 1
        setting.losses(rows).mean().backward()
        made += wrapped.step()
    setting.replica.sync()


def ordered(kind: str, fidelity: str, work: Work) -> None:
    """Orders two epochs by GraB, with an ordinary optimizer on every replica."""
    setting = Setting(work, minibatches=2)
    options = {"group_size": setting.minibatch} if fidelity == "group" else {}
    if kind == "recursive-pair":
        options["batch_size"] = setting.minibatch * setting.replica.num_replicas
    sampler = GraBSampler(
        setting.images, dict(setting.model.named_parameters()), kind, fidelity=fidelity,
        **options,
    )  # fmt: skip
    for epoch in range(2):
        own = list(sampler)
        for start in range(0, len(own), setting.minibatch):
            if epoch and start + setting.minibatch >= len(own):
                setting.mark_last_step()
            with sampler.record(setting.model):
                losses = setting.losses(own[start : start + setting.minibatch])
            sampler.backward(losses)
            setting.inner.step()
            setting.inner.zero_grad(set_to_none=False)
            setting.replica.sync()


def ordered_and_elastic() -> None:
    """Orders two epochs of an elastic run, which balances at its updates."""
    setting = Setting(MLP)
    size = setting.minibatch * setting.replica.num_replicas
    grab = GraBSampler(
        setting.images, dict(setting.model.named_parameters()), fidelity="projected"
    )
    sampler = vbs.CustomSampler(
        setting.images, [size, 2 * size, size], minibatch_size=setting.minibatch,
        on_end="cycle", verbose=False, order=grab,
    )  # fmt: skip
    wrapped = vbs.ElasticOptimizer(setting.inner, sampler, "linear", size)
    wrapped.attach(grab.after_update)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        wrapped.set_epoch(epoch)
        for rows in sampler:
            with grab.record(setting.model):
                losses = setting.losses(rows)
            grab.backward(losses)
            wrapped.step()
    setting.replica.sync()


def sparse(method: str, work: Work) -> None:
    """Trains with two updates of the topology."""
    setting = Setting(work)
    scheduler = RigLScheduler(
        setting.model, setting.inner, dense_allocation=0.1, T_end=1000, delta=2,
        method=method, ignore_linear_layers=False,
    )  # fmt: skip
    for rows in setting.batches(4):
        setting.inner.zero_grad(set_to_none=False)
        setting.losses(rows).mean().backward()
        if scheduler():
            setting.inner.step()
        setting.replica.sync()


def per_sample(answer: str, work: Work) -> None:
    """Computes something of every sample of two minibatches."""
    setting = Setting(work)
    projection = psg.Projection(dict(setting.model.named_parameters()), 4096)
    for rows in setting.batches(2):
        with psg.capture(setting.model) as recorded:
            losses = setting.losses(rows)
        factors = recorded.backward(losses)
        if answer == "projections":
            found = factors.project(projection)
        else:
            found = getattr(factors, answer)()
        setting.replica.to_host(found)


def scored(score: str) -> None:
    """Scores a pool."""
    setting = Setting(MLP)
    pool = torch.utils.data.TensorDataset(setting.images, setting.labels)
    psg.score_pool(
        setting.model, pool, score=score, block_size=setting.minibatch,
        part_size=setting.minibatch, progress=False,
    )  # fmt: skip


def evaluated() -> None:
    """Averages BatchNorm's statistics, then counts right answers."""
    setting = Setting(CNN)
    vbs.average_buffers(setting.model, setting.minibatch, setting.replica)
    setting.replica.sync()
    setting.model.eval()
    right = torch.zeros(1, device=setting.replica.device)
    with torch.no_grad():
        for rows in setting.batches(2):
            images, labels = setting.replica.send(
                (setting.images[rows], setting.labels[rows])
            )
            right += (setting.model(images).argmax(1) == labels).sum()
            setting.replica.sync()
    setting.replica.all_reduce_([right])
    setting.replica.fetch([right])


def broadcast() -> None:
    """Gives all replicas the parameters of the first."""
    setting = Setting(CNN)
    setting.replica.broadcast_(list(setting.model.parameters()))
    setting.replica.sync()


def families(work: Work) -> dict[str, Run]:
    """Returns the cases whose costs stand beside those of a plain step."""
    rule = "linear" if work.optimizer == "sgd" else "root"
    return {
        "plain step": functools.partial(plain, work),
        f"elastic step, {rule}": functools.partial(elastic, rule, "", work),
        "elastic step, adascale": functools.partial(elastic, "adascale", "sgd", work),
        **{
            f"GraB, mean, {fidelity}": functools.partial(
                ordered, "mean", fidelity, work
            )
            for fidelity in ("exact", "projected", "group")
        },
        "topology update, rigl": functools.partial(sparse, "rigl", work),
        "per-sample norms": functools.partial(per_sample, "norms", work),
    }


CASES: dict[str, Run] = {
    **families(MLP),
    "plain step": functools.partial(plain, CNN),
    **{
        f"elastic step, {rule}": functools.partial(elastic, rule, optimizer, CNN)
        for rule, optimizer in (
            ("constant", "sgd"), ("linear", "sgd"), ("linear-momentum", "sgd"),
            ("root", "adamw"), ("power:0.75", "sgd"), ("adascale", "sgd"),
            ("adam-root", "adamw"), ("adam-half-life", "adamw"),
        )
    },
    "exact step": functools.partial(elastic, "linear", "sgd", CNN, exact=True),
    "elastic step, clipped": functools.partial(
        elastic, "linear", "sgd", CNN, max_grad_norm=1.0
    ),
    "elastic step, noise": functools.partial(elastic, "linear", "sgd", CNN, noise=True),
    "averaging of buffers, evaluation": evaluated,
    "broadcast of parameters": broadcast,
    **{
        f"GraB, {kind}, exact": functools.partial(ordered, kind, "exact", MLP)
        for kind in ("pair", "recursive", "recursive-pair")
    },
    "GraB, pair, projected": functools.partial(ordered, "pair", "projected", MLP),
    "GraB in an elastic run": ordered_and_elastic,
    **{
        f"topology update, {method}": functools.partial(sparse, method, MLP)
        for method in ("set", "snfs", "gmp")
    },
    "per-sample projections": functools.partial(per_sample, "projections", MLP),
    **{f"pool scoring, {name}": functools.partial(scored, name)
       for name in ("grad_norm", "el2n")},
    "per-sample inner products": functools.partial(per_sample, "gram", MLP),
}  # fmt: skip
# One of each family and what every script runs, for CI.
QUICK = (
    "plain step", "elastic step, linear", "elastic step, adascale", "exact step",
    "averaging of buffers, evaluation", "broadcast of parameters", "GraB, mean, exact",
    "topology update, rigl", "per-sample norms", "pool scoring, grad_norm",
)  # fmt: skip
# What steps of a model cost beside its plain step. Nobody has GPT-2's or ResNet-50's
# time here, so that these are traced.
COSTS: dict[str, dict[str, Run]] = {
    "transformer": {
        **families(TRANSFORMER),
        "elastic step of 4 minibatches": functools.partial(
            elastic, "linear", "sgd", TRANSFORMER, last=4
        ),
    },
    "GPT-2": {
        **families(GPT2),
        "exact step": functools.partial(elastic, "root", "", GPT2, exact=True),
    },
    # BatchNorm mixes samples, so none has a gradient of its own.
    "ResNet-50": {
        name: run
        for name, run in families(RESNET).items()
        if name not in ("GraB, mean, exact", "GraB, mean, projected")
    },
}
TRACED = ("GPT-2", "ResNet-50")
for _model in TRACED:
    del COSTS[_model]["per-sample norms"]
EVERY = CASES | {
    f"{model}, {name}": run
    for model, runs in COSTS.items()
    for name, run in runs.items()
}


def run_cases(rank: int, names: Sequence[str], traces: bool = False) -> None:
    """Runs cases on this replica, marks where each begins and prints its seconds."""
    with tracing(write_mark) if traces else contextlib.nullcontext():
        _run_cases(rank, names)


def _run_cases(rank: int, names: Sequence[str]) -> None:
    for name in names:
        since = time.perf_counter()
        xla_replica.current().sync()
        write_mark(CASE_MARK + name)
        EVERY[name]()
        xla_replica.current().barrier()
        gc.collect()
        if rank == 0:
            print(f"{name}: {time.perf_counter() - since:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument(
        "--num-replicas", type=int, help="default: every chip of the slice; on a CPU 8"
    )
    parser.add_argument("--trace", action="store_true", help="compile and run nothing")
    args = parser.parse_args()
    names = args.cases or list(CASES)
    if unknown := set(names) - set(EVERY):
        parser.error(f"no case is called {sorted(unknown)}")
    number = args.num_replicas or xla_replica.default_num_replicas("xla", on_cpu=8)
    xla_replica.launch(run_cases, (names, args.trace), number, "xla")


if __name__ == "__main__":
    main()
