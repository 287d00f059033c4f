"""Replicas order as one does, also where an elastic sampler changes the batch."""

from itertools import pairwise

import pytest
import torch
from support.grab_xla import ordering, training
from support.grab_xla.ordering import KINDS, TIE_FREE
from support.xla_replica import replicas
from support.xla_replica.replicas import TORCHTPU, Backend, backends, row
from torch import nn

import variable_batch_size as vbs
import xla_replica

EPOCHS, LATER = 5, range(5, 7)
# Steps of 1 to 6 minibatches of 4: several substeps, and idle replicas.
EVEN = {"num_samples": 50, "trace": [8, 4, 16, 12, 4, 24, 8, 20]}
# Epochs of 16 minibatches of 3 samples: their ends split pairs and blocks.
ODD = {"num_samples": 48, "minibatch_size": 3, "trace": [9, 3, 15, 6, 12, 3]}
NAMES = [*TIE_FREE, "rr"]  # whose steps are checked, and not balanced
# XLA compiles programs of a second for every kind and replica: by default it has a kind
# of each way to balance, or split pairs; `test_balance_family` has all on one replica.
FEW, PAIRS = ["adamean", "recursive-pair", "norm"], ["pair", "coordinated pair"]


class Training(training.Training):
    def __init__(self, name: str, **given) -> None:
        given = EVEN | given
        grab = KINDS[name].sampler(given.pop("num_samples"))
        model = nn.Linear(3, 1).to(xla_replica.current().device)
        inner = torch.optim.SGD(model.parameters(), 0.01)
        super().__init__(model, inner, grab, **given)

    def minibatch(self, indices: list[int]) -> None:
        self.model(self.replica.send(torch.ones(len(indices), 3))).sum().backward()
        rows = ordering.gradients(self.sampler.epoch, self.grab.num_samples)[indices]
        self.grab.step(self.replica.send(ordering.as_dict(rows)), indices=indices)


def train(name: str, epochs=range(EPOCHS), saved=None, **options):
    """Returns the orders of all epochs, the accumulators, and every epoch's counts."""
    run, orders, costs = Training(name, **options), [], []
    if saved is not None:
        run.grab.load_state_dict(saved)
    for epoch in epochs:
        with xla_replica.count(run.replica) as counts:
            orders.append(run.epoch(epoch, run.minibatch))
        costs.append((counts.compilations, counts.transfers))
    return orders, run.grab.state_dict(), costs


def train_plainly(name: str, scheme: str = "sharded"):
    """Returns orders, state and herding of steps of 24 samples, without a trace."""
    options, orders = {"scheme": scheme, "record_herding": True}, []
    sampler = KINDS[name].sampler(50, **options)
    own_batch = 24 // xla_replica.current().num_replicas
    for epoch in range(EPOCHS):
        if name == "adamean":
            sampler.sorter.update_v(torch.arange(1.0, 14.0) + epoch)
        ordering.run_epoch(sampler, epoch, own_batch)
        orders.append(sampler.order.tolist())
    return orders, sampler.state_dict(), sampler.scalars()


def train_all(rank: int, saved) -> dict:
    """Returns what `train` does, two epochs after a saved state, and plain loops."""
    is_cpu = xla_replica.current().device.type == "cpu"
    schemes = ("sharded", "gather") if is_cpu else ("sharded",)
    return {
        name: (
            *train(name),
            train(name, LATER, state)[0],
            [train_plainly(name, scheme) for scheme in schemes],
        )
        for name, state in saved.items()
    }


@pytest.fixture(scope="module")
def alone() -> dict:
    whole = {name: train(name, range(LATER.stop))[0] for name in NAMES}
    return {
        name: (*train(name)[:2], whole[name][EPOCHS:], train_plainly(name))
        for name in NAMES
    }


@pytest.fixture(
    scope="module",
    params=[
        row("cpu", 3), row("cpu", 8, slow=True), row("xla", 2),
        *backends("xla", slow=(1, 3, 8)), row("tpu-like", 2), *TORCHTPU,
    ],
)  # fmt: skip
def together(request, alone):
    names = FEW if request.param == ("xla", 2) else NAMES
    saved = {name: alone[name][1] for name in names}
    return request.param, request.param.run(train_all, saved, timeout=180)


@pytest.mark.parametrize("name", NAMES)
def test_signs_are_credited_to_the_samples_they_are_of(together, alone, name):
    """Whichever replica ran them; and in a plain loop, however they share the sums."""
    backend, outcomes = together
    if name not in outcomes[0]:
        pytest.skip("slow runs have it")
    *own, afterwards, plain = alone[name]
    for orders, *_ in (own, plain):
        assert len({tuple(order) for order in orders}) == EPOCHS
    for outcome in outcomes:
        *theirs, costs, resumed, plainly = outcome[name]
        assert resumed == afterwards
        for found, expected in [(theirs, own), *((each, plain) for each in plainly)]:
            assert found[0] == expected[0]
            both = ((s["engine"]["state"], *rest) for _, s, *rest in (found, expected))
            torch.testing.assert_close(*both, rtol=1e-9, atol=1e-9)
        if backend.device == "xla":
            compilations, transfers = zip(*costs)
            assert compilations[2:] == (0, 0, 0)
            # Every replica reads the placements once, when an epoch begins.
            assert {*transfers} <= {0, backend.num_replicas}


