"""Captures are exact or an error beside hooks, checkpoints, compilers and tracers."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from support.per_sample_grad.gradient_oracle import captured, fold, loop, norms_of
from support.per_sample_grad.layer_cases import Apply
from torch import nn
from torch.utils.checkpoint import checkpoint

import per_sample_grad as psg
from per_sample_grad.engine import graph


def test_gradient_hooks_on_parameters_are_refused():
    """They change the summed gradient; what that means for a sample is unknown."""
    model, ran = nn.Linear(3, 2), []
    # Hooks that see `.grad` do not run, because it does not change.
    model.weight.register_post_accumulate_grad_hook(ran.append)
    recorded, losses = captured(model, fold, torch.randn(4, 3))
    recorded.backward(losses, retain_graph=True)
    assert not ran
    recorded, losses = captured(model, fold, torch.randn(4, 3))
    model.weight.register_hook(lambda grad: 2 * grad)
    for refused in (lambda: recorded.backward(losses), lambda: psg.capture(model)):
        with pytest.raises(psg.PerSampleError, match="weight have gradient hooks"):
            refused()
    psg.capture(model, ["bias"])


def test_reentrant_checkpoints_hide_parameters():
    parts = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 4)}
    model = Apply(lambda m, x: checkpoint(m.b, m.a(x), use_reentrant=True), **parts)
    with pytest.raises(psg.CoverageError, match="use_reentrant=False"):
        psg.per_sample_factors(model, fold, (torch.randn(3, 3),))


def network() -> nn.Module:
    """Returns a small model, while nothing is compiled."""
    torch.compiler.reset()
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def in_place(model: nn.Module) -> nn.Module:
    # torch does not compile its own modules in this way.
    model = Apply(lambda m, x: m.inner(x), inner=model)
    model.compile(backend="aot_eager")
    return model


COMPILED = {
    "wrapper": lambda model: torch.compile(model, backend="aot_eager"),
    "in place": in_place,
    "parts": lambda model: nn.Sequential(
        torch.compile(model[:2], backend="aot_eager"), in_place(model[2])
    ),
}

from_dynamo = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@from_dynamo
@pytest.mark.parametrize("kind", COMPILED)
@pytest.mark.parametrize("called_before", [False, True])
def test_compiled_models_run_as_written_in_captures(kind, called_before):
    """What was compiled before calls no hooks; and it is compiled again afterwards."""
    model, inputs = network(), (torch.randn(5, 3),)
    truth = psg.per_sample_grad_norms(model, fold, inputs)
    compiled = COMPILED[kind](model)
    if called_before:
        compiled(*inputs)
    for _ in range(2):
        found = psg.per_sample_grad_norms(compiled, fold, inputs)
        torch.testing.assert_close(found, truth)
    output = compiled(*inputs)
    names = {node.name() for node in graph.backward_nodes(output.grad_fn)}
    assert "CompiledFunctionBackward" in names


@from_dynamo
@pytest.mark.parametrize("called_before", [False, True])
def test_compiled_functions_are_exact_or_an_error(called_before):
    model, x = network(), torch.randn(5, 3)
    truth = psg.per_sample_grad_norms(model, fold, (x,))
    function = torch.compile(lambda x: fold(model, x), backend="aot_eager")
    if called_before:
        function(x)
    for _ in range(2):
        recorded, losses = captured(model, lambda _: function(x))
        if called_before:
            with pytest.raises(psg.CoverageError, match="not a compiled function"):
                recorded.backward(losses)
        else:
            torch.testing.assert_close(recorded.backward(losses).norms(), truth)


def test_what_is_traced_is_refused_and_what_is_transformed_is_right():
    Traced = type("Traced", (torch.Tensor,), {})  # such as tracers pass to modules
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with pytest.raises(psg.CoverageError, match="a Traced: hooks cannot record"):
        captured(model, fold, x.as_subclass(Traced))
    call = (model, lambda m, x: fold(torch.func.vmap(m), x), (x,))
    found, truth = psg.per_sample_grads(*call), psg.per_sample_grads(model, fold, (x,))
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [(nn.Linear(4, 2), 1), (nn.MultiheadAttention(4, 2, batch_first=True), 3)],
)
def test_a_call_with_other_tensors_is_not_a_layers_own(layer, inputs):
    """The structure is proven of the layer's own parameters by the first capture."""
    own, x = dict(layer.named_parameters()), torch.randn(3, 5, 4)
    for factor in (1, 0.5):
        given = own if factor == 1 else {n: factor * p for n, p in own.items()}
        with psg.capture(layer, fallback="loop") as recorded:
            out = torch.func.functional_call(layer, given, (x,) * inputs)
            losses = (out[0] if inputs == 3 else out).square().sum((1, 2))
        truth = loop(losses, own.values())
        found = recorded.backward(losses).materialize()
        torch.testing.assert_close([*found.values()], truth)


def test_hooks_leave_no_trace():
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(inplace=True), nn.Linear(3, 2))
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    model[2].weight.grad = torch.ones_like(model[2].weight)
    psg.per_sample_factors(model, fold, (torch.randn(4, 2, 4),))
    with pytest.raises(RuntimeError, match="weight"), psg.capture(model):
        model(torch.randn(4, 9, 4))  # fails in the middle of the block
    recorded, losses = captured(model, fold, torch.randn(4, 2, 4))
    with pytest.raises(ZeroDivisionError):  # or of the backward pass
        recorded.stream(losses, lambda factors: 1 / 0, retain_graph=True)
    torch.autograd.grad(losses.sum(), list(model.parameters()))  # asks no rule again
    assert list(model.state_dict()) == keys
    for name, module in model.named_modules():
        assert set(vars(module)) == before[name]
        for value in vars(module).values():
            for item in value.values() if isinstance(value, dict) else ():
                assert isinstance(item, nn.Module) or not callable(item)
    assert model[0].weight.grad is None
    assert torch.equal(model[2].weight.grad, torch.ones_like(model[2].weight))


@pytest.mark.parametrize("fallback", ["error", "loop"])
def test_a_parameter_in_a_checkpoint_without_a_module_is_exact_or_an_error(fallback):
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        product = functools.partial(torch.matmul, other=m.b.weight)
        return checkpoint(lambda x: torch.tanh(product(x)), m.a(x), use_reentrant=False)

    model = Apply(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3, bias=False))
    recorded, losses = captured(model, fold, torch.randn(4, 3), fallback=fallback)
    truth = norms_of(losses, model.parameters())
    with contextlib.suppress(psg.PerSampleError):
        torch.testing.assert_close(recorded.norms(losses), truth)
