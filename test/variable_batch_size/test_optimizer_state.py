"""What a wrapper saves and loads, and what it refuses to load.

That training resumes is checked of rules in test_rule_family.py, of schedulers in
test_attached.py and of the noise meter in test_noise_meter.py.
"""

from __future__ import annotations

import copy

import pytest
from support.variable_batch_size import noise
from support.variable_batch_size.wrapping import make

import variable_batch_size as vbs


def test_state_dict_hooks_run():
    _, _, wrapper = make()
    calls = []
    wrapper.register_state_dict_pre_hook(lambda o: calls.append("save"))
    wrapper.register_state_dict_post_hook(lambda o, state: calls.append("saved"))
    wrapper.register_load_state_dict_pre_hook(lambda o, state: calls.append("load"))
    wrapper.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    wrapper.load_state_dict(wrapper.state_dict())
    assert calls == ["save", "saved", "load", "loaded"]


def test_a_copy_is_refused():
    _, _, wrapper = make()
    with pytest.raises(TypeError, match=r"save optimizer.state_dict\(\) instead"):
        copy.deepcopy(wrapper)


def test_a_state_of_another_reference_is_refused():
    _, optimizer = noise.make(ref_batchsize=2)
    _, other = noise.make(ref_batchsize=1)
    with pytest.raises(ValueError, match="ref_batchsize was 2 and is 1"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="counts steps of 2 samples, and this opt"):
        other.load_state_dict(optimizer.state_dict(), allow_changes=True)


def test_a_state_of_another_rule_is_refused():
    _, linear = noise.make(cls=vbs.LinearRuleOptimizer)
    _, optimizer = noise.make()
    with pytest.raises(ValueError, match="of rule 'linear', and this optimizer has 'a"):
        optimizer.load_state_dict(linear.state_dict())
