"""RigLScheduler in a training loop: what stays sparse, what moves, what is refused."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from support.sparse import (
    OPTIMIZERS,
    batch,
    convnet,
    counts,
    equal,
    inactive_are_zero,
    pruned,
    train,
)
from torch import nn

import variable_batch_size as vbs
from rigl_xla import RigLScheduler


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, **options)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_keeps_inactive_weights_and_their_state_at_zero(kind):
    model = convnet()
    optimizer = OPTIMIZERS[kind](model.parameters())
    pruner = pruned(model, optimizer)
    before, active = copy.deepcopy(pruner.masks), counts(pruner)
    assert active == [231, 820, 32]  # 1152 - floor(0.8 * 1152), ...
    for step in range(15):
        train(model, optimizer, pruner, range(step, step + 1))
        assert counts(pruner) == active
        assert inactive_are_zero(pruner)
    assert pruner.rigl_steps == 4
    assert not equal(pruner.masks, before)


def test_the_step_that_changes_the_topology_changes_no_other_weight():
    model = convnet()
    optimizer = sgd(model)
    pruner = pruned(model, optimizer)
    train(model, optimizer, pruner, range(2))
    before, masks = copy.deepcopy(model.state_dict()), copy.deepcopy(pruner.masks)
    train(model, optimizer, pruner, range(2, 3))
    for name, weight in model.state_dict().items():
        old, new = masks.get(name), pruner.masks.get(name)
        kept = torch.ones_like(weight, dtype=torch.bool) if old is None else old & new
        assert torch.equal(weight, torch.where(kept, before[name], 0.0)), name
        if old is not None:
            grown = new & ~old
            assert grown.any()
            assert torch.equal(new.sum(), old.sum())


@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize("kind", sorted(set(OPTIMIZERS) - {"sgd-plain"}))
def test_a_grown_connection_begins_without_the_optimizers_past(kind, skip_step):
    """Also where something was left behind, as by a state that was loaded."""
    model = convnet()
    optimizer = OPTIMIZERS[kind](model.parameters())
    pruner = pruned(model, optimizer, skip_step=skip_step)
    train(model, optimizer, pruner, range(2))
    kept_of = {}
    for name in pruner.masks:
        weight = model.get_parameter(name)
        state = optimizer.state[weight].values()
        kept_of[name] = [v for v in state if v.shape == weight.shape]
        assert kept_of[name]
        for tensor in kept_of[name]:
            tensor.fill_(1.0)
    masks = copy.deepcopy(pruner.masks)
    train(model, optimizer, pruner, range(2, 3))
    for name, new in pruner.masks.items():
        grown, kept = new & ~masks[name], new & masks[name]
        assert grown.any()
        for tensor in kept_of[name]:
            assert not tensor[grown].any()
            assert tensor[kept].all()


def test_the_strongest_stay_and_the_largest_gradients_grow():
    model = convnet()
    optimizer = sgd(model)
    pruner = pruned(model, optimizer, delta=1, T_end=100)
    masks = copy.deepcopy(pruner.masks)
    weights = {name: model.get_parameter(name).detach().clone() for name in masks}
    dense = {}
    for name in masks:
        parameter = model.get_parameter(name)
        parameter.register_hook(lambda grad, name=name: dense.update({name: grad}))
    pruner.close()  # its hooks come behind ours then
    pruner = pruned(model, optimizer, delta=1, T_end=100)
    train(model, optimizer, pruner, range(1))
    for name, new in pruner.masks.items():
        num_active = int(masks[name].sum())
        num_dropped = pruner.schedule.num_dropped(1, num_active)
        strength = torch.where(masks[name], weights[name].abs(), -1).flatten()
        keep = set(
            strength.argsort(descending=True)[: num_active - num_dropped].tolist()
        )
        order = dense[name].abs().flatten().argsort(descending=True).tolist()
        grow = [index for index in order if index not in keep][:num_dropped]
        assert set(new.flatten().nonzero().flatten().tolist()) == keep | set(grow)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"grad_accumulation_n": 3},
        {"structure": "constant-fan-in"},
        {"structure": "2:4", "dense_allocation": 1, "exclude": "7"},
    ],
    ids=["rigl", "window", "constant-fan-in", "2:4"],
)
def test_one_bad_batch_leaves_masks_and_counts(bad, options):
    model = convnet()
    optimizer = sgd(model)
    pruner = pruned(model, optimizer, **options)
    masks, active = copy.deepcopy(pruner.masks), counts(pruner)
    train(model, optimizer, pruner, range(2))
    (F.cross_entropy(model(batch(2)[0]), batch(2)[1]) * bad).backward()
    assert not pruner()
    assert pruner.rigl_steps == 1
    assert equal(pruner.masks, masks)
    assert counts(pruner) == active
    train(model, optimizer, pruner, range(3, 9))
    assert counts(pruner) == active
    assert all(not torch.equal(pruner.masks[name], masks[name]) for name in masks)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_one_bad_batch_stays_out_of_the_running_mean(bad, at):
    model = convnet()
    optimizer = sgd(model)
    pruner = pruned(model, optimizer, method="snfs", delta=5)
    active = counts(pruner)
    for step in range(5):
        if step != at:
            train(model, optimizer, pruner, range(step, step + 1))
            continue
        optimizer.zero_grad()
        before = {layer.name: layer.gradient for layer in pruner._layers}
        F.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
        pruner._layers[1].pending[0, 0] = bad  # in one layer: all leave the step out
        pruner()  # its optimizer takes no step
        for layer in pruner._layers:
            past = before[layer.name]
            expected = torch.zeros_like(layer.data) if past is None else past
            assert torch.equal(layer.gradient, expected)
    masks = copy.deepcopy(pruner.masks)
    train(model, optimizer, pruner, range(5, 10))
    assert counts(pruner) == active
    assert all(not torch.equal(pruner.masks[name], masks[name]) for name in masks)


def test_nan_in_gradients_of_inactive_weights_does_not_reach_them():
    layer = nn.Linear(4, 4)
    optimizer = sgd(layer)
    pruner = pruned(layer, optimizer, dense_allocation=0.5, dense_first=False)
    pruner()
    (layer(torch.ones(1, 4)).sum() * float("nan")).backward()
    mask = pruner.masks["weight"]
    assert torch.equal(layer.weight.grad[~mask], torch.zeros(8))
    assert layer.weight.grad[mask].isnan().all()


def test_a_layer_outside_of_the_loss_keeps_its_mask():
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizer = sgd(model)
    pruner = pruned(model, optimizer, delta=1)
    masks = copy.deepcopy(pruner.masks)
    for _ in range(3):
        optimizer.zero_grad()
        model[1](model[0](torch.randn(4, 8))).square().sum().backward()
        pruner()
    assert not torch.equal(masks["1.weight"], pruner.masks["1.weight"])
    assert torch.equal(masks["2.weight"], pruner.masks["2.weight"])


def test_the_gradient_is_sparse_before_anyone_clips_it():
    model = convnet()
    optimizer = sgd(model)
    pruner = pruned(model, optimizer, delta=2, grad_accumulation_n=2)
    for step in range(4):
        images, labels = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        for name, mask in pruner.masks.items():
            assert not model.get_parameter(name).grad[~mask].any()
        pruner()


def test_backward_passes_of_one_step_add_up():
    """Micro-batches choose as the whole batch does."""
    masks = []
    for parts in (1, 4):
        model = convnet().double()
        optimizer = sgd(model)
        pruner = pruned(model, optimizer)
        for step in range(13):
            optimizer.zero_grad()
            images, labels = batch(step)
            for x, y in zip(images.double().chunk(parts), labels.chunk(parts)):
                (F.cross_entropy(model(x), y) / parts).backward()
            if pruner():
                optimizer.step()
        masks.append(pruner.masks)
    assert pruner.rigl_steps == 4
    assert equal(*masks)


def test_single_call_mode_steps_and_updates_in_one():
    """Every step moves weights, and updates happen behind steps 3, 6, 9 and 12."""
    model = convnet()
    optimizer = sgd(model)
    pruner = pruned(model, optimizer, skip_step=False)
    changed_at = []
    for step in range(15):
        masks, bias = copy.deepcopy(pruner.masks), model[7].bias.detach().clone()
        train(model, optimizer, pruner, range(step, step + 1))
        assert not torch.equal(bias, model[7].bias)
        if not equal(masks, pruner.masks):
            changed_at.append(pruner.step)
        assert inactive_are_zero(pruner)
    assert changed_at == [3, 6, 9, 12]


def test_single_call_mode_needs_no_call_and_takes_closures():
    weights = []
    for with_closure in (False, True):
        model = convnet()
        optimizer = sgd(model)
        pruner = pruned(model, optimizer, skip_step=False)

        def loss(step, model=model, optimizer=optimizer):
            images, labels = batch(step)
            optimizer.zero_grad()
            value = F.cross_entropy(model(images), labels)
            value.backward()
            return value

        for step in range(10):
            if with_closure:
                assert optimizer.step(lambda step=step: loss(step)) > 0
            else:
                loss(step)
                optimizer.step()
        assert pruner.rigl_steps == 3
        weights.append(model.state_dict())
    assert equal(*weights)


@pytest.mark.parametrize("before", [True, False])
def test_lr_schedulers_made_before_or_after(before):
    model = convnet()
    optimizer = sgd(model)
    if before:
        lrs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        pruned(model, optimizer)
    else:
        pruned(model, optimizer)
        lrs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = optimizer.step
    optimizer.step()
    lrs.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.step == step


def test_gradient_scaling():
    model = convnet()
    optimizer = sgd(model)
    pruner = pruned(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    active = counts(pruner)
    for step in range(10):
        images, labels = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        if step == 5:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if pruner():
            scaler.step(optimizer)
            scaler.update()
    assert pruner.rigl_steps == 3
    assert counts(pruner) == active
    assert inactive_are_zero(pruner)


@pytest.mark.parametrize("n", [1, 3])
def test_a_step_that_gradient_scaling_leaves_out_is_left_out_of_the_update(n):
    model = convnet()
    optimizer = sgd(model)
    pruner = pruned(model, optimizer, skip_step=False, grad_accumulation_n=n)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    active = counts(pruner)
    for step in range(4):
        masks = copy.deepcopy(pruner.masks)
        images, labels = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss * float("inf") if step == 2 else loss).backward()
        assert pruner()
        scaler.step(optimizer)
        scaler.update()
    assert (pruner.step, pruner.rigl_steps) == (3, 1)
    assert not any(torch.equal(mask, masks[n]) for n, mask in pruner.masks.items())
    assert counts(pruner) == active


def test_a_compiled_model_trains_alike():
    results = []
    for compiled in (False, True):
        model = convnet()
        called = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = sgd(model)
        pruner = pruned(called, optimizer)
        train(called, optimizer, pruner, range(7))
        results.append((pruner.masks, model.state_dict()))
    assert equal(results[0][0], results[1][0])
    assert equal(results[0][1], results[1][1])


def test_shared_weights_have_one_mask():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 72), nn.Linear(72, 72)
    )
    model[3].weight = model[2].weight
    optimizer = sgd(model)
    pruner = pruned(model, optimizer, delta=1)
    assert list(pruner.masks) == ["2.weight"]
    model(torch.randn(2, 1, 8, 8)).square().sum().backward()
    assert not pruner()
    assert int(pruner.masks["2.weight"].sum()) == 72 * 72 - 4147


@pytest.mark.parametrize("skip_step", [True, False])
def test_parameters_that_are_replaced_are_an_error(skip_step):
    model = convnet()
    optimizer = sgd(model)
    pruner = pruned(model, optimizer, skip_step=skip_step)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    with pytest.raises(ValueError, match="build optimizer and pruner after the move"):
        pruner()


def test_close_lets_go():
    model = convnet()
    optimizer = sgd(model)
    pruner = pruned(model, optimizer)
    with pruner, pytest.raises(ValueError, match="another RigLScheduler: close"):
        pruned(model, optimizer)
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    assert (model[5].weight != 0).float().mean() > 0.5  # no more than 0.2 before
    pruned(model, optimizer).close()


@pytest.mark.parametrize("options", [{}, {"dense_allocation": 1}])
def test_a_closed_pruner_does_nothing_until_it_loads_a_state(options):
    model = convnet()
    optimizer = sgd(model)
    pruner = pruned(model, optimizer, **options)
    train(model, optimizer, pruner, range(1))
    state, masks = pruner.state_dict(), copy.deepcopy(pruner.masks)
    pruner.close()
    before = copy.deepcopy(model.state_dict())
    assert all(pruner() for _ in range(6))
    assert (pruner.step, pruner.rigl_steps) == (1, 0)
    assert equal(before, model.state_dict())
    assert equal(masks, pruner.masks)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    assert pruner()
    pruner = pruned(model, sgd(model), **options)
    pruner.close()
    pruner.load_state_dict(state)
    assert [pruner() for _ in range(3)] == [True, False, True]


def test_a_sparse_model_is_pickled_and_copied_without_its_pruner():
    model = convnet()
    optimizer = sgd(model)
    pruner = pruned(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert equal(other.state_dict(), model.state_dict())
        pruned(other, sgd(other)).close()
    train(model, optimizer, pruner, range(4))
    assert pruner.rigl_steps == 1


def test_memory_is_shared_throughout():
    """Nothing that aliases a weight or a mask loses it."""
    model = convnet()
    optimizer = sgd(model)
    pruner = pruned(model, optimizer)
    tensors = [model[5].weight, pruner.masks["5.weight"]]
    before = [tensor.data_ptr() for tensor in tensors]
    train(model, optimizer, pruner, range(7))
    tensors = [model[5].weight, pruner.masks["5.weight"]]
    assert before == [tensor.data_ptr() for tensor in tensors]


def test_masks_and_their_past_follow_a_parameter_to_its_device():
    model = convnet()
    [layer, *_] = pruned(model, sgd(model))._layers
    mask = layer.mask
    layer.follow(torch.device("cpu"))
    assert layer.mask is mask
    layer.follow(torch.device("meta"))
    moved = [layer.mask, layer.history.ever, layer.history.counts]
    assert [tensor.device.type for tensor in moved] == ["meta"] * 3


def test_the_drop_fraction_by_its_name_in_rigl_torch():
    model = convnet()
    pruner = pruned(model, sgd(model), alpha=0.4, T_end=8, delta=4)
    found = []
    for _ in range(9):
        found.append(pruner.cosine_annealing())
        pruner()
    expected = [0.2 * (1 + math.cos(math.pi * step / 8)) for step in range(9)]
    assert found == pytest.approx(expected)


def test_gradients_written_by_hand_are_masked_on_demand():
    model = convnet()
    pruner = pruned(model, sgd(model))
    first, *others = pruner.masks  # the first has none
    for name in others:
        weight = model.get_parameter(name)
        weight.grad = torch.where(pruner.masks[name], 2.0, torch.nan)
    pruner.apply_mask_to_gradients()
    assert model.get_parameter(first).grad is None
    for name in others:
        assert torch.equal(model.get_parameter(name).grad, 2.0 * pruner.masks[name])


def test_a_dense_model_is_left_alone():
    model = convnet()
    before = copy.deepcopy(model.state_dict())
    optimizer = sgd(model)
    pruner = RigLScheduler(model, optimizer)
    assert equal(before, model.state_dict())
    train(model, optimizer, pruner, range(2))
    assert pruner.masks == {}
    assert "total_nonzero_params=5480/5480 (100.00%)" in str(pruner)
    assert pruner.report().sparsity == 0


def test_defaults_keep_linear_layers_dense():
    model = convnet()
    pruner = RigLScheduler(model, sgd(model), 0.1, 75, delta=7)
    assert list(pruner.masks) == ["2.weight"]
    assert pytest.approx([0, 0.9, 0, 0]) == pruner.S


@pytest.mark.parametrize("distribution", ["uniform", "adjusted-uniform"])
def test_no_other_layer_is_kept_dense_for_an_excluded_first_one(distribution):
    """The first is the model's, by registration: excluded, it is dense as it is."""
    options = {"sparsity_distribution": distribution, "dense_allocation": 0.5}
    for exclude, names in [
        ((), ["2.weight", "5.weight", "7.weight"]),
        ("0", ["2.weight", "5.weight", "7.weight"]),
        (["0", "2"], ["5.weight", "7.weight"]),
        ("5", ["2.weight", "7.weight"]),
    ]:
        model = convnet()
        pruner = pruned(model, sgd(model), exclude=exclude, **options)
        assert list(pruner.masks) == names
    model = convnet()
    pruner = pruned(model, sgd(model), exclude="0", dense_first=True)
    assert list(pruner.masks) == ["2.weight", "5.weight", "7.weight"]


