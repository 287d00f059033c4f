"""What every method keeps true, RigL and its relatives, and a user's scores."""

import copy
from unittest.mock import Mock

import pytest
import torch
from support.rigl_xla import sparse
from torch import nn

from rigl_xla import METHODS, Layer
from rigl_xla.topology import masks
from rigl_xla.topology.distribution import num_inactive
from rigl_xla.update import topology_update
from xla_replica import DeviceTraits
from xla_replica.device import selection


@pytest.mark.parametrize(("method", "static_topo"), [
    *((method, False) for method in METHODS),
    *((method, True) for method in METHODS if method != "gmp"),
])  # fmt: skip
@pytest.mark.parametrize("distribution", ["uniform", "erk"])
def test_every_method_ends_at_the_sparsity_asked_for(method, static_topo, distribution):
    options = {"method": method, "sparsity_distribution": distribution}
    options |= {"static_topo": True, "T_end": None} if static_topo else {}
    model, optimizer, pruner = sparse.sparse_convnet(**options)
    first = copy.deepcopy(pruner.masks)
    sparse.train(model, optimizer, pruner, range(14))
    if is_static := static_topo or method == "static":
        pruner.load_state_dict(pruner.state_dict(), T_end=100, delta=1)
        sparse.train(model, optimizer, pruner, range(3))
    expected = [n - num_inactive(s, n) for n, s in zip(pruner.N, pruner.S) if s]
    assert sparse.counts(pruner) == expected
    assert sparse.inactive_are_zero(pruner)
    assert sparse.equal(first, pruner.masks) == is_static == (pruner.rigl_steps == 0)


def test_set_grows_from_seed_and_update_alone():
    """Other gradients change nothing, another seed changes what grows."""
    found = []
    for seed, loss in [(0, 1.0), (0, -1.0), (1, 1.0)]:
        layer = nn.Linear(30, 30)
        nn.init.ones_(layer.weight)
        pruner = sparse.pruned(layer, method="set", delta=1, seed=seed)
        for _ in range(3):
            (layer(torch.randn(2, 30)).sum() * loss).backward()
            assert not pruner()
        found.append(pruner.masks)
    assert sparse.equal(*found[:2])
    assert not sparse.equal(*found[1:])


def test_snfs_grows_where_the_running_mean_of_gradients_is_large():
    """It collects from step 3 on: step 2 is like those after the last update."""
    options = {"method": "snfs", "momentum": 0.5, "delta": 5}
    model, optimizer, pruner = sparse.sparse_convnet(**options)
    mean = {name: mask.float() * 0 for name, mask in pruner.masks.items()}
    for step in range(5):
        before, twin = copy.deepcopy(pruner.masks), copy.deepcopy(model)
        sparse.backward(twin, step)
        for name in mean if step >= 2 else ():
            mean[name] = mean[name] * 0.5 + 0.5 * twin.get_parameter(name).grad
        sparse.train(model, optimizer, pruner, range(step, step + 1))
    for name, new in pruner.masks.items():
        grown, never = new & ~before[name], ~new & ~before[name]
        score = mean[name].abs()
        assert grown.any()
        assert score[grown].min() >= score[never].max()


@pytest.mark.parametrize("bad_step", [None, 2, 11])
def test_gradual_pruning_begins_dense_and_only_loses(bad_step):
    """And counts what the masks have after an update that was refused."""
    model, optimizer, pruner = sparse.sparse_convnet(method="gmp", drop="sensitivity")
    assert sparse.counts(pruner) == [1152, 4096, 160]
    for step in range(14):
        before = copy.deepcopy(pruner.masks)
        optimizer.zero_grad()
        sparse.backward(model, step, float("nan") if step == bad_step else 1.0)
        if pruner():
            optimizer.step()
        state, report = pruner.state_dict()["layers"], pruner.report()
        active = sparse.counts(pruner)
        assert not any((m & ~before[n]).any() for n, m in pruner.masks.items())
        assert [layer["num_active"] for layer in state.values()] == active
        assert [layer.num_active for layer in report.layers.values()] == active
        assert f"{active[0]}/1152, {active[1]}/4096, {active[2]}/160" in str(pruner)
        assert step != bad_step or report.num_grown == report.num_dropped == 0
    # Unless the last update was refused.
    assert (active == [231, 820, 32]) == (bad_step != 11)


