"""Which layers of a model a pruner takes, and how it lets go of them."""

import copy
import pickle

import pytest
import torch
from support.rigl_xla import sparse
from torch import nn

from rigl_xla import RigLScheduler, weights_of
from rigl_xla.contrib import rigl_torch


def test_a_compiled_model_trains_alike():
    results = []
    for compiled in (False, True):
        model = sparse.convnet()
        called = torch.compile(model, backend="aot_eager") if compiled else model
        pruner = sparse.pruned(called)
        sparse.train(called, pruner.optimizer, pruner, range(7))
        results.append(pruner.masks | model.state_dict(prefix="model."))
    assert sparse.equal(*results)


@pytest.mark.parametrize("method", ["rigl", "set", "gmp"])
def test_a_layer_that_is_frozen_later_keeps_its_connections(method):
    model, optimizer, pruner = sparse.sparse_convnet(method=method)
    sparse.train(model, optimizer, pruner, range(4))
    before, others = model[5].weight.detach().clone(), copy.deepcopy(pruner.masks)
    mask = others.pop("5.weight")
    model[5].requires_grad_(False)
    sparse.train(model, optimizer, pruner, range(4, 13))
    assert pruner.rigl_steps == 4
    assert torch.equal(model[5].weight, before)
    assert torch.equal(pruner.masks["5.weight"], mask)
    assert not any(torch.equal(pruner.masks[name], others[name]) for name in others)


@pytest.mark.parametrize("skip_step", [True, False])
def test_parameters_that_are_replaced_are_an_error(skip_step):
    model, _, pruner = sparse.sparse_convnet(skip_step=skip_step)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    with pytest.raises(ValueError, match="build optimizer and pruner after the move"):
        pruner()


@pytest.mark.parametrize("options", [{}, {"dense_allocation": 1}])
def test_a_closed_pruner_does_nothing_until_it_loads_a_state(options):
    model, optimizer, pruner = sparse.sparse_convnet(**options)
    sparse.train(model, optimizer, pruner, range(1))
    state, masks = copy.deepcopy([pruner.state_dict(), pruner.masks])
    pruner.close()
    before = copy.deepcopy(model.state_dict())
    assert all(pruner() for _ in range(6))
    assert (pruner.step, pruner.rigl_steps) == (1, 0)
    assert sparse.equal(before, model.state_dict())
    assert sparse.equal(masks, pruner.masks)
    sparse.backward(model, 0)
    optimizer.step()
    assert (model[5].weight != 0).float().mean() > 0.5  # no more than 0.2 before
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    assert pruner()
    pruner = sparse.pruned(model, **options)
    pruner.close()
    pruner.load_state_dict(state)
    for step, steps in enumerate((True, False, True)):
        model.zero_grad()
        sparse.backward(model, step)
        assert pruner() == steps


def unpickled(parts):
    return pickle.loads(pickle.dumps(parts))


@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize("how", [copy.deepcopy, unpickled])
def test_a_copy_trains_as_the_original_would(how, skip_step):
    options = {"skip_step": skip_step, "grad_accumulation_n": 2}
    model, optimizer, pruner = sparse.sparse_convnet(**options)
    sparse.train(model, optimizer, pruner, range(2))  # within a window of gradients
    together = how((model, optimizer, pruner))
    alone = how(pruner)
    sparse.backward(model, 2)
    runs = [how((model, optimizer, pruner))]  # without the gradients, as a model's
    before = copy.deepcopy(model.state_dict())
    runs += [together, (alone.model, alone.optimizer, alone)]
    for one in runs:
        sparse.train(*one, range(2, 13))
    assert sparse.equal(before, model.state_dict())
    sparse.train(model, optimizer, pruner, range(2, 13))  # from another zero_grad() on
    for model_, _, pruner_ in runs:
        assert pruner_.rigl_steps == 4
        assert sparse.inactive_are_zero(pruner_)
        assert sparse.equal(pruner_.masks, pruner.masks)
        assert sparse.equal(model_.state_dict(), model.state_dict())
    with pytest.raises(ValueError, match="another RigLScheduler: close"):
        copy.copy(pruner)
    pruner.close()
    assert how(pruner)()


