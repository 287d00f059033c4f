"""Gradient noise out of the weights of normalisation layers, beside slow oracles."""

from __future__ import annotations

import collections
import functools
import weakref

import pytest
import torch
from support.kernels import Kernels
from support.variable_batch_size.elastic import Case, Training
from support.variable_batch_size.noise import CPU
from support.xla_replica.replicas import (
    FEW_BACKENDS,
    SLOW_XLA_BACKENDS,
    TORCHTPU,
    XLA_BACKENDS,
    row,
)
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.gradient_noise import estimators
from variable_batch_size.gradient_noise.norm_noise import NormLayerNoise


def watch(model, minibatch_size: int, dtype=torch.float64) -> NormLayerNoise:
    """Returns what sees the gradients of all samples at the model's layers."""
    seen = NormLayerNoise(dtype, CPU, is_exact=False)
    seen.use(model, model.parameters(), minibatch_size)
    return seen


class OtherRMSNorm(nn.Module):
    """As the models of transformers write it."""

    def __init__(self, width: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width) - offset)
        self.variance_epsilon, self.offset = 1e-3, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True)
        scaled = x * torch.rsqrt(mean_square + self.variance_epsilon)
        return scaled * (self.offset + self.weight)


class Scale(nn.Module):
    """A vector that multiplies, and no normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Net(nn.Module):
    """Inputs are ``(B, 6, 4)``; one layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.GroupNorm(2, 6)
        self.norms = nn.Sequential(
            nn.LayerNorm(4), nn.Linear(4, 4), nn.RMSNorm(4), nn.Linear(4, 4),
            OtherRMSNorm(4), nn.Linear(4, 4), OtherRMSNorm(4, offset=1.0), Scale(4),
        )  # fmt: skip
        self.twice = nn.LayerNorm((6, 4))
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.images(x))
        return self.last(self.twice(self.norms(x).tanh())).mean(1).squeeze(1)

    def weights(self) -> list[nn.Parameter]:
        """Those that count: of every normalisation layer, once."""
        norms = [self.norms[index] for index in (0, 2, 4, 6)]
        return [layer.weight for layer in (self.images, *norms, self.twice)]


