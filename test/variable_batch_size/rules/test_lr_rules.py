"""Rules by themselves, and what is refused; test_rule_family.py has their weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.variable_batch_size.rules import ROWS
from support.variable_batch_size.wrapping import make, sampler_of
from torch.optim import AdamW

import variable_batch_size as vbs
from variable_batch_size.rules.rule import rule_named, with_options

NAMES = sorted({row.rule for row in ROWS.values()})
GROUP = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
GROUP["decoupled_weight_decay"] = True


@pytest.mark.parametrize("name", NAMES)
@given(ratio=st.floats(1 / 1024, 9))
def test_weight_decay_per_sample(name, ratio):
    """lr * weight_decay, what weights shrink by, is proportional to the batch."""
    rule = with_options(name, False, decay_per_sample=True)
    gain = math.sqrt(ratio)
    scaled, _ = rule.update(ratio, GROUP, rule.init(), gain=gain)
    shrinks = scaled.lr * (scaled.gradient_factor or 1.0) * scaled.weight_decay
    assert shrinks == pytest.approx(0.1 * 0.01 * ratio)


@pytest.mark.parametrize("name", ["adam-root", "adam-half-life"])
def test_adams_rules_keep_their_own_weight_decay_otherwise(name):
    """AdamW's decay follows the learning rate, not the correction of torch's bias."""
    rule, coupled = rule_named(name), GROUP | {"decoupled_weight_decay": False}
    state = rule.init()
    for ratio in (4.0, 2.0, 1.0, 8.0):
        scaled, state = rule.update(ratio, GROUP, state)
        shrinks = scaled.lr * scaled.weight_decay
        assert shrinks == pytest.approx(scaled.effective_lr * 0.01)
        assert rule.update(ratio, coupled, rule.init())[0].weight_decay == 0.01


def test_the_power_rule_holds_the_others():
    assert vbs.power(1).lr_factor(3.0) == 3.0
    assert vbs.power(0).lr_factor(3.0) == 1.0
    assert rule_named("power:0.5").lr_factor(4.0) == 2.0
    assert rule_named(vbs.power(0.25)).name == "power:0.25"


MINE = vbs.Rule("mine", lambda ratio: 1.0, needs_reference=False, for_sgd=True)


@pytest.mark.parametrize("rule", ["linear", "adascale", MINE])
def test_a_rule_that_suits_another_optimizer_warns(rule):
    """Its row says so, not its name: a rule of one's own warns, too."""
    ref = None if rule is MINE else 32
    with pytest.warns(UserWarning, match=r"' is derived for SGD.*for AdamW"):
        make(inner=AdamW, cls=vbs.ElasticOptimizer, rule=rule, ref_batchsize=ref)


# --- Adam: histories of betas, and their limits ---------------------------------------

LR, EPS = 0.01, 1e-3


def test_betas_that_a_scheduler_cycles():
    """Betas are torch's own while every ratio is one; then true weights count."""
    rule, state = rule_named("adam-half-life"), rule_named("adam-half-life").init()
    product = 1.0
    for step, kappa in enumerate([1.0] * 10 + [2.0, 1.0, 4.0]):
        group = {"lr": LR, "betas": (0.85 + 0.01 * (step % 10), 0.999), "eps": EPS}
        scaled, state = rule.update(kappa, group, state)
        product *= group["betas"][0] ** kappa
        if step < 10:
            assert (scaled.lr, scaled.betas) == (LR, group["betas"])
        assert state.products[0] == pytest.approx(product)


def unfreezing(own_group: bool) -> tuple[list[float], list[float]]:
    """Returns the steps of a weight that begins to train after 20 updates."""
    early, late = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    late.requires_grad_(False)
    groups = [[early], [late]] if own_group else [[early, late]]
    sampler = sampler_of((4, 8, 8, 16, 4, 8, 12) * 6, 10_000, minibatch_size=4)
    sampler.num_yielded = 1000  # is not iterated
    inner = torch.optim.Adam([{"params": g} for g in groups], LR, (0.9, 0.99), 0.0)
    wrapper = vbs.AdamRootRuleOptimizer(inner, sampler, ref_batchsize=4)
    updates = []
    wrapper.attach(updates.append)
    steps, expected = [], []
    while len(updates) < 40:
        before = late.item()
        (early + late).sum().backward()
        if wrapper.step():
            late.requires_grad_(len(updates) >= 20)
            steps.append(before - late.item())
            expected.append(updates[-1].lr[0] if len(updates) > 20 else 0.0)
    return steps, expected


def test_a_group_that_begins_to_train_later_has_its_own_history():
    steps, expected = unfreezing(own_group=True)
    assert steps == pytest.approx(expected, rel=1e-4)


def test_a_group_with_two_histories_is_refused():
    with pytest.raises(ValueError, match="put parameters that begin to train"):
        unfreezing(own_group=False)


def test_a_frozen_group_survives_a_checkpoint():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    weights[1].requires_grad_(False)

    def built() -> vbs.ElasticOptimizer:
        inner = torch.optim.Adam([{"params": [w]} for w in weights], LR)
        return make(32, lambda *_: inner, vbs.AdamRootRuleOptimizer)[2]

    wrapper = built()
    for _ in range(4):
        weights[0].sum().backward()
        wrapper.step()
    state = wrapper.state_dict()
    other = built()
    other.load_state_dict(state)
    assert other.state_dict()["elastic"] == state["elastic"]


def test_no_first_moment_at_all():
    """beta1 = 0 stays 0 at ratio one, and below it the average begins to remember."""
    rule = rule_named("adam-root")
    group = {"lr": LR, "betas": (0.0, 0.999), "eps": EPS}
    scaled, state = rule.update(1.0, group, rule.init())
    assert scaled.betas == (0.0, 0.999)
    scaled, _ = rule.update(0.5, group, state)
    assert scaled.betas[0] == 0.5
