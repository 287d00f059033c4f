"""A capture with a history says what one without a history says."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad.gradient_oracle import fold, rules_kept
from torch import nn

import per_sample_grad as psg


class Switched(nn.Module):
    """A module whose forward pass is another function when it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 4, bias=False)
        self.drop = nn.Dropout(0.5)
        self.way: Callable[[Switched, torch.Tensor], torch.Tensor] = ordinary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self, x)


def ordinary(m: Switched, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(m.first(x))
    x = x - x.mean(1, keepdim=True)
    return m.last(m.drop(m.norm(m.second(x))))


def samples_coupled(m, x):
    x = torch.tanh(m.first(x))
    x = x - x.mean(0, keepdim=True)  # as many operations, of the same names
    return m.last(m.drop(m.norm(m.second(x))))


def other_order(m, x):
    x = torch.tanh(m.second(x))
    x = x - x.mean(1, keepdim=True)
    return m.last(m.drop(m.norm(m.first(x))))


def used_outside(m, x):
    return ordinary(m, x) + F.linear(x, m.first.weight)


def used_outside_instead(m, x):
    x = torch.tanh(m.first(x))
    x = x - x.mean(1, keepdim=True)
    return F.linear(m.drop(m.norm(m.second(x))), m.last.weight.sin())


def one_left_out(m, x):
    x = torch.tanh(m.first(x))
    x = x - x.mean(1, keepdim=True)
    return m.last(m.drop(m.norm(x)))


def called_in_vain(m, x):
    m.second(x)
    return one_left_out(m, x)


def called_twice(m, x):
    return ordinary(m, ordinary(m, x))


def without_gradients(m, x):
    with torch.no_grad():
        shifted = m.second(x)
    return one_left_out(m, x) + shifted


def by_indices(m, x):
    x = torch.tanh(m.first(x))
    x = x - x.mean(1, keepdim=True)
    order = torch.arange(len(x)).flip(0)
    return m.last(m.drop(m.norm(m.second(x))))[order]


def input_changed(m, x):
    x = torch.tanh(m.first(x)) * 1
    out = m.second(x)
    x += 1
    return m.last(m.norm(out)) + x


def output_changed(m, x):
    x = m.first(x)
    x.tanh_()
    x = x - x.mean(1, keepdim=True)
    return m.last(m.drop(m.norm(m.second(x))))


def mixed_in_the_end(m, x):
    out = ordinary(m, x)
    return out + out.sum(0, keepdim=True)


def to(way: Callable) -> Callable[[Switched], None]:
    return lambda model: setattr(model, "way", way)


def tied(model: Switched) -> None:
    model.last.weight = model.second.weight


def replaced(model: Switched) -> None:
    model.second = nn.Linear(4, 4).double()


def another_class(model: Switched) -> None:
    model.second = nn.Bilinear(4, 4, 4).double()
    model.way = lambda m, x: m.last(m.norm(m.second(m.first(x), x)))


def new_parameter(model: Switched) -> None:
    model.extra = nn.Parameter(torch.ones(4).double())
    model.way = lambda m, x: ordinary(m, x) * m.extra


def computed_weight(model: Switched) -> None:
    weight = model.second.weight
    del model.second.weight
    model.second.original = weight
    model.second.weight = weight.sin()


def frozen(model: Switched) -> None:
    model.second.weight.requires_grad_(False)


def parametrized(model: Switched) -> None:
    nn.utils.parametrizations.weight_norm(model.second)


def forward_replaced(model: Switched) -> None:
    second = model.second
    second.forward = lambda x: F.linear(x, second.weight.sin(), second.bias)


def hooked(model: Switched) -> None:
    model.second.register_forward_hook(lambda module, args, out: out - out.mean(0))


def tensor_hooked(model: Switched) -> None:
    model.second.weight.register_hook(lambda grad: grad * 2)


def wrong_rule(model: Switched) -> None:
    @psg.register_rule(nn.Linear)
    def wrong(call, grad):
        left = 2 * grad[:, None, None]
        found = {"weight": psg.Outer(left, call.input[:, None, None])}
        return found | {"bias": psg.Dense(grad)}


def evaluated(model: Switched) -> None:
    model.eval()


def with_batch_norm(model: Switched) -> None:
    model.norm = nn.BatchNorm1d(4).double()


def tensor_as_attribute(model: Switched) -> None:
    model.second.bias_scale = torch.ones(())


def compiled(model: Switched) -> None:
    model.second = Compiled(model.second)
    model.second.compile(backend="eager")


class Compiled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def of_a_subclass(model: Switched) -> None:
    model.second.__class__ = type("Other", (nn.Linear,), {})


def renamed(model: Switched) -> None:
    model.third = model._modules.pop("first")
    model.way = lambda m, x: m.last(m.norm(m.second(torch.tanh(m.third(x)))))


CHANGES = [
    to(samples_coupled), to(other_order), to(used_outside), to(used_outside_instead),
    to(one_left_out), to(called_in_vain), to(called_twice), to(without_gradients),
    to(by_indices), to(input_changed), to(output_changed), to(mixed_in_the_end),
    tied, replaced, another_class, new_parameter, computed_weight, frozen,
    parametrized, forward_replaced, hooked, tensor_hooked, wrong_rule, evaluated,
    with_batch_norm, tensor_as_attribute, compiled, of_a_subclass, renamed,
]  # fmt: skip


def outcome(model: nn.Module, x: torch.Tensor) -> tuple:
    """Returns per-sample gradients and those of training; or the error."""
    torch.manual_seed(5)
    model.zero_grad()
    try:
        with psg.capture(model) as recorded:
            losses = fold(model, x)
        rows = recorded.backward(losses, accumulate="mean").materialize()
        found = torch.cat([each.flatten(1) for each in rows.values()], 1)
    except (psg.PerSampleError, ValueError, RuntimeError) as error:
        return type(error), str(error)
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return found, grads


@pytest.mark.parametrize("number", range(len(CHANGES)))
@rules_kept()
def test_a_change_is_seen_as_in_a_model_without_a_history(number):
    torch.manual_seed(number)
    model = Switched().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    fresh = copy.deepcopy(model)
    for _ in range(3):
        assert isinstance(outcome(model, x)[0], torch.Tensor)
    for each in (model, fresh):
        torch.manual_seed(1)
        CHANGES[number](each)
    for _ in range(2):
        found, expected = outcome(model, x), outcome(fresh, x)
        assert type(found[0]) is type(expected[0])
        if isinstance(expected[0], type):
            assert found == expected
            continue
        assert torch.allclose(found[0], expected[0], rtol=1e-9, atol=1e-12)
        for one, other in zip(found[1], expected[1], strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


def test_of_the_changes_many_are_refused_and_many_are_not():
    refused, x = 0, torch.randn(6, 4, dtype=torch.float64)
    for change in CHANGES:
        with rules_kept():
            model = Switched().double()
            change(model)
            refused += isinstance(outcome(model, x)[0], type)
    assert 8 <= refused <= len(CHANGES) - 8


def test_neither_a_graph_nor_a_model_is_kept():
    model = Switched().double()
    node = None
    for _ in range(3):
        x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
        outcome(model, x)
        node = weakref.ref(x)
    del x
    gc.collect()
    assert node() is None
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
