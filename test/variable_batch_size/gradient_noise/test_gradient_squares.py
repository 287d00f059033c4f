"""Squares of each minibatch's gradients: any backward pass, parameter and dtype."""

from __future__ import annotations

import functools
import gc
import math
import weakref

import pytest
import torch
from support.variable_batch_size.noise import make, step
from torch import nn
from torch.utils.checkpoint import checkpoint


def plain(parameter, other, scale: float) -> None:
    (parameter[0] * scale).backward()


def data_replaced(parameter, other, scale: float) -> None:
    parameter.data = parameter.data.clone()
    (parameter[0] * scale).backward()


def used_twice(parameter, other, scale: float) -> None:
    (parameter[0] * scale / 2 + parameter[0] * scale / 2).backward()


def with_autograd_grad(parameter, other, scale: float) -> None:
    loss = (parameter[0] + 1) ** 2 * scale / 2
    (gradient,) = torch.autograd.grad(loss, parameter, create_graph=True)
    (scale * parameter[0] + 0 * gradient.sum()).backward()


def checkpointed(parameter, other, scale: float, use_reentrant: bool = False) -> None:
    x = torch.tensor([scale, 0, 0], requires_grad=True)
    run = functools.partial(checkpoint, use_reentrant=use_reentrant)
    run(lambda x: parameter * x, x).sum().backward()


def thrown_away(parameter, other, scale: float) -> None:
    """They may be those of an adversarial example."""
    if scale == 1.0:  # later, the accumulated ones would go too: an error
        (parameter * 100).sum().backward()
        parameter.grad = None
    (parameter[0] * scale).backward()


def thrown_away_of_another(parameter, other, scale: float) -> None:
    if scale == 1.0:
        (other * 100).sum().backward()
        other.grad = None
    (parameter[0] * scale).backward()


PASSES = {
    "beside a frozen parameter": plain,
    "with replaced data": data_replaced,
    "used twice": used_twice,
    "with autograd.grad": with_autograd_grad,
    "checkpointed": checkpointed,
    "reentrant": functools.partial(checkpointed, use_reentrant=True),
    "thrown away before": thrown_away,
    "thrown away of another": thrown_away_of_another,
}


@pytest.mark.parametrize("how", PASSES)
def test_what_is_seen_is_the_gradient_of_the_minibatch(how):
    """It is 1 and then 3 in one number: their variance is 2."""
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    _, optimizer = make(trace=(2,), parameters=parameters)
    if how == "beside a frozen parameter":
        parameters[1].requires_grad_(False)
    for scale in (1.0, 3.0):
        PASSES[how](*parameters, scale)
        optimizer.step()
    assert optimizer.noise.measure().variance == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.complex64, 1e-6), (torch.complex128, 1e-14)]
)
def test_complex_parameters(dtype, precision):
    parameter = nn.Parameter(torch.zeros(1, dtype=dtype))
    _, optimizer = make(trace=(2,), parameters=[parameter])
    for scale in (1.1j, 3.3j):
        (parameter * scale).sum().real.backward()
        optimizer.step()
    found = optimizer.noise.measure()
    expected = pytest.approx((2.0 * 1.1**2, 3.0 * 1.1**2), rel=precision)
    assert (found.variance, found.square) == expected


def late():
    """Returns two parameters, of which the second is frozen, and their optimizer."""
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    parameters[1].requires_grad_(False)
    return parameters, make(trace=(2,), parameters=parameters)[1]


ROWS = [[1.0, 0, 0], [3.0, 0, 0]]


def test_a_parameter_that_begins_to_train_within_a_step_makes_it_not_count():
    """So does one that trains alone."""
    parameters, optimizer = late()
    parameters[1].requires_grad_(True)
    step(optimizer, parameters[1], ROWS)
    assert optimizer.noise.measure().square == 0.0
    step(optimizer, parameters[1], ROWS)
    assert optimizer.noise.measure().square == pytest.approx(3.0)
    parameters, optimizer = late()
    parameters[1].requires_grad_(True)
    for _ in range(2):
        step(optimizer, parameters[0] + parameters[1], ROWS)
    assert optimizer.noise.measure().variance == pytest.approx(4.0)
    assert optimizer.progress == pytest.approx(1 + 1.25)


def test_a_parameter_that_an_attached_function_unfreezes_is_seen_at_once():
    parameters, optimizer = late()
    optimizer.attach(lambda update: parameters[1].requires_grad_(True))
    step(optimizer, parameters[0], ROWS)
    assert optimizer.noise.measure().variance == pytest.approx(2.0)
    step(optimizer, parameters[0] + parameters[1], ROWS)
    decay = math.exp(-2 / 1000)
    expected = (2.0 * decay + 4.0) / (1 + decay)
    assert optimizer.noise.measure().variance == pytest.approx(expected)


def test_requires_grad_may_not_change_between_minibatches():
    parameters, optimizer = late()
    step(optimizer, parameters[0], ROWS[:1])
    parameters[1].requires_grad_(True)
    with pytest.raises(ValueError, match="changed between the minibatches of one step"):
        step(optimizer, parameters[0] + parameters[1], ROWS[1:])


def test_two_backward_passes_in_a_minibatch_are_an_error():
    [parameter], optimizer = make(trace=(2,))
    parameter.sum().backward()
    parameter.sum().backward()
    with pytest.raises(ValueError, match="two gradients within one minibatch"):
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
    [parameter], optimizer = make(trace=(2,))
    step(optimizer, parameter, ROWS)
    watched = [weakref.ref(optimizer), weakref.ref(parameter)]
    del parameter, optimizer
    gc.collect()
    assert [reference() for reference in watched] == [None, None]
