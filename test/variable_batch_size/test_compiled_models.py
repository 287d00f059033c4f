"""What torch.compile has compiled, in elastic loops: two graphs, and equal weights.

The compiled function is the loss of a minibatch. Minibatches always have one size, so
its forward and its backward graph serve every batch size.
"""

from __future__ import annotations

import pytest
import torch
from support.compiled import GraphCounter, needs_cxx
from support.variable_batch_size.elastic import (
    Case,
    elastic_run,
    large_batch_run,
    loss_of,
)
from support.variable_batch_size.wrapping import make
from support.xla_replica.replicas import row

import variable_batch_size as vbs

# From one minibatch of 4, with which all replicas but one are idle, to sixteen. The
# first step makes replicas run compiled functions while others still compile them.
TRACE = (40, 8, 12, 32, 64, 4, 20, 4)
CASES = {
    "exact": Case((32, 4, 64, 4, 8), optimizer="sgd-heavy-ball", lr=2**-3, exact=True),
    "clipped": Case(
        TRACE, epochs=3, optimizer="adamw", rule="root", lr=2**-8, max_grad_norm=0.05
    ),
}


def compiled_runs(rank: int, backend: str) -> dict[str, tuple[list, int]]:
    """Returns the weights of every case, and how many graphs were compiled for it."""
    runs = {}
    for name, case in CASES.items():
        counter = GraphCounter(backend)
        found = elastic_run(rank, case, torch.compile(loss_of, backend=counter))
        runs[name] = found["weights"], counter.num_graphs
    return runs


def on(backend: str, *args, slow: bool = False):
    """Returns a backend of torch.compile and one of replicas, as a parameter."""
    replicas = row(*args, slow=slow)
    marks = [*replicas.marks, *([needs_cxx] if backend == "inductor" else [])]
    name = f"{backend}-{replicas.id}"
    return pytest.param((backend, *replicas.values), marks=marks, id=name)


@pytest.fixture(
    scope="module",
    params=[
        on("aot_eager", "cpu", 1, slow=True),
        on("aot_eager", "cpu", 2),
        on("inductor", "cpu", 1, slow=True),
        on("inductor", "cpu", 2, slow=True),
        on("openxla", "xla", 1, slow=True),
        on("openxla", "xla", 3),
        on("openxla", "xla", 8, slow=True),
    ],
)
def runs(request):
    """Returns every replica's weights and graphs, by case; one launch."""
    backend, replicas = request.param
    yield replicas.run(compiled_runs, backend)
    torch.compiler.reset()  # what a single replica has compiled in this process


@pytest.mark.parametrize("name", CASES)
def test_two_graphs_and_the_weights_of_a_large_batch_run(runs, name):
    expected, _ = large_batch_run(CASES[name])
    for run in runs:
        weights, num_graphs = run[name]
        assert num_graphs == 2  # forward and backward
        for weight, reference in zip(weights, expected, strict=True):
            if CASES[name].exact:
                assert torch.equal(weight, reference)
            else:
                torch.testing.assert_close(weight, reference, atol=1e-6, rtol=1e-6)


def test_a_compiled_loop_body_is_refused():
    """Its hooks would be compiled too, and step() at every step."""
    model, _, wrapper = make(trace=[256], cls=vbs.ConstantOptimizer)

    def body() -> int:
        model(torch.ones(2, 2)).sum().backward()
        return wrapper.step()

    compiled = torch.compile(body, backend="aot_eager")
    wrapper.set_epoch(0)
    with pytest.raises(TypeError, match=r"compile the forward pass alone"):
        compiled()
    torch.compiler.reset()
    model.zero_grad()
    assert [body() for _ in range(3)] == [0, 0, 0]


def test_a_compiled_step_of_the_inner_optimizer_is_refused():
    def compiled(parameters, lr: float) -> torch.optim.Optimizer:
        inner = torch.optim.SGD(parameters, lr)
        inner.step = torch.compile(inner.step, backend="aot_eager")
        return inner

    with pytest.raises(TypeError, match=r"every learning rate.* compile the model"):
        make(inner=compiled)
