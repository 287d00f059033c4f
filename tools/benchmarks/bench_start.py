"""Measures a start: programs compiled, and seconds from `launch` to the first update.

Every kind of training is started twice, each time in new processes, on handwritten
digits (scikit-learn's, 8 x 8), through `vbs.epochs`. Programs are counted until the
second epoch has ended.

    python tools/benchmarks/bench_start.py --device xla --num-replicas 2
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler
from rigl_xla import RigLScheduler
from tools.record import parser_with_output, row, save

KINDS = ("linear", "adascale", "GraB", "RigL")
MINIBATCH, SAMPLES = 32, 512


def start(rank: int, kind: str, began: float) -> tuple[float, int]:
    """Trains two epochs; returns seconds to the first update, and programs compiled.

    ``began`` is when `launch` was called, by `time.time`.
    """
    del rank
    from sklearn.datasets import load_digits

    replica = xla_replica.current()
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images[:SAMPLES], dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(labels[:SAMPLES]))
    with replica.seeded(0):
        # Of a width of its own, so that kinds share no program in a process.
        width = 128 + KINDS.index(kind)
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    model.to(replica.device)
    inner = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    size = MINIBATCH * replica.num_replicas
    named = dict(model.named_parameters())
    order = GraBSampler(data, named, fidelity="projected") if kind == "GraB" else None
    sampler = vbs.CustomSampler(
        data, [size, 2 * size], minibatch_size=MINIBATCH, on_end="cycle", order=order,
        verbose=False,
    )  # fmt: skip
    rule = "adascale" if kind == "adascale" else "linear"
    optimizer = vbs.ElasticOptimizer(inner, sampler, rule, size)
    pruner = None
    if kind == "RigL":
        pruner = RigLScheduler(
            model, optimizer, 0.2, 1000, delta=2, ignore_linear_layers=False,
            skip_step=False,
        )  # fmt: skip
    loader = DataLoader(data, batch_sampler=sampler)
    first: list[float] = []

    def note(update: Any) -> None:
        del update
        if not first:
            replica.wait()
            first.append(time.time() - began)

    optimizer.attach(note)
    with xla_replica.count(replica) as counts:
        for epoch in vbs.epochs(optimizer, loader, 2, model=model, progress=False):
            for pixels, targets in epoch:
                if order is not None:
                    with order.record(model):
                        losses = F.cross_entropy(
                            model(pixels), targets, reduction="none"
                        )
                    order.backward(losses)
                else:
                    F.cross_entropy(model(pixels), targets).backward()
                if pruner is not None:
                    pruner()
                optimizer.step()
    return first[0], counts.compilations


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument("--device", default="xla", help="as for launch; default: xla")
    parser.add_argument("--num-replicas", type=int, default=2, help="default: 2")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    rows = []
    for kind in KINDS:
        starts = [
            xla_replica.launch(
                start, (kind, time.time()), args.num_replicas, args.device
            )[0]
            for _ in range(2)
        ]
        seconds, programs = zip(*starts)
        found[kind] = {"seconds": seconds, "programs": programs}
        rows += [
            row(f"first start, {kind}", seconds[0], "s"),
            row(f"second start, {kind}", seconds[1], "s", at_most=5.0),
            row(f"second start, {kind}: programs compiled", programs[1], at_most=0),
        ]
    found |= {"replicas": args.num_replicas, "device": args.device}
    save(args.output, found | {"rows": rows})


if __name__ == "__main__":
    main()
