"""Scores of a pool equal those of a loop, for every score, labels and block size."""

import collections
import copy
import functools
import re
import types

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad import captured, norms_of
from support.per_sample_grad.models import Apply
from support.per_sample_grad.pool import Pool, Vectors, assert_same_bits, scores
from torch import nn
from torch.utils.data import DataLoader, default_collate

import per_sample_grad as psg

SCORES = ["grad_norm", "el2n", "loss", "grand"]
INPUTS = [Pool()[i][0] for i in range(Pool.size)]
each_label = pytest.mark.parametrize("labels", ["given", "pseudo", "expected"])


def by_hand(model: nn.Module, score: str, labels: str) -> np.ndarray:
    """Returns the scores of `Pool` in float64, gradients one sample after the other."""
    model = copy.deepcopy(model).double().eval()
    x, y = default_collate([Pool()[i] for i in range(Pool.size)])
    logits = model(x.double())
    chances = logits.softmax(1)

    def scores(targets: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(logits, targets, reduction="none")
        if score == "loss":
            return losses
        if score == "el2n":
            return (chances - F.one_hot(targets, Pool.classes)).norm(dim=1)
        return norms_of(losses, model.parameters())

    if labels == "expected":
        of_classes = [scores(torch.full_like(y, n)) for n in range(Pool.classes)]
        found = (chances * torch.stack(of_classes, 1)).sum(1)
    else:
        found = scores(y if labels == "given" else chances.argmax(1))
    return found.detach().numpy()


@each_label
@pytest.mark.parametrize("score", SCORES)
def test_scores_equal_the_loop(score, labels):
    model = Pool.model().train()
    found = scores(model, score=score, labels=labels, batch_size=5)
    np.testing.assert_allclose(found, by_hand(model, score, labels), rtol=1e-4)
    assert all(module.training for module in model.modules())


def test_expected_gradient_length_needs_no_labels():
    expected = by_hand(Pool.model(), "grad_norm", "expected")
    np.testing.assert_allclose(scores(pool=INPUTS, score="egl"), expected, rtol=1e-4)


def test_mixed_precision_stays_close():
    truth = by_hand(Pool.model(), "grad_norm", "given")

    def forward(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs)

    found = scores(forward=forward, loss=PLAIN_LOSSES["partial"]["loss"])
    assert np.linalg.norm(found - truth) <= 2e-2 * np.linalg.norm(truth)


def labelled(index: int, label: object) -> list:
    labels = [label if i == index else i % Pool.classes for i in range(Pool.size)]
    return [*zip(INPUTS, labels)]


PLAIN_LOSSES = {
    "default": {},
    "module": {"loss": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)},
    "partial": {"loss": functools.partial(F.cross_entropy, reduction="none")},
    "el2n": {"score": "el2n"},
}


@pytest.mark.parametrize("label", [Pool.classes, -1])
@pytest.mark.parametrize("kind", PLAIN_LOSSES)
@pytest.mark.parametrize("index", [0, 13, Pool.size - 1])
def test_a_label_that_is_not_a_class_is_told_with_its_sample(index, kind, label):
    told = rf"label of sample {index} is {label}, but the model has {Pool.classes} clas"
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
    with pytest.raises(ValueError, match=r"labels must be .* for samples 4 to 7"):
        scores(pool=labelled(4, 1.0), score="el2n")


def test_integers_of_any_width_are_classes_and_floats_may_be_probabilities():
    widths = torch.Tensor.int, torch.Tensor.byte, torch.Tensor.char
    for change in (*widths, lambda y: F.one_hot(y, Pool.classes).float()):
        found = scores(split=lambda batch, to=change: (batch[0], to(batch[1])))
        np.testing.assert_allclose(found, scores(), rtol=1e-5)


@each_label
def test_a_function_of_factors_is_a_score(labels):
    model, seen = Pool.model(), []

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


@pytest.mark.parametrize("labels", ["given", "pseudo"])
def test_a_row_is_the_projection_of_a_samples_gradient(labels, tmp_path):
    model = Vectors.model()
    projection = psg.Projection(dict(model.named_parameters()), 60, seed=3)
    score = {"score": projection, "labels": labels, "part_size": 8}
    found = scores(model, Vectors(), **score)
    kept = scores(model, Vectors(), folder=tmp_path, **score)
    assert_same_bits(kept, found)
    model.double()
    x, y = default_collate([Vectors()[i] for i in range(Pool.size)])
    with psg.capture(model) as recorded:
        logits = model(x.double())
        y = y if labels == "given" else logits.argmax(1)
        losses = F.cross_entropy(logits, y, reduction="none")
    truth = recorded.project(losses, projection).float().numpy()
    np.testing.assert_allclose(found, truth, rtol=1e-3, atol=1e-5)
    assert_same_bits(np.load(tmp_path / "part-00000001.npy"), found[8:16])


