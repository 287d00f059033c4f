"""Gradients that stay allocated: zeroed, frozen, added and thrown away by users."""

import functools

import pytest
import torch
from support.kernels import Kernels
from support.rigl_xla.resnet import RESNET50_WEIGHTS
from support.variable_batch_size import wrapping
from support.variable_batch_size.elastic import Case, Training
from support.variable_batch_size.wrapping import CPU, backward, make, run_epoch
from support.xla_replica.replicas import row
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import rigl_xla
import variable_batch_size as vbs
import xla_replica


def test_gradients_keep_their_memory():
    """Also those of an idle replica, even if model.zero_grad() has put None there."""
    model, sampler, wrapper = wrapping.idle_replica()
    before = [p.grad.data_ptr() for p in model.parameters()]
    model.zero_grad()
    wrapper.set_epoch(0)
    assert [p.grad.data_ptr() for p in model.parameters()] == before
    run_epoch(model, sampler, wrapper)
    assert [p.grad.data_ptr() for p in model.parameters()] == before


def test_gradients_from_before_the_wrapper_do_not_count():
    model, sampler, _ = make(trace=32)
    backward(model)  # a learning-rate finder's, say
    wrapper = vbs.ConstantOptimizer(SGD(model.parameters(), 0.1), sampler, replica=CPU)
    assert torch.equal(model.weight.grad, torch.zeros(1, 2))
    assert wrapper.get_lr() == (0.1,)


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_model_zero_grad_between_steps_is_harmless(set_to_none, freezes):
    """Also where another parameter is frozen since the wrapper was built."""
    model, sampler, wrapper = make(trace=32)
    expected, *plain = make(trace=32)
    for each in (model, expected):
        each.bias.requires_grad_(not freezes)
    for _ in sampler:
        model.zero_grad(set_to_none=set_to_none)
        backward(model)
        wrapper.step()
    run_epoch(expected, *plain)
    assert torch.equal(model.weight, expected.weight)


def test_a_group_added_later_is_trained_too():
    model, sampler, wrapper = make(trace=[64])
    late = nn.Parameter(torch.zeros(2))
    wrapper.add_param_group({"params": [late], "lr": 1.0})
    for _ in sampler:
        (model(torch.ones(1, 2)).sum() + late.sum()).backward()
        wrapper.step()
    assert torch.equal(late.data, torch.full((2,), -2.0))
    assert wrapper.get_lr() == (0.1, 1.0)


def test_freezing_and_unfreezing():
    """A frozen parameter stays, whatever its momentum; an unfrozen one is averaged."""
    inner = functools.partial(SGD, momentum=0.9, weight_decay=0.1)
    model, sampler, wrapper = make(trace=64, inner=inner)
    run_epoch(model, sampler, wrapper)
    model.bias.requires_grad_(False)
    frozen = model.bias.detach().clone()
    for epoch in (1, 2):
        sampler.set_epoch(epoch)
        run_epoch(model, sampler, wrapper)
    assert torch.equal(model.bias, frozen)
    assert model.bias.grad is None
    model.bias.requires_grad_(True)
    gradients = []
    wrapper.register_step_pre_hook(lambda *_: gradients.append(model.bias.grad.item()))
    sampler.set_epoch(3)
    run_epoch(model, sampler, wrapper)
    assert gradients == [1.0] * 4


@pytest.mark.parametrize(("value", "place"), [
    (torch.ones(()), ()),
    (torch.ones(9, 4).T, (2, 5)),
    (torch.ones(4, 3, 5, 6).to(memory_format=torch.channels_last), (2, 1, 0, 2)),
    (torch.ones(3, 40, dtype=torch.bfloat16)[:, ::2], (1, 12)),
], ids=["a number", "transposed", "channels last", "every other bfloat16"])  # fmt: skip
def test_a_change_of_one_number_is_seen_in_any_layout(value, place):
    """It is in the middle of the memory; the gradient has the parameter's strides."""
    parameter, (_, sampler, _) = nn.Parameter(value), make(trace=64)
    wrapper = vbs.ConstantOptimizer(SGD([parameter], 0.1), sampler, replica=CPU)
    next(iter(sampler))
    parameter.sum().backward()
    parameter.grad.data[place] = 0.5
    with pytest.raises(ValueError, match="was changed between backward"):
        wrapper.step()


@pytest.mark.parametrize("how", ["add", "copy", "assign", "autograd.grad"])
def test_gradients_made_by_hand_are_allowed(how):
    model, sampler, wrapper = make(trace=[64, 32])
    begins = True
    for _ in sampler:
        for parameter in model.parameters():
            one = torch.ones_like(parameter)
            if how == "autograd.grad":
                [one] = torch.autograd.grad((parameter * one).sum(), parameter)
            if how == "copy":
                parameter.grad.copy_(parameter.grad + one)
            elif how == "assign" and begins:
                parameter.grad = one
            else:
                parameter.grad.add_(one)
        begins = wrapper.step()
    assert torch.allclose(model.weight, torch.full((1, 2), -0.2 - 0.1))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_minibatch_may_accumulate_several_times(checkpointed):
    model, sampler, wrapper = make(trace=64)
    for _ in sampler:
        x = torch.ones(1, 2, requires_grad=True)
        if checkpointed:
            run = functools.partial(checkpoint, model, x, use_reentrant=True)
            (run() + run()).backward()
        else:
            for _ in range(2):
                model(x).sum().backward()
        wrapper.step()
    assert torch.allclose(model.weight, torch.full((1, 2), -0.2 * 2 * 4))


