"""A rule that returns what no gradient can be made of is named, with what it must."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.per_sample_grad.gradient_oracle import fold, rules_kept
from torch import nn

import per_sample_grad as psg

N, Q, P = 5, 3, 2
LEFT, RIGHT = torch.zeros(N, 1, 4, P), torch.zeros(N, 1, 4, Q)
# From what a rule of a Linear returns for its weight to what the message says of it.
WRONG: dict[str, tuple[object, str]] = {
    "tensor": (torch.zeros(N, P, Q), "a Tensor"),
    "tensors": ([torch.zeros(N, P, Q)], "a Tensor"),
    "none": (None, "a NoneType"),
    "dense-of-the-batch": (psg.Dense(torch.zeros(P, Q)), r"the Dense of \(2, 3\)"),
    "dense-flat": (psg.Dense(torch.zeros(N, P * Q)), r"the Dense of \(5, 6\)"),
    "dense-of-others": (psg.Dense(torch.zeros(4, P, Q)), r"the Dense of \(4, 2, 3\)"),
    "outer-without-groups": (
        psg.Outer(LEFT[:, 0], RIGHT[:, 0]),
        r"the Outer of \(5, 4, 2\) and \(5, 4, 3\)",
    ),
    "outer-exchanged": (psg.Outer(RIGHT, LEFT), "the Outer of"),
    "outer-positions": (psg.Outer(LEFT, RIGHT[:, :, 1:]), "the Outer of"),
    "outer-of-others": (psg.Outer(LEFT[1:], RIGHT[1:]), "the Outer of"),
    "lookup": (
        psg.Lookup(torch.zeros(N, dtype=torch.long), torch.zeros(N, Q)),
        r"the Lookup of \(5,\) and \(5, 3\)",
    ),
    "lookup-of-others": (
        psg.Lookup(torch.zeros(4, 1, dtype=torch.long), torch.zeros(4, 1, Q)),
        "the Lookup of",
    ),
    "second-of-two": ([psg.Outer(LEFT, RIGHT), psg.Dense(LEFT)], "the Dense of"),
}


def norms(rule: Callable, **options: object) -> torch.Tensor:
    psg.register_rule(nn.Linear)(rule)
    return psg.per_sample_grad_norms(
        nn.Sequential(nn.Linear(Q, P, bias=False)), fold, (torch.ones(N, Q),), **options
    )


@rules_kept()
@pytest.mark.parametrize("fallback", ["error", "loop"])
@pytest.mark.parametrize("name", WRONG)
def test_an_answer_of_the_wrong_kind_or_shape_names_the_rule(name, fallback):
    returned, message = WRONG[name]

    def wrong_linear(call: psg.Call, grad: torch.Tensor) -> dict[str, object]:
        return {"weight": returned}

    with pytest.raises(psg.PerSampleError, match=message) as caught:
        norms(wrong_linear, fallback=fallback)
    text = str(caught.value)
    assert "Linear '0'" in text
    assert "wrong_linear" in text
    assert "'weight' of shape (2, 3)" in text
    assert "must return a dict" in text


@rules_kept()
def test_a_rule_must_return_a_dict():
    with pytest.raises(psg.PerSampleError, match=r"rule of Linear '0'.* a Dense"):
        norms(lambda call, grad: psg.Dense(torch.zeros(N, P, Q)))


@rules_kept()
def test_several_contributions_are_added():
    def halves(call: psg.Call, grad: torch.Tensor) -> dict[str, object]:
        outer = psg.Outer(grad[:, None, None] / 2, call.input[:, None, None])
        return {"weight": (outer, outer)}

    model, x = nn.Sequential(nn.Linear(Q, P, bias=False)), torch.randn(N, Q)
    expected = psg.per_sample_grad_norms(model, fold, (x,))
    psg.register_rule(nn.Linear)(halves)
    torch.testing.assert_close(psg.per_sample_grad_norms(model, fold, (x,)), expected)
