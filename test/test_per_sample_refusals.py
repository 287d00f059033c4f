"""Where an answer would be wrong there is an error, and nothing is left behind."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from support.per_sample import Case, error, flat, fold, oracle, rules_kept
from support.per_sample_cases import CASES, Apply
from support.replicas import HAS_XLA
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import per_sample_grad as psg

# torch_xla 2.9 replaces nn.GRU by one that needs an XLA device, wherever it computes.
NO_GRU = pytest.mark.skipif(HAS_XLA, reason="torch_xla replaces nn.GRU")

HALF = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
STACKED = Case("stacked", lambda: nn.Sequential(
    nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), (5, 6))  # fmt: skip


class Raw(nn.Module):
    """A parameter that no module owns the use of, beside a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(4))
        self.inner = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * self.token


class Positions(nn.Module):
    """Position ids without a batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.tanh(x + self.embed(torch.arange(x.shape[1]))))


def functional(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One use by the module, one of its weight."""
    return nn.functional.linear(torch.tanh(m.inner(x)), m.inner.weight)


def weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2)))


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    prune.random_unstructured(model[0], "weight", 0.5)
    return model


def weight_as_input() -> nn.Module:
    return Apply(
        lambda m, x: m.inner(x) @ m.inner(m.outer.weight).T,
        inner=nn.Linear(3, 4),
        outer=nn.Linear(3, 2, bias=False),
    )


def patched() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2))
    double = types.MethodType(lambda m, x: 2 * nn.Linear.forward(m, x), model[0])
    model[0].forward = double
    return model


UNSEEN = [
    Case("raw-parameter", Raw, (3,)),
    Case("functional-use", lambda: Apply(functional, inner=nn.Linear(3, 3)), (3,)),
    Case("positions", Positions, (5, 3)),
    Case("positions-square", Positions, (3, 3)),
    Case("weight-norm", weight_norm, (3,)),
    Case("pruned", pruned, (3,)),
    Case("weight-as-input", weight_as_input, (3,)),
    Case("patched-forward", patched, (3,)),
    Case("lstm", lambda: Apply(
        lambda m, x: m.inner(x)[0], inner=nn.LSTM(3, 2, batch_first=True)), (4, 3)),
    Case("gru", lambda: Apply(
        lambda m, x: m.inner(x)[0], inner=nn.GRU(3, 2, batch_first=True)), (4, 3)),
    Case("unbatched-conv", lambda: Apply(
        lambda m, x: torch.stack([m.inner(item) for item in x]),
        inner=nn.Conv1d(3, 3, 1)), (3, 4)),
]  # fmt: skip
BY_NAME = {case.name: case for case in UNSEEN}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=NO_GRU if case.name == "gru" else ())
        for case in UNSEEN
    ],
)
def test_what_no_rule_accounts_for_is_an_error(case):
    model, inputs = case.make(torch.float64)
    with psg.capture(model) as recorded:
        losses = case.loss(model, *inputs)
    expected = psg.CouplingError if "square" in case.name else psg.CoverageError
    with pytest.raises(expected):
        recorded.backward(losses)


@pytest.mark.parametrize("fallback", ["loop", "batched"])
@pytest.mark.parametrize(
    "case",
    [c for c in UNSEEN if c.name not in ("pruned", "lstm", "gru")],
    ids=lambda case: case.name,
)
def test_and_exact_by_a_fallback(case, fallback):
    model, inputs = case.make(torch.float64)
    truth = oracle(case, model, inputs)
    with psg.capture(model, fallback=fallback) as recorded:
        losses = case.loss(model, *inputs)
    factors = recorded.backward(losses)
    for name, values in factors.materialize().items():
        assert error(values, truth[name]) <= 1e-10
    grads = flat(truth)
    assert error(factors.gram(), grads @ grads.T) <= 1e-10
    assert error(factors.norms(), grads.norm(dim=1)) <= 1e-10


@pytest.mark.parametrize("rows", [3, 6])
def test_a_wrong_rule_is_replaced_by_the_fallback_and_remembered(rows, monkeypatch):
    """Positions, as many as samples or a multiple, look like rows of samples."""
    model, inputs = BY_NAME["positions-square"].make(torch.float64)
    model.embed, inputs = nn.Embedding(rows, 3).double(), (torch.randn(3, rows, 3),)
    inputs = (inputs[0].double(),)
    truth = oracle(Case("", Positions, ()), model, inputs)
    for repeated in (False, True):
        if repeated:  # and it costs no comparison
            monkeypatch.setattr(psg.comparison.Comparer, "expect", None)
        with psg.capture(model, fallback="loop") as recorded:
            losses = fold(model, *inputs)
        for name, values in recorded.backward(losses).materialize().items():
            assert error(values, truth[name]) <= 1e-10
    monkeypatch.undo()
    with psg.capture(model) as recorded:
        losses = fold(model, *inputs)
    with pytest.raises(psg.CouplingError, match=r"embed\.weight: off by"):
        recorded.backward(losses)
    report = psg.coverage(model, fold, inputs)
    assert not report.parameters["embed.weight"].correct


