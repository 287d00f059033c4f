"""One pass gives ``.grad`` and every sample's gradient, also of no samples."""

from __future__ import annotations

import copy

import pytest
import torch
from support.per_sample_grad.agreement import answers, assert_same_grads
from support.per_sample_grad.gradient_oracle import captured, error, flat, fold, oracle
from support.per_sample_grad.layer_cases import CASES
from support.per_sample_grad.refused_models import BY_NAME, of_angle
from torch import nn

import per_sample_grad as psg
import xla_replica


@pytest.mark.parametrize("accumulate", ["mean", "sum"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
def test_grad_is_that_of_an_ordinary_pass_to_the_bit(case, accumulate):
    model, inputs = case.make(torch.float64)
    plain = copy.deepcopy(model)
    for _ in range(2):  # the second pass adds to the first
        getattr(case.loss(plain, *inputs), accumulate)().backward()
        recorded, losses = captured(model, case.loss, *inputs, **case.options)
        factors = recorded.backward(losses, accumulate=accumulate)
    assert_same_grads(model, plain)
    truth = flat(oracle(case, model, inputs))
    assert error(flat(factors.materialize()), truth) <= 1e-10


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.mark.parametrize(
    ("build", "options"),
    [
        *((network, {"fallback": fallback, **more}) for fallback in ("error", "loop")
          for more in ({"check": "always"}, {"scale": 2.0**6})),
        # Nothing else accounts for it; the others are trained, although not captured.
        (of_angle, {"params": ["p"], "fallback": "loop"}),
    ],
)  # fmt: skip
def test_streams_and_fallbacks_accumulate_once(build, options):
    model = build()
    plain, x = copy.deepcopy(model), torch.randn(4, 5 if build is network else 3)
    (options.get("scale", 1) * fold(plain, x).mean()).backward()
    for _ in range(2):
        model.zero_grad()
        recorded, losses = captured(model, fold, x, **options)
        recorded.stream(losses, lambda f: f.norms(squared=True), accumulate="mean")
        assert_same_grads(model, plain)


def test_hooks_of_the_ordinary_pass_run():
    model, x, ran = network(), torch.randn(4, 5), []
    model[0].weight.register_hook(xla_replica.AccumulationHook(torch.zeros_like))
    model[2].bias.register_post_accumulate_grad_hook(lambda p: ran.append(p.shape))
    recorded, losses = captured(model, fold, x)
    norms = recorded.backward(losses, accumulate="mean").norms_by_parameter()
    assert (model[0].weight.grad == 0).all()
    assert (norms["0.weight"] > 0).all()
    assert ran == [(3,)]


def test_every_answer_is_that_of_the_samples_own_losses():
    """The pass is of the mean loss, times a scale, and its gradients are smaller."""
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)
    ).double()
    x, found = torch.randn(6, 2, 5, dtype=torch.float64), []
    vectors = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    weights = torch.arange(12.0).double().view(2, 6)
    for options, accumulate in (({}, None), ({"scale": 8.0}, "mean")):
        recorded, losses = captured(model, fold, x, **options)
        factors = recorded.backward(losses, accumulate=accumulate)
        (bias,) = factors.contributions("3.bias")
        projected = factors.project(psg.Projection(vectors, 20))
        found.append([answers(factors, weights, vectors), bias.values, projected])
    torch.testing.assert_close(*found)
    crossed = psg.cross_gram(psg.per_sample_factors(model, fold, (x,)), factors)
    torch.testing.assert_close(crossed, found[0][0]["gram"])


# --- batches of no samples ---------------------------------------------------------

NAMES = ["cnn", "tied-embedding-head", "batch-norm-2d", "transformer", "unused-part"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_answers_and_gradients_are_of_no_samples(name, dtype):
    model, some = BY_NAME[name].make(dtype, 2)
    params, plain = dict(model.named_parameters()), copy.deepcopy(model)
    wide = torch.promote_types(dtype, torch.float32)
    call = (model, fold, tuple(x[:0] for x in some))
    recorded, losses = captured(model, fold, *call[2])
    found = recorded.backward(losses, accumulate="mean")
    assert not recorded.compared
    fold(plain, *call[2]).mean().backward()
    assert_same_grads(model, plain)
    formed = found.materialize(), psg.per_sample_grads(*call, fallback="loop")
    assert len(found) == 0
    vectors = {n: torch.randn(3, *p.shape, dtype=dtype) for n, p in params.items()}
    projected = found.project(psg.Projection(params, 16))
    for answer, shape in (
        (found.norms(), (0,)), (found.norms(squared=True), (0,)),
        (found.gram(), (0, 0)), (found.dot(vectors), (0, 3)),
        (found.dot({n: v[0] for n, v in vectors.items()}), (0,)),
        (psg.per_sample_grad_norms(*call), (0,)), (psg.per_sample_gram(*call), (0, 0)),
        *((g[n], (0, *p.shape)) for g in formed for n, p in params.items()),
        *((g, (0,)) for g in found.norms_by_parameter().values()),
        *((g, (0, *g.shape[1:])) for g in projected.values()),
    ):  # fmt: skip
        assert (answer.shape, answer.dtype) == (shape, wide)
    sums = found.weighted_sum(torch.ones(0))
    assert all(sums[name].shape == param.shape for name, param in params.items())
    assert not any(g.any() for g in sums.values())
    other = psg.per_sample_factors(model, fold, some)
    assert found.cross_gram(other).shape == (0, 2)
    assert psg.cross_gram(other, found).shape == (2, 0)


def test_the_next_batch_is_compared_as_ever():
    model = network()
    for batch, compared in ((0, False), (5, True), (0, False), (5, False)):
        recorded, losses = captured(model, fold, torch.randn(batch, 5))
        recorded.stream(losses, lambda factors: factors.norms(squared=True))
        assert recorded.compared == compared


@pytest.mark.parametrize("options", [{}, {"score": "el2n"}, {"labels": "expected"}])
def test_an_empty_pool_has_no_scores(options, tmp_path):
    pool = torch.utils.data.TensorDataset(torch.randn(0, 4), torch.zeros(0).long())
    model = nn.Linear(4, 3)
    for folder in (None, tmp_path / "scores", tmp_path / "scores"):
        scores = psg.score_pool(model, pool, folder=folder, **options)
        assert len(scores) == 0
        assert len(scores.top(0)) == 0
