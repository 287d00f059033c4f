"""Answers from factors are as precise as the dtype allows, and so are projections."""

import contextlib
import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad import HALF, Case, captured, error, flat, fold, loop
from support.per_sample_grad.agreement import assert_same_grads, projected
from support.per_sample_grad.models import BY_NAME, CASES
from support.xla_replica.replicas import on_gpu
from torch import nn

import per_sample_grad as psg
from per_sample_grad.factors import forms
from per_sample_grad.factors import projection as projections
from per_sample_grad.factors.forms import Dense, Outer

STACKED = Case("stacked", lambda: nn.Sequential(
    nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), (5, 6))  # fmt: skip


@pytest.mark.parametrize("accumulate", ["mean", "sum"])
@pytest.mark.parametrize("name", ["cnn", "transformer", "functional-use"])
def test_a_pass_that_accumulates_under_autocast(name, accumulate):
    """The forward pass is in bfloat16, the losses and everything after in float32.

    The loop's gradients of activations are the same to the bit; those of weights it
    rounds to bfloat16, by at most 2**-8 of every number, and the factors do not.
    """
    model, (x,) = BY_NAME[name].make(torch.float32, 4)
    plain = copy.deepcopy(model)

    def losses_of(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x).float().flatten(1)
        return F.cross_entropy(logits, torch.tensor([0, 2, 1, 1]), reduction="none")

    for _ in range(2):  # first with the comparison, then without
        plain.zero_grad()
        getattr(losses_of(plain), accumulate)().backward()
        model.zero_grad()
        recorded, losses = captured(model, losses_of)
        wide = flat(loop(losses, recorded.params.values())).double()
        factors = recorded.backward(losses, accumulate=accumulate)
        assert_same_grads(model, plain)
        assert {param.grad.dtype for param in model.parameters()} == {torch.float32}
        assert error(flat(factors.materialize()), wide) <= 2**-8
        assert error(factors.gram(), wide @ wide.T) <= 2**-7


