"""Trains a GPT that each member of a live run shards: the script of `sharded_live.py`.

    python -m xla_replica.members run --members 2 --processes 2 \\
        tools/studies/sharded_training.py FOLDER

Embedding and head are tied, AdamW's gradients are clipped. Sums are exact and products
in bfloat16; with --float all is in float64. The folder gets the checkpoints, a line for
every minibatch with its samples, and the weights' hash. If somebody writes a number of
updates into its file "allowed", training waits there until the number grows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

from support.variable_batch_size.member import Record

import variable_batch_size as vbs
import xla_replica
from tools.benchmarks.models import GPT

MINIBATCH, NUM_SAMPLES = 4, 96
TRACE = [MINIBATCH * number for number in (1, 3, 6, 4, 2, 5)]
SAVE_EVERY = 4  # updates
# Width, blocks, vocabulary and length: 5.0 million parameters, and 30 thousand.
SIZE, QUICK_SIZE = (256, 5, 4000, 128), (32, 2, 100, 16)
WAIT_SECONDS = 0.05


def language_model(size: tuple[int, int, int, int]) -> GPT:
    model = GPT(*size)
    nn.init.normal_(model.tokens.weight, std=0.02)
    model.head.weight = model.tokens.weight
    return model


def shard(model: GPT, is_float: bool) -> None:
    """Shards a model over the processes of its member, which may be one."""
    policy = MixedPrecisionPolicy()
    if not is_float:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)


def texts(size: tuple[int, int, int, int]) -> TensorDataset:
    """Returns tokens of which small ones are frequent, and the samples' numbers."""
    _, _, vocabulary, length = size
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(NUM_SAMPLES, length + 1, generator=generator)
    return TensorDataset((drawn**3 * vocabulary).long(), torch.arange(NUM_SAMPLES))


def train(rank: int, options: argparse.Namespace) -> None:
    """Trains as one process of a member, or alone."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if options.float else torch.float32)
    torch.manual_seed(0)
    replica, folder = xla_replica.current(), options.folder
    size = QUICK_SIZE if options.quick else SIZE
    data, model = texts(size), language_model(size)
    pids: list[Any] = [os.getpid()]
    if not options.whole:
        shard(model, options.float)
        pids *= dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
    name = "-".join(map(str, pids))

    def note(what: str, content: str = "") -> None:
        """Writes a file of this member, whole for who looks meanwhile."""
        if rank == 0:
            (folder / f"{name}.new").write_text(content)
            (folder / f"{name}.new").rename(folder / f"{name}.{what}")

    sampler = vbs.CustomSampler(
        data, TRACE, minibatch_size=MINIBATCH, on_end="cycle", verbose=False
    )
    # Of keys' biases the gradient is nothing but rounding, which Adam divides by eps.
    inner = torch.optim.AdamW(model.parameters(), options.lr, eps=1e-6)
    optimizer = vbs.ElasticOptimizer(
        inner, sampler, "root", TRACE[1], max_grad_norm=1.0, compare_every=10,
        exact=None if options.float else model,
    )  # fmt: skip
    checkpointer = vbs.Checkpointer(
        folder / "checkpoints", optimizer, every_updates=SAVE_EVERY, model=model
    )
    record = Record(folder / f"{os.getpid()}.samples", optimizer)
    allowed = folder / "allowed"

    def wait(update: vbs.Update) -> None:
        note("made", str(update.step + 1))
        while allowed.exists() and update.step + 1 >= int(allowed.read_text()):
            if xla_replica.stop_requested():
                break
            time.sleep(WAIT_SECONDS)

    for target in (record, wait):
        optimizer.attach(target)
    note("built")
    checkpointer.num_epochs = options.epochs
    checkpointer.load()
    note("ready")
    loader = DataLoader(data, batch_sampler=sampler)
    told = {"model": model, "checkpoint": checkpointer, "progress": False}
    for epoch in vbs.epochs(optimizer, loader, options.epochs, **told):
        for tokens, indices in epoch:
            record.run(indices.tolist())
            # The bits of the weights are not those that FSDP2's policy gives.
            is_autocast = options.whole and not options.float
            with torch.autocast("cpu", torch.bfloat16, is_autocast):
                scores = model(tokens[:, :-1]).flatten(0, 1)
            scores = scores.to(torch.get_default_dtype())
            F.cross_entropy(scores, tokens[:, 1:].flatten()).backward()
            optimizer.step()
    values = [
        getattr(value, "full_tensor", value.clone)().contiguous()
        for value in model.state_dict().values()
    ]
    content = b"".join(value.numpy().tobytes() for value in values)
    digest = hashlib.sha256(content).hexdigest()[:16]
    if options.float and replica.is_primary:
        torch.save(values, folder / "values")
    note("json", json.dumps({"hash": digest, "updates": checkpointer.num_updates}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, help="for all that the run writes; it must exist")
    add("--float", action="store_true", help="float64 without exact sums")
    help = "do not shard; with exact sums products are in bfloat16 by autocast"
    add("--whole", action="store_true", help=help)
    add("--epochs", type=int, default=6, help="default: %(default)s")
    add("--lr", type=float, default=1e-3, help="default: %(default)s")
    add("--quick", action="store_true", help="a model of 30 thousand parameters")
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ and not options.whole:  # a mesh of one process
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    xla_replica.launch(train, (options,), device="cpu")


if __name__ == "__main__":
    main()
