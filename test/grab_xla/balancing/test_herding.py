"""Herding: against brute force, batch by batch, over shards, and on a device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.xla_replica.replicas import ONE_XLA_BACKEND

import xla_replica
from grab_xla import herding as herding_of
from grab_xla.balancing import prefix_sums
from grab_xla.balancing.prefix_sums import Herding, PrefixNorms, RunningHerding
from tools.peak_memory import peak_memory

F64 = torch.float64


def random_vectors(n: int, d: int, seed: int = 0, dtype=F64) -> torch.Tensor:
    """Returns vectors with a mean far from zero, which must not count as herding."""
    generator = torch.Generator().manual_seed(seed)
    return (3 + torch.randn(n, d, generator=generator, dtype=F64)).to(dtype)


def random_order(n: int, seed: int = 0) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def brute_force(
    vectors: torch.Tensor, order: list[int], mean: torch.Tensor | None = None
) -> tuple[float, float]:
    """Sums every prefix again, one number at a time."""
    rows, columns = vectors.tolist(), range(vectors.shape[1])
    centre = [sum(row[c] for row in rows) / len(rows) for c in columns]
    centre = centre if mean is None else mean.tolist()
    prefixes = [
        [sum(rows[i][c] - centre[c] for i in order[: k + 1]) for c in columns]
        for k in range(len(order))
    ]
    infinity = max(abs(x) for prefix in prefixes for x in prefix)
    return infinity, max(sum(x * x for x in prefix) ** 0.5 for prefix in prefixes)


def numbers(found: Herding) -> tuple[float, float]:
    assert found.infinity.shape == found.euclidean.shape == (1,)
    return found.infinity.item(), found.euclidean.item()


def run(vectors: torch.Tensor, mean: torch.Tensor, sizes: list[int]) -> dict:
    """Returns the state after batches of these sizes; none changes the one before."""
    running = RunningHerding(vectors.dtype)
    state = running.init(vectors.shape[1])
    for rows in vectors.split(sizes):
        before, kept = state, {key: value.clone() for key, value in state.items()}
        state = running.update(state, rows, mean)
        assert all(torch.equal(before[key], kept[key]) for key in kept)
    return state


@pytest.mark.parametrize("n", [1, 2, 17, 64])
@pytest.mark.parametrize("d", [1, 5])
@pytest.mark.parametrize("centre", [None, -1.0])
def test_brute_force_agrees_and_a_nan_shows(n, d, centre, monkeypatch):
    monkeypatch.setattr(prefix_sums, "MAX_ROWS", 5)  # several chunks, one shorter
    vectors, order = random_vectors(n, d), random_order(n)
    mean = None if centre is None else torch.full((d,), centre, dtype=F64)
    for part in (torch.tensor(order[: (n + 1) // 2]), order):  # around all their mean
        expected = brute_force(vectors, part, mean)
        found = numbers(herding_of(vectors, part, mean))
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert numbers(herding_of(vectors[order], mean=mean)) == pytest.approx(found)
    vectors[order[-1], 0] = torch.nan
    assert all(x != x for x in numbers(herding_of(vectors, mean=mean)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_vectors_are_summed_in_float32(dtype):
    vectors, order = random_vectors(256, 3, dtype=dtype), random_order(256)
    found = herding_of(vectors.clone().requires_grad_(), order)
    assert found.infinity.dtype == found.euclidean.dtype == torch.float32
    assert not found.infinity.requires_grad
    expected = brute_force(vectors, order)
    assert numbers(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vectors_are_never_copied_whole(dtype, monkeypatch):
    monkeypatch.setattr(prefix_sums, "MAX_ELEMENTS", 100)
    vectors = random_vectors(2000, 50, dtype=dtype)
    for order in (None, random_order(2000)):
        # The order itself is the most.
        assert peak_memory(lambda order=order: herding_of(vectors, order)) < 40_000


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    d=st.integers(1, 4),
    seed=st.integers(0, 99),
    offset=st.sampled_from([0.0, 0.1]),  # the mean of the epoch before is another
)
def test_the_running_form_is_the_exact_one_however_batches_are_cut(
    sizes, d, seed, offset
):
    vectors = random_vectors(sum(sizes), d, seed)
    mean = vectors.mean(0) + offset
    found = run(vectors, mean, sizes)
    exact = herding_of(vectors, mean=mean)
    assert RunningHerding().result(found) == exact  # bit for bit
    whole = run(vectors, mean, [sum(sizes)])
    assert all(torch.equal(found[key], whole[key]) for key in whole)
    expected = brute_force(vectors, list(range(len(vectors))), mean)
    assert numbers(exact) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("widths", [[7], [3, 4], [1, 4, 2]])
def test_shards_of_the_columns_complete_one_another(widths):
    """Norms are completed row by row; the last line shows that maxima cannot be."""
    vectors = random_vectors(24, 7)
    mean = vectors.mean(0)
    running = RunningHerding(F64)
    kept, alone = [], []
    for columns, centre in zip(vectors.split(widths, 1), mean.split(widths)):
        state, batches = running.init(columns.shape[1]), []
        for rows in columns.split(8):
            state, norms = running.advance(state, rows, centre)
            batches.append(norms)
        kept.append([torch.cat(parts) for parts in zip(*batches)])
        alone.append(herding_of(columns, mean=centre).euclidean ** 2)
    infinity, squares = (torch.stack(parts) for parts in zip(*kept))
    completed = PrefixNorms(infinity.amax(0), squares.sum(0))
    found = numbers(running.result(running.record(state, completed)))
    expected = herding_of(vectors, mean=mean)
    assert found == pytest.approx(numbers(expected), rel=1e-12)
    if len(widths) > 1:
        assert sum(alone).sqrt() > 1.001 * expected.euclidean


ONES = torch.ones(3, 2)


@pytest.mark.parametrize(
    ("vectors", "order", "error", "message"),
    [
        (ONES.long(), None, TypeError, "floating vectors, got torch.int"),
        (torch.ones(3), None, ValueError, r"shape \(n, d\).*got \(3,\)"),
        (torch.ones(0, 2), None, ValueError, r"got \(0, 2\)"),
        (ONES, [0.0, 1.0], TypeError, "integers, got torch.float32"),
        (ONES, [], TypeError, "integers"),
        (ONES, [[0, 1]], ValueError, r"got \(1, 2\)"),
        (ONES, [0, 3], ValueError, "0 to 2, got 0 to 3"),
        (ONES, [-1, 2], ValueError, "got -1 to 2"),
    ],
)
def test_what_is_no_order_of_vectors_is_refused(vectors, order, error, message):
    with pytest.raises(error, match=message):
        herding_of(vectors, order)


@pytest.mark.parametrize(
    ("shape", "columns"), [((2, 4), 3), ((3,), 3), ((0, 3), 3), ((2, 3), 1)]
)
def test_what_does_not_fit_a_state_is_refused(shape, columns):
    running = RunningHerding()
    with pytest.raises(ValueError, match="3 columns"):
        running.update(running.init(3), torch.ones(shape), torch.ones(columns))


def on_a_device(rank: int) -> tuple[list[xla_replica.Counts], list[float]]:
    """Returns counts of the exact form and three epochs, and both results."""
    replica, order = xla_replica.current(), torch.tensor(random_order(48))
    vectors = random_vectors(48, 5, dtype=torch.float32)
    running = RunningHerding(device=replica.device)
    with xla_replica.count(replica) as count:
        exact = herding_of(replica.send(vectors), replica.send(order))
        replica.sync()
    counts = [count]
    for epoch in range(3):
        with xla_replica.count(replica) as count:
            centre = replica.send(vectors.mean(0) + epoch - 2)
            state = running.init(5)
            for rows in vectors[order].split(8):
                state = running.update(state, replica.send(rows), centre)
                replica.sync()
        counts.append(count)
    found = replica.fetch([*running.result(state), *exact])
    return counts, [value.item() for value in found]


@pytest.mark.parametrize("backend", ONE_XLA_BACKEND)
def test_a_device_is_never_read(backend):
    expected = brute_force(random_vectors(48, 5, dtype=torch.float32), random_order(48))
    for counts, found in backend.run(on_a_device):
        assert [(each.transfers, each.fallbacks) for each in counts] == [(0, {})] * 4
        assert [each.compilations for each in counts[2:]] == [0, 0]
        assert found == pytest.approx([*expected, *expected], rel=1e-4)