def test_a_fallback_in_a_stream():
    case = BY_NAME["raw-parameter"]
    model, inputs = case.make(torch.float64)
    truth = oracle(case, model, inputs)
    norms = psg.per_sample_grad_norms(model, fold, inputs, fallback="loop")
    assert error(norms, flat(truth).norm(dim=1)) <= 1e-10


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lstm", "no rule is registered for LSTM"),
        pytest.param("gru", "no rule is registered for GRU", marks=NO_GRU),
        ("raw-parameter", "no rule is registered for Raw"),
        ("patched-forward", "the forward method of this Linear was replaced"),
        ("pruned", "the weight of this Linear is no parameter, but a tensor"),
        ("functional-use", "Linear 'inner' has a rule, but this use is not its own"),
        ("weight-norm", "no rule is registered for"),
        ("subclass", "for Doubling, and as a Linear it may compute something else"),
    ],
)
def test_errors_say_why_there_is_no_rule(name, reason):
    subclass = Case("subclass", lambda: nn.Sequential(Doubling(3, 2)), (3,))
    model, inputs = {**BY_NAME, "subclass": subclass}[name].make(torch.float32)
    with psg.capture(model) as recorded:
        losses = fold(model, *inputs)
    with pytest.raises(psg.CoverageError, match=reason):
        recorded.backward(losses)


def test_gradient_hooks_on_parameters_are_refused():
    """They change the sum's gradient, by who knows what for each sample."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with psg.capture(model) as recorded:
        losses = model(x).square().sum(1)
        handle = model.weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(psg.PerSampleError, match="weight have gradient hooks"):
        recorded.backward(losses)
    with pytest.raises(psg.PerSampleError, match="weight have gradient hooks"):
        psg.capture(model)
    psg.capture(model, ["bias"])
    handle.remove()
    # Those that see `.grad` do not run: it does not change.
    ran = []
    model.weight.register_post_accumulate_grad_hook(ran.append)
    with psg.capture(model) as recorded:
        losses = model(x).square().sum(1)
    recorded.backward(losses)
    assert not ran


@pytest.mark.parametrize("name", ["lstm", pytest.param("gru", marks=NO_GRU)])
def test_a_recurrent_network_by_a_loop(name):
    case = BY_NAME[name]
    model, inputs = case.make(torch.float64)
    truth = oracle(case, model, inputs)
    norms = psg.per_sample_grad_norms(model, fold, inputs, fallback="loop")
    assert error(norms, flat(truth).norm(dim=1)) <= 1e-10


def time_first() -> nn.Module:
    return Apply(
        lambda m, x: m.inner(x.transpose(0, 1)).transpose(0, 1), inner=nn.Linear(3, 4)
    )


def mixing() -> nn.Module:
    """Every sample sees the batch's mean."""
    return Apply(
        lambda m, x: m.b(m.a(x) - m.a(x).mean(0, keepdim=True)),
        a=nn.Linear(3, 4),
        b=nn.Linear(4, 2),
    )


class Doubling(nn.Linear):
    """Registered with a rule that is wrong."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(2 * x)


COUPLED = [
    Case("time-first-square", time_first, (3, 3)),
    Case("batch-mean", mixing, (3,)),
    Case("wrong-rule", lambda: nn.Sequential(Doubling(3, 2)), (3,)),
    Case("swapped-fold", lambda: Apply(
        lambda m, x: m.inner(x.transpose(0, 1).flatten(0, 1))
        .unflatten(0, (-1, len(x))).transpose(0, 1), inner=nn.Linear(3, 2)), (4, 3)),
]  # fmt: skip


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


def test_reentrant_checkpoints_hide_parameters():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    with psg.capture(model) as recorded:
        hidden = model[0](torch.randn(3, 3))
        losses = checkpoint(model[1], hidden, use_reentrant=True).sum(1)
    with pytest.raises(psg.CoverageError, match="use_reentrant=False"):
        recorded.backward(losses)


def test_checkpoints_that_are_not_reentrant_are_exact():
    case = Case(
        "checkpointed",
        lambda: Apply(
            lambda m, x: checkpoint(m.b, torch.tanh(m.a(x)), use_reentrant=False),
            a=nn.Linear(3, 4),
            b=nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
        ),
        (3,),
    )
    model, inputs = case.make(torch.float64)
    truth = oracle(case, model, inputs)
    with psg.capture(model) as recorded:
        losses = case.loss(model, *inputs)
    found = recorded.backward(losses).materialize()
    assert all(error(found[name], truth[name]) <= 1e-10 for name in truth)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own
@pytest.mark.parametrize("compiled_before", [False, True])
def test_compiled_models_are_exact_or_an_error(compiled_before):
    """A compiled function that ran before a capture has no hooks in it."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    inputs = (torch.randn(5, 3),)
    truth = psg.per_sample_grad_norms(model, fold, inputs)
    compiled = torch.compile(model, backend="aot_eager")
    if compiled_before:
        compiled(*inputs)
        with pytest.raises(psg.CoverageError, match="this use is not its own call"):
            psg.per_sample_grad_norms(compiled, fold, inputs)
    else:
        for _ in range(2):
            found = psg.per_sample_grad_norms(compiled, fold, inputs)
            torch.testing.assert_close(found, truth)
    torch.compiler.reset()


