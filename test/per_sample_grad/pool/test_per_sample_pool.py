"""Scores of a pool equal those of a loop, for every score, labels and block size."""

from __future__ import annotations

import functools
import re

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad.layer_cases import WithParameter
from support.per_sample_grad.pool import (
    CLASSES,
    COUNT,
    Pool,
    Vectors,
    assert_same_bits,
    by_hand,
    dense_model,
    make_model,
    scores,
)
from torch import nn
from torch.utils.data import DataLoader, default_collate

import per_sample_grad as psg

SCORES = ["grad_norm", "last_layer_grad_norm", "el2n", "loss", "grand"]


@pytest.mark.parametrize("labels", ["given", "pseudo", "expected"])
@pytest.mark.parametrize("score", SCORES)
def test_scores_equal_the_loop(score, labels):
    model = make_model().train()
    found = scores(model, score=score, labels=labels, batch_size=5)
    np.testing.assert_allclose(found, by_hand(model, score, labels), rtol=1e-4)
    assert all(module.training for module in model.modules())


def test_expected_gradient_length_needs_no_labels():
    expected = by_hand(make_model(), "grad_norm", "expected")
    np.testing.assert_allclose(scores(pool=INPUTS, score="egl"), expected, rtol=1e-4)


def test_several_models_are_averaged():
    models = [make_model(0), make_model(1)]
    truth = np.mean([by_hand(m, "grand", "given") for m in models], axis=0)
    np.testing.assert_allclose(scores(models, score="grand"), truth, rtol=1e-4)


def test_the_last_layer_is_not_guessed():
    """The model's last parameter belongs to no module with a rule."""
    function, body = (lambda m, x: m.body(x.flatten(1)) @ m.p), nn.Linear(12, 5)
    model = WithParameter(function, 5, CLASSES, body=body)
    options = {"model": model, "score": "last_layer_grad_norm"}
    with pytest.raises(ValueError, match=r"accounts for p.*last_layer="):
        scores(**options)
    scores(last_layer="body", **options)


def test_mixed_precision_stays_close():
    truth = by_hand(make_model(), "grad_norm", "given")
    found = scores(autocast=torch.bfloat16)
    assert np.linalg.norm(found - truth) <= 2e-2 * np.linalg.norm(truth)


INPUTS = [Pool()[i][0] for i in range(COUNT)]


def projection_of(model: nn.Module, size: int = 60, seed: int = 3) -> psg.Projection:
    return psg.Projection(dict(model.named_parameters()), size, seed=seed)


NO_VECTOR = r"score= returned a Tensor of shape {} for factors of 4 samples; return a"
OWN_ROWS = {"score": projection_of(make_model())}


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"score": "no"}, ValueError, "score must be .* or a Projection, got 'no'"),
        ({"labels": "no"}, ValueError, "labels must be .* 'expected', got 'no'"),
        *(({name: 0}, ValueError, f"{name} must be an integer >= 1, got 0")
          for name in ("batch_size", "block_size", "part_size")),
        ({"tag": 1}, TypeError, "tag must be a text"),
        ({"folder": 1}, TypeError, "folder must be the path of a folder, got 1"),
        ({"folder": __file__}, NotADirectoryError, "folder= is a file, or below one"),
        ({"folder": f"{__file__}/a"}, NotADirectoryError, "give the path of a folder"),
        ({"autocast": "bf16"}, TypeError, "autocast must be a torch.dtype, .*'bf16'"),
        ({"pool": DataLoader(Pool(), batch_size=None)}, ValueError, "does not collate"),
        ({"pool": iter(())}, TypeError, "no length"),
        *(({"model": wrong}, TypeError, r"model must be a torch\.nn\.Module or a")
          for wrong in (lambda x: x, nn.Linear, {}, [nn.Identity(), None], [])),
        ({"model": nn.Linear(3, 2, device="meta"), "pool": [(torch.ones(3), 0)]},
         ValueError, r"on meta.*move the model with model\.to"),
        *(({"pool": pool}, ValueError, "have no targets; give pairs")
          for pool in (INPUTS, [(x,) for x in INPUTS])),
        ({"params": ["5.weight"], "score": "last_layer_grad_norm"}, ValueError,
         "name the layer with last_layer="),
        *(({"loss": F.cross_entropy, "score": score, "labels": labels}, ValueError,
           r"shape \(\) for 4 samples")
          for score in ("loss", "grad_norm") for labels in ("given", "expected")),
        ({"score": lambda f: f.norms().sum()}, ValueError, NO_VECTOR.format(r"\(\)")),
        ({"score": lambda f: f.gram()}, ValueError, NO_VECTOR.format(r"\(4, 4\)")),
        ({"score": lambda f: f.norms().tolist()}, ValueError,
         "score= returned a list for factors of 4 samples; return a"),
        ({"params": ["0.weight"], **OWN_ROWS}, ValueError,
         "of parameters that are not selected"),
        ({"labels": "expected", **OWN_ROWS}, ValueError,
         "labels must be one of 'given', 'pseudo'"),
    ],
)  # fmt: skip
def test_arguments_are_checked(options, error, told):
    with pytest.raises(error, match=told):
        scores(**options)


