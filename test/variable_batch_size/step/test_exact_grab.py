"""GraB's orders, and the weights, have the same bits on any number of replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.grab_xla import training
from support.xla_replica.replicas import Backend, needs_xla, of_torch_alone

import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler

OPTIONS: dict[str, dict[str, Any]] = {
    "group": {"fidelity": "group", "group_size": 4, "balance_type": "pair"},
    "exact": {"fidelity": "exact", "weights": "update"},
    "projected": {"fidelity": "projected", "projection_size": 24},
    "drawn": {"prob_balance": True, "balance_type": "recursive", "depth": 1},
}
EPOCHS = 4  # of 24 samples


def train(rank: int, kind: str, exact: bool = True):
    """Returns orders and what is left, minibatches yielded, and later compilations.

    In the first epoch's second step losses are 10,000 times as large.
    """
    del rank
    torch.set_num_threads(1)
    replica, model = xla_replica.current(), training.mlp(torch.float32)
    x, y = training.samples(24, torch.float32)
    parameters = dict(model.named_parameters())
    options = {"scheme": "gather", "exact": exact, **OPTIONS[kind]}
    grab = GraBSampler(x, parameters, **options)
    sampler = vbs.CustomSampler(
        x, training.TRACE, minibatch_size=4, on_end="cycle", order=grab, verbose=False
    )
    inner, updates = torch.optim.SGD(model.parameters(), 0.3), []
    optimizer = vbs.LinearRuleOptimizer(
        inner, sampler, 8, max_grad_norm=1.0, exact=model
    )
    for target in (grab.after_update, updates.append):
        optimizer.attach(target)
    orders, counts = [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        with xla_replica.count(replica) as count:
            optimizer.set_epoch(epoch)
            for rows in sampler:
                inputs, targets = replica.send((x[rows], y[rows]))
                scale = replica.scalar(1e4 if len(updates) == 1 else 1.0)
                with grab.record(model):
                    losses = training.cross_entropies(model, inputs, targets) * scale
                grab.backward(losses, indices=rows)
                optimizer.step()
            replica.sync()
        orders.append(torch.tensor(grab.order))
        counts.append(count.compilations)
    state = grab.state_dict()["engine"]
    weights = replica.fetch([p.detach() for p in model.parameters()])
    replica.barrier()
    found = [*orders, *weights, *state["state"].values(), state["codes"]]
    return found, sampler.num_yielded, sum(counts[2:])  # replicas have idled before


def check(kind: str, *backends: Backend) -> None:
    """Asserts that all replicas of all backends find the same."""
    runs = [backend.run(train, kind) for backend in backends]
    expected, num_yielded, _ = runs[0][0]
    assert len({tuple(order.tolist()) for order in expected[:EPOCHS]}) == EPOCHS
    assert num_yielded > EPOCHS * 24 // 4 + 2  # another step than the first is repeated
    for results in runs:
        assert sum(number for _, number, _ in results) == num_yielded
        for found, _, num_compiled in results:
            assert num_compiled == 0
            assert all(map(torch.equal, found, expected))


@of_torch_alone
@pytest.mark.parametrize("kind", OPTIONS)
def test_orders_and_weights_have_the_same_bits(kind):
    check(kind, *(Backend("cpu", number) for number in (1, 2, 3)))


@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize(
    "kind",
    ["group", *(pytest.param(k, marks=pytest.mark.slow) for k in [*OPTIONS][1:])],
)
def test_orders_and_weights_have_the_same_bits_on_xla(kind):
    check(kind, Backend("xla", 1), Backend("xla", 2))


def test_steps_that_are_run_again_need_rows_that_wait():
    with pytest.raises(ValueError, match=r"exact=True, scheme='gather'"):
        train(0, "exact", False)
    with pytest.raises(ValueError, match="needs scheme='gather', got 'sharded'"):
        GraBSampler(range(8), dict(training.mlp().named_parameters()), exact=True)
