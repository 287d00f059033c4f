"""Random projections: their matrices, what they preserve, and what they cost."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch
from support.xla_replica.replicas import ONE_XLA_BACKEND

import xla_replica
from grab_xla import random_projections
from grab_xla.random_projections import (
    PROJECTIONS,
    Projection,
    johnson_lindenstrauss_min_dim,
    projection,
)

F64 = torch.float64
KINDS = sorted(PROJECTIONS.keys() - {"none"})
# Sizes that are not powers, so that kron pads and rounds.
NUM_INPUTS, NUM_OUTPUTS = 300, 60


def project(kind: str, num_inputs=NUM_INPUTS, **options) -> Projection:
    options = {"num_outputs": NUM_OUTPUTS, "dtype": F64, **options}
    return projection(kind, num_inputs, 1000, **options)


def gradients(num_samples: int, num_inputs=NUM_INPUTS, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, num_inputs, generator=generator, dtype=F64)


def explicit_matrix(projected: Projection) -> torch.Tensor:
    """Returns the textbook matrix, ``(K, D)``, made of the tables."""
    tables = projected.tables
    if projected.kind == "jl":
        return tables[0]
    if projected.kind == "jl_sparse":
        columns, signs = tables
        density = 1 / math.sqrt(projected.num_inputs)
        entry = 1 / math.sqrt(projected.num_outputs * density)
        matrix = torch.zeros(projected.num_outputs, projected.num_inputs, dtype=F64)
        for row in range(projected.num_outputs):
            for column, sign in zip(columns[row].tolist(), signs[row].tolist()):
                if sign:
                    assert matrix[row, column] == 0, "an entry is there twice"
                    matrix[row, column] = sign * entry
        return matrix
    matrix = torch.ones(1, 1, dtype=F64)
    for factor in tables:
        matrix = torch.kron(factor, matrix)  # the last factor is the outermost
    return matrix[:, : projected.num_inputs]


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [0, 1, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_a_projection_is_a_product_with_its_matrix(kind, batch_size, order):
    projected = project(kind, order=order)
    rows = gradients(batch_size)
    found = projected(rows)
    assert found.shape == (batch_size, projected.num_outputs)
    torch.testing.assert_close(found, rows @ explicit_matrix(projected).T)


@pytest.mark.parametrize("batch_size", [0, 1, 5])
@pytest.mark.parametrize("at_once", [1, 100, 1000, 2**24])
def test_gathering_in_pieces_is_the_same_sum(monkeypatch, at_once, batch_size):
    monkeypatch.setattr(random_projections, "GATHERED_AT_ONCE", at_once)
    rows, projected = gradients(batch_size), project("jl_sparse")
    expected = projected(rows)
    traits = lambda _: xla_replica.DeviceTraits(is_lazy=True)  # noqa: E731
    monkeypatch.setattr(random_projections, "traits", traits)
    torch.testing.assert_close(projected(rows), expected)


def test_none_is_the_identity():
    rows = gradients(3).float()
    unchanged = project("none", num_outputs=None)
    assert unchanged(rows) is rows
    assert unchanged.num_outputs == NUM_INPUTS


@pytest.mark.parametrize("kind", KINDS)
def test_squared_norms_are_kept_on_average(kind):
    """The estimate is within five standard errors over 200 seeds."""
    rows = gradients(4)
    wanted = rows.square().sum(1)
    ratios = torch.stack(
        [project(kind, seed=seed)(rows).square().sum(1) / wanted for seed in range(200)]
    )
    error = ratios.std(0) / math.sqrt(len(ratios))
    assert ((ratios.mean(0) - 1).abs() < 5 * error).all(), ratios.mean(0)
    assert (error < 0.05).all()


@pytest.mark.parametrize("kind", ["jl", "jl_sparse"])
def test_the_dimension_of_johnson_and_lindenstrauss_keeps_all_distances(kind):
    rows, eps = gradients(20, 4000), 0.4
    projected = projection(kind, 4000, len(rows), eps, dtype=F64)
    assert projected.num_outputs == johnson_lindenstrauss_min_dim(20, eps) < 4000
    squares = torch.pdist(rows).square()
    ratios = torch.pdist(projected(rows)).square() / squares
    assert 1 - eps < ratios.min() < ratios.max() < 1 + eps


@pytest.mark.parametrize("num_samples", [1, 2, 37, 1000, 60_000, 1_281_167])
@pytest.mark.parametrize("eps", [0.05, 0.1, 0.3, 0.99])
def test_the_dimension_is_that_of_scikit_learn(num_samples, eps):
    sklearn = pytest.importorskip("sklearn.random_projection")
    expected = sklearn.johnson_lindenstrauss_min_dim(num_samples, eps=eps)
    assert johnson_lindenstrauss_min_dim(num_samples, eps) == expected


@pytest.mark.parametrize("num_inputs", [1, 2, 4, 8, 50, 10_000])
def test_very_sparse_has_the_density_of_the_paper_in_every_column(num_inputs):
    """This includes the first and last cell of a row, where gaps cross rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        columns, signs = project("jl_sparse", num_inputs, num_outputs=4000).tables
    counts = torch.bincount(columns[signs != 0], minlength=num_inputs)
    density = num_inputs**-0.5
    for found, cells in [(counts.sum(), 4000 * num_inputs), (counts, 4000)]:
        spread = math.sqrt(cells * density * (1 - density))
        if found.dim() == 0 or num_inputs <= 50:  # of many, some are further away
            assert ((found - cells * density).abs() <= 5 * spread).all()
    assert signs.unique().tolist() in ([-1, 1], [-1, 0, 1])
    assert abs(signs.sum()) < 5 * math.sqrt(counts.sum())