def test_an_unknown_option_is_told_with_those_that_are_known():
    with pytest.raises(TypeError, match="option batchsize, fall_back; all") as error:
        scores(fall_back="loop", batchsize=2)
    told = str(error.value).partition("allowed are ")[2].split(", ")
    assert {"batch_size", "folder", "tag", "fallback", "params", "check"} <= set(told)
    assert not {"model", "loader", "options"} & set(told)


def labelled(index: int, label: object) -> list:
    """Returns a pool with one label of its own."""
    return [(x, label if i == index else i % CLASSES) for i, x in enumerate(INPUTS)]


PLAIN_LOSSES = {
    "default": {},
    "module": {"loss": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)},
    "partial": {"loss": functools.partial(F.cross_entropy, reduction="none")},
    "el2n": {"score": "el2n"},
}


@pytest.mark.parametrize("label", [CLASSES, -1])
@pytest.mark.parametrize("kind", PLAIN_LOSSES)
@pytest.mark.parametrize("index", [0, 13, COUNT - 1])
def test_a_label_that_is_not_a_class_is_told_with_its_sample(index, kind, label):
    told = rf"the label of sample {index} is {label}, but the model has {CLASSES} cl"
    with pytest.raises(ValueError, match=told):
        scores(pool=labelled(index, label), **PLAIN_LOSSES[kind])
    # The labels that nobody asked for need not be classes.
    scores(pool=labelled(index, label), labels="pseudo", **PLAIN_LOSSES[kind])


def test_an_ignored_label_is_for_the_losses_that_ignore_it():
    ignoring = functools.partial(PLAIN_LOSSES["partial"]["loss"], ignore_index=7)
    assert scores(pool=labelled(5, -100))[5] == 0
    assert scores(pool=labelled(5, 7), loss=ignoring)[5] == 0
    with pytest.raises(ValueError, match="the label of sample 5 is -100"):
        scores(pool=labelled(5, -100), score="el2n")


def test_labels_of_another_kind_are_told_with_their_samples():
    # From one float in a block, all of them.
    for label, kind in ((1.0, "torch.float"), ("no", "tuple|list"), (None, "NoneType")):
        with pytest.raises((ValueError, TypeError)) as error:
            scores(pool=labelled(4, label))
        told = "".join(getattr(error.value, "__notes__", ())) + str(error.value)
        assert re.search(kind, told), told
        assert "samples 4 to 7" in told
    with pytest.raises(ValueError, match=r"classes as integers.*for samples 4 to 7"):
        scores(pool=labelled(4, 1.0), score="el2n")


def test_integers_of_any_width_are_classes_and_floats_may_be_probabilities():
    for change in (torch.Tensor.int, torch.Tensor.byte, torch.Tensor.char,
                   lambda y: F.one_hot(y, CLASSES).float()):  # fmt: skip
        found = scores(split=lambda batch, to=change: (batch[0], to(batch[1])))
        np.testing.assert_allclose(found, scores(), rtol=1e-5)


@pytest.mark.parametrize("labels", ["given", "pseudo", "expected"])
def test_a_function_of_factors_is_a_score(labels):
    model, seen = make_model(), []

    def doubled(factors: psg.Factors) -> torch.Tensor:
        seen.append((len(factors), set(factors.shapes)))
        return 2 * factors.norms()

    options = {"labels": labels, "block_size": 4, "progress": False}
    found = psg.score_pool(model, Pool(), score=doubled, **options)
    truth = by_hand(model, "grad_norm", labels)
    np.testing.assert_allclose(found.scores, 2 * truth, rtol=1e-4)
    assert found.name == "doubled"
    assert all(each == (4, {*dict(model.named_parameters())}) for each in seen)
    bias = scores(model, score=doubled, params=["5.bias"], labels=labels)
    assert (bias < found.scores).all()