def test_a_copy_of_the_model_alone_has_no_hooks_that_reach_the_original():
    model, _, pruner = sparse.sparse_convnet(delta=1)
    copies = [how(model) for how in (copy.deepcopy, unpickled)]
    copies.append(sparse.through_a_file(model, weights_only=False))
    for other in [torch.optim.swa_utils.AveragedModel(model).module, *copies]:
        assert sparse.equal(other.state_dict(), model.state_dict())
        sparse.backward(other, 0)
        for name, mask in pruner.masks.items():
            assert other.get_parameter(name).grad[~mask].any(), name
        sparse.pruned(other).close()
    with pytest.raises(RuntimeError, match="no backward pass has reached"):
        pruner()


@pytest.mark.parametrize("skip_step", [True, False])
def test_a_model_whose_pruner_went_out_of_scope_can_be_pruned_again(skip_step):
    model, optimizer, _ = sparse.sparse_convnet(skip_step=skip_step)
    del _  # nobody keeps it
    for step in range(2):
        optimizer.zero_grad()
        sparse.backward(model, step)
        optimizer.step()
    assert int((model[5].weight != 0).sum()) == 820  # it stays sparse
    if not skip_step:
        with pytest.raises(ValueError, match="its optimizer keeps it too"):
            sparse.pruned(model, optimizer)
        optimizer = sparse.sgd(model)
    pruner = sparse.pruned(model, optimizer, dense_allocation=0.5)
    mask = pruner.masks["5.weight"].clone()
    sparse.train(model, optimizer, pruner, range(2))
    assert torch.equal(model[5].weight != 0, mask)
    assert int(mask.sum()) == 2048


def test_masks_keep_their_memory_and_follow_parameters_to_another_device():
    model, optimizer, pruner = sparse.sparse_convnet()
    both = model[5].weight.detach(), pruner.masks["5.weight"]
    sparse.train(model, optimizer, pruner, range(7))
    assert both[0].data_ptr() == model[5].weight.data_ptr()
    assert both[1].data_ptr() == pruner.masks["5.weight"].data_ptr()
    [layer, *_] = pruner._layers
    mask = layer.mask
    layer.follow(torch.device("cpu"))
    assert layer.mask is mask
    layer.follow(torch.device("meta"))
    assert all(each.is_meta for each in (layer.mask, layer.ever, layer.counts))


def test_defaults_keep_linear_layers_dense_and_all_of_a_dense_model():
    model, before = sparse.convnet(), sparse.convnet().state_dict()
    optimizer = sparse.sgd(model)
    with RigLScheduler(model, optimizer) as pruner:
        assert sparse.equal(before, model.state_dict())
        sparse.train(model, optimizer, pruner, range(2))
        assert pruner.masks == {}
        assert "total_nonzero_params=5480/5480 (100.00%)" in str(pruner)
        assert pruner.report().sparsity == 0
    pruner = RigLScheduler(model, optimizer, 0.1, 75, delta=7)
    assert list(pruner.masks) == ["2.weight"]
    assert pytest.approx([0, 0.9, 0, 0]) == pruner.S


@pytest.mark.parametrize("distribution", ["uniform", "adjusted-uniform"])
def test_no_other_layer_is_kept_dense_for_an_excluded_first_one(distribution):
    """The first is the model's, by registration; if excluded, it is dense already."""
    for exclude, layers, options in [
        ((), "257", {}), ("0", "257", {}), ("0", "257", {"dense_first": True}),
        (["0", "2"], "57", {}), ("5", "27", {}),
    ]:  # fmt: skip
        options |= {"sparsity_distribution": distribution, "dense_allocation": 0.5}
        *_, pruner = sparse.sparse_convnet(exclude=exclude, **options)
        assert list(pruner.masks) == [f"{layer}.weight" for layer in layers]


