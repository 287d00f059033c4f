"""A sparse model through a compact file: the same numbers, the promised size."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from support.rigl_xla import sparse
from support.xla_replica.replicas import on_xla
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import xla_replica
from rigl_xla import load_compact, save_compact


class Tied(nn.Module):
    """A model with a shared weight, norms, buffers, other dtypes and a long name."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 24)
        self.body = nn.Linear(24, 24).bfloat16()
        self.norm = nn.BatchNorm1d(24)
        self.conv = nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(24, 32, bias=False)
        self.head.weight = self.words.weight


@pytest.mark.parametrize("build", [sparse.convnet, Tied])
def test_a_model_comes_back_bit_for_bit(build, tmp_path):
    model = build()
    pruner = sparse.pruned(model, sparse.sgd(model), dense_first=False)
    assert len(pruner.masks) >= 3
    path = save_compact(tmp_path / "model.pt", nn.DataParallel(model), pruner.masks)
    assert torch.load(path, weights_only=True)["format"] == "rigl_xla compact 1"
    torch.manual_seed(7)
    other = build()
    for tensor in other.state_dict().values():
        tensor.fill_(7)
    masks = load_compact(str(path), other)
    assert sparse.equal(other.state_dict(), model.state_dict())
    assert sparse.equal(masks, pruner.masks)
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]
    before = other.state_dict()[next(iter(masks))]
    assert before.stride() == model.state_dict()[next(iter(masks))].stride()


@pytest.mark.parametrize("sparsity", [0.8, 0.9, 0.98])
def test_its_size_is_the_promised_one(sparsity, tmp_path):
    sizes = (784, 300, 100, 10)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*layers)
    pruner = sparse.pruned(
        model, sparse.sgd(model), dense_allocation=1 - sparsity, dense_first=False
    )
    promised = round(pruner.report().size_in_bytes, 3)
    path = save_compact(tmp_path / "model.pt", model, pruner.masks)
    content = torch.load(path, weights_only=True)
    values, bits = content["values"]["float32"], content["masks"]
    assert promised <= 4 * values.numel() + bits.numel() < promised + 1
    assert promised < path.stat().st_size < promised + 100 * 6 + 2048


def test_an_average_over_topologies_is_not_sparse_and_is_refused(tmp_path):
    model, optimizer, pruner = sparse.sparse_convnet()
    late = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(20):
        sparse.train(model, optimizer, pruner, range(step, step + 1))
        averaged.update_parameters(model)
        if pruner.step >= pruner.T_end:
            late.update_parameters(model)
    path, masks = tmp_path / "model.pt", pruner.masks
    name = "5.weight"
    assert (model.get_parameter(name) == 0).float().mean() > 0.79
    assert (averaged.module.get_parameter(name) == 0).float().mean() < 0.75
    with pytest.raises(
        ValueError, match=r"weights of '2.weight' .* average after T_end"
    ):
        save_compact(path, averaged.module, masks)
    assert not path.exists()
    save_compact(path, late.module, masks)
    with torch.no_grad():
        for name, mask in masks.items():
            averaged.module.get_parameter(name).mul_(mask)
    save_compact(path, averaged.module, masks)
    pruner.close()
    load_compact(path, model)
    assert sparse.equal(model.state_dict(), averaged.module.state_dict())
    assert sparse.inactive_are_zero(pruner)


class Counting(nn.Linear):
    def get_extra_state(self):
        return {"calls": 1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.add_module("7", nn.Linear(16, 9)), r"7.bias was \('f.*10\]\) and"),
        (lambda m: m.append(nn.Linear(10, 10)), r"8.bias was None and is \('f.*10\]\)"),
        (lambda m: m.bfloat16(), r"is \('bfloat16'"),
        (lambda m: setattr(m[2], "bias", m[5].bias), r"5.bias was .* and is '2.bias'"),
    ],
    ids=["other shape", "other names", "other dtype", "other sharing"],
)
def test_another_model_is_refused_and_stays_as_it_is(change, says, tmp_path):
    model, other = sparse.convnet(), sparse.convnet(seed=3)
    pruner = sparse.pruned(model, sparse.sgd(model))
    path = save_compact(tmp_path / "model.pt", model, pruner.masks)
    change(other)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=says):
        load_compact(path, other)
    assert sparse.equal(before, other.state_dict())


