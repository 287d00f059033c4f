"""Answers during the backward pass are the same and need the memory of training."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad.gradient_oracle import captured, fold, norms_of, rules_kept
from support.per_sample_grad.layer_cases import CASES, Apply, WithParameter, twice
from support.per_sample_grad.refused_models import BY_NAME
from torch import nn

import per_sample_grad as psg
from tools.peak_memory import peak_memory

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_answer_of_one_pass_is_that_of_the_factors(case):
    model, inputs = case.make(torch.float64)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    half = sum(p.numel() for p in trained.values()) // 2
    projection = psg.Projection(trained, max(len(trained), half))

    def answers(factors: psg.Factors):
        return (
            [factors.norms(squared=True), factors.gram()],
            factors.dot({name: torch.cos(trained[name]) for name in factors.shapes}),
            factors.weighted_sum(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)),
            factors.materialize(),
            factors.project(projection),
        )

    recorded, losses = captured(model, case.loss, *inputs, **case.options)
    streamed = recorded.stream(losses, answers)
    recorded, losses = captured(model, case.loss, *inputs, **case.options)
    torch.testing.assert_close(streamed, answers(recorded.backward(losses)))


def deep_mlp() -> nn.Module:
    return nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh()))
    )


def deep_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
        *(layer for _ in range(4) for layer in (
            nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


DEEP = {
    "tokens": (deep_mlp, (32, 128, 64)),
    "images": (deep_cnn, (16, 3, 24, 24)),
    "flat": (lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in "abcd")), (64, 512)),
}


def peak_of_training(model: nn.Module, x: torch.Tensor) -> int:
    """Returns what a step takes, the gradients included."""
    for _ in range(2):
        model.zero_grad()
        peak = peak_memory(lambda: fold(model, x).sum().backward())
    model.zero_grad()
    return peak


@pytest.mark.parametrize("name", DEEP)
def test_norms_and_gram_need_the_memory_of_training(name):
    build, shape = DEEP[name]
    model, x = build(), torch.randn(shape)
    training = peak_of_training(model, x)
    for answer in (psg.per_sample_grad_norms, psg.per_sample_gram):
        step = functools.partial(answer, model, fold, (x,))
        step()  # compared with autograd
        assert peak_memory(step) <= 1.1 * training
    kept = peak_memory(lambda: psg.per_sample_factors(model, fold, (x,)).norms())
    if name == "tokens":  # streaming helps where factors are larger than activations
        assert kept > 1.1 * training


def test_gradients_are_made_when_the_activations_have_gone():
    """The head's gradients, the largest, would be kept during the whole pass."""
    model = nn.Sequential(deep_cnn(), nn.Linear(16, 512), nn.Linear(512, 100))
    x = torch.randn(32, 3, 24, 24)
    training = peak_of_training(model, x)
    step = functools.partial(psg.per_sample_grads, model, fold, (x,))
    assert sum(grad.nbytes for grad in step().values()) > 0.4 * training
    assert peak_memory(step) <= 1.1 * training


def embedding() -> nn.Module:
    return nn.Embedding(50, 64)


@pytest.mark.parametrize("method", ["factored", "materialized"])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Conv2d(3, 8, 5, padding=2), (8, 3, 8, 8)),
        (lambda: nn.Conv2d(16, 8, 3, padding=1), (8, 16, 8, 8)),  # is fast
        (lambda: nn.Linear(64, 96), (8, 48, 64)), (embedding, (16, 48)),
        (twice(lambda: nn.Linear(64, 64)), (12, 48, 64)),
    ],
)  # fmt: skip
def test_a_plan_says_what_temporaries_take(build, shape, method):
    x, budget = torch.rand(shape), 2**17
    model, x = build(), (50 * x).long() if build is embedding else x
    options = {"params": lambda n, _: n.endswith("weight"), "method": method}
    factors = psg.per_sample_factors(model, fold, (x,), budget=budget, **options)
    (weight,) = factors.shapes
    for quantity, answer in (("norms", factors.norms), ("gram", factors.gram)):
        choice = factors.plan(quantity).choices[weight]
        assert choice.form == method
        assert choice.num_chunks > 1
        assert choice.bytes <= budget
        answer()
        # Beside the budget: an answer, and a matrix product's copies of its operands.
        assert peak_memory(answer) <= 1.5 * budget + 2**14


class Gate(WithParameter):
    """A module whose second input takes no gradient, although it has a graph."""


@rules_kept()
def test_an_input_that_takes_no_gradient_hides_no_call():
    """The graph says which calls are lowest, not the modules' inputs."""

    @psg.register_rule(Gate)
    def gate(call: psg.Call, grad: torch.Tensor):
        x, y = call.args
        return {"p": psg.Dense(grad * x * y)}

    parts = {"gate": Gate(lambda m, x, y: m.p * x * y.detach(), 3)}
    model = Apply(lambda m, x: m.gate(x, m.below(x)), **parts, below=nn.Linear(3, 3))
    x = torch.randn(3, 3)
    norms = psg.per_sample_grad_norms(model, fold, (x,))
    torch.testing.assert_close(norms, norms_of(fold(model, x), model.parameters()))


def test_a_convolution_is_unfolded_when_it_is_asked():
    model = nn.Conv2d(4, 8, 5, padding=2)
    x = torch.randn(8, 4, 20, 20)
    options = {"params": ["weight"], "check": "never"}
    recorded, losses = captured(model, fold, x, **options)
    factors: list[psg.Factors] = []
    peak = peak_memory(lambda: factors.append(recorded.backward(losses)))
    assert peak < 25 * x.nbytes / 4  # a quarter of all windows
    (windows,) = factors[0].contributions("weight")
    expected = F.unfold(x, 5, padding=2).transpose(1, 2)
    part = windows.outer(2, 4, 25, 75).right[:, 0]
    torch.testing.assert_close(part, expected[2:4, :, 25:75])


ANSWERS = {
    "backward": lambda recorded, losses: recorded.backward(losses),
    "stream": lambda recorded, losses: recorded.stream(losses, psg.Factors.materialize),
    "norms": lambda recorded, losses: recorded.norms(losses),
    "project": lambda recorded, losses: recorded.project(
        losses, psg.Projection(recorded.params, 6), accumulate="mean"
    ),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_nothing_is_kept_by_a_cycle(answer):
    """On a lazy device every tensor that is alive is an output of the program."""
    model, x = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Flatten()), torch.randn(4, 3, 9)

    def alive_after_a_step() -> int:
        ANSWERS[answer](*captured(model, fold, x))
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    alive_after_a_step()
    gc.collect()
    gc.disable()
    try:
        assert alive_after_a_step() >= alive_after_a_step()
    finally:
        gc.enable()


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("fallback", ["error", "loop"])
def test_a_capture_names_what_the_losses_do_not_depend_on(answer, fallback):
    model, inputs = BY_NAME["unused-part"].make(torch.float64)
    # The first one is compared, and takes what rules return.
    for _ in range(2):
        recorded, losses = captured(model, fold, *inputs, fallback=fallback)
        assert not recorded.unused
        ANSWERS[answer](recorded, losses)
        assert recorded.unused == {"unused.weight", "unused.bias"}
    # Small gradients wait until the pass has ended, and are used.
    model = nn.Sequential(nn.Linear(3, 2), nn.PReLU(), nn.LayerNorm(2))
    recorded, losses = captured(model, fold, torch.ones(4, 3), fallback=fallback)
    ANSWERS[answer](recorded, losses)
    assert not recorded.unused
