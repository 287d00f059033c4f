"""Short runs of what the packages do, whose programs are compiled for TPUs.

Every case runs on emulated replicas and leaves its programs in the folder that XLA was
told to dump them to. Run as a script, it runs one case:

    python tools/tpu/cases.py --replicas 8 "elastic step, linear"
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import per_sample_grad as psg
import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler
from rigl_xla import RigLScheduler

MINIBATCH, CLASSES = 32, 10
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


class Setting:
    """A model, data and an optimizer on one replica."""

    def __init__(
        self, make: Callable[[], nn.Module], optimizer: str, size: int = 1024
    ) -> None:
        self.replica = xla_replica.current()
        with self.replica.seeded(0):
            self.model = make().to(self.replica.device)
            self.images = torch.randn(size, 1, 28, 28)
            self.labels = torch.randint(0, CLASSES, (size,))
        parameters = self.model.parameters()
        if optimizer == "adamw":
            self.inner: torch.optim.Optimizer = torch.optim.AdamW(parameters, 1e-3)
        else:
            self.inner = torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=1e-4)

    def batch(self, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.replica.send((self.images[rows], self.labels[rows]))

    def losses(self, rows: Any) -> torch.Tensor:
        images, labels = self.batch(rows)
        return F.cross_entropy(self.model(images), labels, reduction="none")


def elastic(rule: str, optimizer: str = "sgd", **options: Any) -> None:
    """Trains an epoch with a rule, averages buffers and evaluates."""
    setting = Setting(cnn, optimizer)
    replicas = setting.replica.num_replicas
    trace = [MINIBATCH * replicas * n for n in (1, 2, 1)]
    sampler = vbs.CustomSampler(
        setting.images, trace, minibatch_size=MINIBATCH, on_end="cycle", verbose=False
    )
    wrapped = vbs.ElasticOptimizer(
        setting.inner, sampler, rule, MINIBATCH * replicas, **options
    )
    sampler.set_epoch(0)
    wrapped.set_epoch(0)
    for rows in sampler:
        setting.losses(rows).mean().backward()
        wrapped.step()
    wrapped.average_buffers(setting.model)
    with torch.no_grad():
        setting.losses(range(MINIBATCH))
        setting.replica.sync()


def ordered(kind: str, fidelity: str) -> None:
    """Orders two epochs by GraB, with an ordinary optimizer on every replica."""
    setting = Setting(mlp, "sgd", 512)
    sampler = GraBSampler(
        setting.images, dict(setting.model.named_parameters()), kind, fidelity=fidelity
    )
    for _ in range(2):
        own = list(sampler)
        for start in range(0, len(own), MINIBATCH):
            with sampler.record(setting.model):
                losses = setting.losses(own[start : start + MINIBATCH])
            sampler.backward(losses)
            setting.inner.step()
            setting.inner.zero_grad(set_to_none=False)
            setting.replica.sync()


def sparse(method: str) -> None:
    """Trains with two updates of the topology."""
    setting = Setting(mlp, "sgd")
    scheduler = RigLScheduler(
        setting.model, setting.inner, dense_allocation=0.1, T_end=1000, delta=2,
        method=method, ignore_linear_layers=False,
    )  # fmt: skip
    for step in range(6):
        setting.inner.zero_grad(set_to_none=False)
        setting.losses(
            range(step * MINIBATCH, (step + 1) * MINIBATCH)
        ).mean().backward()
        if scheduler():
            setting.inner.step()
        setting.replica.sync()


def per_sample(answer: str) -> None:
    """Computes every sample's norm, or inner products of all samples."""
    setting = Setting(mlp, "sgd")
    with psg.capture(setting.model) as recorded:
        losses = setting.losses(range(MINIBATCH))
    factors = recorded.backward(losses)
    setting.replica.to_host(getattr(factors, answer)())


CASES: dict[str, Run] = {
    **{
        f"elastic step, {rule}": functools.partial(elastic, rule, optimizer)
        for rule, optimizer in (
            ("linear", "sgd"), ("linear-momentum", "sgd"), ("root", "adamw"),
            ("adascale", "sgd"), ("adam-root", "adamw"),
        )
    },
    "elastic step, clipped": functools.partial(elastic, "linear", max_grad_norm=1.0),
    **{
        f"GraB, {kind}, {fidelity}": functools.partial(ordered, kind, fidelity)
        for kind in ("mean", "pair")
        for fidelity in ("exact", "projected")
    },
    **{
        f"topology update, {method}": functools.partial(sparse, method)
        for method in ("rigl", "set")
    },
    "per-sample norms": functools.partial(per_sample, "norms"),
    "per-sample inner products": functools.partial(per_sample, "gram"),
}  # fmt: skip


def run_case(rank: int, name: str) -> None:
    """Runs one case on this replica."""
    del rank
    CASES[name]()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--replicas", type=int, default=8, help="default: 8")
    args = parser.parse_args()
    xla_replica.launch(run_case, (args.case,), args.replicas, "xla")


if __name__ == "__main__":
    main()
