"""Numbers that change are uploaded once; optimizers take them as tensors, unread."""

from __future__ import annotations

import pytest
import torch
from support.variable_batch_size.elastic import OPTIMIZERS
from support.variable_batch_size.wrapping import CPU

from variable_batch_size.device_scalars import DeviceScalars, TensorScalars


def test_numbers_are_uploaded_once_and_never_shared_between_uses():
    """A tensor that two uses share would make another graph."""
    scalars = DeviceScalars(CPU, capacity=3)
    first = scalars.get("lr", 0.5)
    assert first.shape == (1,)
    assert scalars.get("lr", 0.5) is first
    assert scalars.get("divisor", 0.5) is not first
    assert scalars.get("lr", 0.5, torch.float64).dtype == torch.float64
    scalars.get("lr", 0.25)
    assert scalars.get("lr", 0.5) is not first  # the oldest made room


def steps(name: str, as_tensor: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    parameters = [torch.nn.Parameter(random(3, 4)), torch.nn.Parameter(random(5))]
    optimizer = OPTIMIZERS[name](parameters, 0.1)
    for lr in (0.1, 1.0, 0.0, 0.3, 0.5):
        for parameter in parameters:
            parameter.grad = random(*parameter.shape)
        group = optimizer.param_groups[0]
        if as_tensor:
            group["lr"] = torch.tensor([lr], dtype=torch.float64)
            group["foreach"] = False
            with NoReads(), TensorScalars():  # the last entered sees a call first
                optimizer.step()
        else:
            group["lr"] = lr
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


class NoReads(torch.overrides.TorchFunctionMode):
    """Fails on anything that reads a learning rate back to Python."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for name in ("alpha", "value"):
            scalar = kwargs.get(name)
            assert not isinstance(scalar, torch.Tensor), f"{func} would read {name}"
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_the_same(name):
    for tensor, number in zip(steps(name, True), steps(name, False)):
        torch.testing.assert_close(tensor, number, rtol=1e-13, atol=1e-13)


def test_without_it_torch_reads_the_learning_rate():
    """What the module is for: this must keep failing, or it can be deleted."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], torch.tensor(0.1), foreach=False)
    with pytest.raises(AssertionError, match="would read"), NoReads():
        optimizer.step()
