"""Models that something else sums the gradients of are refused."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.xla_replica.replicas import Backend
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
import xla_replica


def wraps_its_model(rank: int) -> list[str]:
    replica = xla_replica.current()
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    wrapper = DistributedDataParallel(model)
    sampler = vbs.CustomSampler(dataset=range(64), trace=[8], minibatch_size=4)
    refused = []

    def train(parameters) -> vbs.LinearRuleOptimizer:
        optimizer = torch.optim.SGD(parameters, 0.1)
        return vbs.LinearRuleOptimizer(optimizer, sampler, ref_batchsize=8)

    for parameters in (wrapper.parameters(), model.parameters()):
        with pytest.raises(TypeError) as caught:
            train(parameters)
        refused.append(str(caught.value))
    optimizer = train(other.parameters())
    with pytest.raises(TypeError, match="of a DistributedDataParallel model"):
        optimizer.add_param_group({"params": [model.weight]})
    # Without the wrapper they can be trained, even while it waits to be collected.
    gone = weakref.ref(wrapper)
    gc.disable()
    wrapper.itself = wrapper
    del wrapper
    assert gone() is not None
    train(model.parameters())
    assert gone() is None
    replica.check_parameters([])
    return refused


def test_a_ddp_models_parameters_are_refused_at_construction():
    for refused in Backend("cpu", 2).run(wraps_its_model):
        for message in refused:
            assert "sums their gradients in every backward pass" in message
            assert "Train the bare module, model.module in place of model" in message


def wraps_its_model_later(rank: int) -> list[str]:
    """After no step, and after two, which are the first that overlap with others."""
    refused = []
    for num_steps in (0, 2):
        for as_view in (False, True):
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
            sampler = vbs.CustomSampler(range(64), 8, minibatch_size=4, verbose=False)
            sampler.num_yielded = 8  # it is not iterated
            inner = torch.optim.SGD(model.parameters(), 0.1)
            optimizer = vbs.ConstantOptimizer(inner, sampler)
            for _ in range(num_steps):
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            wrapper = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
            wrapper(torch.ones(1, 3)).sum().backward()
            with pytest.raises(TypeError) as caught:
                optimizer.step()
            refused.append(str(caught.value))
    return refused


def test_a_model_that_is_wrapped_later_is_refused_at_its_first_step():
    for refused in Backend("cpu", 2).run(wraps_its_model_later):
        for message in refused:
            assert "Train the bare module, model.module in place of model" in message
