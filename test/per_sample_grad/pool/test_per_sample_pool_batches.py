"""A batch of a pool may be a tensor, a pair, a dict, or what the user splits."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import torch
from support.per_sample_grad.pool import (
    Vectors,
    assert_same_bits,
    dense_model,
    scores,
)
from torch import nn
from torch.utils.data import DataLoader

import per_sample_grad as psg

COUNT = 11
Pair = collections.namedtuple("Pair", "inputs targets")


def mapped(function) -> list:
    """Returns the pool with a function applied to every item."""
    return [function(*Vectors(COUNT)[index]) for index in range(COUNT)]


@dataclasses.dataclass
class Output:
    """What models of Hugging Face's transformers return."""

    logits: torch.Tensor
    hidden_states: tuple = ()


class Keyworded(nn.Module):
    """A model that takes its inputs in two halves, as keywords."""

    def __init__(self, wrap=Output) -> None:
        super().__init__()
        self.inner = dense_model()
        self.wrap = wrap

    def forward(self, left: torch.Tensor, right: torch.Tensor):
        return self.wrap(self.inner(torch.cat([left, right], 1)))


def halves(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"left": x[:30], "right": x[30:]}


@pytest.fixture
def truth() -> np.ndarray:
    return scores(dense_model(), Vectors(COUNT))


@pytest.mark.parametrize("key", ["labels", "label"])
@pytest.mark.parametrize("wrap", [Output, lambda x: {"logits": x}, lambda x: x])
def test_dicts_are_keywords_and_labels(key, wrap, truth):
    pool = mapped(lambda x, y: {**halves(x), key: y})
    assert_same_bits(scores(Keyworded(wrap), pool), truth)


@pytest.mark.parametrize("score", ["last_layer_grad_norm", "el2n", "loss", "egl"])
def test_every_score_takes_dicts(score):
    pool = mapped(lambda x, y: {**halves(x), "labels": y})
    expected = scores(dense_model(), Vectors(COUNT), score=score)
    assert_same_bits(scores(Keyworded(), pool, score=score), expected)


def test_dicts_without_labels_have_pseudo_labels():
    expected = scores(dense_model(), Vectors(COUNT), labels="pseudo")
    pool = mapped(lambda x, y: halves(x))
    assert_same_bits(scores(Keyworded(), pool, labels="pseudo"), expected)
    with pytest.raises(ValueError, match="have no targets; give pairs"):
        scores(Keyworded(), pool)


def test_pairs_of_any_kind(truth):
    model = dense_model()
    assert_same_bits(scores(model, mapped(Pair)), truth)
    assert_same_bits(scores(model, mapped(lambda x, y: [x, y])), truth)
    nested = mapped(lambda x, y: (halves(x), y))
    assert_same_bits(scores(Keyworded(), nested), truth)
    tuples = mapped(lambda x, y: (tuple(halves(x).values()), y))  # by position
    assert_same_bits(scores(Keyworded(), tuples), truth)


def test_split_and_forward_are_the_users(truth):
    pool = mapped(
        lambda x, y: {"id": "a sample", "x": {"deep": x}, "class": y, "no": 0}
    )
    found = scores(
        dense_model(),
        DataLoader(pool, batch_size=5),
        split=lambda batch: (batch["x"], batch["class"]),
        forward=lambda model, inputs: model(inputs["deep"]),
    )
    assert_same_bits(found, truth)


def test_targets_of_any_structure_reach_the_loss(truth):
    pool = mapped(lambda x, y: (x, {"class": y, "weight": torch.tensor(2.0)}))

    def weighted(logits, targets):
        losses = nn.functional.cross_entropy(logits, targets["class"], reduction="none")
        return losses * targets["weight"]

    found = scores(dense_model(), pool, loss=weighted)
    np.testing.assert_allclose(found, 2 * truth, rtol=1e-5)
    columns = mapped(lambda x, y: (x, torch.tensor([y])))
    for wrong in (pool, columns, mapped(lambda x, y: (x, float(y)))):
        with pytest.raises(ValueError, match="el2n needs targets of shape"):
            scores(dense_model(), wrong, score="el2n")


