"""Scores of a pool equal those of a loop, for every score, labels and block size."""

from __future__ import annotations

import functools
import re
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad.layer_cases import Apply
from support.per_sample_grad.pool import (
    CLASSES,
    COUNT,
    Pool,
    assert_same_bits,
    by_hand,
    make_model,
)
from torch import nn
from torch.utils.data import DataLoader

import per_sample_grad as psg

SCORES = ["grad_norm", "last_layer_grad_norm", "el2n", "loss", "grand"]


@pytest.mark.parametrize("labels", ["given", "pseudo", "expected"])
@pytest.mark.parametrize("score", SCORES)
def test_scores_equal_the_loop(score, labels):
    model = make_model().train()
    found = psg.score_pool(
        model, Pool(), score=score, labels=labels, batch_size=5, progress=False
    )
    np.testing.assert_allclose(found.scores, by_hand(model, score, labels), rtol=1e-4)
    assert model.training
    assert all(module.training for module in model.modules())


def test_expected_gradient_length_needs_no_labels():
    model, inputs = make_model(), [Pool()[i][0] for i in range(COUNT)]
    found = psg.score_pool(model, inputs, score="egl", batch_size=8, progress=False)
    expected = by_hand(model, "grad_norm", "expected")
    np.testing.assert_allclose(found.scores, expected, rtol=1e-4)
    for pool in (inputs, [(x,) for x in inputs]):
        with pytest.raises(ValueError, match="have no targets; give pairs"):
            psg.score_pool(model, pool, batch_size=8, progress=False)


def test_several_models_are_averaged():
    models = [make_model(0), make_model(1)]
    found = psg.score_pool(models, Pool(), score="grand", batch_size=6, progress=False)
    truth = np.mean([by_hand(m, "grand", "given") for m in models], axis=0)
    np.testing.assert_allclose(found.scores, truth, rtol=1e-4)


def test_the_last_layer_is_not_guessed():
    """The model's last parameter belongs to no module with a rule."""
    options = {"score": "last_layer_grad_norm", "batch_size": 4, "progress": False}
    model = Apply(lambda m, x: m.body(x.flatten(1)) @ m.head, body=nn.Linear(12, 5))
    model.head = nn.Parameter(torch.randn(5, CLASSES))
    with pytest.raises(ValueError, match=r"accounts for head.*last_layer="):
        psg.score_pool(model, Pool(), **options)
    psg.score_pool(model, Pool(), last_layer="body", **options)
    with pytest.raises(ValueError, match="name the layer with last_layer="):
        psg.score_pool(make_model(), Pool(), params=["5.weight"], **options)


@pytest.mark.parametrize("score", ["loss", "grad_norm"])
@pytest.mark.parametrize("labels", ["given", "expected"])
def test_a_mean_over_the_batch_is_refused(score, labels):
    with pytest.raises(ValueError, match=r"shape \(\) for a block of 4"):
        psg.score_pool(
            make_model(), Pool(), score=score, labels=labels, loss=F.cross_entropy,
            block_size=4, progress=False,
        )  # fmt: skip


def test_mixed_precision_stays_close():
    model = make_model()
    found = psg.score_pool(
        model, Pool(), batch_size=8, autocast=torch.bfloat16, progress=False
    )
    truth = by_hand(model, "grad_norm", "given")
    assert np.linalg.norm(found.scores - truth) <= 2e-2 * np.linalg.norm(truth)


def test_options_are_checked():
    model = make_model()
    for options, told in (
        ({"score": "no"}, r"score must be .* of Factors, got 'no'"),
        ({"labels": "no"}, r"labels must be .* 'expected', got 'no'"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"block_size": -1}, "block_size must be an integer >= 1, got -1"),
        ({"part_size": 0}, "part_size must be an integer >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=told):
            psg.score_pool(model, Pool(), **options)
    with pytest.raises(ValueError, match="batch_size=None does not collate"):
        psg.score_pool(model, DataLoader(Pool(), batch_size=None))
    with pytest.raises(TypeError, match="no length"):
        psg.score_pool(model, iter(()), batch_size=2)
    with pytest.raises(TypeError, match="option batchsize, fall_back; all") as error:
        psg.score_pool(model, Pool(), fall_back="loop", batchsize=2)
    told = str(error.value).partition("allowed are ")[2].split(", ")
    assert {"batch_size", "folder", "tag", "fallback", "params", "check"} <= set(told)
    assert not {"model", "loader", "options"} & set(told)
    for wrong in (lambda x: x, nn.Linear, model.state_dict(), [model, None], [], None):
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module or a"):
            psg.score_pool(wrong, Pool())


def labelled(index: int, label: object) -> list:
    """Returns a pool with one label of its own."""
    pool = [Pool()[i] for i in range(COUNT)]
    pool[index] = pool[index][0], label
    return pool


PLAIN_LOSSES = {
    "default": {},
    "module": {"loss": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)},
    "partial": {"loss": functools.partial(F.cross_entropy, reduction="none")},
    "el2n": {"score": "el2n"},
}


