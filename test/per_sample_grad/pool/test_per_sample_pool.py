"""Scores of a pool equal those of a loop, for every score, labels and block size."""

from __future__ import annotations

import functools
import re
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad.pool import CLASSES, COUNT, Pool, by_hand, make_model
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import per_sample_grad as psg


class Inputs(Pool):
    """A pool without targets."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index)[0]


class Singles(Inputs):
    """A pool of tuples of one item."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (super().__getitem__(index),)


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
    model = make_model()
    found = psg.score_pool(model, Inputs(), score="egl", batch_size=8, progress=False)
    expected = by_hand(model, "grad_norm", "expected")
    np.testing.assert_allclose(found.scores, expected, rtol=1e-4)
    for pool in (Inputs(), Singles()):
        with pytest.raises(ValueError, match="have no targets; give pairs"):
            psg.score_pool(model, pool, batch_size=8, progress=False)


@pytest.mark.parametrize("block_size", [1, 4, 23, 64])
def test_blocks_of_any_size_score_alike(block_size):
    model = make_model()
    truth = by_hand(model, "grad_norm", "given")
    found = psg.score_pool(model, Pool(), block_size=block_size, progress=False)
    np.testing.assert_allclose(found.scores, truth, rtol=1e-4)


def test_several_models_are_averaged():
    models = [make_model(0), make_model(1)]
    found = psg.score_pool(models, Pool(), score="grand", batch_size=6, progress=False)
    truth = np.mean([by_hand(m, "grand", "given") for m in models], axis=0)
    np.testing.assert_allclose(found.scores, truth, rtol=1e-4)


class Headed(nn.Module):
    """A model whose last parameters belong to no module with a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 5)
        self.head = nn.Parameter(torch.randn(5, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.flatten(1)) @ self.head


def test_the_last_layer_is_not_guessed():
    options = {"score": "last_layer_grad_norm", "batch_size": 4, "progress": False}
    with pytest.raises(ValueError, match=r"accounts for head.*last_layer="):
        psg.score_pool(Headed(), Pool(), **options)
    psg.score_pool(Headed(), Pool(), last_layer="body", **options)
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


class Stream(IterableDataset):
    """A dataset without a length."""

    def __iter__(self):
        return iter(())


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
        psg.score_pool(model, Stream(), batch_size=2)
    with pytest.raises(TypeError, match="option batchsize, fall_back; all") as error:
        psg.score_pool(model, Pool(), fall_back="loop", batchsize=2)
    told = str(error.value).partition("allowed are ")[2].split(", ")
    assert {"batch_size", "folder", "tag", "fallback", "params", "check"} <= set(told)
    assert not {"model", "loader", "options"} & set(told)
    for wrong in (lambda x: x, nn.Linear, model.state_dict(), [model, None], [], None):
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module or a"):
            psg.score_pool(wrong, Pool())


class Labelled(Pool):
    """A pool with one label of its own."""

    def __init__(self, index: int, label: object) -> None:
        super().__init__()
        self.index, self.label = index, label

    def __getitem__(self, index: int):
        inputs, target = super().__getitem__(index)
        return inputs, self.label if index == self.index else target


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
    options = {"block_size": 4, "progress": False, **PLAIN_LOSSES[kind]}
    with pytest.raises(ValueError, match=told):
        psg.score_pool(make_model(), Labelled(index, label), **options)
    # The labels that nobody asked for need not be classes.
    options["labels"] = "pseudo"
    psg.score_pool(make_model(), Labelled(index, label), **options)


def test_an_ignored_label_is_for_the_losses_that_ignore_it():
    options = {"block_size": 4, "progress": False}
    for number, loss in ((-100, {}), (7, {"loss": PLAIN_LOSSES["partial"]["loss"]})):
        if loss:
            loss = {"loss": functools.partial(loss["loss"], ignore_index=number)}
        found = psg.score_pool(make_model(), Labelled(5, number), **options, **loss)
        assert found.scores[5] == 0
    with pytest.raises(ValueError, match="the label of sample 5 is -100"):
        psg.score_pool(make_model(), Labelled(5, -100), score="el2n", **options)


def test_labels_of_another_kind_are_told_with_their_samples():
    options = {"block_size": 4, "progress": False}
    # From one float in a block, all of them.
    for label, kind in ((1.0, "torch.float"), ("no", "tuple|list"), (None, "NoneType")):
        with pytest.raises((ValueError, TypeError)) as error:
            psg.score_pool(make_model(), Labelled(4, label), **options)
        told = "".join(getattr(error.value, "__notes__", ())) + str(error.value)
        assert re.search(kind, told), told
        assert "samples 4 to 7" in told
    with pytest.raises(ValueError, match=r"classes as integers.*for samples 4 to 7"):
        psg.score_pool(make_model(), Labelled(4, 1.0), score="el2n", **options)


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
        psg.score_pool(make_model(), Labelled(13, CLASSES), loss=loss, **options)
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


def test_a_function_of_factors_may_ask_for_a_direction():
    """The gradients' inner products with that of other samples, for instance."""
    model = make_model().eval()
    x, y = torch.utils.data.default_collate([Pool()[i] for i in range(3)])
    losses = F.cross_entropy(model(x), y, reduction="none")
    grads = torch.autograd.grad(losses.mean(), list(model.parameters()))
    direction = dict(zip(dict(model.named_parameters()), grads))
    found = psg.score_pool(
        model, Pool(), score=lambda f: f.dot(direction), block_size=4, progress=False
    )
    for index in range(3):
        losses = F.cross_entropy(model(x), y, reduction="none")
        own = torch.autograd.grad(losses[index], list(model.parameters()))
        expected = sum((a * b).sum() for a, b in zip(own, grads))
        np.testing.assert_allclose(found.scores[index], expected, rtol=1e-4)


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
