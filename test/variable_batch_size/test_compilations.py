"""After warm-up no change compiles a graph, by XLA or torch, or reads the device."""

import pytest
import torch
import torch.nn.functional as F
from support.compiled import GraphCounter, needs_cxx
from support.variable_batch_size import elastic
from support.variable_batch_size.wrapping import CPU, make
from support.xla_replica import replicas
from torch import nn

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.device_scalars import DeviceScalars, TensorScalars

# The learning rates that this makes, lr = 1/4 at ref 16: among them exactly 1.0, which
# a compiled program would hold as a constant, and 0.5, the momentum. Three replicas of
# 4 samples idle below 12.
BATCH_SIZES = [4 * n for n in (1, 2, 3, 4, 5, 7, 8, 11, 16)]
SAMPLES = sum(BATCH_SIZES)


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def counted_epochs(rank: int, optimizer: str, rule: str, backend="") -> list[tuple]:
    with xla_replica.current().seeded(0):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        inputs, targets = torch.randn(SAMPLES, 6), torch.randint(0, 3, (SAMPLES,))
    case = elastic.Case(BATCH_SIZES, 3, optimizer, rule, 0.25, max_grad_norm=1.0)
    training = elastic.Training(case, cross_entropy, made=(model, inputs, targets))
    if backend:
        called = torch.compile(model, backend=backend)
        training.loss = lambda _, x, y: cross_entropy(called, x, y)
    counts = [training.counted_epoch(epoch) for epoch in range(2)]
    training.optimizer.set_lr((0.0,))  # what a warm-up begins with
    return [*counts, training.counted_epoch(2)]


# Two replicas of XLA have, by default, what `test_rule_family` does not count.
FEW = [
    ("sgd-momentum", "linear"), ("adagrad", "root"), ("rmsprop", "root"),
    ("sgd-momentum", "linear", "openxla"),
]  # fmt: skip
RUNS = [
    *FEW, ("sgd-momentum", "linear-momentum"), ("adamw", "root"),
    ("sgd-momentum", "adascale"), ("adamw", "adam-half-life"),
]  # fmt: skip


def all_counted_epochs(rank: int) -> dict[tuple[str, ...], list[tuple[int, int, int]]]:
    runs = FEW if xla_replica.current().num_replicas == 2 else RUNS
    runs = [run for run in runs if replicas.HAS_XLA or "openxla" not in run]
    return {run: counted_epochs(rank, *run) for run in runs}


@pytest.fixture(scope="module", params=[*replicas.XLA_BACKENDS, *replicas.TORCHTPU])
def counts(request):
    return request.param.run(all_counted_epochs)


@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_steady_state_compiles_and_transfers_nothing(counts, run):
    assert counts[0][RUNS[0]][0][0] > 0
    for replica in counts:
        if run not in replica:
            pytest.skip("its compiler is torch_xla's, or slow runs have it")
        first, *later = replica[run]
        assert later == [(0, 0, 0)] * 2
        assert first[1:] == (0, 0)


def deferred(rank: int) -> dict[tuple[str, ...], list[tuple[int, int, int]]]:
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        return all_counted_epochs(rank)


@pytest.mark.parametrize("backend", replicas.TORCHTPU)
def test_deferred_operations_compile_as_little(backend):
    for counted in backend.run(deferred):
        for run, (_, *later) in counted.items():
            assert later == [(0, 0, 0)] * 2, run


def graphs_of_first_epoch(rank: int, num_batch_sizes: int) -> int:
    trace = [4 * (1 + n % num_batch_sizes) for n in range(32)]
    case = elastic.Case(trace, num_samples=2048)
    return elastic.Training(case, sampler={"on_end": "stop"}).counted_epoch(0)[0]


@pytest.mark.parametrize("backend", replicas.XLA_BACKENDS)
@pytest.mark.parametrize("num_batch_sizes", [1, 16])
def test_three_graphs_for_any_number_of_batch_sizes(backend, num_batch_sizes):
    """They are the minibatch, the update, and the update that creates momentum."""
    assert set(backend.run(graphs_of_first_epoch, num_batch_sizes)) == {3}


@replicas.on_xla
def test_the_counter_sees_transfers_and_compilations():
    assert replicas.Backend("xla", 1).run(a_fetch_and_numbers_in_a_graph) == [(1, 1, 3)]