def losses(*values: float) -> psg.PoolScores:
    return psg.PoolScores(np.array(values, dtype=np.float32), "loss")


# Of every size; some need all their digits.
BITS = np.random.default_rng(0).integers(0, 0x7F7FFFFF, 50, dtype=np.int32)
DRAWN = losses(*BITS.view(np.float32))


def test_nan_has_no_rank_and_is_counted():
    bad = losses(1, np.nan, -np.nan, 3, np.inf, np.nan)
    for k in (0, 1, 6):
        told = r"3 of 6 scores are NaN, .* \(samples 1, 2, 5\): .*skip_nan"
        with pytest.raises(ValueError, match=told):
            bad.top(k)
    assert bad.top(3, skip_nan=True).tolist() == [4, 3, 0]
    with pytest.raises(ValueError, match=r"<= 3, got 4"):
        bad.top(4, skip_nan=True)
    many = losses(*[np.nan] * 100, 7)
    with pytest.raises(ValueError, match=r"\(samples 0, 1, .* and 88 more\)"):
        many.top(1)
    assert many.top(0, skip_nan=True).tolist() == []
    assert repr(many) == "PoolScores('loss' of 101 samples)"


def test_the_highest_come_first_and_ties_by_index():
    ties = losses(1, 3, 2, 3)
    for given in (ties, DRAWN):
        order = sorted(range(len(given)), key=lambda i: (-given.scores[i], i))
        for k in (0, 1, 3, len(given)):
            assert given.top(k).tolist() == order[:k]
    for wrong in (5, -1):
        with pytest.raises(ValueError, match=f">= 0 and <= 4, got {wrong}"):
            ties.top(wrong)
    rows = psg.PoolScores(np.ones((3, 2), np.float32), "rows")
    with pytest.raises(ValueError, match="rows of a projection have no rank; sort"):
        rows.top(1)


def test_every_bit_is_kept(tmp_path):
    frame, path = DRAWN.to_frame(), tmp_path / "scores"
    frame.to_csv(path, index=False)
    for back in (frame, pd.read_csv(path, dtype={"score": np.float32})):
        assert back.columns.tolist() == ["index", "score"]
        assert back["index"].tolist() == list(range(50))
        assert_same_bits(back["score"].to_numpy(), BITS.view(np.float32))


# --- batches: a tensor, a pair, a dict, or what the user splits -----------------------

Pair = collections.namedtuple("Pair", "inputs targets")


def mapped(function) -> list:
    return [function(*Vectors(Pool.size)[index]) for index in range(Pool.size)]


class Keyworded(Apply):
    """A model that takes two keywords, and answers as those of transformers do."""

    def __init__(self, wrap=lambda x: types.SimpleNamespace(logits=x)) -> None:
        super().__init__(wrap, inner=Vectors.model())

    def forward(self, left: torch.Tensor, right: torch.Tensor):
        return self.function(self.inner(torch.cat([left, right], 1)))


def halves(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"left": x[:30], "right": x[30:]}


def keyed(x: torch.Tensor, y: int) -> dict:
    return {**halves(x), "labels": y}


OWN = {  # a dict that is split and given to the model by the user's functions
    "split": lambda batch: (batch["x"], batch["class"]),
    "forward": lambda model, inputs: model(inputs["deep"]),
}


@pytest.mark.parametrize(("model", "item", "options"), [
    *((Keyworded(*wrap), item, {})
      for wrap in ((), (lambda x: {"logits": x},), (torch.clone,))
      for item in (keyed, lambda x, y: {**halves(x), "label": y})),
    *((Keyworded(), keyed, {"score": score})
      for score in ("el2n", "loss", "egl")),
    (Keyworded(), lambda x, y: halves(x), {"labels": "pseudo"}),
    (Vectors.model(), Pair, {}), (Vectors.model(), lambda x, y: [x, y], {}),
    (Keyworded(), lambda x, y: (halves(x), y), {}),
    (Keyworded(), lambda x, y: (tuple(halves(x).values()), y), {}),  # by position
    (Vectors.model(),
     lambda x, y: {"id": "a sample", "x": {"deep": x}, "class": y, "no": 0}, OWN),
    (Vectors.model(), lambda x, y: {"x": x, "labels": y},
     {"forward": lambda model, inputs: model(inputs["x"])}),
])  # fmt: skip
def test_batches_of_every_kind_have_the_same_bits(model, item, options):
    found = scores(model, DataLoader(mapped(item), batch_size=5), **options)
    given = {name: each for name, each in options.items() if name not in OWN}
    assert_same_bits(found, scores(Vectors.model(), Vectors(Pool.size), **given))