class Traced(torch.Tensor):
    """As tracers hand tensors to modules."""


def test_what_is_traced_or_transformed_is_refused():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with (
        pytest.raises(psg.CoverageError, match="a Traced: hooks cannot record"),
        psg.capture(model),
    ):
        model(x.as_subclass(Traced))
    with psg.capture(model) as recorded:
        losses = torch.func.vmap(model)(x).sum(1)
    with pytest.raises(psg.CoverageError, match="this use is not its own call"):
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


def test_hooks_leave_no_trace():
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(inplace=True), nn.Linear(3, 2))
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    model[2].weight.grad = torch.ones_like(model[2].weight)
    with psg.capture(model) as recorded:
        losses = fold(model, torch.randn(4, 2, 4))
    recorded.backward(losses)
    with pytest.raises(RuntimeError, match="weight"), psg.capture(model):
        model(torch.randn(4, 9, 4))  # fails in the middle of the block
    with psg.capture(model) as recorded:
        losses = fold(model, torch.randn(4, 2, 4))
    with pytest.raises(ZeroDivisionError):  # and in the middle of the backward pass
        recorded.stream(losses, lambda factors: 1 / 0)
    assert list(model.state_dict()) == keys
    for name, module in model.named_modules():
        assert set(vars(module)) == before[name]
        for value in vars(module).values():
            if isinstance(value, dict):
                assert not any(
                    callable(item) and not isinstance(item, nn.Module)
                    for item in value.values()
                )
        assert not module._forward_hooks
        assert not module._forward_hooks_with_kwargs
    assert model[0].weight.grad is None
    assert torch.equal(model[2].weight.grad, torch.ones_like(model[2].weight))
    assert all(not param._backward_hooks for param in model.parameters())


def test_other_hooks_change_outputs_after_ours():
    case = Case("hooked", lambda: nn.Sequential(nn.Linear(3, 2)), (3,))
    model, inputs = case.make(torch.float64)
    model[0].register_forward_hook(lambda module, args, out: 3 * out)
    truth = oracle(case, model, inputs)
    with psg.capture(model) as recorded:
        losses = case.loss(model, *inputs)
    found = recorded.backward(losses).materialize()
    assert all(error(found[name], truth[name]) <= 1e-10 for name in truth)


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


@pytest.mark.parametrize("option", ["fallback", "check", "method"])
def test_options_are_checked(option):
    with pytest.raises(ValueError, match=f"{option}='no'; allowed are"):
        psg.capture(nn.Linear(2, 2), **{option: "no"})


def test_autocast():
    case = Case(
        "autocast",
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        ),
        (6,),
    )
    model, inputs = case.make(torch.float32)
    truth = flat(oracle(case, model, inputs))
    for _ in range(2):  # checked, and not
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with psg.capture(model) as recorded:
                losses = case.loss(model, *inputs)
            factors = recorded.backward(losses)
            assert error(factors.norms(), truth.norm(dim=1)) <= 2e-2
        assert error(factors.gram(), truth @ truth.T) <= 4e-2


@pytest.mark.parametrize("size", [1e-7, 1e-5])
def test_float16_that_underflows_is_told_and_can_be_scaled(size):
    """Losses in float32, activations in float16, whose least number is 6e-8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).half()
    x = torch.randn(4, 16).half()

    def losses_of(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return size * m(x).float().square().sum(1)

    wide = copy.deepcopy(model).float()
    truth = psg.per_sample_grad_norms(wide, losses_of, (x.float(),)).double()
    if size < 1e-6:
        with pytest.raises(psg.PerSampleError, match=r"are lost: .*scale="):
            psg.per_sample_grad_norms(model, losses_of, (x,))
    else:
        with pytest.warns(UserWarning, match=r"digits are lost.*scale="):
            psg.per_sample_grad_norms(model, losses_of, (x,))
    for _ in range(2):
        found = psg.per_sample_grad_norms(model, losses_of, (x,), scale=2.0**20)
        assert error(found, truth) <= 5e-3
    with pytest.raises(ValueError, match="power of 2"):
        psg.capture(model, scale=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*CASES, STACKED], ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
def test_every_layer_in_half_precision(case, dtype):
    """Answers of the same model in float64, as far as the dtype reaches."""
    model, inputs = case.make(dtype)
    truth = oracle(case, model, inputs)
    with psg.capture(model, **case.options) as recorded:
        losses = case.loss(model, *inputs)
    factors = recorded.backward(losses)
    grads, tolerance = flat(truth), HALF[dtype]
    assert error(flat(factors.materialize()), grads) <= tolerance
    assert error(factors.norms(), grads.norm(dim=1)) <= tolerance
    assert error(factors.gram(), grads @ grads.T) <= 2 * tolerance
    assert factors.norms().dtype == torch.float32
