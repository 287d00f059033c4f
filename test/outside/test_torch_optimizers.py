"""Every optimizer and option of torch's own tests, wrapped, against itself alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.outside import package
from torch import nn

import variable_batch_size as vbs

pytestmark = pytest.mark.outside
package("expecttest")  # which torch's tests import

MINIBATCH_SIZE = 2
TRACE = (2, 6, 4, 2, 8, 4)  # 1, 3, 2, 1, 4 and 2 minibatches
NAMES = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS",
    "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip


@functools.cache
def database() -> dict[str, Any]:
    """Returns torch's description of each of its optimizers, by the class's name."""
    allows = "__allow_nonbracketed_mutation_flag"
    before = getattr(torch.backends, allows)
    from torch.testing._internal.common_optimizers import optim_db

    # Torch's tests forbid settings of backends to everybody; ours change some.
    setattr(torch.backends, allows, before)
    return {info.optim_cls.__name__: info for info in optim_db}


def options(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns what torch tests an optimizer with: a description and arguments.

    Each option is there with every implementation that a CPU has: a loop over the
    parameters, ``foreach`` and ``fused``.
    """
    from torch.testing._internal import common_optimizers

    inputs = common_optimizers._get_optim_inputs_including_global_cliquey_kwargs(
        "cpu", torch.float32, database()[name], skip=("differentiable",)
    )
    return [(each.desc, each.kwargs) for each in inputs]


def make(
    name: str, kwargs: dict[str, Any]
) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Returns parameters in two groups, and their optimizer."""
    torch.manual_seed(0)
    # Muon takes matrices only.
    shapes = ((4, 3), (2, 2)) if name == "Muon" else ((4, 3), (3,), ())
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    info = database()[name]
    if info.supports_param_groups:
        groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
        return parameters, info.optim_cls(groups, **kwargs)
    return parameters, info.optim_cls(parameters, **kwargs)


def backward(parameters: list[nn.Parameter], minibatch: list[int]) -> None:
    """Adds the gradient of a loss that is not linear in the weights."""
    generator = torch.Generator().manual_seed(minibatch[0])
    for parameter in parameters:
        target = torch.randn(parameter.shape, generator=generator)
        (parameter - target).tanh().square().sum().backward()


def sampler() -> vbs.CustomSampler:
    """Returns the minibatches of the trace, one epoch."""
    samples = range(sum(TRACE))
    return vbs.CustomSampler(
        samples, TRACE, minibatch_size=MINIBATCH_SIZE, verbose=False
    )


def wrapped(name: str, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the weights after an epoch of the trace, through the wrapper."""
    parameters, inner = make(name, kwargs)
    batches, updates = sampler(), 0
    optimizer = vbs.ElasticOptimizer(inner, batches, "constant")
    for minibatch in batches:
        backward(parameters, minibatch)
        updates += optimizer.step()
    assert updates == len(TRACE)
    return [parameter.detach() for parameter in parameters]


def alone(name: str, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the weights after the same steps in plain torch."""
    parameters, optimizer = make(name, kwargs)
    minibatches = iter(sampler())
    for batch_size in TRACE:
        num_minibatches = batch_size // MINIBATCH_SIZE
        optimizer.zero_grad()
        for _ in range(num_minibatches):
            backward(parameters, next(minibatches))
        for parameter in parameters:
            parameter.grad /= num_minibatches
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def refusal(name: str, kwargs: dict[str, Any]) -> str | None:
    """Returns what the error must say; None if the optimizer works."""
    if name == "LBFGS":
        return "evaluates the loss inside step"
    if name == "SparseAdam":
        return "takes sparse gradients alone"
    if isinstance(kwargs.get("lr"), torch.Tensor):
        return "must be a number, not a tensor"
    return None


@pytest.mark.parametrize("name", NAMES)
def test_a_wrapped_optimizer_is_the_optimizer_to_the_bit(name):
    for description, kwargs in options(name):
        expected_error = refusal(name, kwargs)
        if expected_error:
            with pytest.raises((TypeError, RuntimeError), match=expected_error):
                wrapped(name, kwargs)
            continue
        for found, expected in zip(wrapped(name, kwargs), alone(name, kwargs)):
            assert torch.equal(found, expected), description


def test_every_optimizer_of_torch_is_checked():
    assert sorted(database()) == sorted(NAMES)
