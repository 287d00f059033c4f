"""``.grad`` from the gradients of samples: what is not formed twice, and refusals."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from support.grab_xla.training import balance, cross_entropies, sampler_of
from support.xla_replica.replicas import needs_xla
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import per_sample_grad as psg
import xla_replica
from grab_xla import GraBSampler
from grab_xla.gradients.row_copies import flattened, interleaved

BATCH = 4


class WeightGradients(TorchDispatchMode):
    """Counts the convolutions of a backward pass that form a weight's gradient."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            self.count += args[-1][1]
        return func(*args, **(kwargs or {}))


def convolutions() -> nn.Module:
    """Returns two, and a layer that the losses do not depend on."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(*layers, nn.Flatten())
    model[-1].unused = nn.Linear(2, 2)
    return model.double()


X, Y = torch.randn(BATCH, 1, 7, 7, dtype=torch.float64), torch.arange(BATCH) % 3


def sampler(model: nn.Module, **options) -> GraBSampler:
    list(grab := sampler_of(model, 2 * BATCH, **options))
    return grab


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def recorded_step(network: nn.Module, grab: GraBSampler, **options) -> int:
    """Returns how many gradients of weights the second of two passes has formed."""
    for mode in (contextlib.nullcontext(), WeightGradients()):
        network.zero_grad()
        with grab.record(network):
            losses = cross_entropies(network, X, Y)
        with mode:
            grab.backward(losses, **options)
    return mode.count


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_gradient_is_formed_twice(reduction):
    """What the losses do not depend on keeps no gradient, so it takes no step."""
    network, other = convolutions(), convolutions()
    options = {"from_samples": True, "reduction": reduction}
    assert recorded_step(network, sampler(network), **options) == 0
    getattr(cross_entropies(other, X, Y), reduction)().backward()
    torch.testing.assert_close(grads(network), expected := grads(other))
    assert recorded_step(other, sampler(other), reduction=reduction) == 2
    torch.testing.assert_close(grads(other), expected, rtol=0, atol=0)


def test_a_pass_of_another_fidelity_stays_as_it_is():
    network = convolutions()
    grab = sampler(network, fidelity="projected", projection_size=20)
    assert recorded_step(network, grab, from_samples=True) == 2


def test_gradients_add_up_and_the_scale_is_that_of_the_pass():
    network, other = convolutions(), convolutions()
    for _ in range(2):
        with psg.capture(network, scale=8.0) as recorded:
            losses = cross_entropies(network, X, Y)
        found = recorded.backward(losses).materialize()
        recorded.add_gradients({name: rows.mean(0) for name, rows in found.items()})
        (8 * cross_entropies(other, X, Y).mean()).backward()
    assert [grad is None for grad in grads(other)] == [False] * 4 + [True] * 2
    torch.testing.assert_close(grads(network)[:4], grads(other)[:4])


def test_who_would_get_no_gradient_is_named():
    network = convolutions()
    some = {n: p for n, p in network.named_parameters() if n.startswith("2")}
    list(grab := GraBSampler(range(2 * BATCH), some))
    with pytest.raises(psg.PerSampleError, match=r"0\.weight, 0\.bias, 4\.unused"):
        recorded_step(network, grab, from_samples=True)
    grab, heat = sampler(network), torch.ones((), dtype=X.dtype, requires_grad=True)
    for image in (X * heat, X.clone().requires_grad_()):
        given = cross_entropies, network, image, Y
        with pytest.raises(psg.PerSampleError, match="a tensor outside of the model"):
            balance(grab, network, *given, from_samples=True)
        assert not any(grad is not None for grad in grads(network))


def test_sums_without_a_pass_of_their_own_are_refused():
    network = nn.Linear(2, 1)
    with psg.capture(network) as recorded:
        losses = network(torch.ones(3, 2)).sum(1)
    sums = {name: parameter.detach() for name, parameter in network.named_parameters()}
    with pytest.raises(RuntimeError, match=r"call backward\(\) or stream\(\) before"):
        recorded.add_gradients(sums)
    recorded.backward(losses, retain_graph=True)
    with pytest.raises(ValueError, match="missing or unknown: bias"):
        recorded.add_gradients({"weight": sums["weight"]})
    recorded.add_gradients(sums)
    with pytest.raises(RuntimeError, match="without accumulate="):
        recorded.add_gradients(sums)


# 36 rows are joined four at a time, 35 one at a time.
SHAPES = [(3,), (3, 5), (3, 7, 5), (3, 36, 5), (2, 35, 3), (2, 48, 1), (2, 32, 3, 3)]
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
VALUES = [
    torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    for shape, dtype in zip(SHAPES, itertools.cycle(DTYPES))
]
CUBES = [each for each in VALUES if each.dim() == 3]


def copies(rank: int) -> list[torch.Tensor]:
    replica = xla_replica.current()
    found = [flattened(each) for each in replica.send(VALUES)]
    return replica.fetch([*found, *map(interleaved, replica.send(CUBES))])


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("xla", marks=[needs_xla, pytest.mark.xla])]
)
def test_copies_are_those_of_a_reshape(device):
    expected = [each.reshape(len(each), -1) for each in VALUES]
    expected += [each.transpose(0, 1).flatten(0, 1) for each in CUBES]
    [found] = xla_replica.launch(copies, (), 1, device)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