def test_weights_without_values_are_refused():
    model = convnet().to("meta")
    with pytest.raises(ValueError, match="meta device and have no values"):
        pruned(model, sgd(model))


def test_what_it_prints():
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5))
    pruner = pruned(model, sgd(model))
    assert str(pruner).splitlines() == [
        "RigLScheduler(",
        "layers=2,",
        "nonzero_params=[100/100, 10/50],",
        "nonzero_percentages=[100.00%, 20.00%],",
        "total_nonzero_params=110/150 (73.33%),",
        "total_CONV_nonzero_params=0/0 (0.00%),",
        "step=0,",
        "num_rigl_steps=0,",
        "ignoring_linear_layers=False,",
        "sparsity_distribution=uniform,",
        ")",
    ]


BAD_SCORES = {f"{layer}.weight": torch.ones(3) for layer in (0, 2, 5, 7)}
BAD = [
    ({"dense_allocation": 0}, ValueError, "above 0 and at most 1"),
    ({"dense_allocation": "0.1"}, TypeError, "must be a number"),
    ({"T_end": None}, ValueError, "about 0.75 times"),
    ({"T_end": 0}, ValueError, "at least 1 step"),
    ({"alpha": 1.5}, ValueError, r"in \[0, 1\]"),
    ({"delta": 0}, ValueError, "at least 1 step"),
    ({"grad_accumulation_n": 4}, ValueError, "from 1 to delta"),
    ({"sparsity_distribution": "unifrom"}, ValueError, "allowed are"),
    ({"method": "rigel"}, ValueError, "allowed are"),
    ({"method": "gmp", "grow": "random"}, ValueError, "grows no connections"),
    ({"method": "gmp", "T_end": 3}, ValueError, "would leave all dense"),
    ({"method": "static", "drop": "random"}, ValueError, "nothing to do"),
    ({"static_topo": True, "drop": "random"}, ValueError, "nothing to do"),
    ({"static_topo": True, "method": "set", "grow": "random"}, ValueError, "nothing"),
    ({"static_topo": True, "method": "gmp"}, ValueError, "leave out one of them"),
    ({"static_topo": True, "method": "rigel"}, ValueError, "allowed are"),
    ({"grow": "magnitud"}, ValueError, "allowed are"),
    ({"grow": 3}, TypeError, "a function of"),
    ({"initial_masks": "snipe"}, ValueError, "allowed are"),
    ({"initial_masks": 3}, TypeError, "scores by parameter name"),
    ({"initial_masks": {}}, ValueError, "no scores for the weight '2.weight'"),
    ({"initial_masks": BAD_SCORES}, ValueError, r"have shape \(3,\); the weight has"),
    ({"initial_masks": "magnitude", "method": "gmp"}, ValueError, "begins dense"),
    ({"initial_weights": "he"}, ValueError, "allowed are"),
    ({"sparsities": {"nothing": 0.5}}, ValueError, "the name of no weight"),
    ({"sparsities": {"5": 1.0}}, ValueError, "from 0 to below 1"),
    ({"exclude": [nn.Conv2d, nn.Linear]}, ValueError, "no weight is left"),
    ({"exclude": "heads"}, ValueError, "names 'heads'"),
    ({"exclude": nn.LSTM}, ValueError, "the model has no such"),
    ({"structure": "4:2"}, ValueError, "0 < N < M"),
    ({"structure": "2:4"}, ValueError, "leave it out"),
    ({"structure": "2:4", "dense_allocation": 0.5, "method": "gmp"}, ValueError, "gmp"),
    ({"structure": "1:3", "dense_allocation": 1}, ValueError, "no multiple of 3"),
    ({"momentum": 1}, ValueError, "below 1"),
    ({"momentum": "0.9"}, TypeError, "momentum is '0.9'; it must be a number"),
    ({"seed": 0.5}, TypeError, "an integer"),
    ({"sparsities": [0.5]}, TypeError, "a dict from patterns"),
    ({"sparsities": {5: 0.5}}, TypeError, "a dict from patterns"),
    ({"sparsities": {"5": "0.5"}}, TypeError, "must be a number"),
    ({"skip_step": "no"}, TypeError, "skip_step is 'no'; it must be True or False"),
    ({"static_topo": "yes"}, TypeError, "static_topo is 'yes'; it must be True or"),
    ({"ignore_linear_layers": 0}, TypeError, "ignore_linear_layers is 0; it must be"),
    ({"dense_first": 3}, TypeError, "dense_first is 3; it must be True or False"),
    ({"method": ["rigl"]}, TypeError, "method is .'rigl'.; it must be one of"),
    ({"annealing": []}, TypeError, "annealing is ..; it must be one of"),
    ({"include": 3}, TypeError, "3 selects no layers"),
    ({"replica": "xla"}, TypeError, "replica is 'xla'; it must be a xla_replica"),
    ({"state_dict": 3}, TypeError, "must be what"),
    ({"state_dict": {}}, ValueError, "its own format"),
]


