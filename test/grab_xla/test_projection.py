"""grab-sampler's projections: their sizes, and that gradients of any loop are taken."""

from __future__ import annotations

import pytest
import torch

import per_sample_grad as psg
from grab_xla import GraBSampler
from grab_xla.random_projections import KINDS, johnson_lindenstrauss_min_dim

PARAMETERS = {"w": torch.zeros(100, 100), "b": torch.zeros(100), "s": torch.zeros(())}


@pytest.mark.parametrize("num_samples", [1, 2, 37, 1000, 60_000, 1_281_167])
@pytest.mark.parametrize("eps", [0.05, 0.1, 0.3, 0.99])
def test_the_dimension_is_that_of_scikit_learn(num_samples, eps):
    sklearn = pytest.importorskip("sklearn.random_projection")
    expected = sklearn.johnson_lindenstrauss_min_dim(num_samples, eps=eps)
    assert johnson_lindenstrauss_min_dim(num_samples, eps) == expected


@pytest.mark.parametrize(
    ("options", "num_samples", "size"),
    [
        ({"random_projection": "none"}, 1000, None),
        ({"random_projection": "jl"}, 1000, 5920),
        ({"random_projection": "jl_sparse"}, 1000, 5920),
        ({"random_projection": "kron"}, 1000, 77**2),
        ({"random_projection": "kron", "kron_order": 3}, 1000, 19**3),
        ({"random_projection": "kron", "kron_order": 5, "pi_eps": 0.13}, 416, 3125),
        ({"random_projection": "jl"}, 1, len(PARAMETERS)),
        ({"random_projection": "jl", "fidelity": "group", "group_size": 10}, 100, 1973),
    ],
)
def test_a_kind_is_a_projection_of_its_size(options, num_samples, size):
    sampler = GraBSampler(range(num_samples), PARAMETERS, **options)
    if size is None:
        assert sampler.projection is None
        return
    assert repr(sampler.projection) == repr(psg.Projection(PARAMETERS, size, seed=42))
    assert sampler.fidelity == options.get("fidelity", "projected")
    other = GraBSampler(range(num_samples), PARAMETERS, seed=1, **options)
    with pytest.raises(ValueError, match="the state of another sampler"):
        other.load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"none"}))
def test_a_projection_that_reduces_nothing_warns_with_the_numbers(kind):
    with pytest.warns(UserWarning, match=r"makes \d+ numbers of 50 .*1000") as caught:
        sampler = GraBSampler(
            range(1000), {"w": torch.zeros(50)}, random_projection=kind
        )
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert sampler.projection.size == 50
