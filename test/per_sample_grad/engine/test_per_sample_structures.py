"""A capture with a history says what one without a history says."""

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad import captured, flat, fold, rules_kept
from support.per_sample_grad.agreement import assert_same_grads
from support.per_sample_grad.models import WithParameter, put, turned
from support.xla_replica.replicas import HAS_XLA, of_torch_alone
from torch import nn

import per_sample_grad as psg


class Switched(nn.Module):
    """A module whose forward pass is another function when it is told so."""

    shape = 6, 4  # of samples

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 4, bias=False)
        self.drop = nn.Dropout(0.5)
        self.way: Callable[[Switched, torch.Tensor], torch.Tensor] = ordinary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.way(self, x)


def ordinary(
    m: Switched, x: torch.Tensor, dim: int = 1, layers: tuple = ("first", "second")
) -> torch.Tensor:
    first, second = map(m.get_submodule, layers)
    x = torch.tanh(first(x))
    x = x - x.mean(dim, keepdim=True)
    return m.last(m.drop(m.norm(second(x))))


def input_changed(m, x):
    x = torch.tanh(m.first(x)) * 1
    out = m.second(x)
    x += 1
    return m.last(m.norm(out)) + x


def made(place: str, make: Callable) -> Callable[[nn.Module], nn.Module]:
    """Returns a change that puts what is made of the model in a place of it."""
    return lambda model: put(model, place, make(model))


def to(way: Callable) -> Callable[[nn.Module], nn.Module]:
    return made("way", lambda _: way)