def test_targets_of_any_structure_reach_the_loss():
    pool = mapped(lambda x, y: (x, {"class": y, "weight": torch.tensor(2.0)}))

    def weighted(logits, targets):
        losses = nn.functional.cross_entropy(logits, targets["class"], reduction="none")
        return losses * targets["weight"]

    found = scores(Vectors.model(), pool, loss=weighted)
    truth = scores(Vectors.model(), Vectors(Pool.size))
    np.testing.assert_allclose(found, 2 * truth, rtol=1e-5)
    for wrong in (pool, mapped(lambda x, y: (x, torch.tensor([y])))):
        with pytest.raises(ValueError, match=r"labels must be \(4,\) classes"):
            scores(Vectors.model(), wrong, score="el2n")


def test_targets_may_be_wider_than_the_model():
    """A regression has float64 targets: Python numbers are collated so."""
    model = nn.Sequential(Vectors.model(), nn.Linear(4, 1))

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
OF_A_KIND = DataLoader(Vectors(Pool.size), batch_size=4, collate_fn=lambda _: Batch())
NO_VECTOR = r"score= returned a Tensor of shape {} for factors of 4 samples; return a"


@pytest.mark.parametrize(("options", "error", "told"), [
    ({"score": "no"}, ValueError, "score must be .* or a Projection, got 'no'"),
    ({"labels": "no"}, ValueError, "labels must be .* 'expected', got 'no'"),
    ({"tag": 1}, TypeError, "tag must be a text"),
    ({"folder": 1}, TypeError, "not int"),
    ({"folder": __file__}, FileExistsError, "File exists: .*test_per_sample_pool.py"),
    ({"folder": f"{__file__}/a"}, NotADirectoryError, "Not a directory: .*pool.py/a"),
    ({"pool": DataLoader(Pool(), batch_size=None)}, ValueError, "does not collate"),
    ({"pool": iter(())}, TypeError, r"has no len\(\)"),
    *(({"model": wrong}, TypeError, r"model must be a torch\.nn\.Module, got")
      for wrong in (lambda x: x, nn.Linear, [nn.Identity()])),
    ({"model": nn.Linear(3, 2, device="meta"), "pool": [(torch.ones(3), 0)]},
     ValueError, r"on meta.*move the model with model\.to"),
    *(({"pool": pool}, ValueError, "have no targets; give pairs")
      for pool in (INPUTS, [(x,) for x in INPUTS])),
    *(({"loss": F.cross_entropy, "score": score, "labels": labels}, ValueError,
       r"shape \(\) for 4 samples")
      for score in ("loss", "grad_norm") for labels in ("given", "expected")),
    ({"score": lambda f: f.norms().sum()}, ValueError, NO_VECTOR.format(r"\(\)")),
    ({"score": lambda f: f.gram()}, ValueError, NO_VECTOR.format(r"\(4, 4\)")),
    ({"score": lambda f: f.norms().tolist()}, ValueError,
     "score= returned a list for factors of 4 samples; return a"),
    ({"params": ["0.weight"], "score": 60}, ValueError,
     r"shape \(4, \d\) .* a tensor \(4, 5.\), .* a Projection of the selected param"),
    ({"labels": "expected", "score": 60}, ValueError,
     "labels must be one of 'given', 'pseudo'"),
    *(({"pool": mapped(item)}, ValueError, told) for item, told in (
        (lambda x, y: (x, y, y), "has 3 items; understood are a tensor"),
        (lambda x, y: "text", "has 4 items; understood are"),
        (lambda x, y: {"label": y}, "a dict of 'label', and it is not"),
        (lambda x, y: {"x": x, "label": y, "labels": y},
         "dict of 'x', 'label', 'labels', and it is not"),
        (lambda x, y: halves(x), "have no targets; give pairs"))),
    ({"pool": mapped(lambda x, y: ("text", y))}, TypeError,
     "keyword|missing|positional"),
    ({"pool": OF_A_KIND}, TypeError, r"batch of the pool is a Batch; .* split="),
    ({"pool": OF_A_KIND, "split": lambda batch: (batch, None), "labels": "pseudo"},
     TypeError, "Batch"),
    ({"split": lambda batch: [1, 2, 3]}, ValueError, "too many values to unpack"),
    ({"model": Keyworded(lambda x: [x]), "pool": mapped(keyed)}, TypeError,
     r"gave a list without \.logits.*forward="),
])  # fmt: skip
def test_what_cannot_be_scored_is_refused(options, error, told):
    with pytest.raises(error, match=told):
        scores(**options)
