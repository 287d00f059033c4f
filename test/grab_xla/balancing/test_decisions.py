"""Signs from inner products equal those of a loop over the vectors."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.xla_replica.replicas import needs_xla
from torch.utils._python_dispatch import TorchDispatchMode

import xla_replica
from grab_xla.balancing import compiled_loop, decisions
from grab_xla.balancing.decisions import TIES, Decisions, finite_rows
from grab_xla.balancing.rows import SplitRows
from xla_replica import DeviceTraits
from xla_replica.common.compiling import has_numba


def one_by_one(vectors, total, limits, tie_positive):
    """Returns signs and the accumulator, computed from the vectors themselves."""
    signs, total = [], np.array(total)
    for z, limit in zip(vectors, limits):
        if not np.isfinite(z).all():
            signs.append(0)
            continue
        product = total @ z
        plus = product < limit or (tie_positive and product == limit)
        signs.append(1 if plus else -1)
        total = total + signs[-1] * z
    return signs, total


# Small integers: every inner product is exact, and ties are frequent.
ROWS = st.integers(1, 12).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(-3, 3), min_size=3, max_size=3), min_size=n, max_size=n
    )
)


@settings(deadline=None)
@given(ROWS, st.booleans(), st.booleans(), st.data())
def test_signs_are_those_of_the_loop(rows, tie_positive, walks, data):
    vectors = np.array(rows, dtype=np.float64)
    bad = data.draw(st.sets(st.integers(0, len(rows) - 1), max_size=2))
    for row in bad:
        vectors[row, 1] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    limits = np.zeros(len(rows))
    if walks:
        limits = np.array([data.draw(st.integers(-9, 9)) for _ in rows], float)
    start = np.array([1.0, -2.0, 0.5])
    expected, total = one_by_one(vectors, start, limits, tie_positive)
    tie = "positive" if tie_positive else "negative"
    decide = Decisions(tie=tie)
    z, a = torch.from_numpy(vectors), torch.from_numpy(start)
    gram, products = decide.gram(z, a.unsqueeze(0))
    thresholds = torch.from_numpy(limits) if walks else None
    signs = decide.signs(products[:, 0], gram, finite_rows(gram), thresholds)
    assert signs.tolist() == expected
    drawn = None if thresholds is None else thresholds.unsqueeze(1)
    sums = a.unsqueeze(0).clone()
    placements = compiled_loop.balance_in_sequence(
        z, torch.zeros_like(z[:1]), sums, drawn, tie=tie
    )
    assert placements.tolist() == expected
    assert sums[0].tolist() == total.tolist()


def down_a_tree(vectors, sums, limits, depth, tie_positive) -> list[int]:
    """Balances vectors one by one, in place, and returns their placements."""
    placements = []
    for z, thresholds in zip(vectors, limits):
        node = placement = 0
        for level in range((depth + 1) * bool(np.isfinite(z).all())):
            product, leaf = z @ sums[node], node - (2**level - 1)
            positive = product < thresholds[level]
            positive |= tie_positive and product == thresholds[level]
            sums[node] += z if positive else -z
            placement = leaf + 1 if positive else -(leaf + 1)
            node = 2 * node + (1 if positive else 2)
        if placement and len(sums) == 2 ** (depth + 1):
            sums[-1] += z
        placements.append(placement)
    return placements


@pytest.mark.skipif(not has_numba(), reason="needs Numba")
@pytest.mark.parametrize("dtype", compiled_loop.DTYPES)
@pytest.mark.parametrize("tie", ["positive", "negative"])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_compiled_tree_is_that_of_an_oracle(depth, rows, tie, dtype):
    """Integers have exact products, some of which are ties; one row is not finite."""
    draw = torch.Generator().manual_seed(depth)
    random = functools.partial(torch.randint, -2, 3, generator=draw)
    for turn in range(20):
        whole, y = random((2 * rows, 5)).to(dtype), random((1, 5)).to(dtype)
        x = whole[1::2]
        if turn % 4 == 3:
            x[rows // 2, turn % 5] = (torch.nan, torch.inf)[turn // 4 % 2]
        sums = random((2 ** (depth + 1) - turn % 2, 5)).to(dtype)
        limits = None if turn % 3 else random((rows, depth + 1)).to(dtype)
        zeros = torch.zeros(rows, depth + 1)
        total, count = sums.double().numpy().copy(), torch.ones(1, dtype=dtype)
        expected = down_a_tree(
            (x - y).double().numpy(), total,
            (zeros if limits is None else limits).numpy(), depth, tie == "positive",
        )  # fmt: skip
        found = compiled_loop.balance_in_sequence(x, y, sums, limits, depth, tie, count)
        assert found.tolist() == expected
        assert np.array_equal(sums.numpy(), total)
        assert count.item() == 1 + np.count_nonzero(expected)


@pytest.mark.parametrize("dtype", compiled_loop.DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 11])
@pytest.mark.parametrize("of", ["mean", "pair"])
def test_columns_may_be_apart(of, rows, dtype):
    """One part has no columns, one is strided, and two rows are not finite."""
    draw = torch.Generator().manual_seed(rows)
    whole = torch.randn(2 * rows, 700, generator=draw, dtype=dtype)
    centre = torch.randn(1, 700, generator=draw, dtype=dtype)
    if rows > 4:
        whole[2, 5], whole[10, 699] = torch.nan, torch.inf
    parts = whole.split([3, 0, 300, 397], 1)
    parts = [*parts[:3], parts[3].repeat_interleave(2, 1)[:, ::2]]
    split = SplitRows(parts)
    x, y = (whole[0::2], whole[1::2]) if of == "pair" else (whole, centre)
    apart = (split[0::2], split[1::2]) if of == "pair" else (split, centre)
    limits = torch.randn(len(x), 1, generator=draw, dtype=dtype)
    sums = torch.randn(2, 700, generator=draw, dtype=dtype)
    expected, total = one_by_one(
        (x - y).double().numpy(), sums[0].numpy(), limits[:, 0].numpy(), False
    )
    placements = compiled_loop.balance_in_sequence(*apart, sums, limits)
    assert placements.tolist() == expected
    close = 1e-4 if dtype is torch.float32 else 1e-12
    assert np.abs(sums[0].numpy() - total).max() < close


@pytest.mark.parametrize("views", ["rows", "every other", "columns", "one"])
def test_strided_rows_are_read_where_they_are(views):
    whole = torch.arange(40.0).reshape(8, 5)
    x = {"rows": whole, "every other": whole[1::2], "columns": whole[:, ::2],
         "one": whole[3:4]}[views]  # fmt: skip
    sums = torch.zeros(2, x.shape[1])
    placements = compiled_loop.balance_in_sequence(
        x, torch.zeros_like(x[:1]), sums, None
    )
    assert torch.equal(sums[1], x.sum(0))
    assert torch.equal(sums[0], (placements.unsqueeze(1) * x).sum(0))


class Launches(TorchDispatchMode):
    """Counts operations, which are kernels on a GPU."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_a_gpu_stops_soon_after_signs_have_settled(correlation, monkeypatch):
    """It looks every 32 rounds, and a CPU after each."""
    rows = 512
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(rows, 600, generator=draw)
    z += correlation * torch.randn(600, generator=draw)
    gram, products = Decisions().gram(z, torch.zeros(1, 600))
    found, launches = [], []
    for kind in (DeviceTraits(), DeviceTraits(True)):
        monkeypatch.setattr(decisions, "traits", lambda _, kind=kind: kind)
        with Launches() as counted:
            signs = Decisions().signs(products[:, 0], gram, finite_rows(gram))
        found.append(signs)
        launches.append(counted.number)
    gpu, cpu = launches
    assert torch.equal(*found)
    rounds = cpu / 5  # about: with a look at each
    assert gpu <= 20 + 4 * (rounds + 32) + (rounds + 32) / 32
    assert gpu < 4 * rows / 3  # of all rounds


