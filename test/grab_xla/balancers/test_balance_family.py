"""Every balance type keeps the same promises. `KINDS` has a row for each type."""

import pickle
import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grab_xla import ordering
from support.grab_xla.ordering import BALANCING, INVARIANT, KINDS, PERMUTING
from support.xla_replica import replicas
from support.xla_replica.replicas import of_torch_alone, row

import xla_replica
from grab_xla import BALANCE_TYPES, Balancer, GraBSampler, GraBWarning
from grab_xla.balancers.pair import RecursivePairBalance
from grab_xla.balancing.decisions import TIES, Decisions
from grab_xla.balancing.reordering import reorder

each = pytest.mark.parametrize


def test_every_type_is_a_row_and_documented():
    assert all(each.__doc__ for each in BALANCE_TYPES.values())
    ntk = {"ntk", "ntk-fixed", "ntk-eigen", "ntk-fixed-eigen"}
    assert {kind.name for kind in KINDS.values()} | ntk >= BALANCE_TYPES.keys()


@each("products", [False, True])
@each("size", [1, 7, 24])
@each("name", [name for name, kind in KINDS.items() if kind.oracle])
def test_orders_are_the_oracles(name, size, products, monkeypatch):
    ordering.by_products(monkeypatch, products)
    kind = KINDS[name]
    sampler, memory = kind.sampler(), {}
    steps = [(start, min(start + size, 48)) for start in range(0, 48, size)]
    expected = None
    for epoch in range(5):
        order = ordering.run_epoch(sampler, epoch, size)
        assert expected is None or order == expected, epoch
        rows = ordering.gradients(epoch)[order].numpy()
        expected = kind.expected(order, rows, memory, steps)


@each("name", ["ema", "adaema"])
def test_moving_averages_balance_around_what_they_say(name):
    """Compares every sign but those of ties, given the sampler's own earlier signs."""
    sampler, num_steps = KINDS[name].sampler(), 0
    average = square = np.zeros(ordering.NUM_PARAMETERS)
    for epoch in range(3):
        rows = ordering.gradients(epoch)[list(sampler)]
        total = np.zeros(ordering.NUM_PARAMETERS)
        for start in range(0, 48, 8):
            sampler.step(ordering.as_dict(rows[start : start + 8]))
            z, num_steps = rows[start : start + 8].numpy(), num_steps + 1
            mean = z.mean(0)
            average = 0.9 * average + 0.1 * mean
            square = 0.999 * square + 1e-3 * mean**2
            z = z - average / (1 - 0.9**num_steps)
            if name == "adaema":
                z = z / (np.sqrt(square / (1 - 0.999**num_steps)) + 1e-8)
            engine = sampler.state_dict()["engine"]
            signs = engine["codes"].numpy()[start:]
            totals = np.vstack([total, total + (signs[:, None] * z).cumsum(0)])
            products, total = (totals[:-1] * z).sum(1), totals[-1]
            sure = np.abs(products) > 1e-9 * (z**2).sum(1)
            assert (signs == np.where(products < 0, 1, -1))[sure].all()
            np.testing.assert_allclose(engine["state"]["sums"][0], total, 1e-9, 1e-9)
        assert set(engine["codes"].tolist()) == {-1, 1}


@settings(max_examples=25)
@given(data=st.data())
@each("name", PERMUTING)
def test_every_order_is_a_permutation(name, data):
    """This holds for any n, any batch sizes, also none, and epochs that end early."""
    block = {"pair": 2, "coordinated pair": 8, "recursive-pair": 8}.get(name, 1)
    n = data.draw(st.just(1) | st.integers(block, 40))
    sampler = KINDS[name].sampler(n)
    for epoch in range(4):
        order = list(sampler)
        assert sorted(order) == list(range(n))
        sampler.step(ordering.as_dict(torch.zeros(0, 13)))
        done, stop = 0, data.draw(st.integers(0, n))
        while done < stop:
            size = data.draw(st.integers(1, n - done))
            ordering.take_steps(sampler, epoch, order[done : done + size], size)
            done += size


def test_with_replacement_draws_anew():
    sampler = KINDS["swr"].sampler(2000)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert 1100 < len(set(first)) < 1400  # 1 - 1/e of them