def data(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(num)
    x = torch.randn(num, 6, 4, generator=draws, dtype=torch.float64)
    return x, x.mean((1, 2)) + 3


def net() -> Net:
    with xla_replica.seeded(3):
        return Net().double()


def losses(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y) ** 2


def of_each_sample(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of every sample's loss, for the weights that count."""
    rows = [
        torch.autograd.grad(loss, model.weights(), retain_graph=True)
        for loss in losses(model, x, y)
    ]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def expected(samples: torch.Tensor) -> tuple[float, float]:
    """Returns tr Sigma and |G|^2 by the textbook's sums over single samples."""
    mean = samples.mean(0)
    variance = ((samples - mean) ** 2).sum() / (len(samples) - 1)
    return variance.item(), (mean @ mean - variance / len(samples)).item()


def test_half_precision_is_summed_in_float32():
    model, (x, y) = net().bfloat16(), data(5)
    seen = watch(model, 5, torch.float32)
    losses(model, x.bfloat16(), y.bfloat16()).mean().backward()
    precise = net()
    samples = of_each_sample(precise, x, y)
    found = 25 * seen.take().item()
    assert found == pytest.approx((samples**2).sum().item(), rel=0.1)


# What a training script may do between `.grad` of zeros and the step that uses it; the
# gradient is the mean loss's in the end.
def in_one_pass(model, x, y, **options) -> None:
    losses(model, x, y).mean().backward(**options)


def thrown_away(model, x, y, set_to_none: bool) -> None:
    losses(model, 2 * x, y).mean().backward()
    model.zero_grad(set_to_none=set_to_none)
    losses(model, x, y).mean().backward()


def asked_for(model, x, y) -> None:
    loss = losses(model, x, y).mean()
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    losses(model, 2 * x, y).mean()
    loss.backward()


def in_parts(model, x, y) -> None:
    loss = losses(model, x, y).mean()
    (loss / 4).backward(retain_graph=True)
    (3 * loss / 4).backward()


def in_two_forward_passes(model, x, y) -> None:
    for share in (0.25, 0.75):
        (share * losses(model, x, y).mean()).backward()


def checkpointed(model, x, y, reentrant: bool) -> None:
    """The forward pass of most layers is one that is computed again."""
    run = functools.partial(checkpoint, model.norms.forward, use_reentrant=reentrant)
    model.norms.forward = run
    losses(model, x.requires_grad_(reentrant), y).mean().backward()


def offloaded(model, x, y) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = losses(model, x, y).mean()
    loss.backward()


PASSES = {
    "once": in_one_pass,
    "thrown away": functools.partial(thrown_away, set_to_none=True),
    "zeroed": functools.partial(thrown_away, set_to_none=False),
    "asked for": asked_for,
    "in parts": in_parts,
    "in two forward passes": in_two_forward_passes,
    "with a graph": functools.partial(in_one_pass, create_graph=True),
    "checkpoint": functools.partial(checkpointed, reentrant=False),
    "reentrant checkpoint": functools.partial(checkpointed, reentrant=True),
    "offloaded": offloaded,
}


@pytest.mark.parametrize("how", PASSES)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_what_counts_is_what_the_step_s_gradients_are_sums_of(how):
    model, (x, y) = net(), data(5)
    samples = of_each_sample(model, x, y)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # as the optimizer keeps them
    seen = watch(model, 5)
    PASSES[how](model, x, y)
    seen.drop_discarded()
    torch.testing.assert_close(25 * seen.take(), (samples**2).sum().reshape(1))
    square = (samples.mean(0) ** 2).sum().reshape(1)
    torch.testing.assert_close(seen.of_gradients().detach(), square)
    assert seen.take().item() == 0


def test_a_minibatch_that_is_thrown_away_at_last_is_none():
    model, (x, y) = net(), data(5)
    seen = watch(model, 5)
    losses(model, x, y).mean().backward()
    model.zero_grad()
    seen.drop_discarded()
    assert seen.take().item() == 0


def test_a_layer_costs_few_operations():
    """Nothing is computed twice that the forward pass has saved."""
    layers = [nn.LayerNorm(8) for _ in range(6)]
    model, x = nn.Sequential(*layers), torch.randn(4, 3, 8)

    def count() -> collections.Counter[str]:
        model.zero_grad()
        with Kernels() as kernels:
            model(x).sum().backward()
        return kernels.calls

    alone = count()
    seen = watch(model, 4, torch.float32)
    each = {"sub": 1, "mul_": 2, "sum": 1}
    assert count() - alone == {name: 6 * number for name, number in each.items()}
    with Kernels() as kernels:
        seen.take()
    assert kernels.calls.total() <= 6


def test_a_step_of_one_minibatch_costs_few_operations():
    """Those of each layer are counted above; these are of all together."""

    def count(use: bool) -> int:
        model = nn.Sequential(*[nn.LayerNorm(8) for _ in range(6)])
        sampler = vbs.CustomSampler(range(64), [4] * 3, minibatch_size=4, verbose=False)
        optimizer = vbs.ElasticOptimizer(
            SGD(model.parameters(), 0.1), sampler, ref_batchsize=4, noise=use
        )
        if use:
            optimizer.noise.use_norm_layers(model)
        for _ in zip(range(3), sampler):
            with Kernels() as kernels:
                model(torch.ones(4, 3, 8)).sum().backward()
                optimizer.step()
        return kernels.calls.total()

    assert count(use=True) - count(use=False) <= 6 * 4 + 45


def test_inputs_are_freed_by_the_backward_pass_and_may_be_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    seen = watch(model, 4, torch.float32)
    hidden = model[0](torch.randn(4, 3, 8))
    reference = weakref.ref(hidden)
    output = model[1](input=hidden)
    del hidden
    output.square().sum().backward()
    assert reference() is None
    assert seen.take().item() > 0


class Run(Training):
    """Runs its first minibatch as it is told: later ones may throw nothing away."""

    how = staticmethod(in_one_pass)

    def minibatch(self, x: torch.Tensor, y: torch.Tensor) -> int:
        self.how(self.model, x, y)
        self.how = in_one_pass
        return self.optimizer.step()


def train(rank: int, trace: list[int], state=None, how=in_one_pass):
    """Trains for an epoch; returns measurements, state and the optimizer's gains."""
    x, y = data(sum(trace))
    case = Case(trace, 1, "sgd", "adascale", 1e-9, ref_batchsize=2)
    options = {"order": range(len(x)), "on_end": "stop"}
    training = Run(case, sampler=options, made=(net(), x, y))
    training.how, noise = how, training.optimizer.noise
    noise.use_norm_layers(training.model)
    if state is not None:
        noise.load_state_dict(state)
    training.epoch(0)
    return noise.measure(), noise.state_dict(), noise.estimator


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_one_minibatch_a_step_has_a_noise_scale_and_a_gain(backend):
    """On several replicas most of them are idle."""
    variance, square = expected(of_each_sample(net(), *data(4)))
    for found, _, estimator in backend.run(train, [4]):
        assert estimator == "norm layers, factor unknown"
        assert found.norm_factor == 1
        assert found.variance == pytest.approx(variance, rel=1e-6)
        assert found.square == pytest.approx(square, rel=1e-6)
        statistics = torch.tensor([[variance], [square], [1.0]], dtype=torch.float64)
        gain = estimators.gain(statistics, torch.tensor([2.0]), 2).item()
        assert 1 < gain < 2
        assert found.gain == pytest.approx(gain, rel=1e-6)
        assert found.progress == pytest.approx(gain, rel=1e-6)


def train_disturbed(rank: int, trace: list[int]):
    return train(rank, trace, how=PASSES["thrown away"])


@pytest.mark.parametrize("trace", [[4], [12]], ids=["one", "three"])
@pytest.mark.parametrize("backend", [row("cpu", 1), row("xla", 2, slow=True)])
def test_a_step_does_not_count_what_was_thrown_away(backend, trace):
    truth, _, _ = train(0, trace)
    for found, _, _ in backend.run(train_disturbed, trace):
        assert found == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("backend", [row("cpu", 1), row("cpu", 3), *SLOW_XLA_BACKENDS])
def test_the_factor_is_measured_where_a_step_has_several_minibatches(backend):
    """12 samples a step in three minibatches, whose whole gradients are compared."""
    model, (x, y) = net(), data(12)
    part = expected(of_each_sample(model, x, y))
    rows = []
    for index in range(0, 12, 4):
        loss = losses(model, x[index : index + 4], y[index : index + 4]).mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    variance, square = expected(torch.stack(rows))
    whole = 4 * variance, square
    assert min(*part, *whole) > 0
    factor = (whole[0] / whole[1]) / (part[0] / part[1])
    for found, _, estimator in backend.run(train, [12]):
        assert estimator == "norm layers"
        assert found.norm_factor == pytest.approx(factor, rel=1e-6)
        assert found.noise_scale == pytest.approx(whole[0] / whole[1], rel=1e-6)
        assert found.square == pytest.approx(part[1], rel=1e-6)


def test_the_factor_serves_later_steps_and_is_saved():
    together, state, _ = train(0, [12])
    again, _, _ = train(0, [4], state=state)
    assert again.norm_factor == pytest.approx(together.norm_factor)
    del state["norm layers"]  # a state of before
    assert train(0, [4], state=state)[2] == "norm layers, factor unknown"


def counted(rank: int) -> tuple[int, int, int]:
    x, y = (each.float() for each in data(64))
    case = Case((8, 4, 12, 8, 4, 16, 12), 2, "sgd", "adascale", 0.1)
    training = Run(case, made=(net().float(), x, y))
    training.optimizer.noise.use_norm_layers(training.model)
    training.epoch(0)
    return training.counted_epoch(1)


@pytest.mark.parametrize("backend", [*XLA_BACKENDS, *TORCHTPU])
def test_nothing_compiles_and_nothing_is_read_after_two_steps(backend):
    for counts in backend.run(counted):
        assert counts == (0, 0, 0)


def test_gradients_that_come_past_a_layer_s_output_are_refused():
    model, (x, y) = net(), data(5)
    seen = watch(model, 5)
    told = "GroupNorm was given a gradient by a backward pass that did not come"
    with pytest.raises(ValueError, match=told):
        nn.functional.group_norm(x, 2, model.images.weight).sum().backward()
    loss = losses(model, x, y).mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    with pytest.raises(ValueError, match="leave from_samples=True out"):
        xla_replica.add_gradients(list(model.parameters()), list(grads))
    model.zero_grad()
    assert seen.take().item() == 0
    (0 * sum(p.sum() for p in model.parameters())).backward()  # adds nothing
    assert seen.take().item() == 0


def test_what_would_be_wrong_is_refused():
    model = net()
    unused = NormLayerNoise(torch.float64, CPU, is_exact=False)
    linear = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got 3"):
        unused.use(3, [], 4)
    with pytest.raises(ValueError, match="Linear has no LayerNorm, RMSNorm or GroupN"):
        unused.use(linear, linear.parameters(), 4)
    seen = watch(model, 4)
    with pytest.raises(ValueError, match="the minibatch has 4 samples: the first dim"):
        model(data(5)[0])
    assert seen.take().item() == 0
    sampler = vbs.CustomSampler(range(8), [8], minibatch_size=4, verbose=False)
    optimizer = vbs.AdaScaleOptimizer(
        SGD(model.parameters(), 0.1), sampler, compat="reference"
    )
    with pytest.raises(TypeError, match="needs reduction='mean', and not compat="):
        optimizer.noise.use_norm_layers(model)