@pytest.mark.parametrize(
    "work", [psg.score_pool, functools.partial(psg.index_pool, size=4)]
)
def test_a_model_that_is_elsewhere_is_refused_with_a_remedy(work):
    model = nn.Linear(3, 2, device="meta")
    with pytest.raises(ValueError, match=r"on meta.*move the model with model\.to"):
        work(model, [(torch.ones(3), 0)])


@pytest.mark.parametrize("label", [CLASSES, -1])
@pytest.mark.parametrize("kind", PLAIN_LOSSES)
@pytest.mark.parametrize("index", [0, 13, COUNT - 1])
def test_a_label_that_is_not_a_class_is_told_with_its_sample(index, kind, label):
    told = rf"the label of sample {index} is {label}, but the model has {CLASSES} cl"
    options = {"block_size": 4, "progress": False, **PLAIN_LOSSES[kind]}
    with pytest.raises(ValueError, match=told):
        psg.score_pool(make_model(), labelled(index, label), **options)
    # The labels that nobody asked for need not be classes.
    options["labels"] = "pseudo"
    psg.score_pool(make_model(), labelled(index, label), **options)


def test_an_ignored_label_is_for_the_losses_that_ignore_it():
    options = {"block_size": 4, "progress": False}
    for number, loss in ((-100, {}), (7, {"loss": PLAIN_LOSSES["partial"]["loss"]})):
        if loss:
            loss = {"loss": functools.partial(loss["loss"], ignore_index=number)}
        found = psg.score_pool(make_model(), labelled(5, number), **options, **loss)
        assert found.scores[5] == 0
    with pytest.raises(ValueError, match="the label of sample 5 is -100"):
        psg.score_pool(make_model(), labelled(5, -100), score="el2n", **options)


def test_labels_of_another_kind_are_told_with_their_samples():
    options = {"block_size": 4, "progress": False}
    # From one float in a block, all of them.
    for label, kind in ((1.0, "torch.float"), ("no", "tuple|list"), (None, "NoneType")):
        with pytest.raises((ValueError, TypeError)) as error:
            psg.score_pool(make_model(), labelled(4, label), **options)
        told = "".join(getattr(error.value, "__notes__", ())) + str(error.value)
        assert re.search(kind, told), told
        assert "samples 4 to 7" in told
    with pytest.raises(ValueError, match=r"classes as integers.*for samples 4 to 7"):
        psg.score_pool(make_model(), labelled(4, 1.0), score="el2n", **options)


def test_integers_of_any_width_are_classes_and_floats_may_be_probabilities():
    options = {"block_size": 4, "progress": False}
    truth = psg.score_pool(make_model(), Pool(), **options).scores

    def converted(function):
        return psg.score_pool(
            make_model(), Pool(), split=lambda b: (b[0], function(b[1])), **options
        ).scores

    for dtype in (torch.int32, torch.uint8, torch.int8):
        np.testing.assert_array_equal(converted(lambda y, to=dtype: y.to(to)), truth)
    found = converted(lambda y: F.one_hot(y, CLASSES).float())
    np.testing.assert_allclose(found, truth, rtol=1e-5)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_any_error_says_which_samples_were_scored():
    def loss(logits, targets):
        if (targets == CLASSES).any():
            raise ZeroDivisionError("no")
        return F.cross_entropy(logits, targets, reduction="none")

    options = {"block_size": 4, "progress": False}
    with pytest.raises(ZeroDivisionError) as error:
        psg.score_pool(make_model(), labelled(13, CLASSES), loss=loss, **options)
    assert error.value.__notes__ == ["while samples 12 to 15 of the pool were scored"]


