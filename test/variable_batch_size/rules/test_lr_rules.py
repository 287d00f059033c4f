"""Every rule of the registry, so also a new one; and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.variable_batch_size.rules import ROWS
from support.variable_batch_size.wrapping import make
from torch.optim import SGD, AdamW

import variable_batch_size as vbs
from variable_batch_size.rules.rule import rule_named, with_options

FORMULAS = {row.rule: row.lr_factor for row in ROWS.values()}
NAMES = sorted(FORMULAS)
GROUP = {
    "lr": 0.1,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "decoupled_weight_decay": True,
}
ratios = st.floats(1 / 1024, 9)


@pytest.mark.parametrize("name", NAMES)
@given(ratio=ratios)
def test_effective_learning_rate(name, ratio):
    rule = rule_named(name)
    scaled, _ = rule.update(ratio, GROUP, rule.init(), gain=ratio)
    assert scaled.effective_lr == pytest.approx(0.1 * FORMULAS[name](ratio, ratio))
    if scaled.gradient_factor is not None:
        assert scaled.lr * scaled.gradient_factor == pytest.approx(scaled.effective_lr)


@pytest.mark.parametrize("name", NAMES)
@given(ratio=ratios)
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
    rule = rule_named(name)
    state = rule.init()
    for ratio in (4.0, 2.0, 1.0, 8.0):
        scaled, state = rule.update(ratio, GROUP, state)
        assert scaled.lr * scaled.weight_decay == pytest.approx(
            scaled.effective_lr * 0.01
        )
        coupled, _ = rule.update(
            ratio, {**GROUP, "decoupled_weight_decay": False}, rule.init()
        )
        assert coupled.weight_decay == 0.01


def test_the_power_rule_holds_the_others():
    assert vbs.power(1).lr_factor(3.0) == 3.0
    assert vbs.power(0).lr_factor(3.0) == 1.0
    assert rule_named("power:0.5").lr_factor(4.0) == 2.0
    assert rule_named(vbs.power(0.25)).name == "power:0.25"


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        ("lars", ValueError, r"'lars' is unknown; allowed are \['adam-half.*power"),
        ("power", ValueError, "allowed are .* 'power:0.75'"),
        ("power:", ValueError, "'power:' is unknown"),
        ("power:x", ValueError, "'x' is not a finite number"),
        ("power:nan", ValueError, "'nan' is not a finite number"),
        (0.5, TypeError, "rule must be a name or a Rule, got 0.5"),
    ],
)
def test_bad_names(rule, error, message):
    with pytest.raises(error, match=message):
        rule_named(rule)


def test_adams_rules_have_no_momentum_correction():
    with pytest.raises(TypeError, match="can be neither measured nor take a mom"):
        with_options("adam-root", True, False)
    with pytest.raises(TypeError, match="rule 'x' changes Adam's betas"):
        vbs.Rule("x", lambda gain: gain, measured=True, beta=lambda b, k: b)


# --- a rule, a trace and an optimizer that do not go together -----------------------


@pytest.mark.parametrize("factor", [-1.0, float("nan"), None])
def test_a_rule_without_a_factor_is_refused_at_once(factor):
    with pytest.raises(ValueError, match=r"rule 'mine' makes the factor .* finite"):
        make(cls=vbs.ElasticOptimizer, rule=vbs.Rule("mine", lambda ratio: factor))


MINE = vbs.Rule("mine", lambda ratio: 1.0, needs_reference=False, for_sgd=True)


@pytest.mark.parametrize("rule", ["linear", "adascale", MINE])
def test_a_rule_that_suits_another_optimizer_warns(rule):
    """Its row says so, not its name: a rule of one's own warns, too."""
    ref = None if rule is MINE else 32
    with pytest.warns(UserWarning, match=r"' is derived for SGD.*for AdamW"):
        make(inner=AdamW, cls=vbs.ElasticOptimizer, rule=rule, ref_batchsize=ref)


@pytest.mark.parametrize(
    ("inner", "options", "message"),
    [
        (SGD, {"rule": "adam-root"}, "needs torch's Adam or AdamW, got SGD"),
        (torch.optim.RAdam, {"rule": "adam-half-life"}, "Adam or AdamW, got RAdam"),
        (AdamW, {"rule": "root", "momentum_correction": True}, "only SGD turns into"),
        (torch.optim.Adam, {"rule": "root", "decay_per_sample": True},
         "decay_per_sample needs weight decay that multiplies the weights"),
        (lambda ps, lr: AdamW(ps, lr, capturable=True), {"rule": "adam-root"},
         "does not work with capturable=True"),
    ],
)  # fmt: skip
def test_a_rule_that_does_not_work_with_the_optimizer_is_refused(
    inner, options, message
):
    with pytest.raises(TypeError, match=message):
        make(inner=inner, cls=vbs.ElasticOptimizer, **options)