@pytest.mark.parametrize("size", [1e-7, 1e-5])
def test_float16_that_underflows_is_told_and_can_be_scaled(size):
    """Losses are in float32, activations in float16, whose least number is 6e-8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).half()
    x = torch.randn(4, 16).half()

    def losses_of(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return size * m(x).float().square().sum(1)

    wide = copy.deepcopy(model).float()
    truth = psg.per_sample_grad_norms(wide, losses_of, (x.float(),)).double()
    told = pytest.raises(psg.PerSampleError, match=r"are lost: .*scale=")
    if size > 1e-6:
        told = pytest.warns(UserWarning, match=r"digits are lost.*scale=")
    with told:
        psg.per_sample_grad_norms(model, losses_of, (x,))
    for _ in range(2):
        found = psg.per_sample_grad_norms(model, losses_of, (x,), scale=2.0**20)
        assert error(found, truth) <= 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*CASES, STACKED], ids=str)
def test_every_layer_in_half_precision(case, dtype):
    model, inputs = case.make(dtype)
    truth = case.oracle(model, inputs)
    factors = case.factors(model, inputs)
    grads, tolerance = flat(truth), HALF[dtype]
    assert error(flat(factors.materialize()), grads) <= tolerance
    assert error(factors.norms(), grads.norm(dim=1)) <= tolerance
    assert error(factors.gram(), grads @ grads.T) <= 2 * tolerance
    assert factors.norms().dtype == torch.float32


def test_only_where_all_gradients_of_outputs_are_in_bfloat16_fewer_bits_do(monkeypatch):
    """Autocast of a CPU has LayerNorm's outputs in bfloat16, like those of others."""
    asked = []

    def noted(device: torch.device, *, of_bfloat16: bool):
        return contextlib.nullcontext(asked.append(of_bfloat16))

    monkeypatch.setattr(forms, "full_matmul_precision", noted)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False))

    def losses_of(model: nn.Module, enabled: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            hidden = model[0](torch.randn(2, 4))
        with torch.autocast("cpu", torch.bfloat16):
            return model[1](hidden).sum(1)

    def factors(enabled: bool, *numbers: int) -> psg.Factors:
        options = {"params": [f"{n}.weight" for n in numbers], "check": "never"}
        return psg.per_sample_factors(model, losses_of, (enabled,), **options)

    narrow, mixed = factors(True, 0, 1), factors(False, 0, 1)
    for found in (narrow, mixed, factors(False, 1), factors(False, 0)):
        found.norms()
    narrow.cross_gram(mixed)
    mixed.cross_gram(narrow)
    narrow.weighted_sum(torch.ones(2))  # as in training, it asks for nothing
    assert asked == [True, False, True, False, False, False]
    psg.per_sample_gram(model, losses_of, (False,), check="never")
    assert asked[6:] == [True, False]  # one layer after the other


@on_gpu
@pytest.mark.parametrize(("build", "size"), [
    (BY_NAME["cnn"].build, (8, 2, 8, 8)),
    (lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 48)), (8, 5, 64)),
])  # fmt: skip
def test_on_a_gpu_products_of_factors_in_bfloat16_lose_nothing(build, size):
    """The oracle multiplies the same factors in float64."""
    torch.manual_seed(0)
    model, x = build().cuda(), torch.randn(size, device="cuda")
    recorded = psg.capture(model, lambda name, param: param.dim() > 1)
    with recorded, torch.autocast("cuda", torch.bfloat16):
        losses = model(x).float().square().flatten(1).sum(1)
    factors = recorded.backward(losses)
    norms = factors.norms_by_parameter()
    for name, formed in factors.materialize().items():
        (use,) = factors.contributions(name)
        part = forms.part(use, 0, len(x))
        left, right = part.left.double().cpu(), part.right.double().cpu()
        truth = (left.transpose(2, 3) @ right).flatten(1)
        assert error(norms[name], truth.norm(dim=1)) <= 1e-6
        assert error(formed.flatten(1), truth) <= 1e-6


# --- projections ----------------------------------------------------------------------

WIDE = 2**30


