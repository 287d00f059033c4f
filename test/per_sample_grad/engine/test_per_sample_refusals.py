"""Where an answer would be wrong, an error is raised."""

from __future__ import annotations

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
    with psg.capture(model) as recorded:
        losses = case.loss(model, *inputs)
    with pytest.raises(psg.CouplingError, match="off by"):
        recorded.backward(losses)


def test_another_loss_is_checked_again():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with psg.capture(model) as recorded:
        losses = model(x).square().sum(1)
    recorded.backward(losses)
    with psg.capture(model) as recorded:
        out = model(x)
        losses = (out - out.mean(0)).square().sum(1)
    with pytest.raises(psg.CouplingError):
        recorded.backward(losses)


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
    with psg.capture(model) as recorded:
        losses = fold(model, torch.randint(0, 5, (3, 4)))
    with pytest.raises(psg.CoverageError, match="counts over the whole batch"):
        recorded.backward(losses)


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