@pytest.mark.parametrize("labels", ["given", "pseudo", "expected"])
def test_a_function_of_factors_is_a_score(labels, tmp_path):
    model = make_model()
    options = {"labels": labels, "block_size": 4, "progress": False}
    seen = []

    def doubled(factors: psg.Factors) -> torch.Tensor:
        seen.append((len(factors), set(factors.shapes)))
        return 2 * factors.norms()

    found = psg.score_pool(model, Pool(), score=doubled, **options)
    truth = by_hand(model, "grad_norm", labels)
    np.testing.assert_allclose(found.scores, 2 * truth, rtol=1e-4)
    assert found.name == "doubled"
    names = {name for name, _ in model.named_parameters()}
    assert all(each == (4, names) for each in seen)
    bias = psg.score_pool(
        model, Pool(), score=lambda f: f.norms(), params=["5.bias"], **options
    )
    assert (bias.scores < found.scores).all()


@pytest.mark.parametrize(
    ("score", "told"),
    [
        (lambda f: f.norms().sum(), r"a Tensor of shape \(\) for factors of 4"),
        (lambda f: f.gram(), r"a Tensor of shape \(4, 4\) for factors of 4"),
        (lambda f: f.norms().tolist(), "a list for factors of 4"),
    ],
)
def test_what_a_function_of_factors_returns_is_checked(score, told):
    with pytest.raises(ValueError, match=rf"score= returned {told} samples; return a"):
        psg.score_pool(make_model(), Pool(), score=score, block_size=4, progress=False)


def drawn(count: int = 50) -> psg.PoolScores:
    """Returns floats of every size, some of which need all their digits."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 0x7F7FFFFF, count, dtype=np.int32)
    return psg.PoolScores(bits.view(np.float32), "loss")


def test_nan_has_no_rank():
    values = np.array([1, np.nan, -np.nan, 3, np.inf, np.nan], dtype=np.float32)
    bad = psg.PoolScores(values, "loss")
    for k in (0, 1, 6):
        with pytest.raises(
            ValueError,
            match=r"3 of 6 scores are NaN, .* \(samples 1, 2, 5\): .*skip_nan",
        ):
            bad.top(k)
    assert bad.top(3, skip_nan=True).tolist() == [4, 3, 0]
    with pytest.raises(ValueError, match=r"<= 3, got 4"):
        bad.top(4, skip_nan=True)
    with pytest.raises(TypeError, match="skip_nan must be True or False, got 'yes'"):
        bad.top(1, skip_nan="yes")
    many = psg.PoolScores(np.full(10, np.nan, dtype=np.float32), "loss")
    with pytest.raises(ValueError, match=r"\(samples 0, 1, 2, 3, 4, \.\.\.\)"):
        many.top(1)
    assert many.top(0, skip_nan=True).tolist() == []


def test_the_repr_is_one_short_line():
    values = np.arange(100_000, dtype=np.float32)
    values[7] = np.nan
    text = "PoolScores('loss' of 100000 samples, 0 to 1e+05, 1 NaN)"
    assert repr(psg.PoolScores(values, "loss")) == text
    assert repr(psg.PoolScores(values[:0], "loss")) == "PoolScores('loss' of 0 samples)"


def test_the_highest_come_first_and_ties_by_index():
    ties = psg.PoolScores(np.array([1, 3, 2, 3], dtype=np.float32), "loss")
    for scores in (ties, drawn()):
        order = sorted(range(len(scores)), key=lambda i: (-scores.scores[i], i))
        for k in (0, 1, 3, len(scores)):
            assert scores.top(k).tolist() == order[:k]
    for wrong in (5, -1):
        with pytest.raises(ValueError, match=f">= 0 and <= 4, got {wrong}"):
            ties.top(wrong)


@pytest.mark.parametrize("kind", ["frame", "csv"])
def test_every_bit_is_kept(kind, tmp_path):
    scores, path = drawn(), tmp_path / "scores"
    if kind == "frame":
        back = scores.to_frame()
    else:
        scores.to_csv(path)
        back = pd.read_csv(path, dtype={"score": np.float32})
    assert back.columns.tolist() == ["index", "score"]
    assert back["index"].tolist() == list(range(50))
    assert_same_bits(back["score"].to_numpy(), scores.scores)