def test_targets_may_be_wider_than_the_model():
    """A regression has float64 targets: Python numbers are collated so."""
    model = nn.Sequential(dense_model(), nn.Linear(4, 1))

    def squared(out, targets):
        return (out.squeeze(1) - targets).square()

    pool = mapped(lambda x, y: (x, float(y)))
    narrow = mapped(lambda x, y: (x, torch.tensor(float(y))))
    found = scores(model, pool, loss=squared)
    np.testing.assert_allclose(found, scores(model, narrow, loss=squared), rtol=1e-5)
    x, y = torch.utils.data.default_collate([pool[i] for i in range(3)])
    with psg.capture(model) as recorded:
        losses = squared(model(x), y)
    factors = recorded.backward(losses)
    assert losses.dtype == torch.float64
    assert factors.gram().dtype == torch.float32
    sums = factors.weighted_sum(torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(factors.dot(sums), factors.gram().sum(1))


@pytest.mark.parametrize(
    ("item", "error", "match"),
    [
        (lambda x, y: (x, y, y), ValueError, "has 3 items; understood are a tensor"),
        (lambda x, y: "text", ValueError, "has 4 items; understood are"),
        (lambda x, y: {"label": y}, ValueError, "a dict of 'label', and it is not"),
        (
            lambda x, y: {"x": x, "label": y, "labels": y},
            ValueError,
            "dict of 'x', 'label', 'labels', and it is not",
        ),
        (lambda x, y: ("text", y), TypeError, "keyword|missing|positional"),
    ],
    ids=["three", "texts", "no-inputs", "two-targets", "text-inputs"],
)
def test_what_is_not_understood_is_an_error(item, error, match):
    with pytest.raises(error, match=match):
        scores(dense_model(), mapped(item))


def test_a_batch_of_an_unknown_type_is_an_error():
    class Batch:
        def __init__(self, samples) -> None:
            self.x = torch.stack([x for x, _ in samples])

    pool = DataLoader(Vectors(COUNT), batch_size=4, collate_fn=Batch)
    with pytest.raises(TypeError, match=r"batch of the pool is a Batch; .* split="):
        scores(dense_model(), pool)
    inputs_of_a_kind = {"split": lambda batch: (batch, None), "labels": "pseudo"}
    with pytest.raises(TypeError, match=r"the inputs are a Batch; .* forward="):
        scores(dense_model(), pool, **inputs_of_a_kind)


def test_what_split_and_forward_return_is_checked():
    with pytest.raises(TypeError, match="split= returned a Tensor; return a pair"):
        scores(dense_model(), Vectors(COUNT), split=lambda batch: batch[0])
    with pytest.raises(TypeError, match="split= returned a list of 3; return a pair"):
        scores(dense_model(), Vectors(COUNT), split=lambda batch: [1, 2, 3])
    model = Keyworded(lambda x: [x])
    with pytest.raises(TypeError, match=r"gave a list without \.logits.*forward="):
        scores(model, mapped(lambda x, y: {**halves(x), "labels": y}))


def test_tokens_with_their_own_loss():
    """In a language model every sample has a sequence of targets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9))
    pool = []
    for index in range(COUNT):
        ids = torch.randint(0, 9, (6,))
        labels = torch.where(torch.arange(6) < 1 + index % 5, ids, -100)
        pool.append({"input_ids": ids, "labels": labels})

    def next_token(logits, labels):
        return psg.token_cross_entropy(logits[:, :-1], labels[:, 1:])

    found = scores(
        model, pool, loss=next_token, forward=lambda m, batch: m(batch["input_ids"])
    )
    for item, score in zip(pool, found):
        loss = next_token(model(item["input_ids"][None]), item["labels"][None])
        grads = torch.autograd.grad(loss.sum(), list(model.parameters()))
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        np.testing.assert_allclose(score, norm, rtol=1e-4, atol=1e-7)
