"""Models that something else sums the gradients of are refused."""

import gc
import itertools
import weakref

import pytest
import torch
from support.xla_replica.replicas import Backend, of_torch_alone
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
import xla_replica


def optimizer_of(parameters) -> vbs.ConstantOptimizer:
    sampler = vbs.CustomSampler(range(64), 8, minibatch_size=4, verbose=False)
    return vbs.ConstantOptimizer(torch.optim.SGD(parameters, 0.1), sampler)


def refused(call, *arguments) -> None:
    says = (
        "of a DistributedDataParallel model.*sums their gradients in every backward "
        "pass.*Train the bare module, model.module in place of model"
    )
    with pytest.raises(TypeError, match=says):
        call(*arguments)


def wraps_its_model(rank: int) -> None:
    model, optimizer = nn.Linear(3, 1), optimizer_of(nn.Linear(3, 1).parameters())
    wrapper = DistributedDataParallel(model)
    refused(optimizer_of, wrapper.parameters())
    refused(optimizer_of, model.parameters())
    refused(optimizer.add_param_group, {"params": [model.weight]})
    # Without the wrapper they can be trained, even while it waits to be collected.
    gone = weakref.ref(wrapper)
    gc.disable()
    wrapper.itself = wrapper
    del wrapper
    assert gone() is not None
    optimizer_of(model.parameters())
    assert gone() is None
    xla_replica.current().check_parameters([])


def wraps_its_model_later(rank: int) -> None:
    """After no step, and after two, which are the first that overlap with others."""
    for num_steps, as_view in itertools.product((0, 2), (False, True)):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        optimizer = optimizer_of(model.parameters())
        minibatches = iter(optimizer.sampler)
        for _ in range(num_steps):
            next(minibatches)
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        wrapper = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
        next(minibatches)
        wrapper(torch.ones(1, 3)).sum().backward()
        refused(optimizer.step)


@of_torch_alone
@pytest.mark.parametrize("wraps", [wraps_its_model, wraps_its_model_later])
def test_a_ddp_models_parameters_are_refused_at_once_or_at_the_first_step(wraps):
    Backend("cpu", 2).run(wraps)