@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix_is_a_function_of_the_seed_alone(kind):
    torch.manual_seed(1)
    first = project(kind)
    torch.manual_seed(2)
    torch.rand(5)
    before = torch.random.get_rng_state()
    again, other = project(kind), project(kind, seed=43)
    assert torch.equal(torch.random.get_rng_state(), before)
    rows = gradients(3)
    assert torch.equal(first(rows), again(rows))
    assert not torch.allclose(first(rows), other(rows))


def test_the_matrix_is_the_same_in_every_version_of_torch():
    """A resumed run relies on it, also on a CPU without AVX2."""
    found = {kind: project(kind)(torch.ones(1, NUM_INPUTS))[0, :2] for kind in KINDS}
    expected = {
        "jl": [1.1342209235420448, 2.314711039257048],
        "jl_sparse": [1.074569931823542, 2.686424829558855],
        "kron": [1.4649627236156175, -1.8983186280338813],
    }
    for kind in KINDS:
        assert found[kind].tolist() == pytest.approx(expected[kind]), kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_are_roundings_of_the_same_matrix(kind, dtype):
    rows = gradients(2)
    wide = project(kind)(rows)
    narrow = project(kind, dtype=dtype)(rows)
    assert narrow.dtype == dtype
    assert (narrow - wide).norm() < 20 * torch.finfo(dtype).eps * wide.norm()


@pytest.mark.parametrize("kind", sorted(PROJECTIONS))
def test_projections_can_be_copied_and_pickled(kind):
    projected = project(kind)
    rows = gradients(2)
    for twin in (copy.deepcopy(projected), pickle.loads(pickle.dumps(projected))):
        assert torch.equal(twin(rows), projected(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_a_projection_that_reduces_nothing_warns_with_the_numbers(kind):
    with pytest.warns(
        UserWarning, match=r"makes \d+ numbers of 50 .*n.*1000"
    ) as caught:
        grown = projection(kind, 50, num_samples=1000, dtype=F64)
    assert len(caught) == 1
    assert grown.num_outputs >= 5920
    rows = gradients(2, 50)
    torch.testing.assert_close(grown(rows), rows @ explicit_matrix(grown).T)


def test_a_single_sample_leaves_one_output():
    assert projection("jl", 10, num_samples=1).num_outputs == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kind": "jl-sparse"}, ValueError, "must be one of .*'jl_sparse'"),
        ({"num_samples": 0}, ValueError, "num_samples must be an integer >= 1"),
        ({"num_inputs": 2.5}, TypeError, "num_inputs must be an integer >= 1, got 2.5"),
        ({"num_outputs": 0}, ValueError, "num_outputs must be an integer >= 1, got 0"),
        ({"order": 0}, ValueError, "order must be an integer >= 1, got 0"),
        ({"eps": 1.0}, ValueError, "eps must be a finite number > 0 and < 1"),
        ({"eps": math.nan}, ValueError, "eps must be a finite number > 0 and < 1"),
    ],
)
def test_what_is_refused(change, error, message):
    options = {"kind": "jl", "num_inputs": 10**6, "num_samples": 1000, **change}
    with pytest.raises(error, match=message):
        projection(**options)


def counted_projections(rank: int) -> dict[str, tuple[list[tuple], torch.Tensor]]:
    replica, found = xla_replica.current(), {}
    # TorchTPU sums bags by a scan, which the plugin for CPUs has not.
    scans = {"jl_sparse"} if replica.device.type == "tpu" else set()
    for kind in sorted(PROJECTIONS.keys() - scans):
        projected = project(kind, dtype=torch.float32, device=replica.device)
        counts = []
        for seed in range(3):
            rows = replica.send(gradients(4, seed=seed).float())
            replica.wait()
            with xla_replica.count(replica) as count:
                result = projected(rows)
                single = projected(rows[:1])
                replica.sync()
                replica.wait()
            counts.append((count.compilations, count.transfers, count.fallbacks))
        found[kind] = counts, *replica.fetch([result, single])
    return found


@pytest.mark.parametrize("backend", ONE_XLA_BACKEND)
def test_after_the_first_call_nothing_is_compiled_or_read_back(backend):
    for found in backend.run(counted_projections):
        for kind, (counts, result, single) in found.items():
            assert [each[1:] for each in counts] == [(0, {})] * 3, kind
            assert [each[0] for each in counts[1:]] == [0, 0], kind
            expected = project(kind, dtype=torch.float32)(gradients(4, seed=2).float())
            torch.testing.assert_close(result, expected)
            torch.testing.assert_close(single, expected[:1])
