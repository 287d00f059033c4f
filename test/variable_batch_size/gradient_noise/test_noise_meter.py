"""Gradient noise as training measures it, over any split of a step over replicas."""

import functools
import gc
import itertools
import logging
import math
import weakref

import pytest
import torch
from support.variable_batch_size.noise import CLOSED_FORMS, make, step
from support.variable_batch_size.wrapping import one_weight
from support.xla_replica.replicas import BACKENDS
from torch import nn
from torch.utils.checkpoint import checkpoint

import variable_batch_size as vbs

# Also where every sample is two tokens, of which the reference is two.
REFERENCES = {"ref_batchsize": 1}, {"ref_weight": 2, "reduction": "sum"}
STEPS = [*itertools.product((1, 2), CLOSED_FORMS.values())]


def all_steps(rank: int) -> list[tuple[tuple[float, ...], float, int]]:
    """Makes an update of each case, whose rows are the gradients of minibatches."""
    found = []
    for tokens, (rows, *_) in STEPS:
        weight, sampler, optimizer = one_weight(
            [len(rows)], "adascale", size=len(rows), minibatch_size=1,
            numbers=len(rows[0]), **REFERENCES[tokens - 1],
        )  # fmt: skip
        optimizer.set_epoch(0)
        batches = [torch.tensor(rows[index]) for (index,) in sampler]
        for row in optimizer.replica.loader(batches):
            (weight * row * tokens).sum().backward()
            optimizer.step(weight=tokens if tokens > 1 else None)
        rate = optimizer.current_lr()
        found.append((optimizer.noise.measure(), rate, len(batches)))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_closed_forms_for_every_split(backend):
    """1 to 8 replicas with 8 to 0 substeps, some idle, find the same numbers."""
    for (tokens, case), by_rank in zip(STEPS, zip(*backend.run(all_steps))):
        rows, variance, square, gain = case
        assert sum(number for *_, number in by_rank) == len(rows)
        expected = {"variance": tokens * variance, "square": square, "gain": gain}
        expected |= {"progress": gain, "efficiency": gain / len(rows)}
        expected["noise_scale"] = tokens * variance / square if square else math.inf
        for found, rate, _ in by_rank:
            assert found._asdict() == pytest.approx(expected, abs=1e-5)
            assert rate == pytest.approx(0.5 * gain, rel=1e-5)


ROWS = [[1.0, 0, 0], [3.0, 0, 0]]  # of variance 2, and 3 = 1 * 3 the square


def trained(rows=None, **options):
    [parameter], optimizer = make(**{"trace": (2,)} | options)
    step(optimizer, parameter, rows or ROWS)
    return parameter, optimizer


def test_any_batch_size_can_be_asked_for():
    _, optimizer = make()
    found = optimizer.noise.measure()  # before any update nothing is known
    assert (found.gain, found.progress) == (1.0, 0.0)
    assert math.isnan(found.noise_scale)
    assert math.isnan(found.efficiency)
    assert optimizer.noise.measure(8).gain == 1.0
    assert optimizer.current_lr() == (0.01,)
    _, optimizer = trained()
    assert optimizer.noise.measure().gain == pytest.approx(1.25)
    assert optimizer.noise.measure(1).gain == 1.0
    assert optimizer.noise.measure().noise_scale == pytest.approx(2 / 3)
    for batch_size in (2, 7, 100):
        efficiency = (1 + 2 / 3) / (batch_size + 2 / 3)
        found = optimizer.noise.measure(batch_size)
        assert found.efficiency == pytest.approx(efficiency)
        assert found.gain == pytest.approx(batch_size * efficiency)
    assert optimizer.current_lr() == (pytest.approx(0.0125),)


def test_gradients_that_are_not_finite_leave_the_statistics_alone():
    parameter, optimizer = trained()
    before = optimizer.noise.measure()
    step(optimizer, parameter, [[math.inf, 0, 0], [3.0, 0, 0]])
    step(optimizer, parameter, [[1.0, math.nan, 0], [3.0, 0, 0]])
    after = optimizer.noise.measure()
    assert after[:3] == before[:3]
    assert after.progress == pytest.approx(3 * before.gain)


def test_a_parameter_group_added_later_starts_from_nothing():
    parameter, optimizer = trained(max_grad_norm=1e-3)  # squares are before
    other = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [other], "lr": 0.5})
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    optimizer.add_param_group({"params": frozen})
    assert optimizer.noise.lr_factors(2) == pytest.approx((1.25, 1.0, 1.0))
    step(optimizer, parameter + other + other, ROWS)
    assert optimizer.noise.lr_factors(2) == pytest.approx((1.25, 1.25, 1.0))
    assert optimizer.noise.measure().variance == pytest.approx(2.0 + 4 * 2.0)


def test_a_failed_update_is_not_progress():
    [parameter], optimizer = make(trace=(4,))
    optimizer.param_groups[0]["lr"] = math.inf
    with pytest.raises(ValueError, match=">= 0, got inf"):
        step(optimizer, parameter, [[1.0, 0, 0]] * 4)
    assert optimizer.progress == 0.0


def test_progress_keeps_its_fractions_when_it_is_large():
    [parameter], optimizer = make(trace=(2,))
    state = optimizer.state_dict()
    state["elastic"]["noise"]["whole"] += 2**40
    optimizer.load_state_dict(state)
    step(optimizer, parameter, 4 * ROWS)
    assert optimizer.progress - 2**40 == pytest.approx(5.0, abs=1e-3)