@pytest.mark.parametrize("distribution", ["uniform", "erk"])
def test_each_layer_begins_with_its_highest_scores(distribution):
    model, options = sparse.convnet(), {"sparsity_distribution": distribution}
    sparse.backward(model, 0)
    expected = sparse.counts(sparse.sparse_convnet(**options)[2])
    snip = {name: (p * p.grad).abs() for name, p in model.named_parameters()}
    magnitudes = {name: p.abs() for name, p in model.state_dict().items()}
    for given, scores in [(snip, snip), ("magnitude", magnitudes)]:
        *_, pruner = sparse.sparse_convnet(initial_masks=given, **options)
        assert sparse.counts(pruner) == expected
        for name, mask in pruner.masks.items():
            assert scores[name][mask].min() >= scores[name][~mask].max()


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
        norms = nn.LayerNorm((4, 8)), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.PReLU(4)
        self.norms = nn.ModuleList([*norms, nn.InstanceNorm2d(4)])  # a weight of None
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


@pytest.mark.parametrize(("exclude", "gone"), [
    (["head"], {"head.weight"}),
    (["other.*"], {name for name in KINDS if name.startswith("other")}),
    ([nn.RNNBase], {"lstm.weight_ih_l0", "lstm.weight_hh_l0"}),
    ([lambda name, p: p.dim() == 3], {"up.weight", "bilinear.weight"}),
    (["head", nn.GRUCell], {"head.weight", "cell.weight_ih", "cell.weight_hh"}),
    ([nn.MultiheadAttention], set(KINDS[:6])),
    ("attention", set(KINDS[:2])),
    (lambda name, p: name == "up.weight", {"up.weight"}),
])  # fmt: skip
def test_exclusion_by_name_type_or_function(exclude, gone):
    found = names(weights_of(Everything(), exclude=exclude))
    assert found == [name for name in KINDS if name not in gone]


LINEAR = nn.Linear(4, 4)
BLOCK = nn.ModuleDict({"mlp": nn.Sequential(LINEAR), "last": nn.Linear(4, 4)})
BLOCKS = nn.Sequential(BLOCK, copy.deepcopy(BLOCK), nn.Linear(4, 4))
SHARED = nn.Sequential(LINEAR, nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4), LINEAR)
SHARED[2].weight = LINEAR.weight
EMBEDDED = nn.Sequential(LINEAR, nn.Embedding(4, 4))


@pytest.mark.parametrize(("model", "options", "left"), [
    # Whatever is inside a module that is excluded,
    (BLOCKS, {"exclude": [nn.ModuleDict]}, "2"),
    (BLOCKS, {"exclude": ["1", "0.mlp"]}, "0.last 2"),
    (BLOCKS, {"exclude": ["*.mlp", "2"]}, "0.last 1.last"),
    # and a weight of which any name is,
    (SHARED, {}, "0 3"),
    *((SHARED, {"exclude": [name]}, "3") for name in ("0", "2", "4", "2.weight")),
    # and the weight alone of an included module that has a bias.
    *((EMBEDDED, {"include": include}, "0") for include in (nn.Linear, "0")),
    *((EMBEDDED, {"include": include}, "0 1") for include in ("*", ["1", nn.Linear])),
])  # fmt: skip
def test_a_selector_is_of_a_module_and_all_inside_it(model, options, left):
    found = names(weights_of(model, **options))
    assert found == [f"{name}.weight" for name in left.split()]


class Conv1D(nn.ParameterDict):
    """A linear layer with a transposed weight, as transformers' GPT-2 has it."""


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_report_says_what_is_left_out_and_counts_it():
    linear, norm = nn.Linear(20, 20), nn.utils.parametrizations.weight_norm
    model = nn.Sequential(
        nn.Embedding(10, 20), Conv1D({"weight": torch.randn(20, 20)}),
        norm(copy.deepcopy(linear)), linear, nn.Linear(20, 20, bias=False),
        copy.deepcopy(linear).requires_grad_(False), nn.Linear(20, 100),
        nn.LayerNorm(100), nn.utils.weight_norm(nn.Linear(100, 10)),
    )  # fmt: skip
    pruner = sparse.pruned(model, dense_allocation=0.1, exclude="4")
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
    assert "1.weight" in sparse.pruned(model, include=Conv1D, dense_first=False).masks


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
