"""Squares of each minibatch's gradients: any backward pass, parameter and dtype."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from support.variable_batch_size.noise import make, step
from torch import nn


def test_frozen_parameters_take_no_part():
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    _, optimizer = make(trace=(2,), parameters=parameters)
    parameters[1].requires_grad_(False)
    step(optimizer, parameters[0], [[1.0, 0, 0], [3.0, 0, 0]])
    assert optimizer.noise.measure().variance == pytest.approx(2.0)


def test_a_parameter_whose_data_was_replaced_is_still_seen():
    [parameter], optimizer = make(trace=(2,))
    parameter.data = parameter.data.clone()
    step(optimizer, parameter, [[1.0, 0, 0], [3.0, 0, 0]])
    assert optimizer.noise.measure().variance == pytest.approx(2.0)


def test_a_parameter_used_twice_has_one_gradient():
    [parameter], optimizer = make(trace=(2,))
    for scale in (1.0, 3.0):
        (parameter[0] * scale / 2 + parameter[0] * scale / 2).backward()
        optimizer.step()
    assert optimizer.noise.measure().variance == pytest.approx(2.0)


def test_autograd_grad_is_not_a_minibatch():
    [parameter], optimizer = make(trace=(2,))
    for scale in (1.0, 3.0):
        loss = (parameter[0] + 1) ** 2 * scale / 2
        (gradient,) = torch.autograd.grad(loss, parameter, create_graph=True)
        (scale * parameter[0] + 0 * gradient.sum()).backward()
        optimizer.step()
    assert optimizer.noise.measure().variance == pytest.approx(2.0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    [parameter], optimizer = make(trace=(2,))
    for scale in (1.0, 3.0):
        x = torch.tensor([scale, 0, 0], requires_grad=True)
        checkpoint(
            lambda x: parameter * x, x, use_reentrant=use_reentrant
        ).sum().backward()
        optimizer.step()
    assert optimizer.noise.measure().variance == pytest.approx(2.0)


def test_gradients_that_were_thrown_away_do_not_count():
    """They may be those of an adversarial example."""
    [parameter], optimizer = make(trace=(2,))
    for scale in (1.0, 3.0):
        if scale == 1.0:  # later, the accumulated ones would go too: an error
            (parameter * 100).sum().backward()
            parameter.grad = None
        (parameter[0] * scale).backward()
        optimizer.step()
    assert optimizer.noise.measure().variance == pytest.approx(2.0)


def test_a_discarded_pass_through_other_parameters_does_not_count():
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    _, optimizer = make(trace=(2,), parameters=parameters)
    (parameters[1] * 100).sum().backward()
    parameters[1].grad = None
    step(optimizer, parameters[0], [[1.0, 0, 0], [3.0, 0, 0]])
    assert optimizer.noise.measure().variance == pytest.approx(2.0)


def test_complex_parameters():
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    _, optimizer = make(trace=(2,), parameters=[parameter])
    for scale in (1j, 3j):
        (parameter * scale).sum().real.backward()
        optimizer.step()
    found = optimizer.noise.measure()
    assert (found.variance, found.square) == pytest.approx((2.0, 3.0))


def test_a_parameter_that_begins_to_train_within_a_step_makes_it_not_count():
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    parameters[1].requires_grad_(False)
    _, optimizer = make(trace=(2,), parameters=parameters)
    parameters[1].requires_grad_(True)
    for _ in range(2):
        step(optimizer, parameters[0] + parameters[1], [[1.0, 0, 0], [3.0, 0, 0]])
    assert optimizer.noise.measure().variance == pytest.approx(4.0)
    assert optimizer.progress == pytest.approx(1 + 1.25)


def test_so_does_one_that_trains_alone():
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    parameters[1].requires_grad_(False)
    _, optimizer = make(trace=(2,), parameters=parameters)
    parameters[1].requires_grad_(True)
    step(optimizer, parameters[1], [[1.0, 0, 0], [3.0, 0, 0]])
    assert optimizer.noise.measure().square == 0.0
    step(optimizer, parameters[1], [[1.0, 0, 0], [3.0, 0, 0]])
    assert optimizer.noise.measure().square == pytest.approx(3.0)


def test_a_parameter_that_an_attached_function_unfreezes_is_seen_at_once():
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    parameters[1].requires_grad_(False)
    _, optimizer = make(trace=(2,), parameters=parameters)
    optimizer.attach(lambda update: parameters[1].requires_grad_(True))
    step(optimizer, parameters[0], [[1.0, 0, 0], [3.0, 0, 0]])
    assert optimizer.noise.measure().variance == pytest.approx(2.0)
    step(optimizer, parameters[0] + parameters[1], [[1.0, 0, 0], [3.0, 0, 0]])
    decay = math.exp(-2 / 1000)
    expected = (2.0 * decay + 4.0) / (1 + decay)
    assert optimizer.noise.measure().variance == pytest.approx(expected)


def test_requires_grad_may_not_change_between_minibatches():
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    parameters[1].requires_grad_(False)
    _, optimizer = make(trace=(2,), parameters=parameters)
    step(optimizer, parameters[0], [[1.0, 0, 0]])
    parameters[1].requires_grad_(True)
    with pytest.raises(ValueError, match="changed between the minibatches of one step"):
        step(optimizer, parameters[0] + parameters[1], [[3.0, 0, 0]])


def test_two_backward_passes_in_a_minibatch_are_an_error():
    [parameter], optimizer = make(trace=(2,))
    parameter.sum().backward()
    parameter.sum().backward()
    with pytest.raises(
        ValueError, match=r"two gradients within one minibatch.*once per"
    ):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_squares_of_narrow_gradients_are_added_up_in_float32(dtype):
    """300^2 and 4096 times 0.1^2 overflow or vanish in half precision."""
    parameter = nn.Parameter(torch.zeros(4096, dtype=dtype))
    _, optimizer = make(trace=(2,), parameters=[parameter])
    step(optimizer, parameter, [[300.0] * 4096, [300.0] * 4096])
    found = optimizer.noise.measure()
    assert found.square == pytest.approx(300.0**2 * 4096, rel=1e-3)
    assert abs(found.variance) < 1e-3 * found.square


def test_deleting_everything_frees_the_model():
    """Hooks inside autograd's nodes are invisible to the garbage collector."""
    [parameter], optimizer = make(trace=(2,), single_minibatch="difference")
    step(optimizer, parameter, [[1.0, 0, 0], [3.0, 0, 0]])
    watched = [weakref.ref(optimizer), weakref.ref(parameter)]
    del parameter, optimizer
    gc.collect()
    assert [reference() for reference in watched] == [None, None]