def test_rescaled_weights_are_the_models_over_the_root_of_the_density():
    before = sparse.convnet().state_dict()
    model, _, pruner = sparse.sparse_convnet(initial_weights="rescale")
    for name, mask in pruner.masks.items():
        expected = before[name] * mask / mask.float().mean().sqrt()
        assert torch.allclose(model.get_parameter(name), expected)
    assert torch.equal(model[5].bias, before["5.bias"])


@pytest.mark.parametrize(("stride", "groups"), [(0, 0), (1, 1), (2, 1), (1, 4)])
def test_fan_in_weights_keep_the_size_of_their_inputs(stride, groups):
    """Squares of outputs, after a ReLU, have the mean that those of inputs have."""
    layer = nn.Linear(400, 40, bias=False)
    if stride:
        layer = nn.ConvTranspose1d(400, 40, 2, stride, groups=groups, bias=False)
    options = {"initial_weights": "fan-in", "dense_allocation": 0.5}
    pruner = sparse.pruned(layer, **options)
    inputs = torch.randn(8, 400, 50, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        inner = layer(inputs)[:, :, 2:-2] if stride else layer(inputs.mT)
    assert float(inner.relu().square().mean()) == pytest.approx(1, rel=0.1)
    again = copy.deepcopy(layer)
    nn.init.ones_(again.weight)
    sparse.pruned(again, **options)
    assert torch.equal(layer.weight, again.weight)
    state, before = pruner.state_dict(), layer.weight.detach().clone()
    pruner.close()  # a resumed run keeps its weights
    sparse.pruned(layer, **options, state_dict=state)
    assert torch.equal(layer.weight, before)


def test_scores_of_a_user():
    """Here the lowest index stays and the highest index grows."""
    seen = []

    def last(layer: Layer) -> torch.Tensor:
        seen.append((layer.name, layer.step, layer.update, layer.gradient is None))
        return torch.arange(layer.weight.numel()).reshape(layer.weight.shape)

    layer, options = nn.Linear(5, 4), {"dense_allocation": 0.5, "delta": 1}
    scores = {"drop": lambda layer: -last(layer), "grow": last}
    pruner = sparse.pruned(layer, alpha=0.5, T_end=100, **scores, **options)
    dropped = pruner.schedule.num_dropped(1, 10)
    mask = pruner.masks["weight"].flatten().clone()
    mask[mask.nonzero()[10 - dropped :]] = False
    mask[(~mask).nonzero()[-dropped:]] = True
    layer(torch.ones(1, 5)).sum().backward()
    assert not pruner()
    assert torch.equal(pruner.masks["weight"].flatten(), mask)
    assert seen == [("weight", 1, 1, False)] * 2
    pruner.close()
    pruner = sparse.pruned(layer, grow=lambda _: torch.ones(3), **options)
    layer(torch.ones(1, 5)).sum().backward()
    with pytest.raises(ValueError, match=r"weight's shape, \(4, 5\)"):
        pruner()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("structure", [None, "constant-fan-in"])
def test_scores_where_they_do_not_count_may_be_anything(bad, structure):
    """Scores of inactive connections to drop, or of kept ones to grow, are not used."""

    def drop(layer: Layer) -> torch.Tensor:
        return torch.where(layer.mask, layer.weight.abs(), bad)

    def grow(layer: Layer) -> torch.Tensor:
        strongest = layer.weight.abs() >= layer.weight.abs().max()
        return torch.where(strongest, bad, layer.gradient.abs())

    found, options = [], {"delta": 1, "structure": structure}
    for scores in ({}, {"drop": drop, "grow": grow}):
        model, _, pruner = sparse.sparse_convnet(**options, **scores)
        found.append(copy.deepcopy(pruner.masks))
        sparse.backward(model, 0)
        assert not pruner()
        found.append(pruner.masks)
    assert sparse.equal(found[1], found[3])
    assert not sparse.equal(*found[2:])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("what", ["drop", "grow"])
def test_scores_that_count_must_be_finite_in_their_own_layer(bad, what):
    def score(layer: Layer) -> torch.Tensor:
        found = layer.random()
        if layer.name == "1.weight":
            found[tuple((layer.mask == (what == "drop")).nonzero()[0])] = bad
        return found

    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    pruner = sparse.pruned(model, dense_first=False, delta=1, **{what: score})
    before = copy.deepcopy(pruner.masks)
    model(torch.randn(4, 16)).square().sum().backward()
    assert not pruner()
    same = [name for name in before if torch.equal(before[name], pruner.masks[name])]
    assert same == ["1.weight"]


def has(structure: str, mask: torch.Tensor) -> bool:
    """Returns whether a mask has a structure, or a quarter of each row."""
    if structure == "constant-fan-in":
        return {int(row.sum()) for row in mask} == {mask[0].numel() // 4}
    n, m = map(int, structure.split(":"))
    parts = mask.flatten(2) if mask.dim() > 2 else mask[..., None]
    return all((part.sum(1) == n).all() for part in parts.split(m, dim=1))


def structured(structure: str, initial, **options) -> dict[str, object]:
    dense = 0.25 if structure == "constant-fan-in" else 1
    options |= {"structure": structure, "initial_masks": initial, "T_end": 30}
    return options | {"dense_allocation": dense}


@pytest.mark.parametrize("method", ["rigl", "set", "snfs"])
@pytest.mark.parametrize("initial", ["random", "magnitude"])
@pytest.mark.parametrize("structure", ["2:4", "1:8", "constant-fan-in"])
def test_patterns_are_kept_while_connections_move(structure, initial, method):
    options = structured(structure, initial, exclude=["7"], method=method)
    model, optimizer, pruner = sparse.sparse_convnet(**options)
    first = copy.deepcopy(pruner.masks)
    for step in range(7):
        sparse.train(model, optimizer, pruner, range(step, step + 1))
        assert all(has(structure, mask) for mask in pruner.masks.values())
    assert sparse.inactive_are_zero(pruner)
    assert not any(torch.equal(first[n], mask) for n, mask in pruner.masks.items())


@pytest.mark.parametrize("structure", ["2:4", "constant-fan-in"])
def test_patterns_are_filled_by_score(structure):
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
    scores = {f"{i}.weight": torch.rand(model[i].weight.shape) for i in range(2)}
    options = structured(structure, scores, exclude="1", dense_first=False)
    mask = sparse.pruned(model, **options).masks["0.weight"]
    mask = mask.reshape(-1, 4 if structure == "2:4" else 8)
    best = scores["0.weight"].reshape(mask.shape).topk(2).indices
    assert torch.equal(mask, torch.zeros_like(mask).scatter(1, best, True))


@pytest.mark.parametrize("structure", ["2:4", "constant-fan-in"])
@pytest.mark.parametrize("initial", ["random", "magnitude"])
@pytest.mark.parametrize("groups", [1, 3])
def test_inputs_of_transposed_convolutions_lie_along_the_first_dimension(
    structure, initial, groups
):
    torch.manual_seed(0)  # of some draws no weight is another one
    layer = nn.ConvTranspose2d(12, 6, (2, 3), stride=2, groups=groups)
    pruner = sparse.pruned(layer, **structured(structure, initial))
    first = pruner.masks["weight"].clone()
    for _ in range(3):
        layer.zero_grad()
        layer(torch.randn(2, 12, 3, 3)).square().sum().backward()
        pruner()
    mask = pruner.masks["weight"]
    assert not torch.equal(first, mask)
    for inputs in mask.split(12 // groups):  # all that an output sees
        assert has(structure, inputs.transpose(0, 1))


@pytest.mark.parametrize("method", ["rigl", "set", "gmp"])
def test_layers_of_one_size_are_stacked_up_to_a_limit(method, monkeypatch):
    """As on an accelerator, where an update would otherwise need a multiple of them."""
    top = Mock(wraps=masks.top)
    monkeypatch.setattr(masks, "top", top)
    for module in (selection, topology_update):
        monkeypatch.setattr(module, "traits", lambda tensor: DeviceTraits())
    found, largest = [], []
    for limit in (10**9, 3 * 64, 1):
        monkeypatch.setattr(topology_update, "_WEIGHTS_IN_GROUP", limit)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        pruner = sparse.pruned(model, method=method, delta=1, T_end=3)
        model(torch.randn(4, 8)).square().sum().backward()
        top.reset_mock()
        assert not pruner()
        found.append(pruner.masks)
        largest.append(max(call.args[0].numel() for call in top.call_args_list))
    assert largest == [7 * 64, 3 * 64, 64]  # the first layer is dense
    assert all(sparse.equal(found[0], each) for each in found)
