"""``.grad`` from the gradients of samples: what is not formed twice, and refusals."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
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

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            self.count += args[-1][1]
        return func(*args, **(kwargs or {}))


class Unused(nn.Module):
    """Two convolutions, and a layer that the losses do not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 3, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).mean((2, 3))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 1, 7, 7, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (BATCH,), generator=generator)


def sampler(parameters: dict[str, torch.Tensor], **options) -> GraBSampler:
    found = GraBSampler(range(2 * BATCH), parameters, dtype=torch.float64, **options)
    list(found)
    return found


def model() -> Unused:
    torch.manual_seed(0)
    return Unused().double()


def recorded_step(network: nn.Module, grab: GraBSampler, **options) -> int:
    """Returns how many gradients of weights the second of two passes has formed."""
    x, y = images()
    for mode in (contextlib.nullcontext(), WeightGradients()):
        network.zero_grad()
        with grab.record(network):
            losses = F.cross_entropy(network(x), y, reduction="none")
        with mode:
            grab.backward(losses, **options)
    return mode.count


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_gradient_is_formed_twice(reduction):
    network, other = model(), model()
    grab = sampler(dict(network.named_parameters()))
    options = {"reduction": reduction}
    assert recorded_step(network, grab, from_samples=True, **options) == 0
    x, y = images()
    F.cross_entropy(other(x), y, reduction=reduction).backward()
    for mine, theirs in zip(network.parameters(), other.parameters(), strict=True):
        if theirs.grad is None:  # and so an optimizer leaves the parameter alone
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad, theirs.grad)
    grab = sampler(dict(other.named_parameters()))
    assert recorded_step(other, grab, **options) == 2


def test_a_pass_of_another_fidelity_stays_as_it_is():
    network = model()
    parameters = dict(network.named_parameters())
    grab = sampler(parameters, fidelity="projected", projection_size=20)
    assert recorded_step(network, grab, from_samples=True) == 2


def test_gradients_add_up_and_the_scale_is_that_of_the_pass():
    network, other = model(), model()
    x, y = images()
    for _ in range(2):
        with psg.capture(network, scale=8.0) as recorded:
            losses = F.cross_entropy(network(x), y, reduction="none")
        found = recorded.backward(losses).materialize()
        recorded.add_gradients({name: rows.mean(0) for name, rows in found.items()})
        (8 * F.cross_entropy(other(x), y)).backward()
    for mine, theirs in zip(network.parameters(), other.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_who_would_get_no_gradient_is_named():
    network = model()
    x, y = images()
    some = {n: p for n, p in network.named_parameters() if n.startswith("second")}
    grab = sampler(some)
    with pytest.raises(psg.PerSampleError, match=r"first\.weight, first\.bias, unused"):
        recorded_step(network, grab, from_samples=True)
    grab = sampler(dict(network.named_parameters()))
    temperature = torch.ones((), dtype=torch.float64, requires_grad=True)
    for image, heat in ((x, temperature), (x.clone().requires_grad_(), 1.0)):
        with grab.record(network):
            losses = F.cross_entropy(network(image) * heat, y, reduction="none")
        with pytest.raises(psg.PerSampleError, match="a tensor outside of the model"):
            grab.backward(losses, from_samples=True)
        assert all(parameter.grad is None for parameter in network.parameters())


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
VALUES = [
    torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    for shape in SHAPES
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
]


def copies(rank: int) -> list[torch.Tensor]:
    """Returns all values flattened, and those of three dimensions interleaved."""
    replica = xla_replica.current()
    found = [flattened(replica.send(each)) for each in VALUES]
    found += [interleaved(replica.send(each)) for each in VALUES if each.dim() == 3]
    return replica.fetch(found)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("xla", marks=[needs_xla, pytest.mark.xla])]
)
def test_copies_are_those_of_a_reshape(device):
    expected = [each.reshape(len(each), -1) for each in VALUES]
    cubes = [each for each in VALUES if each.dim() == 3]
    expected += [each.transpose(0, 1).flatten(0, 1) for each in cubes]
    found = xla_replica.launch(copies, (), 1, device)[0]
    for one, truth in zip(found, expected, strict=True):
        assert one.dtype == truth.dtype
        assert one.tolist() == truth.tolist()
