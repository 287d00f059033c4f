"""Gains and gradient noise as AdaptDL and fairscale compute them."""

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


def gradients(num_steps: int, num_minibatches: int) -> torch.Tensor:
    """Returns the minibatches' gradients of every step: ``(5,)`` each.

    Their noise is small enough for no estimate to be negative: AdaptDL and fairscale
    make such estimates zero, ours stay unbiased.
    """
    random = np.random.default_rng(0)
    return torch.from_numpy(2 + random.normal(size=(num_steps, num_minibatches, 5)))


def test_gains_of_every_group_are_those_of_fairscale():
    adascale = package("fairscale.optim").AdaScale
    num_minibatches, share = 3, 0.97
    theirs_groups, ours_groups = (
        [{"params": [nn.Parameter(torch.zeros(n).double())]} for n in (2, 3)]
        for _ in range(2)
    )
    theirs = adascale(
        SGD(theirs_groups, 0.01), num_gradients_to_accumulate=num_minibatches,
        smoothing=share**num_minibatches, debias_ewma=True, is_scaled_loss=True,
    )  # fmt: skip
    _, ours = make((num_minibatches,), ours_groups, time_constant=time_constant(share))

    def loss(groups: list[dict], row: torch.Tensor) -> torch.Tensor:
        """Returns one with gradient ``row``, cut at the groups' sizes."""
        return sum(
            (p * g["params"][0]).sum() for p, g in zip(row.split((2, 3)), groups)
        )

    for rows in gradients(8, num_minibatches):
        for row in rows:
            (loss(theirs_groups, row) / num_minibatches).backward()
        gains, overall = [theirs.gain(0), theirs.gain(1)], theirs.gain()
        theirs.step()
        theirs.zero_grad()
        for row, _ in zip(rows, ours.minibatches):
            loss(ours_groups, row).backward()
            ours.step()
        assert ours.noise.lr_factors() == pytest.approx(gains, rel=1e-5)
        assert ours.noise.gain() == pytest.approx(overall, rel=1e-5)
        for one, other in zip(ours_groups, theirs_groups):
            assert torch.allclose(one["params"][0], other["params"][0], atol=1e-12)


@pytest.mark.parametrize("num_minibatches", [2, 4])
def test_noise_is_what_adaptdl_measures(num_minibatches):
    """And its gains; before anything is known, they are 1."""
    # The file alone: the package imports what one needs for jobs on Kubernetes.
    path = Path(package("adaptdl").__path__[0], "torch", "gradient_noise_scale.py")
    spec = importlib.util.spec_from_file_location("gradient_noise_scale", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    weight, own = (nn.Parameter(torch.zeros(5).double()) for _ in range(2))
    replica = SimpleNamespace(require_backward_grad_sync=True)
    scale = module.GradientNoiseScale(
        replica, SGD([weight], 0.01), num_replicas=1, accum_scale=1.0
    )
    options = {"time_constant": time_constant(0.999)}
    _, optimizer = make((num_minibatches,), [own], **options)
    assert scale.gain(2.0) == pytest.approx(optimizer.noise.gain(2.0), rel=1e-5) == 1
    for rows in gradients(12, num_minibatches):
        for number, row in enumerate(rows, 1):
            replica.require_backward_grad_sync = number == num_minibatches
            (weight * row).sum().backward()
        scale.reset_accumulation()
        step(optimizer, own, rows)
        measured = optimizer.noise.measure()
        assert measured.variance == pytest.approx(scale.var_avg(), rel=1e-5)
        assert measured.square == pytest.approx(scale.sqr_avg(), rel=1e-5)
        for ratio in (1.0, 2.0, 3.0, 64.0):
            gain = optimizer.noise.gain(ratio)
            assert gain == pytest.approx(scale.gain(ratio), rel=1e-5)
