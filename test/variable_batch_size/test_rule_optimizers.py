"""What one rule's wrapper has to itself, and that all have options with types.

Editors offer those, and mypy finds a wrong one; the families test what all share.
"""

from __future__ import annotations

import inspect
import typing

import pytest
from support.variable_batch_size.wrapping import make

import variable_batch_size as vbs
from variable_batch_size.data.schedule import OnEnd, Schedule
from variable_batch_size.step.attached import UNITS, Unit
from variable_batch_size.step.settings import ElasticOptions

WRAPPERS = [getattr(vbs, name) for name in vbs.__all__ if name.endswith("Optimizer")]


def test_linear_momentum_takes_a_weight_decay_for_all_groups():
    _, _, wrapper = make(cls=vbs.LinearRuleMomentumOptimizer, weight_decay=0.5)
    assert wrapper.param_groups[0]["weight_decay"] == 0.5
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
