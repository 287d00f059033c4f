"""Scores of a pool equal those of a loop, for every score, labels and block size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.pool import CLASSES, Pool, by_hand, make_model
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import per_sample_grad as psg


class Inputs(Pool):
    """A pool without targets."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index)[0]


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
    with pytest.raises(ValueError, match="have no targets; give pairs"):
        psg.score_pool(model, Inputs(), batch_size=8, progress=False)


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


class Singles(Pool):
    """A pool of tuples of one item."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (super().__getitem__(index)[0],)


def test_given_labels_must_be_there():
    with pytest.raises(ValueError, match="have no targets; give pairs"):
        psg.score_pool(make_model(), Singles(), batch_size=4, progress=False)


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
    with pytest.raises(ValueError, match=r"score must be .* 'loss', got 'no'"):
        psg.score_pool(model, Pool(), score="no", batch_size=2)
    with pytest.raises(ValueError, match=r"labels must be .* 'expected', got 'no'"):
        psg.score_pool(model, Pool(), labels="no", batch_size=2)
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1, got 0"):
        psg.score_pool(model, Pool(), batch_size=0)
    with pytest.raises(ValueError, match="block_size must be an integer >= 1, got -1"):
        psg.score_pool(model, Pool(), block_size=-1)
    with pytest.raises(ValueError, match="batch_size=None does not collate"):
        psg.score_pool(model, DataLoader(Pool(), batch_size=None))
    with pytest.raises(ValueError, match="part_size must be an integer >= 1, got 0"):
        psg.score_pool(model, Pool(), batch_size=2, part_size=0)
    with pytest.raises(TypeError, match="no length"):
        psg.score_pool(model, Stream(), batch_size=2)
