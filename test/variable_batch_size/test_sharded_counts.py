"""What processes exchange in a step of a sharded model, beside FSDP2 alone."""

import tempfile
from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.xla_replica import slices
from support.xla_replica.live_job import needs_lighthouse
from support.xla_replica.replicas import Backend, of_torch_alone
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import variable_batch_size as vbs

WIDTH, NUM_LAYERS, MESH = 64, 3, (2, 2)  # copies of shards
LAYER, ROWS = 4 * WIDTH**2, 4 * WIDTH * NUM_LAYERS  # bytes: four for each number
SUBSTEPS = 1, 3


class Collectives(TorchDispatchMode):
    """Counts collectives by name and by the bytes of their largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, int]] = Counter()

    def note(self, name: str, arguments: Any) -> None:
        tensors = [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]
        self.sent[name, max(tensor.nbytes for tensor in tensors)] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            self.note(name.replace("_base", "").replace("_", ""), args)
        return func(*args, **(kwargs or {}))


def counted(rank: int, mesh: tuple[int, ...], *kinds: str) -> list[list[Counter]]:
    """Returns what a step sends, for each kind and number of minibatches."""
    torch.set_num_threads(1)
    with Collectives() as seen:
        for name in ("allreduce", "allgather", "broadcast"):
            method = getattr(dist.ProcessGroupGloo, name)  # members call it themselves

            def noted(*args: Any, name: str = name, method: Any = method) -> Any:
                seen.note(name, args)
                return method(*args)

            mock.patch.object(dist.ProcessGroupGloo, name, noted).start()
        return [[step(seen.sent, mesh, kind, n) for n in SUBSTEPS] for kind in kinds]


def step(sent: Counter, mesh: tuple[int, ...], kind: str, num_substeps: int) -> Counter:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
    model, x = nn.Sequential(*layers), torch.ones(4, WIDTH)
    names = ("copies", "shards")[-len(mesh) :]
    options = {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=names)}
    if kind == "exact" and len(mesh) > 1:
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    for module in (*layers, model):
        fully_shard(module, **options)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no means
    # Gradients are those of the first step, so that no later one is run again.
    inner = torch.optim.SGD(model.parameters(), 0.0)
    if kind == "by hand":
        sent.clear()
        for substep in range(num_substeps):
            model.set_requires_all_reduce(substep == num_substeps - 1)
            model(x).sum().backward()
        return sent.copy()
    data, size = range(16 * num_substeps), 4 * num_substeps  # of four processes
    sampler = vbs.CustomSampler(data, size, minibatch_size=1, verbose=False)
    exact = model if kind == "exact" else None
    optimizer = vbs.ConstantOptimizer(inner, sampler, exact=exact)
    with tempfile.TemporaryDirectory() as folder:
        vbs.Checkpointer(folder, optimizer, model=model, stop_on=()).load()
    optimizer.set_epoch(0)
    for _ in sampler:
        if optimizer.place.substep == 0:
            sent.clear()
        model(x).sum().backward()
        optimizer.step()
    return sent.copy()


def beside(alone: Counter, sent: Counter, *widened: str) -> Counter:
    """Returns what is sent beside FSDP2's own, of which some have twice the bytes."""
    expected = Counter()
    for (name, size), number in alone.items():
        expected[name, size * (1 + (name in widened))] = number
    assert not expected - sent
    return sent - expected


@needs_lighthouse
@of_torch_alone
def test_a_step_sends_the_bytes_of_fsdp2_and_exact_sums_a_number_for_each_row():
    kinds = "float", "exact"
    [alike, *_] = Backend("cpu", 4).run(counted, MESH, "by hand", *kinds)
    members = slices.run(MESH, counted, (MESH[1:], *kinds))
    for n, (alone, floats, exacts) in enumerate(zip(*alike)):
        assert alone["reducescatter", LAYER] == SUBSTEPS[n] * NUM_LAYERS
        assert beside(alone, floats) == {("allreduce", 24): 1}
        # Over copies of shards FSDP2 keeps and sums float64; members sum int32.
        more = beside(alone, exacts, "reducescatter", "allreduce")
        assert more == {("allreduce", 24): 1, ("allreduce", ROWS): 1}
        for own in members:
            votes = beside(alone, own[0][n])
            assert {size for _, size in votes} <= {8, 24}
            assert votes.total() <= 5
            more = beside(alone, own[1][n]) - votes
            assert {size for _, size in more} <= {8, ROWS}
            assert more.total() <= 4