def out_mixed(module: nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
    return out - out.mean(0)


def computed_weight(model: Switched) -> None:
    weight = model.second.weight
    del model.second.weight
    model.second.original = weight
    model.second.weight = weight.sin()


def wrong_rule(model: Switched) -> None:
    right = psg.layers.linear.linear
    psg.register_rule(nn.Linear)(lambda call, grad: right(call, 2 * grad))


CHANGES = [
    to(lambda m, x: ordinary(m, x, dim=0)),  # as many operations, of the same names
    to(lambda m, x: ordinary(m, x, layers=("second", "first"))),
    to(lambda m, x: ordinary(m, x) + F.linear(x, m.first.weight)),
    to(lambda m, x: ordinary(m, ordinary(m, x))),
    to(lambda m, x: ordinary(m, x, layers=("first", "drop"))),
    to(input_changed), computed_weight, wrong_rule,
    made("last.weight", lambda m: m.second.weight),
    made("second", lambda m: nn.Linear(4, 4).double()),
    made("norm", lambda m: nn.BatchNorm1d(4).double()),
    made("second.bias_scale", lambda m: torch.ones(())),
    made("second.__class__", lambda m: type("Other", (nn.Linear,), {})),
    made("second.forward", lambda m: (
        lambda x, inner=m.second: F.linear(x, inner.weight.sin(), inner.bias))),
    lambda m: m.second.weight.requires_grad_(False),
    lambda m: m.second.register_forward_hook(out_mixed),
    lambda m: m.second.weight.register_hook(lambda grad: grad * 2),
    lambda m: m.eval(),
]  # fmt: skip


class Product(torch.autograd.Function):
    """A product, in a function that modes do not see."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        x, factor = ctx.saved_tensors
        return grad * factor, (grad * x).sum_to_size(factor.shape)


def hidden() -> nn.Module:
    """Returns a module that computes with its parameter where nothing sees it."""
    return WithParameter(lambda m, x: Product.apply(torch.sigmoid(x), m.p), 4)


class Used(nn.Module):
    """A module that uses parameters directly, as it is told."""

    shape = 6, 3, 4

    def __init__(self, way: Callable) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), hidden()
        self.own, self.other = (nn.Parameter(torch.rand(4)) for _ in range(2))
        self.table, self.sub = nn.Embedding(5, 4), hidden()
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


WAYS = {by_operations: "error", by_all: "loop"}


def around(function: Callable) -> Callable[[nn.Module], nn.Module]:
    """Returns a change that puts a function around what the module does."""
    return made("way", lambda m: functools.partial(function, m.way))


def added(function: Callable) -> Callable[[nn.Module], nn.Module]:
    """Returns a change that adds something to what the module does."""
    return around(lambda before, m, x, h: before(m, x, h) + function(m, x, h))


@around
def edited_before(before: Callable, m: Used, x: torch.Tensor, h: torch.Tensor):
    with torch.no_grad():
        m.own.mul_(1.5)
    return before(m, x, h)


@around
def edited_after(before: Callable, m: Used, x: torch.Tensor, h: torch.Tensor):
    found = before(m, x, h)
    with torch.no_grad():
        for param in (m.own, m.sub.p):
            param.mul_(1.5)
    return found


@around
def samples_instead_of_the_buffer(before: Callable, m: Used, x: torch.Tensor, h):
    """The graph and its shapes are the same: what is multiplied is not."""
    with mock.patch.dict(m._buffers, scale=x.detach().mean((0, 1))):
        return before(m, x, h)


def exchanged(model: Used) -> None:
    model.own, model.other = model.other, model.own


def moved(model: Used) -> None:
    """The parameter is another module's, and given to the one that had it."""
    model.drop.p, kept = model.sub.p, model.sub
    del kept.p
    kept.p = model.drop.p


CHANGES_OF_USES = [
    *map(to, (by_operations, by_the_model, by_all)),
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
    to(lambda m, x, h: h * (m.own * m.scale) + m.other),
    to(lambda m, x, h: h * (m.own * m.scale) - m.other),
    to(lambda m, x, h: h * m.own + m.other + m.table(torch.arange(3)[None])),
    to(lambda m, x, h: turned(m.own, h) + turned(m.other * m.scale, h)),
    added(lambda m, x, h: turned(h, m.own)),
    to(lambda m, x, h: m.sub(h.flip(0))),
    edited_before, edited_after, samples_instead_of_the_buffer,
    *(made("own", lambda m, shape=shape: nn.Parameter(torch.rand(shape).double()))
      for shape in ((1,), (3, 4), (6, 1, 4), (6, 3, 1), ())),
    exchanged, moved, around(lambda before, m, x, h: before(m, x, h.detach())),
    made("other", lambda m: m.own),
    lambda m: m.own.requires_grad_(False),
    lambda m: m.sub.register_forward_hook(out_mixed),
    added(lambda m, x, h: h * m.sub.p),
    lambda m: m.sub.eval(), lambda m: m.eval(),
]  # fmt: skip


ROWS = [(Switched, "error", change) for change in CHANGES]
for way, fallback in WAYS.items():
    make = functools.partial(Used, way)
    ROWS += [(make, fallback, change) for change in CHANGES_OF_USES]


def outcome(model: nn.Module, x: torch.Tensor, fallback: str = "error") -> tuple:
    """Returns per-sample gradients, beside those of training; or the error."""
    torch.manual_seed(5)
    model.zero_grad()
    try:
        recorded, losses = captured(model, fold, x, fallback=fallback)
        found = flat(recorded.backward(losses, accumulate="mean").materialize())
    except (psg.PerSampleError, ValueError, RuntimeError) as error:
        return type(error), str(error)
    return (found,)


@pytest.mark.parametrize("number", range(0, len(ROWS), 3 if HAS_XLA else 1))
@rules_kept()
def test_a_change_is_seen_as_in_a_model_without_a_history(number):
    make, fallback, change = ROWS[number]
    torch.manual_seed(number)
    model = make().double()
    x = torch.randn(model.shape, dtype=torch.float64)
    fresh = copy.deepcopy(model)
    for _ in range(3):
        assert isinstance(outcome(model, x, fallback)[0], torch.Tensor)
    for each in (model, fresh):
        torch.manual_seed(1)
        change(each)
    for _ in range(2):
        found, expected = outcome(model, x, fallback), outcome(fresh, x, fallback)
        if isinstance(expected[0], torch.Tensor):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
            assert_same_grads(model, fresh)
        else:
            assert found == expected


@of_torch_alone
@pytest.mark.parametrize("way", [None, *WAYS])
def test_neither_a_graph_nor_a_model_is_kept(way):
    model = Switched().double() if way is None else Used(way).double()
    x = torch.randn(model.shape, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        outcome(model, x, WAYS.get(way, "error"))
    batch, network = weakref.ref(x), weakref.ref(model)
    del x
    gc.collect()
    assert batch() is None
    del model
    gc.collect()
    assert network() is None


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
        (found,) = outcome(model, x)
        torch.testing.assert_close(outcome(copy.deepcopy(model), x), (found,))
        assert stops == (not found[:, :16].any())  # of the first weight


@pytest.mark.parametrize("layer", [nn.Embedding(9, 4), nn.EmbeddingBag(9, 4)])
@pytest.mark.parametrize("num_samples", [2, 4, 0])  # 4 is also the width
def test_losses_that_are_stacked_sample_by_sample_are_each_of_one(layer, num_samples):
    x = torch.arange(3 * num_samples).view(num_samples, 3) % 9
    with psg.capture(layer) as recorded:
        out = layer(x)
        losses = [sample.square().sum() for sample in out.unbind()]
        losses = torch.stack(losses) if losses else out.flatten()
    rows = recorded.backward(losses).materialize()["weight"]
    for row, sample in zip(rows, x):
        loss = layer(sample[None]).square().sum()
        [expected] = torch.autograd.grad(loss, layer.weight)
        torch.testing.assert_close(row, expected)