@pytest.mark.parametrize(("share", "budget"), [(0.3, 1), (0.3, WIDE), (1, WIDE)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_projection_is_a_linear_map_of_the_gradient(case, share, budget):
    model, inputs = case.make(torch.float64)
    truth = case.oracle(model, inputs)
    factors = case.factors(model, inputs, budget=budget, scale=8.0)
    total = sum(map(math.prod, factors.shapes.values()))
    size = max(len(factors.shapes), int(share * total))
    projection = psg.Projection(factors.shapes, size, seed=3)
    assert projection.size <= size
    found, expected = factors.project(projection), projected(truth, projection)
    assert found.keys() == expected.keys()
    assert error(flat(found), flat(expected)) <= 1e-10
    if share == 1:  # all numbers are kept
        assert error(flat(found), flat(truth)) <= 1e-10


SHAPES = {"w": (12, 10), "deep": (6, 4, 3, 3), "bias": (12,), "number": ()}


def test_inner_products_are_right_in_expectation():
    torch.manual_seed(0)
    draw = functools.partial(torch.randn, dtype=torch.float64)
    uses = {
        "w": Outer(draw(3, 1, 5, 12), draw(3, 1, 5, 10)),
        "deep": Outer(draw(3, 2, 7, 3), draw(3, 2, 7, 36)),
        "bias": Dense(draw(3, 12)), "number": Dense(draw(3, 1)),
    }  # fmt: skip

    def gram(size: int, seed: int) -> torch.Tensor:
        projection = psg.Projection(SHAPES, size, seed=seed)
        rows = [projection.of(name, [use], WIDE) for name, use in uses.items()]
        return torch.cat(rows, 1) @ torch.cat(rows, 1).T

    truth = gram(10**6, 0)  # of the gradients
    off = sum(gram(60, seed) for seed in range(400)) / 400 - truth
    assert 0 < off.abs().max() < 0.15 * truth.diagonal().max()


def test_parameters_keep_one_share_and_few_numbers_of_the_shorter_side():
    projection = psg.Projection({"a": (100, 50), "b": (100,), "c": (3, 2)}, 700)
    assert projection.kept == {"a": (100, 6), "b": (37, 1), "c": (1, 1)}
    assert projection.size == 100 * 6 + 37 + 1
    assert "to 638, seed 0" in str(projection)
    # Where the longer side would keep all, the shorter one would keep too few.
    assert psg.Projection({"a": (100, 50)}, 250).kept == {"a": (60, 4)}
    projection = psg.Projection({"a": (50, 100), "b": (32, 16, 3, 3)}, 1500)
    assert projection.kept == {"a": (8, 100), "b": (32, 9)}  # one channel
    assert psg.Projection(SHAPES, 10**6).kept["deep"] == (6, 36)


def test_the_projection_is_the_map_of_its_version():
    """Another map needs another `VERSION`: rows of earlier runs would be mixed."""
    shapes = {"w": (40, 30), "deep": (16, 8, 3, 3), "bias": (40,)}
    projection, rows = psg.Projection(shapes, 200, seed=5), []
    for name, shape in shapes.items():
        numbers = torch.arange(math.prod(shape), dtype=torch.float64) ** 2 % 19
        use = Dense(numbers.reshape(1, *shape))
        rows += projection.of(name, [use], WIDE).flatten().tolist()
    assert (projections.VERSION, len(rows)) == (3, 180)
    assert [*map(int, rows[:120:30])] == [-11, -9, -26, -16]


def test_the_map_depends_on_seed_and_names_and_not_on_what_wraps_a_model():
    """`DistributedDataParallel` and `torch.compile` put a prefix before names."""

    def of(projection: psg.Projection, name: str) -> torch.Tensor:
        return projection.of(name, [Dense(torch.ones(1, 9, 8))], WIDE)

    # A model's own attribute may have such a name, beside another.
    maps = {"w": (9, 8), "module.w": (9, 8)}
    both, other = psg.Projection(maps, 30), psg.Projection(maps, 30, seed=1)
    rows = [of(both, "w"), of(both, "module.w"), of(other, "w")]
    assert len({tuple(row.flatten().tolist()) for row in rows}) == 3
    told = set()
    for prefix in ("", "module.", "module._orig_mod."):
        projection = psg.Projection({f"{prefix}w": (9, 8), f"{prefix}v": (9, 8)}, 30)
        assert torch.equal(of(projection, f"{prefix}w"), rows[0])
        told.add(repr(projection))
    assert len(told) == 1
    # Other names, shapes or sequences are another map, and show it.
    for shapes in ({"u": (9, 8), "v": (9, 8)}, {"v": (9, 8), "w": (9, 8)}):
        assert repr(psg.Projection(shapes, 30)) not in told


def test_columns_follow_the_projection_and_not_the_model():
    model = nn.Linear(3, 2).double()
    projection = psg.Projection({"bias": (2,), "weight": (2, 3)}, 8)
    recorded, losses = captured(model, fold, torch.eye(3, dtype=torch.float64))
    found = recorded.project(losses, projection, retain_graph=True)
    expected = torch.autograd.grad(losses[1], [model.bias, model.weight])
    assert torch.allclose(found[1], torch.cat([g.flatten() for g in expected]))


def test_losses_of_few_digits_do_not_round_projections():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(4, 5, 3)
    answers = []
    for dtype in (torch.float32, torch.bfloat16):
        recorded, losses = captured(model, lambda m, to=dtype: fold(m, x).to(to))
        projection = psg.Projection(recorded.params, 12)
        answers.append(recorded.project(losses, projection, accumulate="sum"))
    assert answers[1].dtype == torch.float32
    torch.testing.assert_close(*answers)
