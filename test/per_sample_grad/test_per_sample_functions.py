"""Coverage reports, plans, one-shot functions, and the code on the pages."""

import copy
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.documents import block
from support.per_sample_grad import error, flat, fold, rules_kept
from support.per_sample_grad.agreement import METHODS
from support.per_sample_grad.models import BY_NAME
from support.per_sample_grad.pool import Pool, Vectors
from torch import nn
from torch.utils.data import DataLoader

import per_sample_grad as psg
from per_sample_grad.layers.registry import RULES


def test_coverage_names_what_is_missing_and_what_is_wrong():
    complete, report, wrong = (
        psg.coverage(model, fold, inputs)
        for name in ("functional-use", "turned", "coupled-square")
        for model, inputs in [BY_NAME[name].make(torch.float32)]
    )
    assert complete.complete
    assert "coverage is complete" in str(complete)
    found = complete.parameters["inner.weight"]
    assert found.error < 1e-5
    assert found.uses == ("Linear 'inner'", "Mm in Linear 'inner'")
    found = report.parameters["p"]
    assert found.problems == (
        "a use outside any module with a rule (no rule is registered for "
        "WithParameter; PolarBackward0 mixes it with samples, and has no rule)",
    )
    assert found.correct  # the loop's answer
    assert not report.parameters["inner.bias"].problems
    assert "needs a fallback" in str(report)
    assert not wrong.parameters["inner.weight"].correct
    assert "WRONG" in str(wrong)


@pytest.mark.parametrize(("model", "x", "quantity", "form"), [
    (nn.Linear(64, 64), torch.randn(4, 2, 64), "norms", "factored"),
    (nn.Linear(8, 8), torch.randn(4, 64, 8), "norms", "materialized"),
    (nn.Linear(8, 8), torch.randn(4, 64, 8), "norms", "dense"),  # of the bias
    # With several positions, many samples' Gram matrix is cheaper from gradients.
    (nn.Linear(32, 32), torch.randn(64, 16, 32), "norms", "factored"),
    (nn.Linear(32, 32), torch.randn(64, 16, 32), "gram", "materialized"),
    # More operations may take less time, where fewer numbers are written.
    *((nn.Embedding(n, 8), torch.randint(n, (32, 5)), quantity, None)
      for n in (11, 1000) for quantity in ("norms", "gram")),
])  # fmt: skip
def test_the_form_follows_the_shapes_and_has_the_lowest_cost(model, x, quantity, form):
    chosen, *choices = (
        factors._choice(quantity, "bias" if form == "dense" else "weight", factors)
        for method in METHODS
        for factors in [psg.per_sample_factors(model, fold, (x,), method=method)]
    )
    assert chosen == min(choices, key=lambda choice: choice.cost)
    assert form in (chosen.form, None)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_token_cross_entropy_is_each_samples_own(reduction):
    logits, targets = torch.randn(4, 5, 7), torch.randint(0, 7, (4, 5))
    targets[1, 2:] = -100
    options = {"reduction": reduction, "label_smoothing": 0.1}
    found = psg.token_cross_entropy(logits, targets, **options)
    expected = [F.cross_entropy(x, y, **options) for x, y in zip(logits, targets)]
    torch.testing.assert_close(found, torch.stack(expected))


def test_a_sample_without_tokens_has_no_loss():
    logits = torch.randn(2, 3, 4, requires_grad=True)
    targets = torch.tensor([[1, 2, 3], [-1, -1, -1]])
    losses = psg.token_cross_entropy(logits, targets, ignore_index=-1)
    assert losses[1] == 0
    losses.sum().backward()
    assert torch.equal(logits.grad[1], torch.zeros(3, 4))
    with pytest.raises(ValueError, match="classes last"):
        psg.token_cross_entropy(logits.mT, targets)
    with pytest.raises(ValueError, match="'mean', 'sum', got 'none'"):
        psg.token_cross_entropy(logits, targets, reduction="none")


def test_one_shot_functions_agree_with_the_loop():
    case = BY_NAME["tied-embedding-head"]
    model, inputs = case.make(torch.float64)
    _, others = case.make(torch.float64, batch=5, seed=1)
    truth, call = case.oracle(model, inputs), (model, fold, inputs)
    grads, other = flat(truth), flat(case.oracle(model, others))
    vectors = {name: values[0] for name, values in truth.items()}
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    sums = [g[None] for g in psg.weighted_grad(*call, weights).values()]
    b = psg.per_sample_factors(model, fold, others)
    for found, expected in (
        (flat(psg.per_sample_grads(*call)), grads),
        (psg.per_sample_grad_dot(*call, vectors), grads @ grads[0]),
        (flat(sums)[0], weights @ grads),
        (psg.per_sample_factors(*call).cross_gram(b), grads @ other.T),
        (b.cross_gram(psg.per_sample_factors(*call)), other @ grads.T),
    ):
        assert error(found, expected) <= 1e-10


@pytest.mark.parametrize("changed", ["input", "answer"])
def test_no_answer_is_of_a_tensor_that_was_changed_in_place(changed):
    model, x = nn.Linear(2, 3), torch.randn(4, 2)
    factors, other = (psg.per_sample_factors(model, fold, (x,)) for x in (x, x.clone()))
    projection = psg.Projection(factors.shapes, 2)
    (x if changed == "input" else factors.materialize()["bias"]).mul_(2)
    for answer in (
        factors.norms, factors.norms_by_parameter, factors.gram, factors.materialize,
        lambda: factors.dot(dict(model.named_parameters())),
        lambda: factors.weighted_sum(torch.ones(4)),
        lambda: factors.project(projection), lambda: factors.contributions("weight"),
        lambda: factors.cross_gram(other), lambda: other.cross_gram(factors),
    ):  # fmt: skip
        with pytest.raises(psg.PerSampleError, match="Ask for all answers before"):
            answer()
    assert other.norms().shape == (4,)


