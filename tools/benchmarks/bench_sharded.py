"""Measures what live members cost whose model FSDP2 shards, in time and memory.

Two processes train a model with AdamW: by FSDP2, with accumulation by hand; by the
elastic wrapper that `launch` starts; as one live member of two processes; as a replica
group of torchft, with its sum in FSDP2's all-reduce hook; and, each with all of the
model, by DistributedDataParallel, by FSDP2 as two replicas of one shard (HSDP), and as
two live members of one process. Sums are of floats, or exact. Each pair of processes
runs beside the one that it is compared with, and both take turns of six updates, whose
time is compared. Peak memory is the most that torch's allocator holds in a process,
from before the model is built to the third update, and the most that the process has
resident; malloc keeps what is freed.

    python tools/benchmarks/bench_sharded.py --output sharded.json
    python tools/benchmarks/bench_sharded.py --quick
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
import xla_replica
from tools.benchmarks.bench_live import (
    TURN,
    Loop,
    Turns,
    add_cases,
    start,
    train_by_hand,
)
from tools.benchmarks.models import Attention
from tools.peak_memory import Recording
from tools.record import parser_with_output, row, save
from tools.side_by_side import keep_freed_pages

MODELS = "gpt", "mlp"  # of bench_live.py
# Of both processes of a pair that are one member, of two of them, and of others.
ONE_MEMBER, TWO_MEMBERS = ("live", "live exact", "torchft"), ("2 x 1", "2 x 1 exact")
# The pair that is measured, the one that it is compared with, and the goals for time
# and for memory.
RATIOS = (
    ("elastic", "FSDP2", 1.05, 1.05), ("live", "FSDP2", 1.05, 1.05),
    ("elastic exact", "FSDP2", 1.25, None), ("live exact", "FSDP2", 1.25, None),
    ("torchft", "FSDP2", None, None), ("2 x 1", "DDP", 1.03, None),
    ("HSDP", "DDP", None, None), ("2 x 1", "HSDP", None, None),
    ("2 x 1 exact", "2 x 1", None, None),
)  # fmt: skip
NUM_PROFILED = 3  # updates

Found = dict[str, Any]  # what a process finds


def shard(shape: tuple[int, ...], model: nn.Module) -> None:
    """Shards blocks or layers, and the rest of the model, over a mesh of processes."""
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    how: dict[str, Any] = {"mesh": mesh}
    for module in model.modules():
        if isinstance(module, Attention):
            fully_shard(module, **how)
    if isinstance(model, nn.Sequential):
        for layer in model:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, **how)
    fully_shard(model, **how)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo has no means
            module.set_force_sum_reduction_for_comms(True)


@contextlib.contextmanager
def summing_shards_alone(model: Any) -> Iterator[None]:
    """Leaves the sum over copies of shards to a later minibatch."""
    model.set_requires_all_reduce(False)
    yield
    model.set_requires_all_reduce(True)


class Ends:
    """Takes turns with other pairs, and measures memory in the first updates."""

    def __init__(self, turns: Turns, memory: Recording) -> None:
        self._turns, self._memory = turns, memory
        self.peak_bytes = 0

    def __call__(self, update: vbs.Update) -> None:
        self.end(update.step)

    def end(self, step: int) -> None:
        if step + 1 == NUM_PROFILED:
            self.peak_bytes = self._memory.stop().peak_bytes
        self._turns.end(step)


def train(
    rank: int, pair: str, number: int, name: str, substeps: int, num_updates: int,
    folder: str, lighthouse: str = "",
) -> Found:  # fmt: skip
    """Trains one of a pair; returns the seconds of turns, and peaks of memory."""
    if not torch.distributed.is_initialized():  # a member of one process
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    keep_freed_pages()
    memory, is_exact = Recording(), "exact" in pair
    shape = (2, 1) if pair == "HSDP" else (torch.distributed.get_world_size(),)
    loop = Loop(name, None if pair == "DDP" else partial(shard, shape))
    model: Any = loop.model
    turns = partial(Turns, Path(folder), number, num_updates, num_pairs=2)
    if pair in ("FSDP2", "DDP", "HSDP", "torchft"):
        inner: Any = loop.inner
        if pair == "DDP":
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if pair == "HSDP":
            model.no_sync = partial(summing_shards_alone, model)
        if pair == "torchft":
            inner = of_torchft(rank, model, inner, lighthouse)
        ends = Ends(turns(), memory)
        train_by_hand(model, inner, loop, substeps, num_updates, ends)
        if pair == "torchft":
            inner.manager.shutdown()
    else:
        ends = train_elastically(loop, is_exact, substeps, num_updates, turns, memory)
    return {
        "seconds": ends._turns.seconds[1:],  # memory was measured in the first one
        "allocated": ends.peak_bytes / 2**20,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }


def train_elastically(
    loop: Loop, is_exact: bool, substeps: int, num_updates: int, turns: Any,
    memory: Recording,
) -> Ends:  # fmt: skip
    """Trains with the elastic wrapper, as a member where there is a lighthouse."""
    sampler = vbs.CustomSampler(
        dataset_size=2 * substeps * num_updates, trace=[2 * substeps],
        minibatch_size=1, on_end="hold", verbose=False,
    )  # fmt: skip
    exact = loop.model if is_exact else None
    optimizer = vbs.ConstantOptimizer(loop.inner, sampler, exact=exact)
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = vbs.Checkpointer(
            folder, optimizer, model=loop.model, every_updates=10**6, stop_on=()
        )
        checkpointer.load()
        ends = Ends(turns(), memory)
        optimizer.attach(ends)
        optimizer.attach(checkpointer)
        optimizer.set_epoch(0)
        for _ in sampler:
            loop.backward(loop.model)
            optimizer.step()
            if checkpointer.num_updates == num_updates:
                return ends
    raise AssertionError


def of_torchft(rank: int, model: nn.Module, inner: Any, lighthouse: str) -> Any:
    """Returns torchft's optimizer, of a group of processes that shard the model."""
    import torchft
    from torchft.process_group import ManagedProcessGroup

    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    port = xla_replica.current().all_gather_object(store.port)[0]
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(), load_state_dict=lambda state: None,
        state_dict=dict, min_replica_size=1, rank=rank, world_size=2,
        store_addr="127.0.0.1", store_port=port, lighthouse_addr=lighthouse,
        hostname="127.0.0.1", replica_id="torchft", init_sync=False,
    )  # fmt: skip
    group = ManagedProcessGroup(manager)
    group.register("members")
    mean = partial(
        torch.distributed.all_reduce, group=group, op=torch.distributed.ReduceOp.AVG
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(mean)
    optimizer = torchft.Optimizer(manager, inner)
    optimizer.kept = store  # as long as it
    return optimizer


def measured(
    pairs: tuple[str, str], name: str, substeps: int, num_turns: int
) -> list[list[Found]]:
    """Returns what the processes of two pairs have found."""
    num_updates = TURN * (num_turns + 1)
    processes: dict[str, list[subprocess.Popen[str]]] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for number, pair in enumerate(pairs):
            told: tuple[Any, ...] = (pair, number, name, substeps, num_updates, folder)
            variables, code = {}, "[bench_sharded.train(0, *{})]"
            if pair not in TWO_MEMBERS:
                code = "xla_replica.launch(bench_sharded.train, {}, 2, 'cpu')"
            if pair in (*ONE_MEMBER, *TWO_MEMBERS):
                address = stack.enter_context(xla_replica.lighthouse())
                variables = {"LIVE_LIGHTHOUSE": address}
                variables["LIVE_MIN_MEMBERS"] = "2" if pair in TWO_MEMBERS else "1"
            if pair == "torchft":
                told, variables = (*told, address), {}
            code = f"import json; print(json.dumps({code.format(told)}))"
            count = 2 if pair in TWO_MEMBERS else 1
            made = [start(code, "bench_sharded", **variables) for _ in range(count)]
            processes[pair] = made
            for process in made:  # if the other pair fails
                stack.callback(process.kill)
        while len(list(Path(folder).glob("ready-*"))) < 4:
            for pair, own in processes.items():
                if any(process.poll() for process in own):
                    raise SystemExit(f"{pair} could not begin")
            time.sleep(0.1)
        Path(folder, "turn-0").touch()
        texts = [[each.communicate()[0] for each in processes[pair]] for pair in pairs]
    return [
        [found for text in own for found in json.loads(text.splitlines()[-1])]
        for own in texts
    ]


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument("--turns", type=int, default=3, help="default: 3")
    add_cases(parser, MODELS, [2])
    pairs = [*dict.fromkeys(ratio[0] for ratio in RATIOS)]
    parser.add_argument(
        "--pairs", nargs="+", choices=pairs, default=pairs, help="default: all"
    )
    parser.add_argument("--quick", action="store_true", help="one turn, one model")
    options = parser.parse_args()
    rows, num_turns = [], 1 if options.quick else options.turns
    cases = [
        (name, count, *ratio)
        for name in options.models[: 1 if options.quick else None]
        for count in options.substeps
        for ratio in RATIOS
        if ratio[0] in options.pairs
    ]
    for name, count, pair, other, goal, most in tqdm(cases, "pairs", disable=None):
        found = measured((pair, other), name, count, num_turns)
        of, work = f"{name}, {count} a step", f"{pair} over {other}"
        mine, its = (own[0]["seconds"] for own in found)
        ms = [1e3 * seconds / (TURN - 1) for seconds in its]
        rows.append(row(f"{other} step beside {pair}: {of}", ms, "ms"))
        ratios = [one / another for one, another in zip(mine, its)]
        rows.append(row(f"{work}: {of}", ratios, at_most=goal))
        for kind, limit in (("allocated", most), ("resident", None)):
            mine, its = (max(each[kind] for each in own) for own in found)
            rows.append(row(f"{other}'s peak {kind} beside {pair}: {of}", its, "MB"))
            rows.append(row(f"peak {kind}, {work}: {of}", mine / its, at_most=limit))
    others = {"torchft": importlib.metadata.version("torchft")}
    save(options.output, {"others": others, "rows": rows})


if __name__ == "__main__":
    main()
