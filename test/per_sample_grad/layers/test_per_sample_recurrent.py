"""RNN, LSTM and GRU agree with a float64 loop, whichever outputs the losses use.

``.grad`` is that of an ordinary pass to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.per_sample_grad.agreement import agree, assert_same_grads
from support.per_sample_grad.gradient_oracle import Case, fold, oracle
from support.per_sample_grad.layer_cases import Apply
from torch import nn
from torch.nn.modules import rnn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import per_sample_grad as psg

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")

# torch_xla puts another GRU in place of `nn.GRU`, which needs an XLA device.
KINDS = {"rnn": rnn.RNN, "lstm": rnn.LSTM, "gru": rnn.GRU}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch-first-no-bias": {"batch_first": True, "bias": False},
    "deep-both-ways": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}
ROWS = [(kind, options) for kind in KINDS for options in OPTIONS.items()]
ROWS += [
    ("rnn", ("relu", {"nonlinearity": "relu"})),
    ("lstm", ("projected", {"proj_size": 2, "num_layers": 2, "bidirectional": True})),
]
LENGTHS = {"sorted": [5, 3, 3], "unsorted": [2, 5, 1], "equal": [4, 4, 4]}


def summed(states: Any) -> torch.Tensor:
    """Returns a number of each sample, ``(B, 1)``, of all last states."""
    states = states if isinstance(states, tuple) else (states,)
    each = [state.transpose(0, 1).flatten(1).sin().sum(1) for state in states]
    return torch.stack(each).sum(0).unsqueeze(1)


def turned(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Returns what the layer takes or returns with its first two dimensions as here."""
    return x if m.inner.batch_first else x.transpose(0, 1)


def output(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return turned(m, m.inner(turned(m, x))[0])


def last_states(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return summed(m.inner(turned(m, x))[1])


def both(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The module is between others, and one after the other."""
    x = turned(m, torch.tanh(m.before(x)))
    found, states = m.inner(x)
    # The first states are those of the last call.
    _, again = m.inner(x, hx=states)
    return turned(m, found).flatten(1) * summed(again)


def last_step(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A Linear takes what the layer returns, as it lies."""
    found = m.inner(turned(m, x))[0]
    return m.after(found[:, -1] if m.inner.batch_first else found[-1])


def first_states(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """So it does here; what is after the first layer is not used."""
    states = m.inner(turned(m, x))[1]
    states = states if isinstance(states, tuple) else (states,)
    return sum(layer(state[0]) for layer, state in zip((m.short, m.cell), states))


def packed(m: nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    first, x = m.inner.batch_first, turned(m, x)
    given = pack_padded_sequence(x, lengths, first, enforce_sorted=False)
    found, states = m.inner(given)
    found, _ = pad_packed_sequence(found, first, total_length=5)
    return turned(m, found).flatten(1) * summed(states)


def model(kind: str, options: dict[str, Any], use: Callable[..., Any]) -> nn.Module:
    inner = KINDS[kind](3, 4, **options)
    width = inner.proj_size or 4
    return Apply(
        use, before=nn.Linear(3, 3), inner=inner, short=nn.Linear(width, 6),
        cell=nn.Linear(4, 6), after=nn.Linear(width * (1 + inner.bidirectional), 6),
    )  # fmt: skip


USES = [output, last_states, both, last_step, first_states]


@pytest.mark.parametrize("use", USES, ids=lambda u: u.__name__)
@pytest.mark.parametrize(
    ("kind", "options"), ROWS, ids=[f"{k}-{name}" for k, (name, _) in ROWS]
)
def test_recurrent_layers_equal_the_loop(kind, options, use):
    case = Case("", lambda: model(kind, options[1], use), (5, 3))
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        made, inputs = case.make(dtype)
        truth = oracle(case, made, inputs)
        agree(psg.per_sample_factors(made, fold, inputs), truth, tolerance)
        made, inputs = case.make(dtype, 8)
        plain = copy.deepcopy(made)
        expected = fold(plain, *inputs)
        expected.mean().backward()
        with psg.capture(made) as recorded:
            losses = fold(made, *inputs)
        assert torch.equal(losses, expected)
        recorded.backward(losses, accumulate="mean")
        assert_same_grads(made, plain)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", ["plain", "deep-both-ways"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_equal_the_loop(kind, options, lengths):
    case = Case(
        "",
        lambda: model(kind, OPTIONS[options], packed),
        lambda batch: (torch.randn(batch, 5, 3), torch.tensor(LENGTHS[lengths])),
    )
    made, inputs = case.make(torch.float64)
    plain = made(*inputs)
    truth = oracle(case, made, inputs)
    for _ in range(2):
        agree(psg.per_sample_factors(made, fold, inputs), truth, 1e-10)
    with psg.capture(made):
        torch.testing.assert_close(made(*inputs), plain, rtol=0, atol=0)


def test_under_autocast():
    case = Case("", lambda: model("lstm", {}, output), (5, 3))
    made, inputs = case.make(torch.float32)
    truth = oracle(case, made, inputs)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            fold(made, *inputs)
    except RuntimeError as error:
        pytest.skip(f"torch has no bfloat16 LSTM on this processor: {error}")
    with psg.capture(made) as recorded, torch.autocast("cpu", torch.bfloat16):
        losses = fold(made, *inputs).float()
    found = recorded.backward(losses).norms()
    expected = sum(g.flatten(1).square().sum(1) for g in truth.values()).sqrt()
    torch.testing.assert_close(found.double(), expected, rtol=3e-2, atol=0)


@pytest.mark.parametrize(
    ("options", "shape", "reason"),
    [
        ({"dropout": 0.5, "num_layers": 2}, (5, 2, 3), "cannot be drawn again; call"),
        ({}, (5, 3), r"its input of shape \(5, 3\) has 2 dimensions"),
    ],
)
def test_what_is_refused(options, shape, reason):
    inner = nn.LSTM(3, 4, **options)
    with psg.capture(inner) as recorded:
        found, _ = inner(torch.randn(shape))
    with pytest.raises(psg.CoverageError, match=reason):
        recorded.backward(
            found.flatten(1).sum(1) if len(shape) == 2 else found.sum((0, 2))
        )