def test_damaged_and_other_files_are_refused(tmp_path):
    model, _, pruner = sparse.sparse_convnet()
    path = save_compact(tmp_path / "model.pt", model, pruner.masks)
    with pytest.raises(ValueError, match=r"is kept sparse .* close\(\) that first"):
        load_compact(path, model)
    pruner.close()
    good, before = path.read_bytes(), copy.deepcopy(model.state_dict())
    content = torch.load(path, weights_only=True)
    content["masks"][3] ^= 1
    torch.save(content, path)
    with pytest.raises(ValueError, match="its checksum is not that of its content"):
        load_compact(path, model)
    for wrong in (good[:1000], b"", b"anything"):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="is damaged, or not a compact file"):
            load_compact(path, model)
    for other in (model.state_dict(), [1]):
        torch.save(other, path)
        with pytest.raises(ValueError, match="this release reads 'rigl_xla compact 1'"):
            load_compact(path, model)
    with pytest.raises(FileNotFoundError):
        load_compact(tmp_path / "none.pt", model)
    assert sparse.equal(before, model.state_dict())
    path.write_bytes(good)
    load_compact(path, model)


@pytest.mark.parametrize(
    ("masks", "error", "says"),
    [
        ({"9.weight": torch.ones(2).bool()}, ValueError, "not in the model's"),
        ({"5.weight": torch.ones(16, 2).bool()}, ValueError, r"shape \(16, 256\)"),
        ({"5.weight": torch.ones(16, 256)}, ValueError, r"got torch.float32 of shape"),
        (None, TypeError, "must be a dict of bool tensor"),
        ([torch.ones(2)], TypeError, "must be a dict of bool tensor"),
        ({"5.weight": 3}, TypeError, "must be a bool tensor"),
    ],
)
def test_masks_that_do_not_fit_are_refused(masks, error, says, tmp_path):
    with pytest.raises(error, match=says):
        save_compact(tmp_path / "model.pt", sparse.convnet(), masks)
    assert not list(tmp_path.iterdir())


def test_a_model_without_values_is_neither_saved_nor_filled(tmp_path):
    path = save_compact(tmp_path / "model.pt", sparse.convnet(), {})
    model = sparse.convnet().to("meta")
    with pytest.raises(ValueError, match=r"'0.weight' is on the meta device"):
        save_compact(path, model, {})
    with pytest.raises(ValueError, match=r"'0.weight' is on the meta device"):
        load_compact(path, model)
    with pytest.raises(TypeError, match=r"has '0._extra_state', a dict; a compact"):
        save_compact(path, nn.Sequential(Counting(2, 2)), {})
    with pytest.raises(TypeError, match=r"model must be a torch module, got {} \(dict"):
        load_compact(path, {})


def from_xla(rank: int, path: str) -> int:
    replica = xla_replica.current()
    model = sparse.convnet().to(replica.device)
    pruner = sparse.pruned(model, sparse.sgd(model))
    with xla_replica.count(replica) as count:
        save_compact(path, model, pruner.masks)
    pruner.close()
    load_compact(path, model)
    assert (count.transfers, count.fallbacks) == (1, {})
    return count.transfers


@on_xla
def test_a_model_on_xla_is_one_transfer(tmp_path):
    path = str(tmp_path / "model.pt")
    assert xla_replica.launch(from_xla, (path,), 1, "xla") == [1]
    other = sparse.convnet(seed=1)
    masks = load_compact(path, other)
    model = sparse.convnet()
    assert sparse.equal(masks, sparse.pruned(model, sparse.sgd(model)).masks)
    assert sparse.equal(other.state_dict(), model.state_dict())
