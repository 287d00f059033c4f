"""Models that FSDP2 shards train as one process does, with any number of processes."""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.variable_batch_size import exact
from support.variable_batch_size.elastic import Case, large_batch_run
from support.variable_batch_size.sharded import TRACE, Model, Run, Training, data, whole
from support.xla_replica.replicas import HAS_XLA, Backend, of_torch_alone
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultReduceScatter,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing import assert_close

import variable_batch_size as vbs
import xla_replica
from xla_replica.device import row_units

BY_HAND = [
    Run(Case(TRACE, epochs=3)),
    Run(Case(TRACE, rule="root", optimizer="adamw", max_grad_norm=0.5)),
]
BY_TOKENS = ("reduction", "sum"), ("ref_weight", 40.0), ("noise", True)
WHOLE_SUMS = "shard_gradients", False
ADAM = Case(TRACE, rule="adam-root", optimizer="adamw")
RUNS = [
    *BY_HAND,
    Run(Case(TRACE, rule="adascale", max_grad_norm=1.0)),
    Run(Case(TRACE, rule="adascale"), on_device=True),
    Run(Case(TRACE), BY_TOKENS, on_device=True),
    Run(ADAM, (("decay_per_sample", True), WHOLE_SUMS), has_whole_part=True),
    Run(Case(TRACE), (("momentum_correction", True),), has_batch_norm=True),
]


def outcome(run: Run, shape: tuple[int, ...] | None = None) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        if run.on_device:
            patched.setattr(xla_replica.Replica, "is_host", False)
        training = Training(run, shape)
        model, optimizer = training.model, training.optimizer
        norms: list[torch.Tensor] = []

        def note(*args: Any) -> None:
            gradients = whole(p.grad for p in model.parameters())
            norms.append(torch.cat([g.reshape(-1) for g in gradients]).norm())

        optimizer.register_step_pre_hook(note)
        training.train()
        optimizer.average_buffers(model)
        return {
            "weights": whole(model.parameters()),
            "norms": norms,
            "noise": optimizer.noise.measure() if optimizer.noise else (),
            "buffers": whole(model.buffers()),
            "num_samples": sum(len(each) - 1 for each in training.counted),
        }


def loss_of(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y) + 0 * model.unused.sum()


# Clipped, of AdamW; of tokens, with running statistics and whole parameters, whose
# gradients add up on every process; AdaScale; and computed in bfloat16.
ODD_PARTS = {"has_whole_part": True, "has_batch_norm": True, "exact": True}
EXACT = [
    Run(replace(ADAM, max_grad_norm=0.5), exact=True),
    Run(Case(TRACE), (*BY_TOKENS, WHOLE_SUMS), **ODD_PARTS),
    Run(Case(TRACE, rule="adascale", epochs=2), exact=True),
    Run(Case(TRACE), exact=True, computes_in=torch.bfloat16),
]
# Pairs of a shape of the mesh and one of the runs.
Pairs = list[tuple[tuple[int, ...], int]]


def all_on(num_replicas: int) -> Pairs:
    """Returns all runs; beside torch_xla, with the oldest torch, the last two."""
    return [((num_replicas,), n) for n in range(5 if HAS_XLA else 0, len(RUNS))]


def outcomes(rank: int, pairs: Pairs) -> list[dict[str, Any]]:
    return [outcome(RUNS[index], shape) for shape, index in pairs]


def both(rank: int) -> tuple[list[dict[str, Any]], bool]:
    return outcomes(rank, all_on(2)), HAS_XLA or misuses(rank)


@pytest.fixture(scope="module")
def two() -> list[Any]:
    return Backend("cpu", 2).run(both)


@functools.cache
def alone(index: int) -> dict[str, Any]:
    return outcome(RUNS[index])


