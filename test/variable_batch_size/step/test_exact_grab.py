"""GraB's orders, and the weights, have the same bits on any number of replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.grab_xla.training import (
    MINIBATCH,
    REFERENCE,
    TRACE,
    cross_entropies,
    mlp,
    samples,
)
from support.xla_replica.replicas import Backend, needs_xla

import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler

OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"weights": "update", "fidelity": "exact"},
    "projected": {"fidelity": "projected", "projection_size": 24},
    "group": {"fidelity": "group", "group_size": MINIBATCH, "balance_type": "pair"},
    "drawn": {"prob_balance": True, "balance_type": "recursive", "depth": 1},
}
EPOCHS = 4


def train(rank: int, kind: str, is_exact: bool = True, num_samples: int = 24):
    """Returns orders, what is left, minibatches yielded, and every epoch's programs.

    In the first epoch's second step losses are 10,000 times as large.
    """
    del rank
    torch.set_num_threads(1)
    replica, model = xla_replica.current(), mlp(torch.float32)
    x, y = samples(num_samples, torch.float32)
    parameters = dict(model.named_parameters())
    exact = {"scheme": "gather", "exact": True} if is_exact else {}
    grab = GraBSampler(range(num_samples), parameters, **exact, **OPTIONS[kind])
    sampler = vbs.CustomSampler(
        range(num_samples), TRACE, minibatch_size=MINIBATCH, on_end="cycle",
        order=grab, verbose=False,
    )  # fmt: skip
    inner = torch.optim.SGD(model.parameters(), 0.3)
    optimizer = vbs.LinearRuleOptimizer(
        inner, sampler, REFERENCE, max_grad_norm=1.0, exact=model
    )
    updates: list[vbs.Update] = []
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
                    losses = cross_entropies(model, inputs, targets) * scale
                grab.backward(losses, indices=rows)
                optimizer.step()
            replica.sync()
        orders.append(grab.order.tolist())
        counts.append(count.compilations)
    state = grab.state_dict()["engine"]
    weights = replica.fetch([p.detach() for p in model.parameters()])
    left = [*weights, *state["state"].values(), state["codes"]]
    replica.barrier()
    return orders, left, sampler.num_yielded, counts


def check(kind: str, *backends: Backend) -> None:
    """Asserts that all replicas of all backends find the same."""
    expected = None
    for backend in backends:
        results = backend.run(train, kind)
        total = sum(number for _, _, number, _ in results)
        for orders, left, _, counts in results:
            expected = expected or (orders, left, total)
            assert len({tuple(order) for order in orders}) == EPOCHS
            assert counts[1:] == [0] * (EPOCHS - 1)
            assert orders == expected[0]
            assert all(map(torch.equal, left, expected[1]))
            # The first two steps and the third were run again.
            num_dealt = EPOCHS * 24 // MINIBATCH
            assert total == expected[2] >= num_dealt + sum(TRACE[:2]) // MINIBATCH


@pytest.fixture(autouse=True)
def threads():
    """One replica alone trains in this process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", OPTIONS)
def test_orders_and_weights_have_the_same_bits(kind):
    check(kind, *(Backend("cpu", number) for number in (1, 2, 3)))


@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow) for k in OPTIONS if k != "group"]
    + ["group"],
)
def test_orders_and_weights_have_the_same_bits_on_xla(kind):
    check(kind, Backend("xla", 1), Backend("xla", 2))


def test_steps_that_are_run_again_need_rows_that_wait():
    with pytest.raises(ValueError, match=r"exact=True, scheme='gather'"):
        train(0, "exact", is_exact=False)
    with pytest.raises(ValueError, match="needs scheme='gather', got 'sharded'"):
        GraBSampler(range(8), dict(mlp().named_parameters()), exact=True)