def signs_on_xla(rank: int) -> list[tuple[bool, int]]:
    """Returns whether signs are those of the CPU, and the length of the program."""
    del rank
    import torch_xla

    replica = xla_replica.current()
    outcomes = []
    for rows in (16, 200):
        draw = torch.Generator().manual_seed(0)
        z = torch.randn(rows, 50, generator=draw) + torch.randn(50, generator=draw)
        z[3, 0] = float("nan")
        gram, products = Decisions().gram(z, torch.ones(1, 50))
        given = [products[:, 0], gram, finite_rows(gram), torch.randn(rows)]
        for tie in TIES:
            sent = Decisions(tie).signs(*map(replica.send, given))
            program = torch_xla._XLAC._get_xla_tensors_hlo([sent])
            is_equal = torch.equal(replica.to_host(sent), Decisions(tie).signs(*given))
            outcomes.append((is_equal, len(program.splitlines())))
    return outcomes


@needs_xla
@pytest.mark.xla
def test_a_compiled_backend_loops_on_the_device():
    """More rows are not more operations, for which the compiler would need longer."""
    [outcomes] = xla_replica.launch(signs_on_xla, (), 1, "xla")
    equal, lengths = zip(*outcomes)
    assert all(equal)
    assert len(set(lengths)) == 1
