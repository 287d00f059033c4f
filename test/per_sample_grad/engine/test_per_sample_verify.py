"""What the comparison with autograd sees, when it is repeated, and what it allows."""

import pytest
import torch
from support.per_sample_grad import captured, compared, fold, loop, norms_of, rules_kept
from support.per_sample_grad.models import Apply, of_angle
from support.xla_replica.replicas import Backend, on_xla
from torch import nn

import per_sample_grad as psg
import xla_replica


def squares(out: torch.Tensor) -> torch.Tensor:
    return out.flatten(1).square().sum(1)


def far_from_one(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return squares(m(x) - 1)


def comparisons(model: nn.Module, steps: list) -> list[bool]:
    return [compared(model, step) for step in steps]


@pytest.mark.parametrize("lowest", [-torch.inf, -1e9])
@pytest.mark.parametrize(("factor", "told"), [(1.01, r"0\.0"), (torch.nan, "inf")])
@rules_kept()
def test_a_mask_hides_no_wrong_rule_nor_one_that_is_not_finite(lowest, factor, told):
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward((x @ x.mT + mask).softmax(2) @ x)

    @psg.register_rule(Masked)
    def wrong(call: psg.Call, grad: torch.Tensor):
        x, mask = call.args
        right = ((x @ x.mT + mask).softmax(2) @ x).unsqueeze(1)
        bias = psg.Dense(factor * grad.sum(1))
        return {"weight": psg.Outer(grad.unsqueeze(1), right), "bias": bias}

    mask = torch.full((5, 5), lowest).triu(1)
    call = Masked(4, 4), lambda m, *x: squares(m(*x)), (torch.randn(3, 5, 4), mask)
    with pytest.raises(psg.CouplingError, match=rf"bias: off by {told}"):
        psg.per_sample_factors(*call)


def test_a_bias_that_cancels_is_no_error():
    """The bias is the only parameter, so that the whole gradient is rounding."""
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(4, 4))
    call = (model, fold, (torch.randn(3, 2, 9),))
    assert psg.per_sample_factors(*call, params=["0.bias"]).norms().max() < 1e-3


def test_a_comparison_that_said_something_is_not_repeated():
    """Also of a bias that a normalisation cancels, and of small gradients."""
    cancels = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(4, 4))
    small = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        small[1].weight.mul_(1e-9)
    for model, x in ((cancels, torch.randn(3, 2, 9)), (small, torch.randn(5, 3))):
        steps = [lambda m, x=x: squares(torch.sin(m(x) - 1))] * 2
        assert comparisons(model, steps) == [True, False]


def test_a_zero_that_is_learnt_is_compared_as_soon_as_it_is_none():
    """While a layer stays dead, no backward pass is spent on it."""
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False))
    nn.init.zeros_(model[1].weight)
    steps = [lambda m: far_from_one(m, torch.ones(4, 3))] * 2
    assert comparisons(model, steps) == [True, False]
    nn.init.ones_(model[1].weight)
    assert comparisons(model, steps) == [True, False]


@pytest.mark.parametrize(("own", "other"), [
    (lambda out: out - out.mean(1, True), lambda out: out - out.mean(0, True)),
    (lambda out: out - out.mean(-1, True), lambda out: out - out.mean(-2, True)),
    (lambda out: (out.T * out.unbind(1)[0]).T, lambda out: out * out.unbind()[0]),
    (lambda out: out[:, :1] * out, lambda out: out[:1] * out),
    (lambda out: out[torch.arange(4)], lambda out: out[torch.arange(4).roll(1)]),
])  # fmt: skip
def test_a_dimension_is_structure(own, other):
    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    psg.per_sample_factors(model, lambda m, x: squares(own(m(x))), (x,))
    with pytest.raises(psg.CouplingError):
        psg.per_sample_factors(model, lambda m, x: squares(other(m(x))), (x,))


def test_what_is_not_finite_is_not_compared_and_told_until_there_is_a_proof():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    for bad in (torch.nan, torch.inf):
        given = x.clone()
        given[1, 2] = bad
        with pytest.warns(UserWarning, match="weight, bias are not finite, so the ans"):
            assert comparisons(model, [lambda m, x=given: squares(m(x))]) == [False]
    steps = [lambda m, x=x: squares(m(x)) for x in (x, given)]
    assert comparisons(model, steps) == [True, False]


@pytest.mark.parametrize("check", ["always", "first"])
def test_queries_without_keys_take_no_gradient(check):
    model, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(3, 5, 4)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[1] = True
    mask[3, 2:] = True
    recorded, losses = captured(model, lambda m: squares(
        m(x, x, x, attn_mask=mask, need_weights=False)[0]), check=check)  # fmt: skip
    truth = norms_of(losses, model.parameters())
    torch.testing.assert_close(recorded.norms(losses), truth)