def projected(model: nn.Module, labels: str = "given") -> np.ndarray:
    """Returns the projections of all gradients, which are formed in float64."""
    model = model.double()
    x, y = default_collate([Vectors()[i] for i in range(COUNT)])
    with psg.capture(model) as recorded:
        logits = model(x.double())
        y = y if labels == "given" else logits.argmax(1)
        losses = F.cross_entropy(logits, y, reduction="none")
    return recorded.project(losses, projection_of(model)).float().numpy()


@pytest.mark.parametrize("labels", ["given", "pseudo"])
def test_a_row_is_the_projection_of_a_samples_gradient(labels, tmp_path):
    model = dense_model()
    score = {"score": projection_of(model), "labels": labels, "part_size": 8}
    found = scores(model, Vectors(), **score)
    truth = projected(model, labels)
    np.testing.assert_allclose(found, truth, rtol=1e-3, atol=1e-5)
    kept = scores(model.float(), Vectors(), folder=tmp_path, **score)
    assert_same_bits(kept, found)
    assert_same_bits(np.load(tmp_path / "part-00000001.npy"), found[8:16])


def test_a_projection_with_room_for_all_keeps_the_gradients():
    model = dense_model()
    projection = projection_of(model, 10**6)
    rows = psg.score_pool(model, Vectors(), score=projection, progress=False)
    norms = np.linalg.norm(rows.scores, axis=1)
    np.testing.assert_allclose(norms, scores(model, Vectors()), rtol=1e-4)
    with pytest.raises(ValueError, match="rows of a projection have no rank; sort"):
        rows.top(3)


def drawn(count: int = 50) -> psg.PoolScores:
    """Returns floats of every size, some of which need all their digits."""
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 0x7F7FFFFF, count, dtype=np.int32)
    return psg.PoolScores(bits.view(np.float32), "loss")


def losses(*values: float) -> psg.PoolScores:
    return psg.PoolScores(np.array(values, dtype=np.float32), "loss")


def test_nan_has_no_rank_and_is_counted():
    bad = losses(1, np.nan, -np.nan, 3, np.inf, np.nan)
    for k in (0, 1, 6):
        told = r"3 of 6 scores are NaN, .* \(samples 1, 2, 5\): .*skip_nan"
        with pytest.raises(ValueError, match=told):
            bad.top(k)
    assert bad.top(3, skip_nan=True).tolist() == [4, 3, 0]
    with pytest.raises(ValueError, match=r"<= 3, got 4"):
        bad.top(4, skip_nan=True)
    with pytest.raises(TypeError, match="skip_nan must be True or False, got 'yes'"):
        bad.top(1, skip_nan="yes")
    many = losses(*[np.nan] * 100, 7)
    with pytest.raises(ValueError, match=r"\(samples 0, 1, .* and 88 more\)"):
        many.top(1)
    assert many.top(0, skip_nan=True).tolist() == []
    assert repr(many) == "PoolScores('loss' of 101 samples, 7 to 7, 100 NaN)"
    assert repr(losses()) == "PoolScores('loss' of 0 samples)"


def test_the_highest_come_first_and_ties_by_index():
    ties = losses(1, 3, 2, 3)
    for given in (ties, drawn()):
        order = sorted(range(len(given)), key=lambda i: (-given.scores[i], i))
        for k in (0, 1, 3, len(given)):
            assert given.top(k).tolist() == order[:k]
    for wrong in (5, -1):
        with pytest.raises(ValueError, match=f">= 0 and <= 4, got {wrong}"):
            ties.top(wrong)


def test_every_bit_is_kept(tmp_path):
    given, path = drawn(), tmp_path / "scores"
    given.to_csv(path)
    for back in (given.to_frame(), pd.read_csv(path, dtype={"score": np.float32})):
        assert back.columns.tolist() == ["index", "score"]
        assert back["index"].tolist() == list(range(50))
        assert_same_bits(back["score"].to_numpy(), given.scores)
