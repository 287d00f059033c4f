"""What no rule accounts for is an error that says why, or exact by a fallback."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.per_sample_grad.agreement import agree
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
    Powered,
    Turned,
    turned,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import per_sample_grad as psg
from per_sample_grad.layers import registry

BY_NAME = {case.name: case for case in (*BY_OPERATIONS, *UNSEEN)}


@pytest.mark.parametrize("case", UNSEEN, ids=lambda case: case.name)
def test_what_no_rule_accounts_for_is_an_error_or_exact_by_a_fallback(case):
    model, inputs = case.make(torch.float64)
    expected = psg.CouplingError if "square" in case.name else psg.CoverageError
    with pytest.raises(expected):
        psg.per_sample_factors(model, case.loss, inputs)
    truth = oracle(case, model, inputs)
    call = (model, case.loss, inputs)
    for fallback in ("loop", "batched"):
        agree(psg.per_sample_factors(*call, fallback=fallback), truth, 1e-10)
        norms = psg.per_sample_grad_norms(*call, fallback=fallback)  # in a stream
        assert error(norms, flat(truth).norm(dim=1)) <= 1e-10


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
    order = ["register_rule", 'fallback="batched"', 'fallback="loop"']
    assert [text.index(way) for way in order] == sorted(map(text.index, order))


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
    agree(psg.per_sample_factors(model, fold, inputs, **options), truth, 1e-10)


class Remembering(nn.Module):
    """A module that keeps what it has seen in buffers and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.last = nn.Parameter(torch.ones(3)), None
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("first", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean, self.last = 0.9 * self.mean + x.detach().mean(0), x.detach()
        self.first = self.last if self.first is None else self.first
        self.calls += 1
        return turned(x, self.slope)


def test_a_module_that_runs_once_more_remembers_its_own_run_alone():
    model, x = nn.Sequential(Remembering()), torch.randn(4, 3)
    with psg.capture(model, fallback="batched") as recorded:
        losses = fold(model, x)
    kept = {**vars(model[0]), **model[0]._buffers}
    recorded.backward(losses)
    now = {**vars(model[0]), **model[0]._buffers}
    assert all(now[name] is value for name, value in kept.items())
    assert now.keys() == kept.keys()
    assert model[0].calls == 1


class VisionTransformer(nn.Module):
    """A class token, places and a slope are parameters; no rule knows the slope."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, 8, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, 5, 8))
        self.slope = nn.Parameter(torch.ones(8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        x = turned(1 + x.square(), self.slope)
        return self.head(self.block(x)[:, 0])


VISION = Case("vision-transformer", VisionTransformer, (2, 4, 4))


def flops_of(run, *args, **kwargs) -> int:
    with FlopCounterMode(display=False) as counter:
        run(*args, **kwargs)
    return counter.get_total_flops()


def test_a_batched_fallback_costs_in_proportion_to_the_batch():
    counts = []
    for batch in (4, 16):
        model, inputs = VISION.make(torch.float32, batch)
        call = (psg.per_sample_grad_norms, model, fold, inputs)
        psg.per_sample_grad_norms(model, fold, inputs, fallback="batched")
        training = flops_of(lambda m, x: fold(m, x).sum().backward(), model, *inputs)
        counts.append(flops_of(*call, fallback="batched"))
        assert counts[-1] < 3 * training
    assert counts[1] <= 4.01 * counts[0]


class Hidden(Turned):
    """A module that computes with its parameter where nothing sees it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Powered.apply(torch.sigmoid(self.inner(x)), self.angle)


class Noisy(Hidden):
    """A module that draws random numbers beside that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.dropout(x, 0.5, True))


def runs_of(model: nn.Module, x: torch.Tensor) -> list[type[nn.Module]]:
    """Returns the kinds of the modules that run, in order, by a batched fallback."""
    runs: list[type[nn.Module]] = []
    for module in model.modules():
        if module is not model:
            module.register_forward_hook(lambda module, *_: runs.append(type(module)))
    psg.per_sample_grad_norms(model, fold, (x,), fallback="batched")
    first, runs[:] = runs.copy(), []
    psg.per_sample_grad_norms(model, fold, (x,), fallback="batched")
    assert runs == first
    return runs


def test_modules_that_run_once_more_are_as_small_as_they_can_be():
    """Only the small one runs again, and not the model around it."""
    model = nn.Sequential(nn.Linear(3, 64), nn.Linear(64, 3), Hidden(), nn.Linear(4, 8))
    once = [nn.Linear, nn.Linear, nn.Linear, Hidden, nn.Linear]
    assert runs_of(model, torch.randn(5, 3)) == [*once, nn.Linear, Hidden]


def exponents(function: Callable, *shape: int) -> Callable[[], nn.Module]:
    """Returns what makes a model that uses a parameter of its own directly."""
    return lambda: WithParameter(
        lambda m, x: m.b(function(m, torch.sigmoid(m.a(x)), m.p)), *shape,
        a=nn.Linear(3, 4), b=nn.Linear(4, 4),
    )  # fmt: skip


def in_place(m: nn.Module, x: torch.Tensor, own: nn.Parameter) -> torch.Tensor:
    """What is computed from the parameter alone comes to depend on samples."""
    table = torch.stack([own] * len(x))
    table.mul_(x)
    return x.clone().mul_(1 + table).exp()


FUNCTIONS = [
    Case("turned", exponents(lambda m, x, p: turned(x, p), 4), (3,)),
    Case("distances-of-places", exponents(
        lambda m, x, p: torch.cdist(x, p.softmax(0)[None]), 4, 4), (5, 3)),
    Case("time-first", exponents(
        lambda m, x, p: turned(x.transpose(0, 1), p).transpose(0, 1), 4), (5, 3),
        {"batch_dim": {"": 1, "a": 0, "b": 0}}),
    # In place, so that what a parameter makes comes to depend on samples.
    Case("in-place", exponents(in_place, 4), (3,)),
    Case("folded", exponents(
        lambda m, x, p: turned(x.flatten(0, 1), p).unflatten(0, (len(x), -1)), 4),
        (5, 3)),
]  # fmt: skip


def twice(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return m.b(m.a(m.a(x[:, :3])[:, :3])) + turned(x.square().mean(1, True), m.c.angle)


ENCLOSED = [
    VISION,
    Case("called-twice", lambda: Apply(
        twice, a=Turned(), b=nn.Linear(4, 4), c=Turned()), (3,)),
    Case("time-first", lambda: Apply(
        lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1), a=Turned()), (5, 3),
        {"batch_dim": 1}),
    Case("folded", lambda: Apply(
        lambda m, x: m.a(x.flatten(0, 1)).unflatten(0, (len(x), -1)), a=Turned()),
        (4, 3)),
    Case("mask-beside", lambda: Apply(
        lambda m, x: m.a(x, torch.ones(6, 6).triu().to(x)),
        a=Apply(lambda m, x, mask: m.b(mask @ x), b=Turned())), (6, 3)),
    Case("several-outputs", lambda: Apply(
        lambda m, x: sum(m.a(x).values()),
        a=Apply(lambda m, x: {"y": m.b(x), "z": m.b(2 * x)}, b=Turned())), (3,)),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:fallback=")  # a model need not be batch first
@pytest.mark.parametrize("batch", [1, 3, 4, 6])
@pytest.mark.parametrize("case", [*FUNCTIONS, *ENCLOSED], ids=lambda case: case.name)
def test_modules_or_the_model_are_run_once_more(case, batch):
    """Whatever they take and return."""
    model, inputs = case.make(torch.float64, batch)
    truth = oracle(case, model, inputs)
    if case in FUNCTIONS and case.name != "in-place":
        with pytest.raises(psg.CoverageError, match="p: "):
            psg.per_sample_factors(model, fold, inputs, **case.options)
    options = {"fallback": "batched", **case.options}
    for _ in range(2):
        agree(psg.per_sample_factors(model, fold, inputs, **options), truth, 1e-10)


def test_modules_are_run_once_more_under_the_autocast_of_their_calls():
    model, inputs = VISION.make(torch.float32)
    truth = flat(oracle(VISION, model, inputs))
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    with psg.capture(model, fallback="batched") as recorded, autocast:
        losses = fold(model, *inputs)
    assert error(recorded.backward(losses).norms(), truth.norm(dim=1)) <= 2e-2


def test_what_cannot_be_run_once_more_is_told_and_still_exact():
    """Another dropout mask would be another model."""
    model, x = Noisy(), torch.randn(4, 3)
    found = {}
    for fallback in ("loop", "batched"):
        torch.manual_seed(1)
        with psg.capture(model, ["angle"], fallback=fallback) as recorded:
            losses = fold(model, x)
        if fallback == "batched":
            with pytest.warns(UserWarning, match="grows with the square of the batch"):
                found[fallback] = recorded.backward(losses).norms()
        else:
            found[fallback] = recorded.backward(losses).norms()
    torch.testing.assert_close(found["batched"], found["loop"])
