"""Trains digits by Ray Train, with as many workers as there are at the moment.

    python examples/launch/ray_train.py --checkpoint /shared/job --num-workers 1 8
    python examples/launch/ray_train.py --device tpu --topology 2x4 \
        --accelerator-type TPU-V5LITEPOD --num-workers 8 16    # one or two slices

Ray starts the workers anew when one is lost or another can be had, and each start goes
on from the newest checkpoint. Needs the extra `ray` on every host. Change `train`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
import xla_replica

ROOT = Path(__file__).resolve().parents[2]


def train(rank: int, args: argparse.Namespace) -> None:
    """Trains as one replica, from the newest checkpoint on."""
    from examples.pool.digits import digits, network

    replica = xla_replica.current()
    training, held_back = digits(0, 1440, 357)
    with replica.seeded(0):  # the same weights on every replica
        model = network()
    model.to(replica.device)
    sampler = vbs.CustomSampler(training, [32, 64], minibatch_size=8, on_end="cycle")
    loader = DataLoader(training, batch_sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(optimizer, sampler, ref_batchsize=32)
    log = vbs.RunLog(f"{args.checkpoint}/run.jsonl", optimizer)
    # Ray calls this in a thread, where Python catches no signals: stop_on=().
    checkpointer = vbs.Checkpointer(
        args.checkpoint, optimizer, every_updates=args.save_every, stop_on=(),
        model=model, log=log,
    )  # fmt: skip
    run = {"model": model, "checkpoint": checkpointer, "log": log, "progress": False}
    for epoch in vbs.epochs(optimizer, loader, args.epochs, **run):
        for pixels, labels in epoch:
            loss = F.cross_entropy(model(pixels), labels)
            loss.backward()
            epoch.add(loss)
            optimizer.step()
        pixels, labels = replica.send(held_back.tensors)
        with torch.no_grad():
            hits = model(pixels).argmax(1) == labels
        accuracy = 100 * hits.float().mean().item()
        if replica.is_primary:
            print(f"epoch {epoch.number}: {accuracy:.2f} %, by {replica}", flush=True)
        epoch.write(accuracy=accuracy)


def worker(args: argparse.Namespace) -> None:
    """Is one of Ray's workers, which has joined the process group."""
    xla_replica.launch(train, (args,))


def scaling(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what the options say to Ray's ScalingConfig."""
    least, most = args.num_workers
    found: dict[str, Any] = {
        "num_workers": least if least == most else (least, most),
        "elastic_resize_monitor_interval_s": args.look_every,
    }
    if args.device == "tpu":  # TorchTPU has a chip in each process
        found |= {"use_tpu": True, "resources_per_worker": {"TPU": 1}}
        found |= {"topology": args.topology, "accelerator_type": args.accelerator_type}
    found["use_gpu"] = args.device == "gpu"
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", default="/shared/job",
        help="folder that all hosts share (default: /shared/job)")  # fmt: skip
    add("--epochs", type=int, default=20, help="default: 20")
    add("--save-every", type=int, default=100, help="updates (default: 100)")
    add("--num-workers", type=int, nargs=2, default=(1, 8), metavar=("LEAST", "MOST"),
        help="as many as there are (default: 1 8)")  # fmt: skip
    add("--look-every", type=float, default=60.0,
        help="seconds, whether there are more workers (default: 60)")  # fmt: skip
    add("--device", choices=("gpu", "tpu", "cpu"), default="gpu", help="default: gpu")
    add("--topology", help="of a TPU slice, such as 2x4")
    add("--accelerator-type", help="of a TPU, such as TPU-V5LITEPOD")
    return parser.parse_args(argv)


def main() -> None:
    """Starts the workers."""
    args = parse()
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        worker,
        train_loop_config=args,
        scaling_config=ScalingConfig(**scaling(args)),
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=100),
            worker_runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        ),
    ).fit()


if __name__ == "__main__":
    main()