@pytest.mark.parametrize(("options", "error", "says"), BAD)
def test_whatever_is_wrong_is_said_before_anything_is_touched(options, error, says):
    model = convnet()
    before = copy.deepcopy(model.state_dict())
    optimizer = sgd(model)
    with pytest.raises(error, match=says):
        pruned(model, optimizer, **options)
    assert equal(before, model.state_dict())
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    pruned(model, optimizer)  # and nothing stands in the way


def test_a_model_of_linear_layers_needs_to_be_told():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="needs ignore_linear_layers=False"):
        RigLScheduler(model, sgd(model), dense_allocation=0.5, T_end=10)


def test_an_optimizer_that_steps_by_itself_needs_to_be_told():
    images, labels = batch(0, 16)
    dataset = torch.utils.data.TensorDataset(images, labels)
    sampler = vbs.CustomSampler(dataset, [8], minibatch_size=4, on_end="cycle")
    model = convnet()
    optimizer = vbs.ConstantOptimizer(sgd(model), sampler)
    with pytest.raises(ValueError, match="build the pruner with skip_step=False"):
        pruned(model, optimizer)
    pruned(model, optimizer, skip_step=False)


def test_an_optimizer_of_other_weights_is_refused():
    model = convnet()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"does not train \['2.weight'"):
        pruned(model, sgd(convnet()))
    with pytest.raises(TypeError, match="must be a torch optimizer"):
        pruned(model, nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model is a dict; it must be a torch module"):
        pruned({}, sgd(model))
    assert equal(before, model.state_dict())