def test_one_process_trains_as_a_loop_by_hand():
    for index, run in enumerate(BY_HAND):
        made = Model(run, None), *data(run.case)
        weights, updates = large_batch_run(run.case, loss_of, made)
        assert len(updates) >= (20 if run.case.epochs > 1 else 5)
        assert_close(alone(index)["weights"], weights, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("num_replicas", "pairs"), [
    (2, all_on(2)),
    pytest.param(4, [((4,), 0), ((2, 2), 2)], marks=of_torch_alone),
    pytest.param(3, all_on(3), marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_is_that_of_one_process(num_replicas, pairs, request):
    if num_replicas == 2:
        found = [results for results, _ in request.getfixturevalue("two")]
    else:
        found = Backend("cpu", num_replicas).run(outcomes, pairs)
    for (_, index), *copies in zip(pairs, *found):
        one = alone(index)
        for copy in copies:
            for name in ("weights", "norms", "noise"):
                assert_close(copy[name], one[name], rtol=1e-9, atol=1e-10)
            assert all(map(torch.equal, copy["buffers"], copies[0]["buffers"]))
        # Every sample counts once, whatever was run twice.
        assert sum(copy["num_samples"] for copy in copies) == one["num_samples"]


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def exact_outcomes(rank: int, shape: tuple[int, ...] | None) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        # Steps of six minibatches and more are as those of 256: beyond int32.
        patched.setattr(row_units, "MOST_NARROW", 5)
        return [outcome(run, shape) for run in EXACT if shape or not run.computes_in]


@pytest.fixture(scope="module")
def exact_alone() -> list[dict[str, Any]]:
    with group_of_one():
        return exact_outcomes(0, (1,))


@pytest.mark.parametrize("shape", [
    None, (2,),
    *(pytest.param(s, marks=of_torch_alone) for s in ((3,), (2, 1), (2, 2))),
])  # fmt: skip
def test_exact_sums_have_the_same_bits_however_a_model_is_sharded(shape, exact_alone):
    """None is a whole model; computing in another dtype is FSDP2's own."""
    for found in Backend("cpu", math.prod(shape or ())).run(exact_outcomes, shape):
        assert_same_bits(found, exact_alone)


def language_model() -> nn.Module:
    """An embedding that is tied, and a block of its own where processes share it."""
    model = exact.Transformer()
    if dist.is_initialized():
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
        for module in (model.block, model):
            fully_shard(module, mp_policy=policy)
    return model


def jumps(rank: int) -> tuple[str, set[int]]:
    """Trains with jumps of gradients, and one that is not finite.

    Returns a hash of the weights, and which steps were run again.
    """
    torch.set_num_threads(1)  # as children have
    options = {"reduction": "sum", "max_grad_norm": 1.0}
    own = exact.Run(language_model, exact.adamw, "root", options, True, zero_step=None)
    training = exact.Training(own).finish()
    found = training.outcome(whole(training.model.state_dict().values()))
    return found.digest, {*found.repeated}


@of_torch_alone
def test_exact_sums_of_shards_run_the_steps_again_that_those_of_whole_models_do():
    digest, repeated = jumps(0)
    assert {0, 3, 9} <= repeated
    for own, steps in Backend("cpu", 2).run(jumps):
        assert own == digest
        assert steps <= repeated


def assert_same_bits(found: list[dict[str, Any]], expected: Any) -> None:
    for own, others in zip(found, expected):
        for name in ("weights", "buffers", "norms"):
            assert own[name] or name == "buffers"
            assert all(map(torch.equal, own[name], others[name])), name
        assert own["noise"] == others["noise"]


def refused(message: str) -> Any:
    return pytest.raises((ValueError, TypeError), match=message)


def misuses(rank: int) -> bool:
    """Asserts what is refused; returns whether shards were those of replica 0."""
    run = Run(Case((16, 4), num_samples=56))  # the next epoch begins with 4
    minibatch = torch.ones(4, 6).double(), torch.zeros(4, dtype=torch.int64)

    def begun(num_substeps: int, run: Run = run) -> Training:
        """Returns a run that has taken one more minibatch than it has trained."""
        training = Training(run, (2,))
        minibatches = iter(training.sampler)
        next(minibatches)
        for _ in range(num_substeps):
            training.minibatch(*minibatch)
            next(minibatches)
        return training

    def wrapped(parameters: Any, sampler: Any = None, **options: Any) -> Any:
        sampler = sampler or begun(0).sampler
        inner = torch.optim.SGD(parameters, 1)
        return vbs.ConstantOptimizer(inner, sampler, **options)

    def linear(*dtypes: torch.dtype | None) -> nn.Module:
        policy = MixedPrecisionPolicy(*dtypes)  # computes in, and adds up in
        return fully_shard(nn.Linear(6, 3), mesh=mesh, mp_policy=policy)

    def backward(model: nn.Module, scale: float = 1.0) -> None:
        model(scale * torch.ones(4, 6)).sum().backward()

    for substep, is_kept in ((0, False), (1, False), (1, True)):
        training = begun(substep)
        training.model(minibatch[0]).sum().backward()
        for parameter in training.model.parameters():
            own = parameter.grad if is_kept else None
            parameter.grad = None if own is None else own.clone()
        with refused("a gradient was replaced after backward"):
            training.optimizer.step()
    with refused(r"step\(\) without backward\(\)"):
        begun(1).optimizer.step()
    training = begun(1)
    # Between minibatches a replica holds its part of the gradients alone.
    places = training.optimizer.updates.gradients.sums._places
    assert all(place.whole.grad is None for place in places if place.whole is not None)
    training.model.zero_grad()
    with refused("gradients were overwritten"):
        training.minibatch(*minibatch)
    training = Training(run, (2, 1))
    training.train()
    training.sampler.set_epoch(1)
    next(iter(training.sampler))
    with refused(r"call optimizer.set_epoch\(epoch\) before every epoch"):
        training.minibatch(*minibatch)
    training = Training(Run(Case((24,), num_samples=24)), (2, 1))
    minibatches = iter(training.sampler)
    for part, size in ((training.model, 6), (training.model.body[2], 5)):
        next(minibatches)
        part(torch.ones(4, size).double()).sum().backward()
        with refused("other parameters") if size == 5 else nullcontext():
            training.optimizer.step()
    training, plain = Training(run, (2,)), Training(run, None)
    with refused("build it with a sharded one, too"):
        plain.optimizer.add_param_group({"params": [training.model.unused]})
    with refused("share a sampler"):
        wrapped(plain.model.parameters(), training.sampler)
    training = begun(0, Run(Case((8,), num_samples=8)))
    register_fsdp_forward_method(training.model, "score")
    training.model.score(minibatch[0]).sum().backward()
    with refused("call the model, not one of its methods"):
        training.optimizer.step()
    mesh = init_device_mesh("cpu", (2,))
    column = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    with refused("Tensor and pipeline parallelism are not supported"):
        wrapped([column], plain.sampler)
    # A step that is abandoned leaves nothing, also if it is added up in another dtype.
    torch.manual_seed(0)
    model = linear(torch.bfloat16, torch.float32)
    optimizer, ends = wrapped(model.parameters()), []
    state, before = optimizer.state_dict(), whole(model.parameters())
    for scales in ((1, 1), (100,), (1, 1)):
        optimizer.load_state_dict(state)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before):
                parameter.copy_(distribute_tensor(value, mesh, [Shard(0)]))
        for scale, _ in zip(scales, optimizer.sampler):
            backward(model, scale)
            optimizer.step()
        ends.append(whole(model.parameters()))
    assert all(map(torch.equal, ends[0], ends[2]))
    # What exact sums of shards refuse.
    for dtype, num_parameters, num_passes, scatters_integers, message in (
        (None, 2, 1, False, "FSDP2 sums gradients in torch.float32, which rounds"),
        (torch.float16, 2, 1, True, "is float16, which cannot hold"),
        (None, 2, 2, True, "was accumulated twice in a minibatch"),
        (None, 1, 1, True, "give all of them to one optimizer"),
    ):
        model = linear(dtype)
        own = [*model.parameters()][:num_parameters]
        optimizer = wrapped(own, exact=model)
        next(iter(optimizer.sampler))
        if not scatters_integers:
            model.set_custom_reduce_scatter(DefaultReduceScatter())
        with refused(message):
            for _ in range(num_passes):
                backward(model)
            optimizer.step()
    # Copies of shards become equal at construction.
    torch.manual_seed(rank)
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    fully_shard(model, mesh=mesh)
    own = [p.to_local().clone() for p in model.parameters()]
    wrapped(model.parameters())
    return all(map(torch.equal, own, [p.to_local() for p in model.parameters()]))


@of_torch_alone
def test_what_would_be_wrong_is_an_error_and_copies_become_equal(two):
    assert [was_equal for _, was_equal in two] == [True, False]


class Either(nn.ModuleList):
    used = 2  # of its layers

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return sum(layer(inputs) for layer, _ in zip(self, range(self.used)))


@of_torch_alone
def test_members_sum_zeros_where_a_step_has_no_gradient(monkeypatch):
    def begin(tensor: torch.Tensor) -> Any:
        tensor.mul_(2)  # another member has the same
        return lambda: None

    monkeypatch.setattr(xla_replica.Replica, "sums_parts", lambda self: begin)
    ends, either = [], Either(nn.Linear(2, 1) for _ in range(2))
    with group_of_one():
        fully_shard(either)  # it is summed while the pass goes on
        fully_shard(model := nn.Sequential(nn.Linear(2, 2), either))
        sampler = vbs.CustomSampler(range(8), [4], minibatch_size=4, on_end="hold")
        inner = torch.optim.SGD(model.parameters(), 1.0)
        optimizer = vbs.ConstantOptimizer(inner, sampler)
        for either.used, _ in zip((2, 1), sampler):
            model(torch.ones(4, 2)).mean().backward()
            optimizer.step()
            ends.append(whole(either[1].parameters()))
    assert all(map(torch.equal, *ends))
