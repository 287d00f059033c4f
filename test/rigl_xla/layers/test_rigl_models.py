"""Which layers of a model a pruner takes, and how it lets go of them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.rigl_xla import sparse
from torch import nn
from torch.optim.swa_utils import AveragedModel

from rigl_xla import RigLScheduler


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


def test_close_lets_go():
    model, optimizer, pruner = sparse.sparse_convnet()
    with pruner, pytest.raises(ValueError, match="another RigLScheduler: close"):
        sparse.pruned(model, optimizer)
    sparse.backward(model, 0)
    optimizer.step()
    assert (model[5].weight != 0).float().mean() > 0.5  # no more than 0.2 before
    sparse.pruned(model, optimizer).close()


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
    for other in [AveragedModel(model).module, *copies]:
        assert sparse.equal(other.state_dict(), model.state_dict())
        sparse.backward(other, 0)
        for name, mask in pruner.masks.items():
            assert other.get_parameter(name).grad[~mask].any(), name
        sparse.pruned(other).close()
    for layer in pruner._layers:
        assert (layer.pending, layer.weight.parameter.grad) == (None, None)
        assert not layer.hooked
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


def test_memory_is_shared_throughout():
    """Everything that shares memory with a weight or a mask keeps sharing it."""
    model, optimizer, pruner = sparse.sparse_convnet()
    both = model[5].weight.detach(), pruner.masks["5.weight"]
    sparse.train(model, optimizer, pruner, range(7))
    assert both[0].data_ptr() == model[5].weight.data_ptr()
    assert both[1].data_ptr() == pruner.masks["5.weight"].data_ptr()


def test_masks_and_their_past_follow_a_parameter_to_its_device():
    [layer, *_] = sparse.sparse_convnet()[2]._layers
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
    """Here those by which SNIP chooses, and magnitudes."""
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


@pytest.mark.parametrize("structure", ["2:4", "constant-fan-in"])
def test_patterns_are_filled_by_score(structure):
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
    scores = {f"{i}.weight": torch.rand(model[i].weight.shape) for i in range(2)}
    dense = 0.25 if structure == "constant-fan-in" else 1
    options = {"initial_masks": scores, "exclude": "1", "dense_first": False}
    options |= {"dense_allocation": dense, "structure": structure}
    mask = sparse.pruned(model, **options).masks["0.weight"]
    mask = mask.reshape(-1, 8 if dense == 0.25 else 4)
    best = scores["0.weight"].reshape(mask.shape).topk(2).indices
    assert torch.equal(mask, torch.zeros_like(mask).scatter(1, best, True))
