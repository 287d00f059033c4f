"""What no rule accounts for is an error that says why, or exact by a fallback."""

from __future__ import annotations

import pytest
import torch
from support.gradient_oracle import Case, error, flat, fold, oracle, rules_kept
from support.refused_models import NO_GRU, UNSEEN, Doubling, Positions
from test_per_sample_family import agree
from torch import nn

import per_sample_grad as psg
from per_sample_grad.engine import comparison

BY_NAME = {case.name: case for case in UNSEEN}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=NO_GRU if case.name == "gru" else ())
        for case in UNSEEN
    ],
)
def test_what_no_rule_accounts_for_is_an_error(case):
    model, inputs = case.make(torch.float64)
    with psg.capture(model) as recorded:
        losses = case.loss(model, *inputs)
    expected = psg.CouplingError if "square" in case.name else psg.CoverageError
    with pytest.raises(expected):
        recorded.backward(losses)


@pytest.mark.parametrize("fallback", ["loop", "batched"])
@pytest.mark.parametrize(
    "case",
    [c for c in UNSEEN if c.name not in ("pruned", "lstm", "gru")],
    ids=lambda case: case.name,
)
def test_and_exact_by_a_fallback(case, fallback):
    model, inputs = case.make(torch.float64)
    truth = oracle(case, model, inputs)
    with psg.capture(model, fallback=fallback) as recorded:
        losses = case.loss(model, *inputs)
    factors = recorded.backward(losses)
    for name, values in factors.materialize().items():
        assert error(values, truth[name]) <= 1e-10
    grads = flat(truth)
    assert error(factors.gram(), grads @ grads.T) <= 1e-10
    assert error(factors.norms(), grads.norm(dim=1)) <= 1e-10


@pytest.mark.parametrize("rows", [3, 6])
def test_a_wrong_rule_is_replaced_by_the_fallback_and_remembered(rows, monkeypatch):
    """As many positions as samples, or a multiple, look like rows of samples."""
    model, inputs = BY_NAME["positions-square"].make(torch.float64)
    model.embed, inputs = nn.Embedding(rows, 3).double(), (torch.randn(3, rows, 3),)
    inputs = (inputs[0].double(),)
    truth = oracle(Case("", Positions, ()), model, inputs)
    for repeated in (False, True):
        if repeated:  # the second time nothing is compared
            monkeypatch.setattr(comparison.Comparer, "expect", None)
        with psg.capture(model, fallback="loop") as recorded:
            losses = fold(model, *inputs)
        for name, values in recorded.backward(losses).materialize().items():
            assert error(values, truth[name]) <= 1e-10
    monkeypatch.undo()
    with psg.capture(model) as recorded:
        losses = fold(model, *inputs)
    with pytest.raises(psg.CouplingError, match=r"embed\.weight: off by"):
        recorded.backward(losses)
    report = psg.coverage(model, fold, inputs)
    assert not report.parameters["embed.weight"].correct


def test_a_fallback_in_a_stream():
    case = BY_NAME["raw-parameter"]
    model, inputs = case.make(torch.float64)
    truth = oracle(case, model, inputs)
    norms = psg.per_sample_grad_norms(model, fold, inputs, fallback="loop")
    assert error(norms, flat(truth).norm(dim=1)) <= 1e-10


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lstm", "no rule is registered for LSTM"),
        pytest.param("gru", "no rule is registered for GRU", marks=NO_GRU),
        ("raw-parameter", "no rule is registered for Raw"),
        ("patched-forward", "the forward method of this Linear was replaced"),
        ("pruned", "the weight of this Linear is not a parameter, but a tensor"),
        ("functional-use", "Linear 'inner' has a rule, but this use is not its own"),
        ("weight-norm", "no rule is registered for"),
        ("subclass", "for Doubling, and as a Linear it may compute something else"),
    ],
)
def test_errors_say_why_there_is_no_rule(name, reason):
    subclass = Case("subclass", lambda: nn.Sequential(Doubling(3, 2)), (3,))
    model, inputs = {**BY_NAME, "subclass": subclass}[name].make(torch.float32)
    with psg.capture(model) as recorded:
        losses = fold(model, *inputs)
    with pytest.raises(psg.CoverageError, match=reason):
        recorded.backward(losses)


@pytest.mark.parametrize("name", ["lstm", pytest.param("gru", marks=NO_GRU)])
def test_a_recurrent_network_by_a_loop(name):
    case = BY_NAME[name]
    model, inputs = case.make(torch.float64)
    truth = oracle(case, model, inputs)
    norms = psg.per_sample_grad_norms(model, fold, inputs, fallback="loop")
    assert error(norms, flat(truth).norm(dim=1)) <= 1e-10


class Scale(nn.Module):
    """A module whose parameter is a single number without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


@pytest.mark.parametrize("way", ["rule", "loop", "batched"])
@rules_kept()
def test_a_parameter_without_dimensions(way):
    if way == "rule":

        @psg.register_rule(Scale)
        def scale(call: psg.Call, grad: torch.Tensor) -> dict[str, psg.Dense]:
            return {"factor": psg.Dense((grad * call.input).flatten(1).sum(1))}

    case = Case("", lambda: nn.Sequential(nn.Linear(3, 4), Scale()), (5, 3))
    model, inputs = case.make(torch.float64)
    truth = oracle(case, model, inputs)
    options = {} if way == "rule" else {"fallback": way}
    agree(case, psg.per_sample_factors(model, fold, inputs, **options), truth, 1e-10)
