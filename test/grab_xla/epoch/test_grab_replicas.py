"""Any number of replicas gives the orders and accumulators of one replica."""

from typing import Any

import pytest
import torch
from support.grab_xla import ordering
from support.grab_xla.ordering import KINDS, TIE_FREE
from support.xla_replica.replicas import TORCHTPU, row

import xla_replica

# 13 columns and 50 samples: neither is a multiple of 2, 3, 4 or 8.
NUM_SAMPLES, GLOBAL_BATCH = 50, 24
EPOCHS, SAVED_AFTER = 6, 1  # saved in the middle of epoch 3


def train(sampler, first: int, last: int, steps: int | None = None) -> list[list[int]]:
    """Returns the whole orders of the epochs; ``steps`` cuts the last one short."""
    replica = xla_replica.current()
    own_batch = GLOBAL_BATCH // replica.num_replicas
    orders = []
    for epoch in range(first, last):
        begun = epoch % 2 or list(sampler)
        if sampler.balance_type == "adamean":  # the last epoch's last step may wait
            sampler.sorter.update_v(torch.arange(1.0, 14.0) + epoch)
        order = list(sampler) if epoch % 2 else begun
        cut = steps if epoch == last - 1 else None
        ordering.take_steps(sampler, epoch, order, own_batch, cut)
        orders.append(sampler.order.tolist())
    return orders


def run(name: str, saved: dict[str, Any] | None = None, **options: Any):
    """Returns orders, accumulators, a resumed run's orders, and the state to resume."""
    sampler, stopped, restored = (
        KINDS[name].sampler(NUM_SAMPLES, **options) for _ in range(3)
    )
    orders = train(sampler, 0, EPOCHS)
    train(stopped, 0, 4, SAVED_AFTER)
    resumed = []
    if saved is not None:
        restored.load_state_dict(saved)
        resumed = train(restored, 3, 7)[1:]
    accumulators = sampler.state_dict()["engine"]["state"]
    return orders, accumulators, resumed, stopped.state_dict()


def run_all(rank: int, saved: dict[str, Any], options: dict[str, Any]) -> dict:
    return {name: run(name, state, **options) for name, state in saved.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple]:
    """What one replica on the CPU returns, and what a resumed run must give."""
    found = {}
    for name in TIE_FREE:
        orders, accumulators, _, state = run(name)
        whole = train(KINDS[name].sampler(NUM_SAMPLES), 0, 7)
        found[name] = orders, accumulators, whole[4:], state
    return found


# XLA compiles programs of a second for every kind and replica. By default it has a kind
# of each way to balance; slow runs have all, and `test_balance_family` has all on one.
FEW = ["adamean", "coordinated pair", "recursive-pair", "norm"]


def _case(scheme: str, device: str, num_replicas: int, slow=False, names=TIE_FREE):
    marked = row(device, num_replicas, slow)
    case = (scheme, marked.values[0], names)
    few = "" if names is TIE_FREE else "-few"
    return pytest.param(case, marks=marked.marks, id=f"{scheme}-{marked.id}{few}")


@pytest.fixture(
    scope="module",
    params=[
        _case("sharded", "cpu", 3),
        _case("sharded", "xla", 2, names=FEW),
        *(_case("sharded", "xla", n, slow=True) for n in (1, 2, 4, 8)),
        _case("gather", "cpu", 3),
        _case("gather", "xla", 2, slow=True),
        *(_case("sharded", "tpu", 1, names=FEW) for _ in TORCHTPU),
        _case("sharded", "tpu-like", 2),
    ],
)
def together(request, alone):
    scheme, backend, names = request.param
    saved = {name: alone[name][-1] for name in names}
    return backend.run(run_all, saved, {"scheme": scheme}, timeout=180)


@pytest.mark.parametrize("name", TIE_FREE)
def test_orders_and_accumulators_are_those_of_one_replica(together, alone, name):
    """Also of a run that one replica has saved, or several, and others go on with."""
    if name not in together[0]:
        pytest.skip("slow runs have it")
    orders, accumulators, resumed, _ = alone[name]
    for outcome in together:
        found, theirs, gone_on, state = outcome[name]
        assert found == orders
        torch.testing.assert_close(theirs, accumulators, rtol=1e-9, atol=1e-9)
        assert gone_on == resumed
    sampler = KINDS[name].sampler(NUM_SAMPLES)
    sampler.load_state_dict(state)
    assert train(sampler, 3, 7)[1:] == resumed
