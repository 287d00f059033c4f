"""The pages about coming from other software show code that runs and means the same."""

import json
import re
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.documents import blocks, read
from torch import nn, optim
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
import xla_replica

FOLDER = "docs/migration"
EARLIER = f"{FOLDER}/earlier_variable_batch_size.md"
EPOCH = 1  # of 256 samples: its steps are 32, 128, 64 and 32
TRACE = [64, 96, 96, 32, 128, 64, 32]
ASSIGNED = [[], [2, 4], [6], []]
# What the names that are gone meant when the epoch begins, on replica 1 of 2. Those of
# None make something, which the table's code makes too.
MEANT = {
    "sampler.trace": TRACE,
    "sampler.dataset": 256,
    "sampler.minibatches_per_epoch": 8,
    "sampler.max_epoch": 2,
    "sampler.get_epoch_range(epoch)": [3, 7],
    "sampler.get_epochtrace(epoch)": [32, 128, 64, 32],
    "sampler.get_batch_assignments(epochtrace)": ASSIGNED,
    "optimizer.optimizer": None,
    "optimizer.epochtrace": [32, 128, 64, 32],
    "optimizer.divisors": [1, 4, 2, 1],
    "optimizer.schedule": ASSIGNED,
    "optimizer.step_index": 0,
    "optimizer.substep_index": None,
    "optimizer.adapt_lr()": None,
    "CustomOptimizer(inner, sampler, log_steps)": None,
    "CustomOptimizer(inner, sampler, log_steps, 'sum')": None,
    "LinearRuleOptimizer.F(lr, batchsize, ref_batchsize)": 0.1 * 96 / 128,
    "init_group(local_ordinal, cores_per_host)": [0, 1],
    "all_reduce_tensors(tensors, scale)": None,
    "all_reduce_tensors_mesh(tag, data, scale)": 6.0,
}


@pytest.fixture
def classes() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(96) % 4
    vectors = torch.randn(96, 4, generator=generator) / 2 + torch.eye(4)[labels] * 3
    return TensorDataset(vectors, labels)


def small_model(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))


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
    [script] = blocks(EARLIER, "python")
    exec(script, names)
    assert accuracy(model, classes) > 0.9


def names_of_a_script(trace: list[int], num_replicas: int) -> dict[str, object]:
    """Returns variables of such a script, some of them, on the last replica."""
    sampler = vbs.CustomSampler(
        range(256), trace, num_replicas=num_replicas, rank=num_replicas - 1,
        verbose=False,
    )  # fmt: skip
    sampler.set_epoch(EPOCH if num_replicas > 1 else 0)
    inner = optim.SGD([nn.Parameter(torch.zeros(2))], 0.1, momentum=0.5)
    return {
        "vbs": vbs, "xla_replica": xla_replica, "np": np, "sampler": sampler,
        "inner": inner, "epoch": EPOCH, "log_steps": 10, "lr": 0.1, "batchsize": 96,
        "ref_batchsize": 128, "tensors": [torch.ones(2)], "scale": 2.0, "data": 3.0,
    }  # fmt: skip


def test_the_names_that_are_gone_have_successors_that_mean_the_same():
    table = read(EARLIER).split("These names are gone.")[1]
    rows = re.findall(r"^\| `(.+?)`.*? \| (.+) \|$", table, re.MULTILINE)
    assert [was for was, _ in rows] == [*MEANT]
    for was, now in rows:
        codes = re.findall(r"`(.+?)`", now)
        code = codes[0 if was.startswith("all_reduce") else -1]
        if code.startswith("optimizer."):  # test_pages sees that there is one
            continue
        # An optimizer is made on one replica, with which the sampler has to agree.
        value = eval(code, names_of_a_script(TRACE, 2 - ("ElasticOptimizer" in code)))
        if (meant := MEANT[was]) is not None:
            found = json.loads(json.dumps(value, default=np.ndarray.tolist))
            assert found == meant, was
    # Of gradients of ones in steps of 2 and 3 minibatches the buffer gets 2 and 3.
    [code] = re.findall(r"'sum'\)`.* \| `(.*)`", table)
    found = names_of_a_script([64, 96], num_replicas=1)
    optimizer = eval(code, found)
    [weight] = found["inner"].param_groups[0]["params"]
    for _ in found["sampler"]:
        weight.sum().backward()
        optimizer.step()
    assert weight.tolist() == pytest.approx([-0.1 * (2 + (0.5 * 2 + 3))] * 2)


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
    model = nn.Sequential(nn.Linear(4, 4), small_model(64))
    names = {"model": model, "dataloader": DataLoader(classes, 8, shuffle=True)}
    [script] = blocks(f"{FOLDER}/rigl_torch.md", "python")
    exec(script, names)
    assert "num_rigl_steps=" in capsys.readouterr().out
    assert accuracy(model, classes) > 0.9
    saved = torch.load(tmp_path / "checkpoint.pth")
    assert set(saved) == {"model", "pruner", "optimizer"}


def test_per_sample_gradients_are_the_same(classes):
    x, y = (tensor[:12] for tensor in classes.tensors)
    names = {"F": F, "model": small_model(), "x": x, "y": y, "pool": classes}
    names |= {"torch": torch, "loss_func": F.cross_entropy}
    texts = blocks(f"{FOLDER}/per_sample_gradients.md", "python")
    loop, one_pass, pool, functional, captured, _ = texts
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
