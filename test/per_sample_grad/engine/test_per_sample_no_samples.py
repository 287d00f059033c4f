"""A batch of no samples has answers of no samples, and plain autograd's ``.grad``."""

from __future__ import annotations

import copy

import pytest
import torch
from support.per_sample_grad.agreement import assert_same_grads
from support.per_sample_grad.gradient_oracle import Case, fold
from support.per_sample_grad.layer_cases import CASES
from torch import nn

import per_sample_grad as psg

BY_NAME = {case.name: case for case in CASES}
NAMES = [
    "linear-3d", "cnn", "tied-embedding-head", "batch-norm-2d", "transformer",
    "unused-part",
]  # fmt: skip


def made(name: str, dtype: torch.dtype, batch: int = 0) -> tuple:
    model, inputs = BY_NAME[name].make(dtype, 2)
    return model, tuple(x[:batch] for x in inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_of_no_samples(name, dtype):
    model, inputs = made(name, dtype)
    params = dict(model.named_parameters())
    wide = torch.promote_types(dtype, torch.float32)
    found = psg.per_sample_factors(model, fold, inputs)
    assert len(found) == 0
    size = sum(param.numel() for param in params.values())
    vectors = {n: torch.randn(3, *p.shape, dtype=dtype) for n, p in params.items()}
    projected = found.project(psg.Projection(params, 16))
    for answer, shape in (
        (found.norms(), (0,)),
        (found.norms(squared=True), (0,)),
        (found.gram(), (0, 0)),
        (found.dot(vectors), (0, 3)),
        (found.dot({n: v[0] for n, v in vectors.items()}), (0,)),
        *((g, (0, *params[n].shape)) for n, g in found.materialize().items()),
        *((g, (0,)) for g in found.norms_by_parameter().values()),
        *((g, (0, *g.shape[1:])) for g in projected.values()),
    ):
        assert (answer.shape, answer.dtype) == (shape, wide)
    assert sum(found.weighted_sum(torch.ones(0))[n].numel() for n in params) == size
    assert not any(g.any() for g in found.weighted_sum(torch.ones(0)).values())
    other = psg.per_sample_factors(model, fold, made(name, dtype, 2)[1])
    assert found.cross_gram(other).shape == (0, 2)
    assert psg.cross_gram(other, found).shape == (2, 0)


@pytest.mark.parametrize("name", NAMES)
def test_functions_for_one_call(name):
    model, inputs = made(name, torch.float32)
    assert psg.per_sample_grad_norms(model, fold, inputs).shape == (0,)
    assert psg.per_sample_gram(model, fold, inputs).shape == (0, 0)
    found = psg.per_sample_grads(model, fold, inputs, fallback="loop")
    shapes = {n: (0, *p.shape) for n, p in model.named_parameters()}
    assert {n: tuple(g.shape) for n, g in found.items()} == shapes


@pytest.mark.parametrize("accumulate", [None, "mean", "sum"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_plain_autograd(name, accumulate):
    model, inputs = made(name, torch.float32)
    plain = copy.deepcopy(model)
    if accumulate is not None:
        getattr(fold(plain, *inputs), accumulate)().backward()
    with psg.capture(model) as recorded:
        losses = fold(model, *inputs)
    recorded.backward(losses, accumulate=accumulate)
    assert not recorded.compared
    assert_same_grads(model, plain)


def test_the_next_batch_is_compared_as_ever():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for batch, compared in ((0, False), (5, True), (0, False), (5, False)):
        with psg.capture(model) as recorded:
            losses = fold(model, torch.randn(batch, 3))
        recorded.stream(losses, lambda factors: factors.norms(squared=True))
        assert recorded.compared == compared


def test_what_is_coupled_is_refused_without_samples_too():
    case = Case("", lambda: nn.BatchNorm1d(3), (3,))
    model, _ = case.make(torch.float32)
    with pytest.raises(psg.CouplingError), psg.capture(model.train()):
        pass


def test_a_report_needs_samples():
    with pytest.raises(ValueError, match="has no samples; give one"):
        psg.coverage(nn.Linear(3, 2), fold, (torch.randn(0, 3),))


@pytest.mark.parametrize("options", [{}, {"score": "el2n"}, {"labels": "expected"}])
def test_an_empty_pool_has_no_scores(options, tmp_path):
    pool = torch.utils.data.TensorDataset(torch.randn(0, 4), torch.zeros(0).long())
    model = nn.Linear(4, 3)
    for folder in (None, tmp_path / "scores", tmp_path / "scores"):
        scores = psg.score_pool(model, pool, folder=folder, **options)
        assert len(scores) == 0
        assert len(scores.top(0)) == 0
