"""Where an answer would be wrong, an error is raised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.per_sample_grad.gradient_oracle import fold, rules_kept
from support.per_sample_grad.refused_models import COUPLED, Doubling
from torch import nn

import per_sample_grad as psg


@pytest.mark.parametrize("case", COUPLED, ids=lambda case: case.name)
@pytest.mark.parametrize("batch", [2, 3, 12])
@rules_kept()
def test_what_is_attributed_wrongly_is_an_error(case, batch):
    psg.register_rule(Doubling)(psg.layers.linear.linear)
    if case.name.endswith("square"):
        batch = 3
    model, inputs = case.make(torch.float32, batch=batch)
    with pytest.raises(psg.CouplingError, match="off by"):
        psg.per_sample_factors(model, case.loss, inputs)


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False).eval()],
    ids=["training", "no-running-statistics"],
)
def test_batch_statistics_are_refused_before_anything_happens(norm):
    model = nn.Sequential(nn.Linear(3, 3), norm)
    with (
        pytest.raises(psg.CouplingError, match="Freeze the statistics"),
        psg.capture(model),
    ):
        raise AssertionError("not reached")
    assert not model[0]._forward_hooks


def test_scale_grad_by_freq_is_refused():
    model = nn.Embedding(5, 3, scale_grad_by_freq=True)
    with pytest.raises(psg.CoverageError, match="counts over the whole batch"):
        psg.per_sample_factors(model, fold, (torch.randint(0, 5, (3, 4)),))


def test_an_input_changed_in_place_is_an_error():
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    with psg.capture(model) as recorded:
        losses = model(x).sum(1)
    x.add_(1)
    with pytest.raises(psg.PerSampleError, match="changed in place"):
        recorded.backward(losses)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (lambda out: out.sum(), "reduction"),
        (lambda out: out, "one number per sample"),
        (lambda out: out.sum(1).detach(), "no graph"),
        (lambda out: out.sum(1).long(), "dtype torch.int64"),
    ],
)
def test_losses_that_are_no_vector_are_refused(losses, message):
    model = nn.Linear(3, 2)
    with psg.capture(model) as recorded:
        given = losses(model(torch.randn(4, 3)))
    with pytest.raises(ValueError, match=message):
        recorded.backward(given)


def test_only_some_parameters():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    with psg.capture(model, ["1.weight"]) as recorded:
        losses = model(x).square().sum(1)
    assert list(recorded.backward(losses).shapes) == ["1.weight"]
    with psg.capture(model, lambda name, _: name.endswith("bias")) as recorded:
        losses = model(x).square().sum(1)
    assert list(recorded.backward(losses).shapes) == ["0.bias", "1.bias"]
    with pytest.raises(ValueError, match=r"allowed are 0\.weight"):
        psg.capture(model, ["2.weight"])
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match=r"of a wrapper, such as .*torch\.compile"):
        psg.capture(compiled, ["1.weight"])
    with pytest.raises(ValueError, match="of a wrapper"):
        psg.capture(model, [name for name, _ in compiled.named_parameters()])
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(9))
    with pytest.raises(ValueError, match=r"5\.bias and 6 more$"):
        psg.capture(model, ["9.weight"])


@pytest.mark.parametrize("option", ["fallback", "check", "method"])
def test_options_are_checked(option):
    with pytest.raises(ValueError, match=f"{option} must be one of .*, got 'no'"):
        psg.capture(nn.Linear(2, 2), **{option: "no"})


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
    "outer-without-groups": (psg.Outer(LEFT[:, 0], RIGHT[:, 0]),
                             r"the Outer of \(5, 4, 2\) and \(5, 4, 3\)"),
    "outer-exchanged": (psg.Outer(RIGHT, LEFT), "the Outer of"),
    "outer-positions": (psg.Outer(LEFT, RIGHT[:, :, 1:]), "the Outer of"),
    "outer-of-others": (psg.Outer(LEFT[1:], RIGHT[1:]), "the Outer of"),
    "lookup": (psg.Lookup(torch.zeros(N, dtype=torch.long), torch.zeros(N, Q)),
               r"the Lookup of \(5,\) and \(5, 3\)"),
    "lookup-of-others": (psg.Lookup(
        torch.zeros(4, 1, dtype=torch.long), torch.zeros(4, 1, Q)), "the Lookup of"),
    "second-of-two": ([psg.Outer(LEFT, RIGHT), psg.Dense(LEFT)], "the Dense of"),
}  # fmt: skip


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
