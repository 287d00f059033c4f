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
from grab_xla import GraBSampler
from grab_xla.balancing import decisions
from grab_xla.balancing.decisions import TIES, Decisions
from xla_replica import DeviceTraits
from xla_replica.common.compiling import has_numba


def finite_rows(gram: torch.Tensor) -> torch.Tensor:
    return torch.diagonal(gram).isfinite()


def one_by_one(vectors, total, limits, tie_positive):
    """Returns signs, computed from the vectors themselves."""
    signs, total = [], np.array(total)
    for z, limit in zip(vectors, limits):
        if not np.isfinite(z).all():
            signs.append(0)
            continue
        product = total @ z
        plus = product < limit or (tie_positive and product == limit)
        signs.append(1 if plus else -1)
        total = total + signs[-1] * z
    return signs


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
    expected = one_by_one(vectors, start, limits, tie_positive)
    tie = "positive" if tie_positive else "negative"
    decide = Decisions(tie=tie)
    z, a = torch.from_numpy(vectors), torch.from_numpy(start)
    gram, products = decide.gram(z, a.unsqueeze(0))
    thresholds = torch.from_numpy(limits) if walks else None
    signs = decide.signs(products[:, 0], gram, finite_rows(gram), thresholds)
    assert signs.tolist() == expected


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_compiled_row_is_that_of_an_oracle(depth, tie, dtype):
    """Integers have exact products, some of which are ties; some are not finite."""
    from grab_xla.balancing.compiled_row import balance_row

    draw = torch.Generator().manual_seed(depth)
    random = functools.partial(torch.randint, -2, 3, generator=draw)
    for turn in range(60):
        x, y = random((5, 1)).T.to(dtype), random((1, 5)).to(dtype)
        if turn % 4 == 3:
            x[0, turn % 5] = (torch.nan, torch.inf)[turn // 4 % 2]
        y = None if turn % 5 == 4 else y
        sums = random((2 ** (depth + 1) - turn % 2, 5)).to(dtype)
        limits = None if turn % 3 else random((1, depth + 1)).to(dtype)
        zeros, total = torch.zeros(1, depth + 1), sums.double().numpy().copy()
        expected = down_a_tree(
            (x if y is None else x - y).double().numpy(), total,
            (zeros if limits is None else limits).numpy(), depth, tie == "positive",
        )  # fmt: skip
        assert balance_row(x, y, sums, limits, depth, tie).tolist() == expected
        assert np.array_equal(sums.numpy(), total)


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("balance_type", ["mean", "pair", "recursive", "adamean"])
def test_groups_are_ordered_alike_without_the_compiled_row(balance_type, group_size):
    orders = []
    for tile_size in (None, 4):  # where a size is given, no loop is compiled
        grab = GraBSampler(
            range(24), {"w": torch.zeros(7)}, balance_type, fidelity="group",
            group_size=group_size, tile_size=tile_size,
        )  # fmt: skip
        rows = torch.randn(24, 7, generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            for group in torch.tensor(list(grab)).split(group_size):
                grab.step({"w": rows[group].mean(0)}, batch=False)
        orders.append(list(grab))
    assert orders[0] == orders[1]


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
