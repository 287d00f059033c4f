"""What one rule's wrapper has to itself; the families test what all share."""

from __future__ import annotations

import pytest
from support.variable_batch_size.wrapping import make

import variable_batch_size as vbs


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