@each("name", INVARIANT)
def test_batches_do_not_change_drawn_signs(name, monkeypatch):
    orders, options = [], {"prob_balance": True, "prob_balance_c": 5.0}
    for products in (False, True):
        ordering.by_products(monkeypatch, products)
        for size in (48, 1, 7, 5, 16):
            sampler = KINDS[name].sampler(**options)
            epochs = [ordering.run_epoch(sampler, epoch, size) for epoch in range(3)]
            orders.append(epochs)
    assert all(each == orders[0] for each in orders)


@each("products", [False, True])
@each("name", BALANCING)
def test_what_is_not_finite_keeps_its_place(name, products, monkeypatch):
    """Sums and herding stay finite, and there is one warning, not one per epoch."""
    ordering.by_products(monkeypatch, products)
    options = {"record_herding": True, "stale_mean_herding": products}
    sampler = KINDS[name].sampler(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(3):
            order = list(sampler)
            rows = ordering.gradients(epoch)[order]
            rows[5, 2] = np.nan
            rows[20:22, 12] = np.inf  # Their difference would be zero.
            places = {place: order[place] for place in (5, 20, 21)}
            for part in rows.split(8):
                sampler.step(ordering.as_dict(part))
            state = sampler.state_dict()["engine"]["state"]
            assert all(value.isfinite().all() for value in state.values())
            assert np.isfinite(sampler.sorter.herding)
            assert sampler.scalars().keys() == {"herding", "avg_grad_error"}
            following = list(sampler)
            assert {p: following[p] for p in places} == places
            assert sorted(following) == list(range(48))
    assert [each.category for each in caught] == [GraBWarning]
    assert "not finite" in str(caught[0].message)


@each("steps", [0, 3, *(pytest.param(n, marks=of_torch_alone) for n in (2, 6))])
@each("name", ordering.ALL)
def test_a_saved_run_goes_on_where_it_was(name, steps, tmp_path):
    kind = KINDS[name]
    drawn = {"prob_balance": True, "prob_balance_c": 3.0}
    for options in ({}, drawn):
        undisturbed, sampler = kind.sampler(**options), kind.sampler(**options)
        for each_sampler in (undisturbed, sampler):
            ordering.run_epoch(each_sampler, 0, 8)
            order = ordering.run_epoch(each_sampler, 1, 8, steps)
        torch.save(sampler.state_dict(), tmp_path / "state.pt")
        restored = kind.sampler(**options, seed=7)
        restored.load_state_dict(torch.load(tmp_path / "state.pt"))
        left = order[8 * steps :]
        ordering.take_steps(undisturbed, 1, left, 8)
        # An order that needs no gradients counted no sample: the next one follows.
        if left and (steps or BALANCE_TYPES[kind.name].needs_gradients):
            assert len(restored) == len(left)
            assert list(restored) == list(restored) == left
            ordering.take_steps(restored, 1, left, 8)
        for epoch in (2, 3, 4):
            expected = ordering.run_epoch(undisturbed, epoch, 8)
            restored = pickle.loads(pickle.dumps(restored))
            assert ordering.run_epoch(restored, epoch, 8) == expected


class Returning(Balancer):
    placements: ClassVar[torch.Tensor]

    def init(self, num_columns, dtype, device):
        return {}

    def balance(self, state, rows, decide):
        return state, self.placements.to(rows.device)


def returned_once(rank: int, placements: torch.Tensor) -> None:
    Returning.placements, BALANCE_TYPES["returning"] = placements, Returning
    list(grab := GraBSampler(range(3), {"w": torch.zeros(2)}, "returning"))
    grab.step({"w": torch.ones(3, 2).to(grab.device)})
    assert grab.device.type != "cpu", "the step has raised"
    list(grab)


@each(("placements", "message"), [
    (torch.tensor([1, 2, -1]), r"balance returned 2 .*integers from -1 to 1"),
    (torch.tensor([0.5, 1, -1]), r"balance returned 0\.5 \(float32\)"),
    (torch.tensor([True, False, True]), r"returned True \(bool\)"),
    (torch.tensor([1, -1]), r"placements of shape \(2,\) for 3 samples"),
])  # fmt: skip
@each("backend", [row("cpu", 1), row("xla", 1)])
def test_bad_placements_are_named(monkeypatch, backend, placements, message):
    """On a CPU at once; elsewhere, where values are not read, when an epoch ends."""
    monkeypatch.setitem(BALANCE_TYPES, "returning", Returning)
    with pytest.raises((ValueError, xla_replica.ReplicaError), match=message):
        backend.run(returned_once, placements)


RUNS = [
    *((name, {}) for name in BALANCING),
    ("mean", {"prob_balance": True}),
    ("mean", dict.fromkeys(["record_norm", "record_herding", "stale_mean_herding"], 1)),
    ("mean", {"normalize_grads": True}),
]
NUM_SAMPLES = 44  # with steps of 16: two whole ones and one of 12


def count_epochs(rank: int) -> list[list]:
    replica = xla_replica.current()
    own_batch = 16 // replica.num_replicas
    counted = []
    for name, options in RUNS:
        sampler = KINDS[name].sampler(NUM_SAMPLES, **options)
        epochs = []
        for epoch in range(4):
            rows = ordering.gradients(epoch, NUM_SAMPLES)
            with xla_replica.count(replica) as beginning:
                order = list(sampler)
            with xla_replica.count(replica) as steps:
                for batch in ordering.batches(order, own_batch):
                    grads = replica.send(ordering.as_dict(rows[batch]))
                    sampler.step(grads, indices=batch)
                    replica.sync()
            epochs.append((beginning, steps))
        counted.append(epochs)
    return counted


@each("backend", replicas.ONE_XLA_BACKEND)
def test_steps_read_nothing_and_compile_nothing_new(backend):
    for replica in backend.run(count_epochs, timeout=120):
        for run, epochs in zip(RUNS, replica, strict=True):
            for epoch, (beginning, steps) in enumerate(epochs):
                assert steps.transfers == 0, (run, epoch)
                assert beginning.transfers <= backend.num_replicas, (run, epoch)
                assert steps.fallbacks == beginning.fallbacks == {}, (run, epoch)
                compiled = steps.compilations + beginning.compilations
                assert epoch == 0 or compiled == 0, (run, epoch)


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("has_thresholds", [False, True])
@pytest.mark.parametrize("size", [2, 4, 32, 256])
def test_blocks_are_sorted_as_by_the_oracle(size, has_thresholds, tie):
    draw = torch.Generator().manual_seed(size)  # many ties
    rows, limits = (
        torch.randint(-2, 3, (3 * size, n), generator=draw).double() for n in (5, 9)
    )
    rows[0] *= 2**20
    decide = Decisions(tie, thresholds_RN=limits if has_thresholds else None)
    sums, order = torch.zeros(size - 1, 5).double(), np.arange(3 * size)
    tree = RecursivePairBalance(batch_size=size)
    placements = tree.place_blocks(sums, rows, decide)
    options = {"size": size, "tie": tie, "limits": limits.numpy() * has_thresholds}
    expected = ordering.recursive_pair(order, rows.numpy(), **options)
    assert reorder(order, placements.numpy(), size).tolist() == expected


def balanced(rank: int) -> tuple[list[torch.Tensor], str]:
    """Returns placements and accumulators of two blocks, and the program."""
    replica = xla_replica.current()
    tree = RecursivePairBalance(batch_size=8)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(16, 5, generator=draw)
    rows[3, 2] = float("inf")
    sums = replica.send(torch.zeros(7, 5))
    made = [tree.place_blocks(sums, replica.send(rows), Decisions()), sums]
    program = ""
    if replica.is_lazy:
        import torch_xla

        program = torch_xla._XLAC._get_xla_tensors_hlo(made)
    return replica.fetch(made), program


@replicas.on_xla
def test_on_xla_blocks_are_those_of_the_host_without_64_bits():
    (placements, sums), _ = balanced(0)
    [(found, program)] = xla_replica.launch(balanced, (), 1, "xla")
    assert found[0].tolist() == placements.tolist()
    torch.testing.assert_close(found[1], sums)
    assert placements[3] == 0
    for slow in (" gather(", " scatter(", "f64[", "s64["):
        assert slow not in program, slow
