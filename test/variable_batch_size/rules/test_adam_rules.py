"""What the Adam rules have to themselves: histories of betas, and their limits.

Their weights are compared with those by hand in test_rule_family.py.
"""

from __future__ import annotations

import pytest
import torch
from support.variable_batch_size.wrapping import make

import variable_batch_size as vbs
from variable_batch_size.rules.adam import half_life_beta, sde_beta
from variable_batch_size.rules.rule import rule_named

LR, EPS = 0.01, 1e-3


def test_betas_that_a_scheduler_cycles():
    """Betas are torch's own while every ratio is one; then true weights count."""
    rule, state = rule_named("adam-half-life"), rule_named("adam-half-life").init()
    product = 1.0
    for step, kappa in enumerate([1.0] * 10 + [2.0, 1.0, 4.0]):
        betas = (0.85 + 0.01 * (step % 10), 0.999)
        scaled, state = rule.update(
            kappa, {"lr": LR, "betas": betas, "eps": EPS}, state
        )
        product *= betas[0] ** kappa
        if step < 10:
            assert scaled.lr == LR
            assert scaled.betas == betas
        assert state.products[0] == pytest.approx(product)


def unfreezing(own_group: bool) -> tuple[list[float], list[float]]:
    """Returns the steps of a weight that begins to train after 20 updates."""
    early, late = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    late.requires_grad_(False)
    groups = [[early], [late]] if own_group else [[early, late]]
    sampler = vbs.CustomSampler(
        dataset_size=10_000, trace=(4, 8, 8, 16, 4, 8, 12), num_replicas=1, rank=0,
        minibatch_size=4, verbose=False, on_end="cycle",
    )  # fmt: skip
    sampler.num_yielded = 1000  # is not iterated
    wrapper = vbs.AdamRootRuleOptimizer(
        torch.optim.Adam([{"params": g} for g in groups], LR, (0.9, 0.99), 0.0),
        sampler,
        ref_batchsize=4,
    )
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


def test_betas_where_both_forms_agree_to_first_order():
    for kappa in (0.5, 1.0, 2.0):
        assert sde_beta(0.9999, kappa) == pytest.approx(
            half_life_beta(0.9999, kappa), abs=1e-7
        )


def test_no_first_moment_at_all():
    """beta1 = 0 stays 0 at ratio one, and below it the average begins to remember."""
    rule = rule_named("adam-root")
    group = {"lr": LR, "betas": (0.0, 0.999), "eps": EPS}
    scaled, state = rule.update(1.0, group, rule.init())
    assert scaled.betas == (0.0, 0.999)
    scaled, _ = rule.update(0.5, group, state)
    assert scaled.betas[0] == 0.5


def test_a_trace_that_the_sde_rule_cannot_follow_is_refused_at_once():
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], LR)
    sampler = vbs.CustomSampler(
        range(64), [4, 40], num_replicas=1, rank=0, minibatch_size=2, verbose=False
    )
    with pytest.raises(ValueError, match=r"batch ratio 10.* use rule 'adam-half-life'"):
        vbs.AdamRootRuleOptimizer(inner, sampler, ref_batchsize=4)
    vbs.AdamHalfLifeRuleOptimizer(inner, sampler, ref_batchsize=4)
