"""Every learning-rate rule: a new one is checked by being in the registry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from variable_batch_size.lr_rules import rule_named

FORMULAS = {
    "constant": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "linear-momentum": lambda ratio: ratio,
    "root": lambda ratio: ratio**0.5,
}
ratios = st.floats(1 / 1024, 1024)


def test_every_rule_has_its_formula_here():
    assert FORMULAS.keys() == vbs.RULES.keys()


@pytest.mark.parametrize("name", vbs.RULES)
@given(ratio=ratios)
def test_effective_factor(name, ratio):
    rule = rule_named(name)
    assert rule.effective_lr_factor(ratio) == pytest.approx(FORMULAS[name](ratio))


@pytest.mark.parametrize("name", vbs.RULES)
def test_identity_at_the_reference_batch(name):
    """Exactly: an unchanged batch size must not change a run."""
    rule = rule_named(name)
    assert rule.lr_factor(1.0) == 1.0
    assert rule.gradient_factor is None or rule.gradient_factor(1.0) == 1.0


def test_an_unknown_rule_names_the_known():
    with pytest.raises(
        ValueError, match=r"'lars' is unknown; allowed are \['constant'"
    ):
        rule_named("lars")
