"""A batch of a pool may be a tensor, a pair, a dict, or what the user splits."""

from __future__ import annotations

import collections
import types

import numpy as np
import pytest
import torch
from support.per_sample_grad.gradient_oracle import captured
from support.per_sample_grad.layer_cases import Apply
from support.per_sample_grad.pool import Vectors, assert_same_bits, dense_model, scores
from torch import nn
from torch.utils.data import DataLoader, default_collate

COUNT = 11
Pair = collections.namedtuple("Pair", "inputs targets")


def mapped(function) -> list:
    """Returns the pool with a function applied to every item."""
    return [function(*Vectors(COUNT)[index]) for index in range(COUNT)]


class Keyworded(Apply):
    """A model that takes its inputs in two halves, as keywords.

    What it returns looks like that of models of Hugging Face's transformers.
    """

    def __init__(self, wrap=lambda x: types.SimpleNamespace(logits=x)) -> None:
        super().__init__(wrap, inner=dense_model())

    def forward(self, left: torch.Tensor, right: torch.Tensor):
        return self.function(self.inner(torch.cat([left, right], 1)))


def halves(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"left": x[:30], "right": x[30:]}


def labelled(x: torch.Tensor, y: int) -> dict:
    return {**halves(x), "labels": y}


OWN = {  # a dict that is split and given to the model by the user's functions
    "split": lambda batch: (batch["x"], batch["class"]),
    "forward": lambda model, inputs: model(inputs["deep"]),
}


@pytest.mark.parametrize(
    ("model", "item", "options"),
    [
        *((Keyworded(*wrap), item, {})
          for wrap in ((), (lambda x: {"logits": x},), (torch.clone,))
          for item in (labelled, lambda x, y: {**halves(x), "label": y})),
        *((Keyworded(), labelled, {"score": score})
          for score in ("last_layer_grad_norm", "el2n", "loss", "egl")),
        (Keyworded(), lambda x, y: halves(x), {"labels": "pseudo"}),
        (dense_model(), Pair, {}), (dense_model(), lambda x, y: [x, y], {}),
        (Keyworded(), lambda x, y: (halves(x), y), {}),
        (Keyworded(), lambda x, y: (tuple(halves(x).values()), y), {}),  # by position
        (dense_model(),
         lambda x, y: {"id": "a sample", "x": {"deep": x}, "class": y, "no": 0}, OWN),
        (dense_model(), lambda x, y: {"x": x, "labels": y},
         {"forward": lambda model, inputs: model(inputs["x"])}),
    ],
)  # fmt: skip
def test_batches_of_every_kind_have_the_same_bits(model, item, options):
    found = scores(model, DataLoader(mapped(item), batch_size=5), **options)
    given = {name: each for name, each in options.items() if name not in OWN}
    assert_same_bits(found, scores(dense_model(), Vectors(COUNT), **given))


def test_targets_of_any_structure_reach_the_loss():
    pool = mapped(lambda x, y: (x, {"class": y, "weight": torch.tensor(2.0)}))

    def weighted(logits, targets):
        losses = nn.functional.cross_entropy(logits, targets["class"], reduction="none")
        return losses * targets["weight"]

    found = scores(dense_model(), pool, loss=weighted)
    truth = scores(dense_model(), Vectors(COUNT))
    np.testing.assert_allclose(found, 2 * truth, rtol=1e-5)
    for wrong in (pool, mapped(lambda x, y: (x, torch.tensor([y])))):
        with pytest.raises(ValueError, match=r"el2n needs \(\d,\) classes"):
            scores(dense_model(), wrong, score="el2n")


def test_targets_may_be_wider_than_the_model():
    """A regression has float64 targets: Python numbers are collated so."""
    model = nn.Sequential(dense_model(), nn.Linear(4, 1))

    def squared(out, targets):
        return (out.squeeze(1) - targets).square()

    wide = mapped(lambda x, y: (x, float(y)))
    narrow = mapped(lambda x, y: (x, torch.tensor(float(y))))
    found = [scores(model, pool, loss=squared) for pool in (wide, narrow)]
    np.testing.assert_allclose(*found, rtol=1e-5)
    x, y = default_collate(wide)
    recorded, losses = captured(model, lambda m: squared(m(x), y))
    factors = recorded.backward(losses)
    assert (losses.dtype, factors.gram().dtype) == (torch.float64, torch.float32)
    sums = factors.weighted_sum(torch.ones_like(losses))
    torch.testing.assert_close(factors.dot(sums), factors.gram().sum(1))


Batch = type("Batch", (), {})  # of which nothing is known
OF_A_KIND = DataLoader(Vectors(COUNT), batch_size=4, collate_fn=lambda _: Batch())


@pytest.mark.parametrize(
    ("pool", "options", "error", "match"),
    [
        (mapped(lambda x, y: (x, y, y)), {}, ValueError,
         "has 3 items; understood are a tensor"),
        (mapped(lambda x, y: "text"), {}, ValueError, "has 4 items; understood are"),
        (mapped(lambda x, y: {"label": y}), {}, ValueError,
         "a dict of 'label', and it is not"),
        (mapped(lambda x, y: {"x": x, "label": y, "labels": y}), {}, ValueError,
         "dict of 'x', 'label', 'labels', and it is not"),
        (mapped(lambda x, y: ("text", y)), {}, TypeError, "keyword|missing|positional"),
        (mapped(lambda x, y: halves(x)), {}, ValueError, "have no targets; give pairs"),
        (OF_A_KIND, {}, TypeError, r"batch of the pool is a Batch; .* split="),
        (OF_A_KIND, {"split": lambda batch: (batch, None), "labels": "pseudo"},
         TypeError, r"the inputs are a Batch; .* forward="),
        (Vectors(COUNT), {"split": lambda batch: batch[0]}, TypeError,
         "split= returned a Tensor; return a pair"),
        (Vectors(COUNT), {"split": lambda batch: [1, 2, 3]}, TypeError,
         "split= returned a list of 3; return a pair"),
        (mapped(labelled), {"model": Keyworded(lambda x: [x])}, TypeError,
         r"gave a list without \.logits.*forward="),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_an_error(pool, options, error, match):
    with pytest.raises(error, match=match):
        scores(**{"model": dense_model(), "pool": pool, **options})