class Hiding(torch.autograd.Function):
    """Runs a module inside, and its backward pass in another graph."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inside = x.detach().requires_grad_()
            ctx.module(inside).backward(grad)
        return None, inside.grad


@pytest.mark.parametrize("inner", [nn.Linear(3, 4), of_angle()])
def test_functions_that_hide_modules_are_an_error(inner):
    model = Apply(lambda m, x: Hiding.apply(m.b, m.a(x)), a=nn.Linear(3, 3), b=inner)
    call = (model, fold, (torch.randn(5, 3),))
    for fallback in ("error", "loop"):
        with pytest.raises(psg.CoverageError, match="Function HidingBackward"):
            psg.per_sample_factors(*call, fallback=fallback)
    assert all(param.grad is None for param in model.parameters())
    psg.per_sample_factors(*call, params=["a.weight", "a.bias"])


def test_a_function_beside_a_pass_without_gradients_hides_none():
    def losses_of(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            m(x)
        return squares(Hiding.apply(nn.Identity(), m(x)))

    psg.per_sample_factors(nn.Linear(3, 2), losses_of, (torch.randn(4, 3),))


def test_backward_once_and_after_a_forward_pass():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    truth = psg.per_sample_grad_norms(model, lambda m, x: m(x).sum(1), (x,))
    # Operations account for a forward pass that ran before.
    found = psg.capture(model).backward(model(x).sum(1)).norms()
    torch.testing.assert_close(found, truth)
    recorded, losses = captured(model, fold, x)
    recorded.backward(losses, retain_graph=True)
    with pytest.raises(RuntimeError, match="had its backward pass"):
        recorded.backward(losses)


class Narrow(nn.Linear):
    """A layer that computes in float32 whatever the dtype, as Gemma 2's norms do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.float(), self.weight.float(), self.bias.float()
        return nn.functional.linear(*given).type_as(x)


@pytest.mark.parametrize("fallback", ["error", "loop"])
@rules_kept()
def test_float64_models_that_compute_in_float32_are_compared_as_such(fallback):
    """Also where that is within the call of a module that has a rule."""
    if fallback == "error":
        psg.register_rule(Narrow, like=nn.Linear)
    model = nn.Sequential(nn.Linear(8, 8), Narrow(8, 8), nn.Linear(8, 3)).double()
    call = (model, fold, (torch.randn(4, 6, 8).double(),))
    factors = psg.per_sample_factors(*call, fallback=fallback)
    assert factors.norms().dtype == torch.float64


@pytest.mark.parametrize(("dtype", "hidden", "told"), [
    (torch.float32, 1e-4, 1e-2), (torch.float64, 1e-10, 1e-6),
], ids=str)  # fmt: skip
def test_couplings_of_the_documented_size_are_told_from_rounding(dtype, hidden, told):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2).to(dtype), torch.randn(6, 4).to(dtype)

    def coupled(m: nn.Module, size: float) -> torch.Tensor:
        losses = squares(m(x))
        return losses + size * losses.mean()

    psg.per_sample_factors(model, coupled, (hidden,), check="always")
    with pytest.raises(psg.CouplingError):
        psg.per_sample_factors(model, coupled, (told,), check="always")


class Off(nn.Linear):
    """A layer whose registered rule is a tenth off."""


def beside_a_large_one(scale: float) -> nn.Module:
    """Returns a model in which such a layer's output has a scale."""
    right = psg.layers.linear.linear
    psg.register_rule(Off)(lambda call, grad: right(call, 1.1 * grad))
    parts = {"large": nn.Linear(3, 3, bias=False), "small": Off(3, 3, bias=False)}
    model = Apply(lambda m, x: m.large(x) + m.scale * m.small(x), **parts)
    model.register_buffer("scale", torch.tensor(scale))
    return model


@pytest.mark.parametrize("is_tied", [False, True])
@rules_kept()
def test_a_small_contribution_is_compared_with_itself_and_again_when_it_grows(is_tied):
    """Beside a large one to the same weight a tenth of it is rounding, at first."""
    model = beside_a_large_one(1e-5)
    if is_tied:
        model.small.weight = model.large.weight
        steps = [lambda m: far_from_one(m, torch.eye(3))] * 2
        assert comparisons(model, steps) == [True, False]
        model.scale.fill_(1.0)
    with pytest.raises(psg.CouplingError, match="weight: off by 0"):
        psg.per_sample_factors(model, far_from_one, (torch.eye(3),))


@rules_kept()
def grown(rank: int) -> None:
    """Checks that a gradient of 1e-7 of all is right, and one of 1e-4 an error."""
    x = torch.eye(3, device=xla_replica.current().device)
    model = beside_a_large_one(1e-7).to(x.device)
    for _ in range(2):
        psg.per_sample_factors(model, far_from_one, (x,))
    model.scale.fill_(1e-4)
    with pytest.raises(psg.CouplingError, match=r"small\.weight: off by 0"):
        psg.per_sample_factors(model, far_from_one, (x,))


@on_xla
def test_an_accelerator_compares_a_gradient_again_when_it_has_grown():
    Backend("xla", 1).run(grown)


# --- beside hooks, checkpoints, compilers and tracers ---------------------------------


def test_gradient_hooks_on_parameters_are_refused():
    """They change the summed gradient; what that means for a sample is unknown."""
    model, ran = nn.Linear(3, 2), []
    # Hooks that see `.grad` do not run, because it does not change.
    model.weight.register_post_accumulate_grad_hook(ran.append)
    psg.per_sample_factors(model, fold, (torch.randn(4, 3),))
    assert not ran
    recorded, losses = captured(model, fold, torch.randn(4, 3))
    model.weight.register_hook(lambda grad: 2 * grad)
    for refused in (lambda: recorded.backward(losses), lambda: psg.capture(model)):
        with pytest.raises(psg.PerSampleError, match="weight have gradient hooks"):
            refused()
    psg.capture(model, ["bias"])


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
    assert compiled(*inputs).grad_fn.name() == "CompiledFunctionBackward"


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


@pytest.mark.parametrize(("layer", "inputs"), [
    (nn.Linear(4, 2), 1), (nn.MultiheadAttention(4, 2, batch_first=True), 3),
])  # fmt: skip
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
