"""What no rule accounts for is an error that says why, or exact by a loop."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.per_sample_grad.agreement import agree, assert_same_grads
from support.per_sample_grad.gradient_oracle import (
    Case,
    error,
    flat,
    fold,
    oracle,
    rules_kept,
)
from support.per_sample_grad.layer_cases import Apply, WithParameter
from support.per_sample_grad.refused_models import (
    BY_OPERATIONS,
    UNSEEN,
    DeepPositions,
    Doubling,
    turned,
)
from torch import nn
from torch.nn.modules import rnn
from torch.nn.utils.rnn import pack_padded_sequence

import per_sample_grad as psg
from per_sample_grad.layers import registry

BY_NAME = {case.name: case for case in (*BY_OPERATIONS, *UNSEEN)}


def exponents(function: Callable, *shape: int) -> Callable[[], nn.Module]:
    """Returns what makes a model that uses a parameter of its own directly."""
    return lambda: WithParameter(
        lambda m, x: m.b(function(m, torch.sigmoid(m.a(x)), m.p)), *shape,
        a=nn.Linear(3, 4), b=nn.Linear(4, 4),
    )  # fmt: skip


FUNCTIONS = [
    Case("turned", exponents(lambda m, x, p: turned(x, p), 4), (3,)),
    Case("distances-of-places", exponents(
        lambda m, x, p: torch.cdist(x, p.softmax(0)[None]), 4, 4), (5, 3)),
    Case("time-first", exponents(
        lambda m, x, p: turned(x.transpose(0, 1), p).transpose(0, 1), 4), (5, 3),
        {"batch_dim": {"": 1, "a": 0, "b": 0}}),
    Case("folded", exponents(
        lambda m, x, p: turned(x.flatten(0, 1), p).unflatten(0, (len(x), -1)), 4),
        (5, 3)),
]  # fmt: skip


ROWS = [(case, 3) for case in UNSEEN]
ROWS += [(case, batch) for case in FUNCTIONS for batch in (1, 4)]


@pytest.mark.parametrize(
    ("case", "batch"), ROWS, ids=[f"{case.name}-{batch}" for case, batch in ROWS]
)
def test_what_no_rule_accounts_for_is_an_error_or_exact_by_the_loop(case, batch):
    model, inputs = case.make(torch.float64, batch)
    expected = psg.CouplingError if "square" in case.name else psg.CoverageError
    call = (model, case.loss, inputs)
    with pytest.raises(expected):
        psg.per_sample_factors(*call, **case.options)
    options = {"fallback": "loop", **case.options}
    truth = oracle(case, model, inputs)
    for _ in range(2):
        agree(psg.per_sample_factors(*call, **options), truth, 1e-10)
    norms = psg.per_sample_grad_norms(*call, **options)  # in a stream
    assert error(norms, flat(truth).norm(dim=1)) <= 1e-10


# torch_xla puts another GRU in place of `nn.GRU`, which needs an XLA device.
RECURRENT: dict[str, Callable[[], rnn.RNNBase]] = {
    "rnn": lambda: rnn.RNN(3, 4, batch_first=True),
    "lstm": lambda: rnn.LSTM(3, 4, batch_first=True),
    "gru": lambda: rnn.GRU(3, 4, bias=False),
    "lstm-deep-both-ways": lambda: rnn.LSTM(
        3, 4, 2, bidirectional=True, proj_size=2, batch_first=True
    ),
}


def all_outputs(m: nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns what a recurrent layer returns, between other layers, ``(B, *)``."""
    x, first = torch.tanh(m.before(x)), m.inner.batch_first
    out, states = m.inner(x if first else x.transpose(0, 1))
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    _, again = m.inner(packed, states)
    given = [*states, *again] if isinstance(states, tuple) else [states, again]
    out = m.after(out if first else out.transpose(0, 1))
    parts = [out, *(each.transpose(0, 1) for each in given)]
    return torch.cat([part.flatten(1) for part in parts], 1)


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_are_refused_or_exact_by_the_loop(kind):
    """Sequences and last states count, packed and not."""

    def make() -> nn.Module:
        inner = RECURRENT[kind]()
        width = (inner.proj_size or 4) * (1 + inner.bidirectional)
        return Apply(
            all_outputs, before=nn.Linear(3, 3), inner=inner, after=nn.Linear(width, 2)
        )

    case = Case(kind, make, lambda batch: (
        torch.randn(batch, 5, 3), torch.tensor([2, 5, 1])))  # fmt: skip
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        model, inputs = case.make(dtype)
        reason = rf"inner\.weight_ih_l0.*no rule is registered for {kind[:4].upper()}"
        with pytest.raises(psg.CoverageError, match=f'(?s){reason}.*fallback="loop"'):
            psg.per_sample_grad_norms(model, fold, inputs)
        truth = oracle(case, model, inputs)
        plain = copy.deepcopy(model)
        fold(plain, *inputs).mean().backward()
        for _ in range(2):
            model.zero_grad()
            with psg.capture(model, fallback="loop") as recorded:
                losses = fold(model, *inputs)
            factors = recorded.backward(losses, accumulate="mean")
            agree(factors, truth, tolerance)
            assert_same_grads(model, plain)


