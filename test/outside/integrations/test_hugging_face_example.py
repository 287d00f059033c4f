"""The script that trains a language model takes one of transformers."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from support.outside import package
from support.scripts import words

from examples.ordering import causal_language_model, ordered_training
from examples.ordering.hugging_face_model import GPTNeoX
from tools.outside import models

pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def transformers():
    models.import_torchvision()
    return package("transformers")


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_a_gradient_of_each_sample(tied):
    torch.manual_seed(0)
    model = GPTNeoX(12, width=16, num_layers=2, num_heads=2, tied=tied)
    windows = torch.randint(256, (4, 13), dtype=torch.uint8)
    batch = windows[:, :-1], windows[:, 1:]
    assert ordered_training.check_gradients(model, *batch) < 1e-4
    losses_of = ordered_training.sample_losses
    alone = [losses_of(model, *(each[[i]] for each in batch)) for i in range(4)]
    torch.testing.assert_close(torch.cat(alone), losses_of(model, *batch))


@pytest.mark.parametrize("fidelity", ["exact", "projected", "group"])
def test_it_trains_in_bfloat16_under_a_trace(tmp_path, fidelity):
    book, trace = tmp_path / "book.txt", tmp_path / "trace.csv"
    book.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(400)))
    trace.write_text("step,batchsize\n0,8\n1,16\n2,24\n")
    arguments = [
        "--model", "gpt-neox", "--text", book, "--max-bytes", 6000, "--context", 24,
        "--width", 16, "--num-layers", 1, "--num-heads", 2, "--batch-size", 8,
        "--order", "rr,mean", "--epochs", 2, "--bf16", "--trace", trace,
        "--fidelity", fidelity, "--projection-size", 60, "--no-progress",
        "--num-replicas", 1, "--device", "cpu", "--logdir", tmp_path / "log",
    ]  # fmt: skip
    assert causal_language_model.main(words(arguments)) == 0
    rows = pd.read_csv(tmp_path / "log" / "history.csv").set_index("epoch")
    for _, losses in rows.groupby("order")["train_loss"]:
        assert losses[2] < losses[0]