def a_fetch_and_numbers_in_a_graph(rank: int) -> tuple[int, int, int]:
    replica = xla_replica.current()
    tensors = [torch.ones(3, device=replica.device) * replica.scalar(k) for k in (2, 3)]
    replica.wait()
    with xla_replica.count() as fetch:
        assert [v.tolist() for v in replica.fetch(tensors)] == [[2.0] * 3, [3.0] * 3]
    with xla_replica.count() as item:
        assert tensors[0][0].item() == 2.0
    with xla_replica.count() as programs:
        for shape in (2, 3, 4):
            tensors[0].expand(shape, 3).sum().item()
    return fetch.transfers, item.transfers, programs.compilations


# --- by torch.compile: minibatches have one size, so that two graphs serve all ------

# From one minibatch of 4, with which all replicas but one are idle, to sixteen. The
# first step makes replicas run compiled functions while others still compile them.
TRACE = (40, 8, 12, 32, 64, 4, 20, 4)
CASES = {
    "exact": elastic.Case((32, 4, 64, 4, 8), 1, "sgd-heavy-ball", lr=1 / 8, exact=True),
    "clipped": elastic.Case(
        TRACE, epochs=3, optimizer="adamw", rule="root", lr=2**-8, max_grad_norm=0.05
    ),
}


def compiled_runs(rank: int, backend: str) -> dict[str, tuple[list, int]]:
    """Returns the weights of every case, and how many graphs were compiled for it."""
    runs = {}
    for name, case in CASES.items():
        counter = GraphCounter(backend)
        found = elastic.elastic_run(
            rank, case, torch.compile(elastic.loss_of, backend=counter)
        )
        runs[name] = found["weights"], counter.num_graphs
    return runs


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("aot_eager", "cpu"), marks=replicas.of_torch_alone),
        pytest.param(("inductor", "cpu"), marks=[needs_cxx, pytest.mark.slow]),
        pytest.param(("openxla", "xla"), marks=[replicas.needs_xla, pytest.mark.xla]),
    ],
)
def runs(request):
    compiler, device = request.param
    return replicas.Backend(device, 2).run(compiled_runs, compiler)


@pytest.mark.parametrize("name", CASES)
def test_two_graphs_and_the_weights_of_a_large_batch_run(runs, name):
    for run in runs:
        weights, num_graphs = run[name]
        assert num_graphs == 2  # forward and backward
        elastic.assert_as_one_large_batch(CASES[name], weights)


@replicas.of_torch_alone
def test_a_compiled_loop_body_is_refused():
    """Its hooks would be compiled too, and step() at every step."""
    model, sampler, wrapper = make(trace=[256], cls=vbs.ConstantOptimizer)

    def body() -> int:
        model(torch.ones(2, 2)).sum().backward()
        return wrapper.step()

    compiled = torch.compile(body, backend="aot_eager")
    wrapper.set_epoch(0)
    with pytest.raises(TypeError, match=r"compile the forward pass alone"):
        compiled()
    torch.compiler.reset()
    model.zero_grad()
    assert [body() for _ in zip(range(3), sampler)] == [0, 0, 0]


# --- numbers are uploaded once; optimizers take them as tensors, unread -------------


def test_numbers_are_uploaded_once_and_never_shared_between_uses():
    scalars = DeviceScalars(CPU, capacity=3)
    first = scalars.get("lr", 0.5)
    assert first.shape == (1,)
    assert scalars.get("lr", 0.5) is first
    assert scalars.get("divisor", 0.5) is not first
    assert scalars.get("lr", 0.5, torch.float64).dtype == torch.float64
    scalars.get("lr", 0.25)
    assert scalars.get("lr", 0.5) is not first  # the oldest made room


def steps(name: str, as_tensor: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape).double()) for shape in ((3, 4), (5,))]
    optimizer = elastic.OPTIMIZERS[name](parameters, 0.1)
    [group] = optimizer.param_groups
    for lr in (0.1, 1.0, 0.0, 0.3, 0.5):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape).double()
        group["lr"] = lr
        if not as_tensor:
            optimizer.step()
            continue
        group |= {"lr": torch.tensor([lr], dtype=torch.float64), "foreach": False}
        with NoReads(), TensorScalars():  # the last entered sees a call first
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


class NoReads(torch.overrides.TorchFunctionMode):
    """Fails on anything that reads a learning rate back to Python."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for name in kwargs.keys() & {"alpha", "value"}:
            assert not torch.is_tensor(kwargs[name]), f"{func} would read {name}"
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", elastic.OPTIMIZERS)
def test_every_optimizer_steps_the_same(name):
    found, expected = steps(name, True), steps(name, False)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_without_it_torch_reads_the_learning_rate():
    """What the module is for: this must keep failing, or it can be deleted."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], torch.tensor(0.1), foreach=False)
    with pytest.raises(AssertionError, match="would read"), NoReads():
        optimizer.step()