def test_the_withdrawn_fallback_names_what_to_pass():
    with pytest.raises(ValueError, match='was withdrawn: pass fallback="loop"'):
        psg.capture(nn.Linear(2, 1), fallback="batched")


@pytest.mark.parametrize("rows", [3, 6])
def test_a_wrong_rule_is_replaced_by_the_fallback_and_remembered(rows):
    """As many positions as samples, or a multiple, look like rows of samples."""
    model, inputs = BY_NAME["deep-positions-square"].make(torch.float64)
    model.embed, inputs = nn.Embedding(rows, 3).double(), (torch.randn(3, rows, 3),)
    inputs = (inputs[0].double(),)
    truth = oracle(Case("", DeepPositions, ()), model, inputs)
    for repeated in (False, True):
        with psg.capture(model, fallback="loop") as recorded:
            losses = fold(model, *inputs)
        for name, values in recorded.backward(losses).materialize().items():
            assert error(values, truth[name]) <= 1e-10
        assert recorded.compared == (not repeated)
    with pytest.raises(psg.CouplingError, match=r"embed\.weight: off by"):
        psg.per_sample_factors(model, fold, inputs)
    report = psg.coverage(model, fold, inputs)
    assert not report.parameters["embed.weight"].correct


def test_errors_say_why_there_is_no_rule_and_recommend_what_is_cheapest_first():
    model, inputs = BY_NAME["turned"].make(torch.float32)
    reason = "no rule is registered for Turned; PolarBackward0 mixes it"
    with pytest.raises(psg.CoverageError, match=reason) as caught:
        psg.per_sample_grad_norms(model, fold, inputs)
    text = str(caught.value)
    assert text.index("register_rule") < text.index('fallback="loop"')


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("patched-forward", "the forward method of this Linear was replaced"),
        ("pruned", "the weight of this Linear is not a parameter, but a tensor"),
        ("weight-norm", "no rule is registered for"),
        ("subclass", "for Doubling, and as a Linear it may compute something else"),
    ],
)
def test_modules_that_look_like_known_ones_have_no_rule(name, reason):
    subclass = Case("subclass", lambda: nn.Sequential(Doubling(3, 2)), (3,))
    model, _ = {**BY_NAME, "subclass": subclass}[name].make(torch.float32)
    assert reason in registry.why_no_rule(model[0])


class Scale(nn.Module):
    """A module whose parameter is a single number without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


@pytest.mark.parametrize("way", ["rule", "loop"])
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
    agree(psg.per_sample_factors(model, fold, inputs, **options), truth, 1e-10)
