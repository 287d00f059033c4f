"""Signs from inner products, orders from signs, and the herding of orders."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.grab_xla import ordering
from support.kernels import Kernels
from support.xla_replica.replicas import on_xla

import xla_replica
from grab_xla import GraBSampler, herding
from grab_xla.balancing import decisions
from grab_xla.balancing.decisions import TIES, Decisions
from grab_xla.balancing.prefix_sums import Herding
from grab_xla.balancing.reordering import RoundRobinSharding, reorder, reorder_by_score
from xla_replica import DeviceTraits

# Small integers: every inner product is exact, and ties are frequent.
ROWS = st.lists(st.tuples(*[st.integers(-3, 3)] * 3), min_size=1, max_size=12)


@settings(deadline=None)
@given(ROWS, st.booleans(), st.booleans(), st.data())
def test_signs_are_those_of_the_loop(rows, tie_positive, walks, data):
    vectors = np.array(rows, dtype=np.float64)
    for row in data.draw(st.sets(st.integers(0, len(rows) - 1), max_size=2)):
        vectors[row, 1] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    limits = [float(walks and data.draw(st.integers(-9, 9))) for _ in rows]
    total, expected = np.array([1.0, -2.0, 0.5]), []
    decide = Decisions(tie="positive" if tie_positive else "negative")
    gram, products = decide.gram(*map(torch.from_numpy, (vectors, total[None])))
    thresholds = torch.tensor(limits).double() if walks else None
    signs = decide.signs(products[:, 0], gram, gram.diag().isfinite(), thresholds)
    for z, limit in zip(vectors, limits):
        expected.append(0)
        if np.isfinite(z).all():
            product = total @ z
            plus = product < limit or (tie_positive and product == limit)
            expected[-1] = 1 if plus else -1
            total = total + expected[-1] * z
    assert signs.tolist() == expected


@pytest.mark.filterwarnings("ignore::grab_xla.GraBWarning")
@pytest.mark.parametrize("options", [{}, {"prob_balance": True, "prob_balance_c": 4}])
@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize(("group_size", "at_once"), [(1, 1), (2, 1), (1, 6)])
@pytest.mark.parametrize("balance_type", ["mean", "pair", "recursive", "adamean"])
def test_groups_are_ordered_alike_by_products(
    balance_type, group_size, at_once, tie, options, monkeypatch
):
    """Also where some are not finite; integers have exact products, and ties."""
    orders, states = [], []
    size = 18 * group_size  # so that means are of 16 groups
    for products in (False, True):
        ordering.by_products(monkeypatch, products)
        grab = GraBSampler(
            range(size), {"w": torch.zeros(7)}, balance_type, fidelity="group", tie=tie,
            group_size=group_size, dtype=torch.float64, **options,
        )  # fmt: skip
        draw = torch.Generator().manual_seed(0)
        rows = torch.randint(-2, 3, (size, 7), generator=draw).double()
        rows[3, 0], rows[8, 1] = torch.nan, torch.inf
        begun = list(grab)
        for _ in range(3):
            for groups in torch.tensor(list(grab)).split(group_size * at_once):
                grab.step({"w": rows[groups.view(at_once, -1)].mean(1)})
        orders.append(list(grab))
        assert [*map(orders[-1].index, (3, 8))] == [*map(begun.index, (3, 8))]
        states.append(grab.state_dict()["engine"]["state"])
        assert all(value.isfinite().all() for value in states[-1].values())
    assert orders[0] == orders[1]
    torch.testing.assert_close(*states)


@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_a_gpu_stops_soon_after_signs_have_settled(correlation, monkeypatch):
    rows, draw = 512, torch.Generator().manual_seed(0)
    z = torch.randn(rows, 600, generator=draw)
    z += correlation * torch.randn(600, generator=draw)
    gram, products = Decisions().gram(z, torch.zeros(1, 600))
    found, launches = [], []
    for kind in (DeviceTraits(), DeviceTraits(True)):
        monkeypatch.setattr(decisions, "traits", lambda _, kind=kind: kind)
        with Kernels() as counted:
            signs = Decisions().signs(products[:, 0], gram, gram.diag().isfinite())
        found.append(signs)
        launches.append(counted.calls.total())
    gpu, cpu = launches
    assert torch.equal(*found)
    rounds = cpu / 5  # about: with a look at each
    assert gpu <= 20 + 4 * (rounds + 32) + (rounds + 32) / 32
    assert gpu < 4 * rows / 3  # of all rounds


def compare_on_xla(rank: int) -> None:
    import torch_xla

    replica, lengths = xla_replica.current(), set()
    for rows in (16, 200):
        draw = torch.Generator().manual_seed(0)
        z = torch.randn(rows, 50, generator=draw) + torch.randn(50, generator=draw)
        z[3, 0] = float("nan")
        gram, products = Decisions().gram(z, torch.ones(1, 50))
        given = [products[:, 0], gram, gram.diag().isfinite(), torch.randn(rows)]
        for tie in TIES:
            sent = Decisions(tie).signs(*map(replica.send, given))
            program = torch_xla._XLAC._get_xla_tensors_hlo([sent])
            lengths.add(len(program.splitlines()))
            assert torch.equal(replica.to_host(sent), Decisions(tie).signs(*given))
    assert len(lengths) == 1


@on_xla
def test_a_compiled_backend_loops_on_the_device():
    """More rows are not more operations, for which the compiler would need longer."""
    xla_replica.launch(compare_on_xla, (), 1, "xla")


ORDER = np.array([10, 11, 12, 13, 14, 15, 16])


@pytest.mark.parametrize(("placements", "num_leaves", "expected"), [
    ([1, 1, 1, 1, 1, 1, 1], 1, [10, 11, 12, 13, 14, 15, 16]),
    ([-1] * 7, 1, [16, 15, 14, 13, 12, 11, 10]),
    ([-1, 1, 1, -1, 1, -1, 1], 1, [11, 12, 14, 16, 15, 13, 10]),
    ([-1, 1, 1, -1], 1, [11, 12, 14, 15, 16, 13, 10]),  # three were not seen
    ([], 1, [10, 11, 12, 13, 14, 15, 16]),
    # Two keep their places.
    ([-1, 0, 1, -1, 0, 1, 1], 1, [12, 11, 15, 16, 14, 13, 10]),
    ([0] * 7, 1, [10, 11, 12, 13, 14, 15, 16]),
    ([2, -1, 1, -2, 1, -1, 2], 2, [12, 14, 15, 11, 10, 16, 13]),
    # Unseen samples go between the halves of the tree.
    ([2, -1, 1, -2], 2, [12, 11, 14, 15, 16, 10, 13]),
])  # fmt: skip
def test_leaves_have_positives_then_negatives_reversed(
    placements, num_leaves, expected
):
    given = np.array(placements, dtype=np.int8)
    assert reorder(ORDER, given, num_leaves).tolist() == expected


def test_scores_sort_and_what_has_none_stays():
    scores = np.array([3.0, np.nan, 1.0, 2.0, 3.0])
    ascending = reorder_by_score(ORDER, scores, False).tolist()
    assert ascending == [12, 11, 13, 10, 14, 15, 16]
    descending = reorder_by_score(ORDER, scores, True).tolist()
    assert descending == [10, 11, 14, 13, 12, 15, 16]


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 30))
def test_replicas_are_dealt_equally_many_and_together_the_order(n, w, start):
    start = min(start, n)
    order = np.random.default_rng(n).permutation(n)
    hands = [RoundRobinSharding(n, w, r).own(order, start) for r in range(w)]
    assert len({len(hand) for hand in hands}) == 1
    dealt = np.stack(hands, axis=1).reshape(-1)
    assert dealt[: n - start].tolist() == order[start:].tolist()
    assert len(dealt) - (n - start) < w
    assert set(dealt.tolist()) <= set(range(n))


def random_order(n: int, d: int, dtype=torch.float64) -> tuple[torch.Tensor, list[int]]:
    """Returns vectors whose mean, which must not count, is far from zero; an order."""
    draw = torch.Generator().manual_seed(0)
    vectors = 3 + torch.randn(n, d, generator=draw, dtype=torch.float64)
    return vectors.to(dtype), torch.randperm(n, generator=draw).tolist()


def by_prefixes(rows: np.ndarray, centre: np.ndarray) -> tuple[float, float]:
    """Returns the largest number and the largest norm of sums of first rows."""
    prefixes = (rows - centre).cumsum(0)
    return np.abs(prefixes).max(), np.linalg.norm(prefixes, axis=1).max()


def numbers(found: Herding) -> tuple[float, float]:
    assert found.infinity.shape == found.euclidean.shape == (1,)
    return found.infinity.item(), found.euclidean.item()


@pytest.mark.parametrize("centre", [None, -1.0])
@pytest.mark.parametrize(("n", "d", "dtype", "few"), [
    *((n, d, torch.float64, 1e-12) for n in (1, 2, 17, 64) for d in (1, 5)),
    *((256, 3, dtype, 1e-5) for dtype in (torch.float32, torch.bfloat16, torch.half)),
])  # fmt: skip
def test_herding_is_that_of_prefixes_and_a_nan_shows(n, d, dtype, few, centre):
    vectors, order = random_order(n, d, dtype)
    mean = None if centre is None else torch.full((d,), centre, dtype=dtype)
    rows = vectors.double().numpy()
    around = rows.mean(0) if centre is None else centre
    for part in (order[: (n + 1) // 2], order):  # around all their mean
        found = herding(vectors.clone().requires_grad_(), torch.tensor(part), mean)
        assert found.infinity.dtype == found.euclidean.dtype
        assert found.infinity.dtype == torch.promote_types(dtype, torch.float32)
        assert not found.infinity.requires_grad
        expected = by_prefixes(rows[part], around)
        assert numbers(found) == pytest.approx(expected, rel=few, abs=1e-12)
    again = herding(vectors[order], list(range(n)), mean)
    assert numbers(again) == numbers(herding(vectors[order], mean=mean))
    assert numbers(again) == pytest.approx(expected, rel=few, abs=1e-12)
    vectors[order[-1], 0] = torch.nan
    assert all(x != x for x in numbers(herding(vectors, mean=mean)))


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("name", ["mean", "norm", "rr"])
def test_that_of_an_epoch_is_around_its_own_mean_or_the_last_one(name, stale):
    options = {"record_herding": True, "stale_mean_herding": stale}
    sampler = ordering.KINDS[name].sampler(**options, record_norm=True)
    before = np.zeros(ordering.NUM_PARAMETERS)
    for epoch in range(3):
        assert sampler.sorter.herding == -np.inf or epoch
        rows = ordering.gradients(epoch)[ordering.run_epoch(sampler, epoch, 6)].numpy()
        expected = by_prefixes(rows, before if stale else rows.mean(0))
        before = rows.mean(0)
        found = sampler.sorter.herding, sampler.sorter.avg_grad_error
        assert found == pytest.approx(expected)
        norms = np.linalg.norm(rows, axis=1)
        assert sampler.sorter.grad_norms == pytest.approx(norms)


@pytest.mark.parametrize(("given", "error", "message"), [
    ((torch.ones(3),), ValueError, r"shape \(n, d\).*got \(3,\) in"),
    ((torch.ones(0, 2),), ValueError, r"got \(0, 2\)"),
    ((torch.ones(3, 2), [0.0, 1.0]), IndexError,
     "tensors used as indices must be long"),
    ((torch.ones(3, 2), [[0, 1]]), ValueError, r"got \(3, 2\) in \(1, 2\)"),
    ((torch.ones(3, 2), []), ValueError, r"got \(3, 2\) in \(0,\)"),
    ((torch.ones(3, 2), [0, 3]), IndexError, "out of range|out of bounds"),
])  # fmt: skip
def test_what_is_no_order_of_vectors_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        herding(*given)
