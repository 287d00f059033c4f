"""The pages about coming from other software show code that runs."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from support.documents import blocks, sides
from support.readers import check_trained, on_replicas, run_script_of_reader
from support.xla_replica.replicas import HAS_XLA, needs_xla
from support.xla_replica.torchrun import LAUNCHER
from torch import nn, optim
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

FOLDER = "docs/migration"
GRADIENTS = f"{FOLDER}/per_sample_gradients.md"


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1], ids=["before", "after"])
def test_the_data_parallel_scripts_train(tmp_path, side):
    [diff] = blocks(f"{FOLDER}/distributed_data_parallel.md", "diff")
    check_trained(run_script_of_reader(sides(diff)[side], tmp_path, *LAUNCHER[1:]), 2)


@pytest.mark.parametrize(
    "side",
    [pytest.param(0, marks=[needs_xla, pytest.mark.xla, pytest.mark.slow]), 1],
    ids=["before", "after"],
)
def test_the_torch_xla_scripts_train(tmp_path, side):
    [diff] = blocks(f"{FOLDER}/torch_xla.md", "diff")
    script = sides(diff)[side]
    num_replicas = 2 if HAS_XLA and side else 1
    script = on_replicas(num_replicas, script) if side else script
    check_trained(run_script_of_reader(script, tmp_path), num_replicas)


@pytest.fixture
def classes() -> TensorDataset:
    """Four kinds of vectors, far apart."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(96) % 4
    vectors = torch.randn(96, 4, generator=generator) / 2 + torch.eye(4)[labels] * 3
    return TensorDataset(vectors, labels)


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))


def accuracy(model, data: TensorDataset) -> float:
    vectors, labels = data.tensors
    return (model(vectors).argmax(1) == labels).double().mean().item()


def test_the_script_of_the_earlier_variable_batch_size(tmp_path, monkeypatch, classes):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{step}, {8 + step % 3 * 8}\n" for step in range(60))
    (tmp_path / "trace.csv").write_text(f"step,batchsize\n{rows}")
    model = nn.Sequential(small_model(), nn.LogSoftmax(1))
    flags = {"batch_size": 8, "lr": 0.1, "momentum": 0.9, "log_steps": 10}
    names = {"torch": torch, "optim": optim, "F": F, "model": model}
    names |= {"train_dataset": classes, "WORLD_SIZE": 1, "ORDINAL": 0}
    names["flags"] = types.SimpleNamespace(num_epochs=8, **flags)
    [script] = blocks(f"{FOLDER}/earlier_variable_batch_size.md", "python")
    exec(script, names)
    assert accuracy(model, classes) > 0.9


def test_the_scripts_of_grab_sampler(classes):
    functional, ordinary = blocks(f"{FOLDER}/grab_sampler.md", "python")
    names = {"dataset": classes, "model": small_model()}
    names["loss_fn"] = nn.CrossEntropyLoss()
    exec(functional, names)
    model, params = names["model"], names["params"]
    assert accuracy(lambda x: functional_call(model, params, (x,)), classes) > 0.9
    ordered = names["sampler"].order
    names = {"dataset": classes, "model": small_model()}
    exec(ordinary, names)
    assert accuracy(names["model"], classes) > 0.9
    # The same gradients but for rounding, and so the same orders.
    assert (names["sampler"].order == ordered).mean() > 0.9


def test_the_script_of_rigl_torch(tmp_path, monkeypatch, capsys, classes):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    names = {"model": model, "dataloader": DataLoader(classes, 8, shuffle=True)}
    [script] = blocks(f"{FOLDER}/rigl_torch.md", "python")
    exec(script, names)
    assert "num_rigl_steps=" in capsys.readouterr().out
    assert accuracy(model, classes) > 0.9
    saved = torch.load(tmp_path / "checkpoint.pth")
    assert set(saved) == {"model", "pruner", "optimizer"}


def test_per_sample_gradients_are_the_same(classes):
    model = small_model()
    x, y = (tensor[:12] for tensor in classes.tensors)
    names = {"F": F, "model": model, "x": x, "y": y, "pool": classes}
    names |= {"torch": torch, "loss_func": F.cross_entropy}
    loop, one_pass, pool, functional, captured, _ = blocks(GRADIENTS, "python")
    exec(loop, names)
    expected = torch.stack(names["norms"])
    exec(one_pass, names)
    torch.testing.assert_close(names["norms"], expected)
    exec(pool, names)
    assert len(names["scores"]) == len(classes)
    exec(functional, names)
    gradients = names["gradients"]
    exec(captured, names)
    torch.testing.assert_close(names["gradients"], gradients)
    squares = [gradient.flatten(1).square().sum(1) for gradient in gradients.values()]
    torch.testing.assert_close(names["norms"], sum(squares).sqrt())
    torch.testing.assert_close(names["gram"].diagonal(), sum(squares))