def train_pairs(rank: int, names: list[str]) -> dict:
    return {name: train(name, **ODD) for name in names}


@pytest.mark.parametrize("backend", [
    row("cpu", 1), row("cpu", 3, slow=True), row("xla", 2), row("xla", 8, slow=True),
])  # fmt: skip
def test_pairs_that_minibatches_split_are_the_oracles(backend):
    names = PAIRS if backend == ("xla", 2) else [*PAIRS, "recursive-pair"]
    for outcome in backend.run(train_pairs, names, timeout=180):
        for name, (orders, _, costs) in outcome.items():
            assert len(set(map(tuple, orders))) == EPOCHS
            for epoch, (order, following) in enumerate(pairwise(orders)):
                rows = ordering.gradients(epoch, len(order))[order].numpy()
                assert KINDS[name].expected(order, rows, {}, None) == following, name
            if backend.device == "xla":
                # Whatever number of samples waits has been seen in the first epoch.
                assert [compilations for compilations, _ in costs[1:]] == [0] * 4, name


def stepped_wrongly(rank: int, how: str) -> None:
    run = Training("mean", trace=[8], attaches=how != "not attached")
    rows = ordering.gradients(0)
    grads = ordering.as_dict(rows[: training.MINIBATCH])
    for epoch in range(2):
        run.sampler.set_epoch(epoch)
        run.optimizer.set_epoch(epoch)
        for minibatch in run.sampler:
            run.model(torch.ones(len(minibatch), 3)).sum().backward()
            if how not in ("optimizer first", "never"):
                run.grab.step(ordering.as_dict(rows[: len(minibatch)]))
            if how == "other samples":
                run.grab.step(grads, indices=range(training.MINIBATCH))
            run.optimizer.step()
            if how == "optimizer first":
                run.grab.step(grads)


@pytest.mark.parametrize(("num_replicas", "how", "message"), [
    (2, "not attached", "optimizer.attach"),
    (2, "optimizer first", "before optimizer.step"),
    (2, "other samples", "indices are"),
    # The first update, of two minibatches of four, raises.
    (1, "optimizer first", r"gradients of 4 since.*before optimizer\.step"),
    (1, "other samples", "indices are"),
    (1, "never", "took the gradients of 0 since"),
])  # fmt: skip
def test_misuse_is_named(num_replicas, how, message):
    with pytest.raises((ValueError, xla_replica.ReplicaError), match=message):
        Backend("cpu", num_replicas).run(stepped_wrongly, how)


def test_one_replica_balances_at_once_and_gives_no_earlier_order():
    stepped_wrongly(0, "not attached")
    grab = KINDS["mean"].sampler()
    assert grab(3).tolist() == grab(3).tolist()
    with pytest.raises(ValueError, match="gone"):
        grab(2)


def stopped_at(rank: int, name: str, folder, stop_at: int | None) -> list[list[int]]:
    """Returns the orders of all epochs, or until a checkpoint after ``stop_at``."""
    run = Training(name)
    checkpointer = vbs.Checkpointer(
        folder, run.optimizer, every_updates=10_000, model=run.model, grab=run.grab
    )
    checkpointer.load()

    def stop(update: vbs.Update) -> None:
        if update.step == stop_at:
            xla_replica.request_stop("test")

    run.optimizer.attach(stop)
    run.optimizer.attach(checkpointer)
    left = range(run.sampler.epoch, EPOCHS)
    return [run.epoch(epoch, run.minibatch) for epoch in left]


@pytest.mark.parametrize("name", ["mean", "pair"])
@pytest.mark.parametrize(("first", "then"), [
    (Backend("cpu", 1), Backend("cpu", 2)),
    pytest.param(Backend("cpu", 3), Backend("cpu", 1), marks=replicas.of_torch_alone),
    pytest.param(
        Backend("xla", 3), Backend("cpu", 2), marks=row("xla", 3, slow=True).marks
    ),
], ids=["1 then 2", "3 then 1", "3 on XLA, then 2"])  # fmt: skip
def test_orders_go_on_in_the_middle_of_an_epoch(first, then, name, alone, tmp_path):
    """The number of replicas changes; epochs have four or five steps."""
    expected = alone[name][0]
    with pytest.raises(xla_replica.Stopped):
        first.run(stopped_at, name, tmp_path, 8, timeout=180)
    for orders in then.run(stopped_at, name, tmp_path, None, timeout=180):
        assert orders == expected[EPOCHS - len(orders) :]
        assert 2 <= len(orders) < EPOCHS
