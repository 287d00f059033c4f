"""What the first page of each package writes by hand is what the package does."""

import math

import torch
import torch.nn.functional as F
from support.documents import block
from support.grab_xla.training import balance, cross_entropies, sampler_of
from torch import nn
from torch.utils.data import TensorDataset

import per_sample_grad as psg
import rigl_xla
import variable_batch_size as vbs
import xla_replica

LOCAL = xla_replica.LocalReplica("cpu")
ALONE = {"num_replicas": 1, "rank": 0, "minibatch_size": 32}


def last_of(code: str):
    """Returns the last function that a block of code defines."""
    names = {"torch": torch, "F": F, "math": math}
    exec(code, names)
    return names.popitem()[1]


def model_and_optimizer(**options) -> tuple[nn.Module, torch.optim.Optimizer]:
    with LOCAL.seeded(0):
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **options)


def data(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (num_samples,), generator=generator)


def assert_same(ours, theirs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_an_elastic_loop():
    code = block("docs/variable_batch_size.md", "python", "def train_by_hand(")
    inputs, targets = data(512)
    batch_sizes = [64, 128, 96, 32, 160]
    expected, plain = model_and_optimizer(momentum=0.9)
    with LOCAL.seeded(7):  # for its randperm
        last_of(code)(expected, plain, inputs, targets, batch_sizes, 64)

    model, inner = model_and_optimizer(momentum=0.9)
    sampler = vbs.CustomSampler(range(512), batch_sizes, seed=7, **ALONE)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, 64, replica=LOCAL)
    for indices in sampler:
        F.cross_entropy(model(inputs[indices]), targets[indices]).backward()
        optimizer.step()
    assert_same(model.state_dict(), expected.state_dict())


def test_the_loop_of_lockstep_goes_on_within_an_epoch():
    (inputs, targets), (model, inner) = data(512), model_and_optimizer()
    sampler, replica = vbs.CustomSampler(range(512), [64, 96], **ALONE), LOCAL
    sampler.load_state_dict(sampler.state_dict() | {"step": 1})
    options = {"replica": replica, "lockstep": True}
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, 64, **options)
    optimizer.set_epoch(0)
    minibatches = ((inputs[rows], targets[rows]) for rows in sampler)
    scheduler = torch.optim.lr_scheduler.ConstantLR(inner)
    code = block("docs/variable_batch_size.md", "python", "join_step()")
    exec(code, globals() | locals())
    assert optimizer.place == (0, 2, 0)


def test_mean_balance():
    code = block("docs/grab_xla.md", "python", "def train_by_hand(")
    dataset, orders = TensorDataset(*data(40)), []
    model, optimizer = model_and_optimizer()
    sampler = sampler_of(model, len(dataset))
    for _ in range(4):
        orders.append(list(sampler))
        for sample in orders[-1]:
            x, y = dataset[sample : sample + 1]
            optimizer.zero_grad()
            balance(sampler, model, cross_entropies, model, x, y)
            optimizer.step()
    expected, plain = model_and_optimizer()
    last = last_of(code)(expected, plain, dataset, orders[0], 4)
    assert list(sampler) == last != orders[-1] != orders[0]
    assert_same(model.state_dict(), expected.state_dict())


def test_gradients_of_samples():
    code = block("docs/per_sample_grad.md", "python", "def gradients_by_loop(")
    model, _ = model_and_optimizer()
    with psg.capture(model) as recorded:
        losses = cross_entropies(model, *data(6))
    expected = last_of(code)(model, losses)
    assert_same(recorded.backward(losses).materialize(), expected)


def test_a_topology_update():
    code = block("docs/rigl_xla.md", "python", "def update_by_hand(")
    update_by_hand, [inputs, _] = last_of(code), data(8)
    model, optimizer = model_and_optimizer()
    layer, alpha, T_end, num_updates = model[2], 0.3, 100, 0
    pruner = rigl_xla.RigLScheduler(
        model, optimizer, dense_allocation=0.5, T_end=T_end, delta=5, alpha=alpha,
        ignore_linear_layers=False,
    )  # fmt: skip
    for step in range(1, 16):
        before = layer.weight.detach().clone()
        mask = pruner.masks["2.weight"].clone()
        optimizer.zero_grad()
        hidden = model[:2](inputs).detach()
        weight = before.clone().requires_grad_()
        error = F.linear(hidden, weight, layer.bias).square().mean()
        [dense] = torch.autograd.grad(error, [weight])
        model(inputs).square().mean().backward()
        if pruner():
            optimizer.step()
            continue
        share = alpha / 2 * (1 + math.cos(math.pi * step / T_end))
        num = int(share * int(mask.sum()))
        expected = update_by_hand(before, dense, mask, num)
        assert torch.equal(pruner.masks["2.weight"], expected)
        assert torch.equal(layer.weight, before)
        num_updates += num > 0
    assert num_updates == 3
