"""Gains and gradient noise as AdaptDL and fairscale compute them, or expect them."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.outside import package
from support.variable_batch_size.noise import make, step
from torch import nn
from torch.optim import SGD

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]


def time_constant(share: float) -> float:
    """Returns that under which averages keep this share of theirs at a minibatch."""
    return -1 / math.log(share)


def gradients(num_steps: int, num_minibatches: int) -> list[list[torch.Tensor]]:
    """Returns the minibatches' gradients of every step: ``(5,)`` each.

    Their noise is small enough for no estimate to be negative: AdaptDL and fairscale
    make such estimates zero, ours stay unbiased.
    """
    random = np.random.default_rng(0)
    shape = (num_steps, num_minibatches, 5)
    values = torch.from_numpy(2 + random.normal(size=shape))
    return [list(step) for step in values]


def two_groups() -> list[dict[str, list[nn.Parameter]]]:
    return [{"params": [nn.Parameter(torch.zeros(n).double())]} for n in (2, 3)]


def test_gains_and_gradients_that_fairscale_expects():
    """Two minibatches of one sample through a layer, whose outputs' sum is the loss."""
    expected = package("fairscale.fair_dev.testing.golden_testing_data")
    for case in expected.adascale_test_data:
        layer = nn.Linear(2, 2)
        # fairscale keeps 1 - S / 1000 after a step of S = 2 minibatches.
        options = {"time_constant": time_constant(0.998**0.5)}
        parameters, optimizer = make((2,), list(layer.parameters()), **options)
        seen = []

        def look(inner, args, kwargs, seen=seen, parameters=parameters):
            seen[:] = [parameter.grad.clone() for parameter in parameters]

        optimizer.inner.register_step_pre_hook(look)
        optimizer.set_epoch(0)
        for minibatches in case.get("inputs", [case.get("input")]):
            for inputs in minibatches:
                layer(torch.tensor([inputs])).sum().backward()
                optimizer.step()
        assert optimizer.noise.gain() == pytest.approx(case["expected_gain"], rel=1e-5)
        assert np.allclose(seen[0], case["expected_grad"])
        assert np.allclose(seen[1], case["expected_bias_grad"])


def test_gains_of_every_group_are_those_of_fairscale():
    adascale = package("fairscale.optim").AdaScale
    num_minibatches, share = 3, 0.97
    theirs_groups, ours_groups = two_groups(), two_groups()
    theirs = adascale(
        SGD(theirs_groups, 0.01), num_gradients_to_accumulate=num_minibatches,
        smoothing=share**num_minibatches, debias_ewma=True, is_scaled_loss=True,
    )  # fmt: skip
    _, ours = make((num_minibatches,), ours_groups, time_constant=time_constant(share))
    ours.set_epoch(0)
    for rows in gradients(8, num_minibatches):
        for row in rows:
            (loss(theirs_groups, row) / num_minibatches).backward()
        gains = [theirs.gain(0), theirs.gain(1)]
        overall = theirs.gain()
        theirs.step()
        theirs.zero_grad()
        for row in rows:
            loss(ours_groups, row).backward()
            ours.step()
        assert ours.noise.lr_factors() == pytest.approx(gains, rel=1e-5)
        assert ours.noise.gain() == pytest.approx(overall, rel=1e-5)
        for one, other in zip(ours_groups, theirs_groups):
            assert torch.allclose(one["params"][0], other["params"][0], atol=1e-12)


def loss(groups: list[dict], row: torch.Tensor) -> torch.Tensor:
    """Returns a loss with gradient ``row``, cut at the groups' sizes."""
    parts = row.split([len(group["params"][0]) for group in groups])
    return sum((p * g["params"][0]).sum() for p, g in zip(parts, groups))


def adaptdl_scale(parameter: nn.Parameter):
    """Returns AdaptDL's noise scale of a parameter, and what it takes for a model."""
    # The file alone: the package imports what one needs for jobs on Kubernetes.
    folder = Path(package("adaptdl").__path__[0])
    spec = importlib.util.spec_from_file_location(
        "gradient_noise_scale", folder / "torch" / "gradient_noise_scale.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    replica = SimpleNamespace(require_backward_grad_sync=True)
    scale = module.GradientNoiseScale(
        replica, SGD([parameter], 0.01), num_replicas=1, accum_scale=1.0
    )
    return scale, replica


@pytest.mark.parametrize("num_minibatches", [2, 4])
def test_noise_is_what_adaptdl_measures(num_minibatches):
    weight = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    scale, replica = adaptdl_scale(weight)
    own = [nn.Parameter(weight.detach().clone())]
    options = {"time_constant": time_constant(0.999)}
    [ours], optimizer = make((num_minibatches,), own, **options)
    optimizer.set_epoch(0)
    for rows in gradients(12, num_minibatches):
        for number, row in enumerate(rows, 1):
            replica.require_backward_grad_sync = number == num_minibatches
            (weight * row).sum().backward()
        scale.reset_accumulation()
        step(optimizer, ours, rows)
        measured = optimizer.noise.measure()
        assert measured.variance == pytest.approx(scale.var_avg(), rel=1e-5)
        assert measured.square == pytest.approx(scale.sqr_avg(), rel=1e-5)
        for ratio in (1.0, 2.0, 3.0, 64.0):
            gain = optimizer.noise.gain(ratio)
            assert gain == pytest.approx(scale.gain(ratio), rel=1e-5)


def test_gains_that_adaptdl_expects():
    """Variance 3 and square 1 make 2 of a batch ratio of 3; without knowledge, 1."""
    weight = nn.Parameter(torch.zeros(5))
    scale, _ = adaptdl_scale(weight)
    _, optimizer = make()
    assert scale.gain(2.0) == pytest.approx(optimizer.noise.gain(2.0), rel=1e-5) == 1
    state = optimizer.noise.state_dict()
    state["averages"] = torch.tensor([[3.0], [1.0], [1.0]])
    optimizer.noise.load_state_dict(state)
    averages = {"var_avg": np.array([3.0]), "sqr_avg": np.array([1.0])}
    scale._optimizer.state["gns"].update(averages)
    assert optimizer.noise.gain(3.0) == scale.gain(3.0) == 2
