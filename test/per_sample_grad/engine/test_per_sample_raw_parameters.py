"""A change of what is done with raw parameters is seen as by a fresh model."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from support.per_sample_grad.gradient_oracle import error, fold, rules_kept
from support.per_sample_grad.refused_models import Powered, turned
from torch import nn

import per_sample_grad as psg


class Hidden(nn.Module):
    """A module that computes with its parameter where nothing sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.exponent = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Powered.apply(torch.sigmoid(x), self.exponent)


class Used(nn.Module):
    """A module that uses parameters directly, as it is told."""

    def __init__(self, way: Callable) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), Hidden()
        self.own, self.other = (nn.Parameter(torch.rand(4)) for _ in range(2))
        self.table, self.sub = nn.Embedding(5, 4), Hidden()
        self.register_buffer("scale", torch.rand(4))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.way(self, x, torch.sigmoid(self.first(x))))


def by_operations(m: Used, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return h * (m.own * m.scale) + m.other + m.table(torch.arange(3)[None])


def by_the_model(m: Used, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return turned(h, m.own) + turned(m.other * m.scale, h)


def by_all(m: Used, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return m.sub(by_the_model(m, x, h)) * m.other


WAYS = {
    by_operations: "error",
    by_the_model: "batched",
    by_all: "batched",
}


def to(way: Callable) -> Callable[[Used], None]:
    """Returns a change of what the module does."""
    return lambda model: setattr(model, "way", way)


def around(function: Callable) -> Callable[[Used], None]:
    """Returns a change that puts a function around what the module does."""

    def change(model: Used) -> None:
        before = model.way
        model.way = lambda m, x, h: function(before, m, x, h)

    return change


def added(function: Callable) -> Callable[[Used], None]:
    """Returns a change that adds something to what the module does."""
    return around(lambda before, m, x, h: before(m, x, h) + function(m, x, h))


def within_no_grad(m: Used, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return h**m.own + h * m.other


@around
def edited_before(before: Callable, m: Used, x: torch.Tensor, h: torch.Tensor):
    with torch.no_grad():
        m.own.mul_(1.5)
    return before(m, x, h)


@around
def edited_after(before: Callable, m: Used, x: torch.Tensor, h: torch.Tensor):
    found = before(m, x, h)
    with torch.no_grad():
        for param in (m.own, m.sub.exponent):
            param.mul_(1.5)
    return found


@around
def activations_edited(before: Callable, m: Used, x: torch.Tensor, h: torch.Tensor):
    found = before(m, x, h)
    h.mul_(2)
    return found


@around
def samples_instead_of_the_buffer(
    before: Callable, m: Used, x: torch.Tensor, h: torch.Tensor
):
    """The graph and its shapes are the same: what is multiplied is not."""
    kept, m.scale = m.scale, x.detach().mean((0, 1))
    try:
        return before(m, x, h)
    finally:
        m.scale = kept


def shaped(*shape: int) -> Callable[[Used], None]:
    def change(model: Used) -> None:
        model.own = nn.Parameter(torch.rand(shape).double())

    return change


def exchanged(model: Used) -> None:
    model.own, model.other = model.other, model.own


def tied(model: Used) -> None:
    model.other = model.own


def frozen(model: Used) -> None:
    model.own.requires_grad_(False)


def two_outputs(model: Used) -> None:
    inner = model.sub
    model.sub = TwoOutputs()
    model.sub.exponent = inner.exponent


class TwoOutputs(Hidden):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + super().forward(x + 1)


def moved(model: Used) -> None:
    """The parameter is another module's, and given to the one that had it."""
    model.drop.exponent, kept = model.sub.exponent, model.sub
    del kept.exponent
    kept.exponent = model.drop.exponent


def hooked(model: Used) -> None:
    model.sub.register_forward_hook(lambda module, args, out: out - out.mean(0))


@around
def cut(before: Callable, m: Used, x: torch.Tensor, h: torch.Tensor):
    return before(m, x, h.detach())


def outside_its_module(model: Used) -> None:
    added(lambda m, x, h: h**m.sub.exponent)(model)


CHANGES = [
    *(to(way) for way in WAYS),
    added(lambda m, x, h: h * m.own),
    added(lambda m, x, h: h**m.own),
    added(lambda m, x, h: h * m.own.detach()),
    added(lambda m, x, h: m.own * h.mean(0, keepdim=True)),
    added(lambda m, x, h: (m.own * h).mean(0, keepdim=True)),
    added(lambda m, x, h: h.clamp(max=m.own)),
    added(lambda m, x, h: m.own.expand_as(h)),
    added(lambda m, x, h: m.sub(h)),
    added(lambda m, x, h: h @ torch.outer(m.own, m.other)),
    added(lambda m, x, h: (h**m.own).detach()),
    added(within_no_grad),
    to(lambda m, x, h: h * (m.own * m.scale) + m.other),
    to(lambda m, x, h: h * (m.own * m.scale) - m.other),
    to(lambda m, x, h: h * m.own + m.other + m.table(torch.arange(3)[None])),
    to(lambda m, x, h: m.own**h + torch.atan2(m.other * m.scale, h)),
    to(lambda m, x, h: h**m.other + torch.atan2(m.own * m.scale, h)),
    to(lambda m, x, h: h**m.own + torch.atan2(h, m.other * m.scale)),
    to(lambda m, x, h: h**m.own + torch.hypot(m.other * m.scale, h)),
    to(lambda m, x, h: turned(m.own, h) + turned(m.other * m.scale, h)),
    to(lambda m, x, h: turned(h, m.own) + turned(h, m.other * m.scale)),
    added(lambda m, x, h: turned(h, m.own)),
    to(lambda m, x, h: m.sub(h.flip(0))),
    edited_before, edited_after, activations_edited, samples_instead_of_the_buffer,
    shaped(1), shaped(3, 4), shaped(6, 1, 4), shaped(6, 3, 1), shaped(), exchanged,
    tied, frozen, two_outputs, moved, hooked, cut, outside_its_module,
    lambda model: model.sub.eval(), lambda model: model.eval(),
]  # fmt: skip


def made(way: Callable) -> tuple[Used, torch.Tensor]:
    torch.manual_seed(0)
    return Used(way).double(), torch.randn(6, 3, 4, dtype=torch.float64)


def outcome(model: nn.Module, x: torch.Tensor, fallback: str) -> tuple:
    """Returns gradients by name; or the error."""
    try:
        with psg.capture(model, fallback=fallback) as recorded:
            losses = fold(model, x)
        found = recorded.backward(losses).materialize()
    except (psg.PerSampleError, ValueError, RuntimeError) as raised:
        return type(raised), str(raised)
    return (found,)


@pytest.mark.parametrize("number", range(len(CHANGES)))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.filterwarnings("ignore:fallback")
def test_a_change_is_seen_as_in_a_model_without_a_history(way, number):
    fallback = WAYS[way]
    model, x = made(way)
    fresh = copy.deepcopy(model)
    for _ in range(2):
        assert isinstance(outcome(model, x, fallback)[0], dict)
    for each in (model, fresh):
        torch.manual_seed(1)
        CHANGES[number](each)
    for _ in range(2):
        found, expected = outcome(model, x, fallback), outcome(fresh, x, fallback)
        if isinstance(expected[0], type):
            assert found == expected
            continue
        assert isinstance(found[0], dict), found
        assert found[0].keys() == expected[0].keys()
        for name, values in expected[0].items():
            assert error(found[0][name], values) <= 1e-10


def test_of_the_changes_many_are_refused_and_many_are_not():
    refused = 0
    for change in CHANGES:
        model, x = made(by_operations)
        change(model)
        refused += isinstance(outcome(model, x, "error")[0], type)
    assert 10 <= refused <= len(CHANGES) - 10


@rules_kept()
def test_insides_of_a_call_may_stop_gradients():
    class Cut(nn.Linear):
        stops = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.detach() if self.stops else x)

    psg.register_rule(Cut, like=nn.Linear)
    model = nn.Sequential(nn.Linear(4, 4), Cut(4, 4), nn.Linear(4, 4)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    for stops in (False, False, True, False, True):
        model[1].stops = stops
        expected = outcome(copy.deepcopy(model), x, "error")[0]
        [found] = outcome(model, x, "error")
        for name, values in expected.items():
            assert torch.allclose(found[name], values, rtol=1e-10, atol=0)
        assert stops == (not found["0.weight"].any())


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_neither_a_graph_nor_a_model_is_kept(way):
    model, x = made(way)
    for _ in range(3):
        outcome(model, x, WAYS[way])
    gone, other = weakref.ref(x), weakref.ref(model)
    del x
    gc.collect()
    assert gone() is None
    del model
    gc.collect()
    assert other() is None
