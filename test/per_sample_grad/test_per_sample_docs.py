"""The code on the pages about per_sample_grad runs."""

from __future__ import annotations

import types

import numpy as np
import torch
import torch.nn.functional as F
from support.documents import block
from support.per_sample_grad.gradient_oracle import rules_kept
from support.per_sample_grad.pool import CLASSES, Vectors, dense_model
from torch import nn
from torch.utils.data import DataLoader

import per_sample_grad as psg
from per_sample_grad.layers.registry import RULES

PAGE = "docs/per_sample_grad.md"
DETAILS = "docs/per_sample_grad_details.md"
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
    names = {"psg": psg, "model": dense_model(), "dataset": Vectors(COUNT)}
    exec(block(POOLS, "python", "scores.to_csv"), names)
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
    names["tokenised"] = [{"input_ids": i, "labels": i % CLASSES} for i in range(20)]
    names["model"] = Classifier(nn.Embedding(20, 3), nn.Linear(3, CLASSES))
    exec(block(POOLS, "python", "collate_fn=collator"), names)
    names["model"], image = WithFeatures(4, CLASSES), torch.ones(4)
    names["dataset"] = [{"image": i * image, "class": {"fine": i}} for i in range(4)]
    exec(block(POOLS, "python", "return_features"), names)


def test_a_class_like_another():
    class MyLinear(nn.Linear):
        pass

    with rules_kept():
        names = {"psg": psg, "nn": nn, "MyLinear": MyLinear}
        exec(block(DETAILS, "python", "like="), names)
        assert RULES[MyLinear] is RULES[nn.Linear]
