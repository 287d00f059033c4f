"""Which weights RigL makes sparse."""

from __future__ import annotations

import copy

import pytest
import torch
from support.rigl_xla.sparse import pruned
from torch import nn

from rigl_xla import weights_of
from rigl_xla.contrib import rigl_torch


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.positions = nn.Parameter(torch.zeros(5, 8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.other = nn.MultiheadAttention(8, 2, kdim=4, vdim=6)
        self.lstm = nn.LSTM(8, 4)
        self.cell = nn.GRUCell(8, 4)
        self.conv = nn.Conv2d(4, 4, 3, groups=2)
        self.up = nn.ConvTranspose1d(4, 2, 3)
        self.bilinear = nn.Bilinear(3, 4, 5)
        self.norms = nn.ModuleList(
            [nn.LayerNorm((4, 8)), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.PReLU(4)]
        )
        self.norms.append(nn.InstanceNorm2d(4))  # has a weight of None
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(8, 12)


KINDS = [
    "attention.in_proj_weight", "attention.out_proj.weight", "other.q_proj_weight",
    "other.k_proj_weight", "other.v_proj_weight", "other.out_proj.weight",
    "lstm.weight_ih_l0", "lstm.weight_hh_l0", "cell.weight_ih", "cell.weight_hh",
    "conv.weight", "up.weight", "bilinear.weight", "head.weight",
]  # fmt: skip


def names(weights):
    return [weight.name for weight in weights]


def test_matrices_and_kernels_but_only_included_norms_and_embeddings():
    weights = weights_of(Everything())
    assert names(weights) == KINDS
    assert [w.name for w in weights if w.is_conv] == ["conv.weight", "up.weight"]
    found = names(weights_of(Everything(), include=["positions", nn.Embedding]))
    assert set(found) == {*KINDS, "positions", "embedding.weight"}


def test_shared_weights_are_found_once():
    model = Everything()
    model.head.weight = model.embedding.weight
    [*others, tied] = weights_of(model)
    assert names(others) == KINDS[:-1]
    assert tied.name == "embedding.weight"  # as named_parameters has it
    assert tied.names == ("embedding.weight", "head.weight")
    assert tied.module is model.head
    assert tied.name in dict(model.named_parameters())


@pytest.mark.parametrize(
    ("exclude", "gone"),
    [
        (["head"], {"head.weight"}),
        (["other.*"], {name for name in KINDS if name.startswith("other")}),
        ([nn.RNNBase], {"lstm.weight_ih_l0", "lstm.weight_hh_l0"}),
        ([lambda name, p: p.dim() == 3], {"up.weight", "bilinear.weight"}),
        (["head", nn.GRUCell], {"head.weight", "cell.weight_ih", "cell.weight_hh"}),
        ([nn.MultiheadAttention], set(KINDS[:6])),
        ("attention", set(KINDS[:2])),
        (lambda name, p: name == "up.weight", {"up.weight"}),
    ],
)
def test_exclusion_by_name_type_or_function(exclude, gone):
    found = names(weights_of(Everything(), exclude=exclude))
    assert found == [name for name in KINDS if name not in gone]


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ([nn.ModuleDict], "2"),
        (["1", "0.mlp"], "0.last 2"),
        (["*.mlp", "2"], "0.last 1.last"),
    ],
)
def test_to_exclude_a_module_is_to_exclude_all_inside_it(exclude, left):
    mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    block = nn.ModuleDict({"mlp": mlp, "last": nn.Linear(4, 4)})
    model = nn.Sequential(block, copy.deepcopy(block), nn.Linear(4, 4))
    found = names(weights_of(model, exclude=exclude))
    assert found == [f"{name}.weight" for name in left.split()]


@pytest.mark.parametrize("exclude", ["0", "2", "4", "2.weight"])
def test_any_name_of_a_shared_weight_excludes_it(exclude):
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4), shared)
    model[2].weight = shared.weight
    assert names(weights_of(model)) == ["0.weight", "3.weight"]
    assert names(weights_of(model, exclude=[exclude])) == ["3.weight"]


def test_a_module_with_a_bias_is_included():
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4))
    both = ["0.weight", "1.weight"]
    for include, expected in [
        (nn.Linear, both[:1]), ("*", both), ("0", both[:1]), (["1", nn.Linear], both),
    ]:  # fmt: skip
        assert names(weights_of(model, include=include)) == expected
    for alone in ("0.bias", lambda name, p: "0" in name):
        with pytest.raises(ValueError, match=r"include selects '0.bias'"):
            weights_of(model, include=alone)


class Conv1D(nn.ParameterDict):
    """A linear layer with a transposed weight, as transformers' GPT-2 has it."""

    def __init__(self, outputs, inputs):
        weight, bias = torch.randn(inputs, outputs), torch.zeros(outputs)
        super().__init__({"weight": weight, "bias": bias})


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_report_says_what_is_left_out_and_counts_it():
    linear, norm = nn.Linear(20, 20), nn.utils.parametrizations.weight_norm
    model = nn.Sequential(
        nn.Embedding(10, 20), Conv1D(20, 20), norm(copy.deepcopy(linear)), linear,
        nn.Linear(20, 20, bias=False), copy.deepcopy(linear).requires_grad_(False),
        nn.Linear(20, 100), nn.LayerNorm(100), nn.utils.weight_norm(nn.Linear(100, 10)),
    )  # fmt: skip
    pruner = pruned(model, dense_allocation=0.1, exclude="4")
    report = pruner.report()
    total = sum(parameter.numel() for parameter in model.parameters())
    assert (report.sparsity, report.num_parameters) == (0.9, total)
    assert report.model_sparsity == 1800 / total
    computed = "a weight is computed from it, as by weight_norm"
    asked = "by dense_first, ignore_linear_layers, sparsities= or the distribution"
    unknown = "Conv1D is not known to multiply by it; include= makes it sparse"
    assert report.dense == {
        "0.weight": "an embedding; include= makes it sparse",
        "1.weight": unknown,
        "2.parametrizations.weight.original0": computed,
        "2.parametrizations.weight.original1": computed,
        "3.weight": asked,
        "4.weight": "exclude= names it",
        "5.weight": "it is frozen",
        "8.weight_g": computed,
        "8.weight_v": computed,
    }
    text = str(report).splitlines()
    assert f"of all {total} parameters {1800 / total:.2%} are inactive" in text
    for lines in (text, str(pruner).splitlines()):
        assert f"dense: 1.weight ({unknown})" in lines
        [line] = [line for line in lines if computed in line]
        assert line.endswith(f"8.weight_g and 1 more ({computed})")
    pruner.close()
    assert "1.weight" in pruned(model, include=Conv1D, dense_first=False).masks


def test_names_are_without_wrappers():
    model = nn.Sequential(nn.Linear(4, 4))
    assert names(weights_of(nn.DataParallel(model))) == ["0.weight"]
    compiled = torch.compile(model, backend="eager")
    assert names(weights_of(nn.DataParallel(compiled))) == ["0.weight"]
    part = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    part[1] = torch.compile(part[1], backend="eager")
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(part, backend="eager"))
    assert names(weights_of(model)) == ["0.weight", "1.0.weight", "1.1.weight"]
    assert names(weights_of(model, exclude=["1.1"])) == ["0.weight", "1.0.weight"]
    assert names(rigl_torch.weights_of(model)) == names(weights_of(model))
    # which also takes norms and embeddings
    model = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4), nn.BatchNorm2d(4))
    assert names(rigl_torch.weights_of(model)) == ["0.weight", "1.weight"]
