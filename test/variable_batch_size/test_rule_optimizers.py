"""What one rule's wrapper has to itself, and that all have options with types.

Editors offer those, and mypy finds a wrong one; the families test what all share.
"""

from __future__ import annotations

import inspect
import typing

import pytest
import torch
from support.variable_batch_size.wrapping import CPU, make
from torch import nn
from torch.optim import SGD

import variable_batch_size as vbs
from variable_batch_size.data.schedule import OnEnd, Schedule
from variable_batch_size.step.attached import UNITS, Unit
from variable_batch_size.step.settings import ElasticOptions

WRAPPERS = [getattr(vbs, name) for name in vbs.__all__ if name.endswith("Optimizer")]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_linear_momentum_keeps_the_factor_in_the_buffer(maximize, nesterov):
    """v = m v + (B/ref) (mean gradient + wd w); w -= lr v, in float64 by hand."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, dtype=torch.float64))
    w, v = weight.detach().clone(), torch.zeros(5, dtype=torch.float64)
    sampler = vbs.CustomSampler(
        range(256), [64, 32, 96, 64], num_replicas=1, rank=0, verbose=False
    )
    sampler.num_yielded = 1000  # is not iterated
    inner = SGD(
        [weight], 0.1, momentum=0.9, weight_decay=0.01, nesterov=nesterov,
        maximize=maximize,
    )  # fmt: skip
    wrapper = vbs.LinearRuleMomentumOptimizer(inner, sampler, 64, replica=CPU)
    for n in sampler.plan.num_minibatches:
        gradients = torch.randn(n, 5, dtype=torch.float64)
        for gradient in gradients:
            weight.grad.add_(gradient)
            wrapper.step()
        g = gradients.mean(0) * (-1 if maximize else 1) + 0.01 * w
        g = g * (32 * n / 64)
        v = 0.9 * v + g
        w = w - 0.1 * (g + 0.9 * v if nesterov else v)
    torch.testing.assert_close(weight.detach(), w, rtol=1e-13, atol=1e-13)
    assert inner.param_groups[0]["weight_decay"] == 0.01
    assert wrapper.current_lr() == pytest.approx(0.1 * 64 / 64)


def test_linear_momentum_takes_a_weight_decay_for_all_groups():
    _, _, wrapper = make(cls=vbs.LinearRuleMomentumOptimizer, weight_decay=0.5)
    assert wrapper.param_groups[0]["weight_decay"] == 0.5
    _, _, other = make(cls=vbs.LinearRuleMomentumOptimizer, weight_decay=0.25)
    with pytest.raises(ValueError, match=r"weight_decay was 0\.5 and is 0\.25"):
        other.load_state_dict(wrapper.state_dict())
    with pytest.raises(ValueError, match="weight_decay must be a finite number >= 0"):
        make(cls=vbs.LinearRuleMomentumOptimizer, weight_decay=-1)


def test_adascale_does_not_drop_noise_options():
    """They are arguments of its own; noise= would be replaced by the defaults."""
    noise = vbs.NoiseOptions(time_constant=7)
    with pytest.raises(TypeError, match="time_constant=, not noise=, got NoiseOptions"):
        make(cls=vbs.AdaScaleOptimizer, noise=noise)
    _, _, wrapper = make(cls=vbs.AdaScaleOptimizer, noise=True, time_constant=7)
    assert wrapper.noise.options == noise


def test_the_wrappers_options_are_those_of_elastic_optimizer():
    """`typing.Unpack[ElasticOptions]` is what a type checker reads."""
    options = typing.get_type_hints(ElasticOptions)
    parameters = inspect.signature(vbs.ElasticOptimizer).parameters
    assert options.keys() == {
        name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY
    }
    own = typing.get_type_hints(vbs.ElasticOptimizer.__init__)
    assert {name: own[name] for name in options} == options


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_wrapper_takes_anything(wrapper):
    for parameter in inspect.signature(wrapper).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            assert parameter.annotation == "Unpack[ElasticOptions]"


def test_literals_are_what_is_allowed():
    for on_end in typing.get_args(OnEnd):
        Schedule(vbs.Trace([2]), 4, 2, on_end)
    with pytest.raises(ValueError, match=r"on_end"):
        Schedule(vbs.Trace([2]), 4, 2, "never")
    assert set(typing.get_args(Unit)) == set(UNITS)
