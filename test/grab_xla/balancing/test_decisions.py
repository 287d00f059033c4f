"""Signs from inner products equal those of a loop over the vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import Kernels
from support.xla_replica.replicas import needs_xla

import xla_replica
from grab_xla import GraBSampler
from grab_xla.balancing import decisions
from grab_xla.balancing.decisions import TIES, Decisions
from xla_replica import DeviceTraits


def one_by_one(vectors, total, limits, tie_positive):
    """Returns signs, computed from the vectors themselves."""
    signs = []
    for z, limit in zip(vectors, limits):
        signs.append(0)
        if np.isfinite(z).all():
            product = total @ z
            plus = product < limit or (tie_positive and product == limit)
            signs[-1] = 1 if plus else -1
            total = total + signs[-1] * z
    return signs


# Small integers: every inner product is exact, and ties are frequent.
ROWS = st.lists(st.tuples(*[st.integers(-3, 3)] * 3), min_size=1, max_size=12)


@settings(deadline=None)
@given(ROWS, st.booleans(), st.booleans(), st.data())
def test_signs_are_those_of_the_loop(rows, tie_positive, walks, data):
    vectors = np.array(rows, dtype=np.float64)
    for row in data.draw(st.sets(st.integers(0, len(rows) - 1), max_size=2)):
        vectors[row, 1] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    limits = [float(walks and data.draw(st.integers(-9, 9))) for _ in rows]
    start = np.array([1.0, -2.0, 0.5])
    decide = Decisions(tie="positive" if tie_positive else "negative")
    gram, products = decide.gram(*map(torch.from_numpy, (vectors, start[None])))
    thresholds = torch.tensor(limits).double() if walks else None
    signs = decide.signs(products[:, 0], gram, gram.diag().isfinite(), thresholds)
    assert signs.tolist() == one_by_one(vectors, start, limits, tie_positive)


@pytest.mark.filterwarnings("ignore::grab_xla.GraBWarning")
@pytest.mark.parametrize("options", [{}, {"prob_balance": True, "prob_balance_c": 4}])
@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize(("group_size", "at_once"), [(1, 1), (2, 1), (1, 6)])
@pytest.mark.parametrize("balance_type", ["mean", "pair", "recursive", "adamean"])
def test_groups_are_ordered_alike_without_the_compiled_loop(
    balance_type, group_size, at_once, tie, options
):
    """Integers have exact products, some of which are ties; some are not finite."""
    orders, states = [], []
    for tile_size in (None, 4):  # where a size is given, no loop is compiled
        grab = GraBSampler(
            range(24), {"w": torch.zeros(7)}, balance_type, fidelity="group", tie=tie,
            group_size=group_size, tile_size=tile_size, dtype=torch.float64, **options,
        )  # fmt: skip
        draw = torch.Generator().manual_seed(0)
        rows = torch.randint(-2, 3, (24, 7), generator=draw).double()
        rows[3, 0], rows[8, 1] = torch.nan, torch.inf
        for _ in range(3):
            for groups in torch.tensor(list(grab)).split(group_size * at_once):
                grab.step({"w": rows[groups.view(at_once, -1)].mean(1)})
        orders.append(list(grab))
        states.append(grab.state_dict()["engine"]["state"])
    assert orders[0] == orders[1]
    torch.testing.assert_close(*states)


@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_a_gpu_stops_soon_after_signs_have_settled(correlation, monkeypatch):
    """It looks every 32 rounds, and a CPU after each."""
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
    """Compares signs with those of the CPU, and the lengths of their programs."""
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


@needs_xla
@pytest.mark.xla
def test_a_compiled_backend_loops_on_the_device():
    """More rows are not more operations, for which the compiler would need longer."""
    xla_replica.launch(compare_on_xla, (), 1, "xla")
