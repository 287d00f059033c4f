"""grab-sampler's projections: their sizes, and that gradients of any loop are taken."""

from __future__ import annotations

import pytest
import torch
from support.grab_xla import ordering
from support.grab_xla.training import balance, sampler_of
from torch import nn
from torch.func import functional_call, grad, vmap

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


def test_projected_groups_are_those_of_their_gradients():
    """The rows of `backward` and of a step with what a group added to ``.grad``."""
    torch.manual_seed(0)
    model, x = nn.Linear(300, 4), torch.randn(24, 300)
    options = {"fidelity": "group", "group_size": 4, "random_projection": "jl"}
    one, other = (sampler_of(model, pi_eps=0.5, **options) for _ in range(2))
    orders = []
    for _ in range(3):
        order = list(one)
        assert list(other) == order
        orders.append(tuple(order))
        for batch in ordering.batches(order, 4):
            model.zero_grad()
            balance(one, model, lambda x: model(x).square().mean(), x[batch])
            grads = {name: p.grad for name, p in model.named_parameters()}
            other.step(grads, batch=False)
    assert len(set(orders)) == 3


@pytest.mark.parametrize("options", [{}, {"random_projection": "kron", "pi_eps": 0.9}])
def test_the_loop_of_grab_sampler_runs_with_a_large_model(options):
    """Above 2^20 parameters projections are balanced; the loop does not know."""
    model = nn.Sequential(nn.Linear(1025, 1024), nn.Tanh(), nn.Linear(1024, 1))
    x, params = torch.randn(6, 1025), dict(model.named_parameters())
    assert sum(p.numel() for p in params.values()) > 2**20

    def loss(params, x):
        return functional_call(model, params, (x,)).square().sum()

    sampler, recorded = (GraBSampler(range(6), params, **options) for _ in range(2))
    assert sampler.fidelity == "projected"
    orders = []
    for _ in range(3):
        order = list(sampler)
        assert list(recorded) == order
        orders.append(tuple(order))
        for batch in ordering.batches(order, 3):
            values = {name: value.detach() for name, value in params.items()}
            sampler.step(vmap(grad(loss), (None, 0))(values, x[batch]))
            balance(recorded, model, lambda x: model(x).square().sum(1), x[batch])
    assert len(set(orders)) > 1