@pytest.mark.parametrize(("build", "shape"), [
    (lambda: nn.Linear(1024, 1024), (2, 128, 1024)),
    (lambda: nn.Linear(512, 512), (2, 16, 512)),
    (lambda: nn.Conv2d(40, 40, 3), (4, 40, 5, 5)),
    (lambda: nn.Embedding(9, 64), (4, 3)),
])  # fmt: skip
def test_norms_are_right_where_positions_cancel(build, shape):
    """Inputs are almost the same everywhere: factors alone are off by a per cent."""
    torch.manual_seed(0)
    model, x = build(), 1.1 + 1e-3 * torch.randn(shape)

    def losses_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x.long() if isinstance(model, nn.Embedding) else x)
        out = out.mT if out.dim() == 3 else out.flatten(2)
        signs = torch.cos(torch.arange(float(out.shape[2]))).to(out.dtype)
        return (out * (signs - signs.mean() + 3e-4)).sum((1, 2))

    def answers(model: nn.Module, x: torch.Tensor, method: str) -> list[torch.Tensor]:
        options = {"check": "never", "params": ["weight"], "method": method}
        factors = psg.per_sample_factors(model, losses_of, (x,), **options)
        norms = psg.per_sample_grad_norms(model, losses_of, (x,), **options)
        return [factors.norms(), factors.gram(), factors.cross_gram(factors), norms]

    found, rough = answers(model, x, "auto"), answers(model, x, "factored")
    exact = answers(copy.deepcopy(model).double(), x.double(), "materialized")
    for one, other, truth in zip(found, rough, exact):
        # The gradients of activations have lost digits themselves.
        assert error(one, truth) <= 1e-3
        assert error(other, truth) > 3e-3


# --- the code on the pages ------------------------------------------------------------

PAGE = "docs/per_sample_grad.md"
POOLS = "docs/pools.md"
COUNT = 1000  # the pages ask for the highest thousand


def test_a_capture_and_a_stream():
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y, w = torch.randn(6, 5), torch.randint(0, 3, (6,)), torch.ones(6)
    v = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    names = {"F": F, "model": model, "x": x, "y": y, "v": v, "w": w}
    exec(block(PAGE, "python", "factors = recorded.backward"), names)
    factors = names["factors"]
    with psg.capture(model) as names["recorded"]:
        names["losses"] = F.cross_entropy(model(x), y, reduction="none")
    exec(block(PAGE, "python", "recorded.stream"), names)
    torch.testing.assert_close(names["squared"].sqrt(), factors.norms())
    torch.testing.assert_close(names["gram"], factors.gram())


def test_scoring_and_projecting_a_pool(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"psg": psg, "model": Vectors.model(), "dataset": Vectors(COUNT)}
    exec(block(POOLS, "python", "scores.to_frame"), names)
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == COUNT + 1
    names |= {"dataset": Vectors(30), "few": Vectors(3), "np": np}
    exec(block(POOLS, "python", "score=projection"), names)
    assert names["influential"].shape == (3, 5)
    assert (tmp_path / "rows" / "part-00000000.npy").exists()
    exec(block(POOLS, "python", "np.linalg.solve"), names)
    assert names["influences"].shape == (3, 30)
    x, y = torch.utils.data.default_collate([Vectors(COUNT)[i] for i in range(5)])
    names |= {"torch": torch, "x": x, "y": y, "dataset": Vectors(5)}
    names["loss_fn"] = lambda m, x, y: F.cross_entropy(m(x), y, reduction="none")
    exec(block(POOLS, "python", "factors.dot(toward)"), names)
    gram = psg.per_sample_gram(names["model"], names["loss_fn"], (x, y))
    found = torch.from_numpy(names["scores"].scores)
    torch.testing.assert_close(found, gram.sum(1))


def test_pools_of_dicts():
    """The items, and what the model answers, look like those of Hugging Face."""

    class Classifier(nn.Sequential):
        def forward(self, input_ids: torch.Tensor) -> types.SimpleNamespace:
            return types.SimpleNamespace(logits=super().forward(input_ids))

    class WithFeatures(nn.Linear):
        def forward(self, x: torch.Tensor, return_features: bool):
            assert not return_features
            return (super().forward(x),)

    names = {"psg": psg, "DataLoader": DataLoader}
    names["collator"] = torch.utils.data.default_collate
    names["tokenised"] = [{"input_ids": n, "labels": n % 4} for n in range(20)]
    names["model"] = Classifier(nn.Embedding(20, 3), nn.Linear(3, Pool.classes))
    exec(block(POOLS, "python", "collate_fn=collator"), names)
    names["model"], image = WithFeatures(4, Pool.classes), torch.ones(4)
    names["dataset"] = [{"image": i * image, "class": {"fine": i}} for i in range(4)]
    exec(block(POOLS, "python", "return_features"), names)


@rules_kept()
def test_a_class_like_another():
    own = type("MyLinear", (nn.Linear,), {})
    code = block("docs/per_sample_grad_details.md", "python", "like=")
    exec(code, {"psg": psg, "nn": nn, "MyLinear": own})
    assert RULES[own] is RULES[nn.Linear]