def test_what_has_no_gradient_needs_no_backward_pass():
    model, _, wrapper = make(trace=64, reduction="sum", cls=vbs.ConstantOptimizer)
    next(wrapper.minibatches)
    assert wrapper.step(weight=0) == 0
    next(wrapper.minibatches)
    with pytest.raises(ValueError, match="without backward"):
        wrapper.step(weight=2)
    backward(model)
    assert wrapper.step(weight=2) == 1
    next(wrapper.minibatches)
    assert wrapper.step(weight=torch.tensor(0.0)) == 0
    model, _, wrapper = make(trace=32)
    model.requires_grad_(False)
    next(wrapper.minibatches)
    assert wrapper.step() == 1


@pytest.mark.parametrize("rule", ["constant", "linear", "adascale", "adam-root"])
def test_an_update_of_resnet_50_takes_few_kernels(rule):
    """On the device ``meta`` nothing can be read: every read would raise."""
    shapes = list(RESNET50_WEIGHTS.values())
    shapes += [shape[:1] for shape in shapes for _ in range(1 + (len(shape) == 4))]
    parameters = [nn.Parameter(torch.zeros(s, device="meta")) for s in shapes]
    assert len(parameters) == 161
    kind = torch.optim.AdamW if rule == "adam-root" else SGD
    inner, meta = kind(parameters, 0.1, foreach=True), xla_replica.LocalReplica("meta")
    kernels, sampler = Kernels(inner), wrapping.sampler_of([32, 64, 32, 64])
    wrapper = vbs.ElasticOptimizer(inner, sampler, rule, 32, replica=meta)
    wrapper.attach(torch.optim.lr_scheduler.CosineAnnealingLR(inner, 100))
    for index, _ in enumerate(sampler):
        sum(parameter.sum() for parameter in parameters).backward()
        kernels.clear()
        with kernels:
            updated = wrapper.step()
        if updated and index >= 3:  # the batch size has been uploaded before
            assert kernels.calls.total() <= 60, kernels.calls


def error_of_16_bits(rank: int, float32_sums: bool) -> float:
    """Returns the relative error of an update of 384 minibatches of one sample."""
    x = torch.rand(384, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    model = nn.Linear(64, 1, bias=False).bfloat16()
    nn.init.zeros_(model.weight)
    case = Case((384,), 2, "sgd", "constant", 1.0, num_samples=384, minibatch_size=1)
    options = {"made": (model, x, x), "float32_sums": float32_sums}
    training, before = Training(case, lambda m, x, y: m(x).sum(), **options), 0.0
    for epoch in range(2):  # the second one finds buckets in their order
        training.epoch(epoch)
        [weight] = training.weights()
        change, before = weight.double() - before, weight.double()
    expected = -x.double().mean(0)
    return float((change - expected).norm() / expected.norm())


@pytest.mark.parametrize("backend", [row("cpu", 1), row("cpu", 2), row("xla", 2)])
def test_minibatches_of_16_bits_add_up_in_float32(backend):
    assert max(backend.run(error_of_16_bits, True)) < 0.004
    assert min(backend.run(error_of_16_bits, False)) > 0.01


@pytest.mark.parametrize("float32_sums", [True, False])
def test_rigl_grows_by_all_minibatches_of_16_bits(float32_sums):
    replica = xla_replica.LocalReplica("cpu")
    model = nn.Linear(8, 1, bias=False).bfloat16()
    x = torch.eye(8)[4:].bfloat16() * torch.tensor([[1], [9], [1], [2]])  # 5 grows
    sgd = SGD(model.parameters(), 0.1)
    active = torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 0]])
    pruner = rigl_xla.RigLScheduler(
        model, sgd, T_end=100, delta=1, alpha=0.5, dense_allocation=0.5,
        dense_first=False, initial_masks={"weight": active}, replica=replica,
        skip_step=False, ignore_linear_layers=False,
    )  # fmt: skip
    sampler = vbs.CustomSampler(x, [4], minibatch_size=1, order=range(4))
    options = {"float32_sums": float32_sums, "replica": replica}
    wrapper = vbs.ConstantOptimizer(sgd, sampler, **options)
    wrapper.attach(lambda update: pruner())
    for [sample] in sampler:
        model(x[sample]).sum().backward()
        wrapper.step()
    assert pruner.masks["weight"][0].nonzero().flatten().tolist()[-1] == 5