MINE = vbs.Rule("mine", lambda gain: gain**0.5, measured=True)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2.0), (MINE, 1.25**0.5)])
def test_other_rules_and_ones_own_measure_too(rule, factor):
    options = {"rule": rule, "noise": vbs.NoiseOptions(per_group=False)}
    [parameter], optimizer = make(trace=(2,), cls=vbs.ElasticOptimizer, **options)
    updates = []
    optimizer.attach(updates.append)
    step(optimizer, parameter, ROWS)
    assert optimizer.noise.measure().gain == pytest.approx(1.25)
    assert optimizer.noise.lr_factors() == (pytest.approx(1.25),)
    assert updates[0].lr == (pytest.approx(0.01 * factor),)
    assert optimizer.current_lr() == pytest.approx(updates[0].lr[0])


def test_the_log_shows_what_was_measured(caplog):
    with caplog.at_level("INFO"):
        trained(log_steps=1)
    assert "learning rate 0.0125, gain 1.25, noise scale 0.6666" in caplog.text


def test_an_epoch_that_was_not_prepared_for_does_not_count_what_was_not_seen():
    """The step under way had one minibatch, and now is one of two."""
    [parameter], optimizer = make(trace=(1, 2))
    optimizer.sampler.set_epoch(1)
    step(optimizer, parameter, ROWS)
    assert optimizer.noise.measure().square == 0.0
    step(optimizer, parameter, [[1.0, 0, 0]])
    step(optimizer, parameter, ROWS)
    assert optimizer.noise.measure().variance == pytest.approx(2.0)


def test_squares_that_overflow_are_told(caplog):
    parameter, sampler, optimizer = one_weight(
        [8] * 6, "adascale", size=48, ref_batchsize=4, noise=True
    )
    for number, _ in enumerate(sampler):
        (parameter * (1e20 + number)).sum().backward()
        optimizer.step()
    with caplog.at_level(logging.WARNING):
        assert optimizer.noise.measure().gain == 1
        optimizer.noise.measure()
    assert caplog.text.count("squares of their gradients are not finite") == 1


def with_autograd_grad(parameter, other, scale: float) -> torch.Tensor:
    loss = (parameter[0] + 1) ** 2 * scale / 2
    (gradient,) = torch.autograd.grad(loss, parameter, create_graph=True)
    return scale * parameter[0] + 0 * gradient.sum()


def checkpointed(parameter, other, scale: float, **how: bool) -> torch.Tensor:
    x = torch.tensor([scale, 0, 0], requires_grad=True)
    return checkpoint(lambda x: parameter * x, x, **how).sum()


def thrown_away(parameter, thrown, scale: float) -> torch.Tensor:
    """They may be those of an adversarial example."""
    if scale == 1.0:  # later, the accumulated ones would go too: an error
        (thrown * 100).sum().backward()
        thrown.grad = None
    return parameter[0] * scale


def data_replaced(parameter, other, scale: float) -> torch.Tensor:
    parameter.data = parameter.data.clone()
    return parameter[0] * scale


# Losses of parameters, of which the first has the gradient of the minibatch.
LOSSES = {
    "beside a frozen parameter": lambda p, other, scale: p[0] * scale,
    "with replaced data": data_replaced,
    "used twice": lambda p, other, scale: p[0] * scale / 2 + p[0] * scale / 2,
    "with autograd.grad": with_autograd_grad,
    "checkpointed": functools.partial(checkpointed, use_reentrant=False),
    "reentrant": functools.partial(checkpointed, use_reentrant=True),
    "thrown away before": lambda p, other, scale: thrown_away(p, p, scale),
    "thrown away of another": thrown_away,
}


@pytest.mark.parametrize("how", LOSSES)
def test_what_is_seen_is_the_gradient_of_the_minibatch(how):
    """It is 1 and then 3 in one number: their variance is 2."""
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    _, optimizer = make(trace=(2,), parameters=parameters)
    parameters[1].requires_grad_(how != "beside a frozen parameter")
    for scale, _ in zip((1.0, 3.0), optimizer.minibatches):
        LOSSES[how](*parameters, scale).backward()
        optimizer.step()
    assert optimizer.noise.measure().variance == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.complex64, 1e-6), (torch.complex128, 1e-14)]
)
def test_complex_parameters(dtype, precision):
    parameter = nn.Parameter(torch.zeros(1, dtype=dtype))
    _, optimizer = trained([[1.1j], [3.3j]], parameters=[parameter])
    expected = pytest.approx((2.0 * 1.1**2, 3.0 * 1.1**2), rel=precision)
    assert optimizer.noise.measure()[-2:] == expected


def late():
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    parameters[1].requires_grad_(False)
    return parameters, make(trace=(2,), parameters=parameters)[1]


def test_a_parameter_that_begins_to_train_within_a_step_makes_it_not_count():
    """So does one that trains alone."""
    for alone in (True, False):
        parameters, optimizer = late()
        parameters[1].requires_grad_(True)
        used = parameters[1] if alone else parameters[0] + parameters[1]
        step(optimizer, used, ROWS)
        assert optimizer.noise.measure().square == 0.0
        step(optimizer, used, ROWS)
        assert optimizer.noise.measure().square == pytest.approx(3.0 if alone else 6.0)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_squares_of_narrow_gradients_are_added_up_in_float32(dtype):
    parameter = nn.Parameter(torch.zeros(4096, dtype=dtype))
    _, optimizer = trained([[300.0] * 4096] * 2, parameters=[parameter])
    found = optimizer.noise.measure()
    assert found.square == pytest.approx(300.0**2 * 4096, rel=1e-3)
    assert abs(found.variance) < 1e-3 * found.square


def test_deleting_everything_frees_the_model():
    """Hooks inside autograd's nodes are invisible to the garbage collector."""
    watched = [weakref.ref(each) for each in trained()]
    gc.collect()
    assert [reference() for reference in watched] == [None, None]
