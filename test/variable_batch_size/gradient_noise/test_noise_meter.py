"""Gradient noise as training measures it, over any split of a step over replicas."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from support.variable_batch_size.noise import CLOSED_FORMS, make, step
from support.variable_batch_size.wrapping import one_weight
from support.xla_replica.replicas import BACKENDS
from torch import nn
from torch.optim import SGD

import variable_batch_size as vbs
import xla_replica


def one_step(rank: int, rows: list[list[float]]) -> tuple[tuple[float, ...], int]:
    """Makes one update whose minibatch gradients are ``rows``, one per minibatch."""
    replica = xla_replica.current()
    weight = nn.Parameter(torch.zeros(len(rows[0]), device=replica.device))
    sampler = vbs.CustomSampler(
        dataset_size=len(rows), trace=[len(rows)], minibatch_size=1, verbose=False
    )
    optimizer = vbs.AdaScaleOptimizer(SGD([weight], 1.0), sampler, ref_batchsize=1)
    optimizer.set_epoch(0)
    batches = [torch.tensor(rows[index]) for (index,) in sampler]
    for row in replica.loader(batches):
        (weight * row).sum().backward()
        optimizer.step()
    return optimizer.noise.measure(), len(batches)


def all_steps(rank: int) -> dict[str, tuple[tuple[float, ...], int]]:
    return {name: one_step(rank, case[0]) for name, case in CLOSED_FORMS.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_closed_forms_for_every_split(backend):
    """1 to 8 replicas with 8 to 0 substeps, some idle, find the same numbers."""
    by_rank = backend.run(all_steps)
    for name, (rows, variance, square, gain) in CLOSED_FORMS.items():
        assert sum(outcome[name][1] for outcome in by_rank) == len(rows)
        for outcome in by_rank:
            found = outcome[name][0]
            assert found.variance == pytest.approx(variance, abs=1e-5)
            assert found.square == pytest.approx(square, abs=1e-5)
            assert found.gain == pytest.approx(gain, abs=1e-5)
            assert found.progress == pytest.approx(gain, abs=1e-5)
            assert found.efficiency == pytest.approx(gain / len(rows), abs=1e-5)
            scale = variance / square if square else math.inf
            assert found.noise_scale == pytest.approx(scale, rel=1e-5)


ROWS = [[1.0, 0, 0], [3.0, 0, 0]]  # of variance 2, and 3 = 1 * 3 the square


def test_before_any_update_nothing_is_known():
    _, optimizer = make()
    found = optimizer.noise.measure()
    assert found.gain == 1.0
    assert found.progress == 0.0
    assert math.isnan(found.noise_scale)
    assert math.isnan(found.efficiency)
    assert optimizer.gain(8) == 1.0
    assert optimizer.current_lr() == (0.01,)


def test_any_batch_size_can_be_asked_for():
    [parameter], optimizer = make(trace=(2,))
    step(optimizer, parameter, ROWS)
    assert optimizer.gain() == pytest.approx(1.25)
    assert optimizer.gain(1) == 1.0
    noise_scale = 2 / 3
    assert optimizer.noise_scale() == pytest.approx(noise_scale)
    for batch_size in (2, 7, 100):
        efficiency = (1 + noise_scale) / (batch_size + noise_scale)
        assert optimizer.efficiency(batch_size) == pytest.approx(efficiency)
        assert optimizer.gain(batch_size) == pytest.approx(batch_size * efficiency)
    assert optimizer.current_lr() == (pytest.approx(0.0125),)
    for ask in (optimizer.gain, optimizer.efficiency):
        with pytest.raises(ValueError, match="batch_size must be > 0, got 0"):
            ask(0)


def test_gradients_that_are_not_finite_leave_the_statistics_alone():
    [parameter], optimizer = make(trace=(2,))
    step(optimizer, parameter, ROWS)
    before = optimizer.noise.measure()
    step(optimizer, parameter, [[math.inf, 0, 0], [3.0, 0, 0]])
    step(optimizer, parameter, [[1.0, math.nan, 0], [3.0, 0, 0]])
    after = optimizer.noise.measure()
    assert after[:3] == before[:3]
    assert after.progress == pytest.approx(3 * before.gain)


def test_a_parameter_group_added_later_starts_from_nothing():
    [parameter], optimizer = make(trace=(2,), max_grad_norm=1e-3)  # squares are before
    step(optimizer, parameter, ROWS)
    other = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [other], "lr": 0.5})
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    optimizer.add_param_group({"params": frozen})
    assert optimizer.noise.lr_factors(2) == pytest.approx((1.25, 1.0, 1.0))
    for scale in (1.0, 3.0):
        ((parameter + 2 * other) * torch.tensor([scale, 0, 0])).sum().backward()
        optimizer.step()
    assert optimizer.noise.lr_factors(2) == pytest.approx((1.25, 1.25, 1.0))
    assert optimizer.noise.measure().variance == pytest.approx(2.0 + 4 * 2.0)


def test_a_failed_update_is_not_progress():
    [parameter], optimizer = make(trace=(4,))
    optimizer.param_groups[0]["lr"] = math.inf
    for _ in range(3):
        step(optimizer, parameter, [[1.0, 0, 0]])
    with pytest.raises(ValueError, match="has become inf"):
        step(optimizer, parameter, [[1.0, 0, 0]])
    assert optimizer.noise.progress_bounds == (0.0, 0.0)


def test_a_saved_state_answers_as_before():
    [parameter], optimizer = make(trace=(2,))
    step(optimizer, parameter, ROWS)
    _, other = make(trace=(2,))
    other.load_state_dict(optimizer.state_dict())
    assert other.noise.measure() == optimizer.noise.measure()
    assert other.noise.progress_bounds == (optimizer.progress,) * 2


def test_other_rules_measure_too():
    [parameter], optimizer = make(
        trace=(2,), cls=vbs.LinearRuleOptimizer, noise=vbs.NoiseOptions(per_group=False)
    )
    step(optimizer, parameter, ROWS)
    assert optimizer.noise.gain() == pytest.approx(1.25)
    assert optimizer.noise.lr_factors() == (pytest.approx(1.25),)
    assert optimizer.current_lr() == pytest.approx(0.02)


def test_progress_lies_between_what_the_host_knows():
    [parameter], optimizer = make(trace=(2, 8, 1, 4))
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        step(optimizer, parameter, torch.randn(15, 3, generator=generator))
    low, high = optimizer.noise.progress_bounds
    assert low < high
    progress = optimizer.progress
    assert low <= progress <= high
    assert optimizer.noise.progress_bounds == (progress, progress)


def test_progress_keeps_its_fractions_when_it_is_large():
    [parameter], optimizer = make(trace=(2,))
    state = optimizer.state_dict()
    state["elastic"]["noise"]["whole"] += 2**40
    optimizer.load_state_dict(state)
    for _ in range(4):
        step(optimizer, parameter, ROWS)
    assert optimizer.progress - 2**40 == pytest.approx(5.0, abs=1e-3)


LINEAR = {"cls": vbs.LinearRuleOptimizer}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"time_constant": 0}, ValueError, "time_constant must be a finite number > 0"),
        ({"time_constant": "a"}, TypeError, "time_constant must be a finite number"),
        ({"time_constant": math.inf}, ValueError, "time_constant must be a finite num"),
        ({"compat": "seed"}, ValueError, "compat must be one of None, 'reference', g"),
        *(
            (LINEAR | {"noise": noise}, TypeError, "noise must be a bool or NoiseOpt")
            for noise in (None, {"time_constant": 10}, 1)
        ),
        ({"cls": vbs.ElasticOptimizer, "rule": vbs.Rule("x", math.sqrt, measured=True)},
         TypeError, r"gain \*\* 0.5, in place of math.sqrt"),
        ({"cls": vbs.ConstantOptimizer, "ref_batchsize": None, "noise": True},
         TypeError, "noise= needs ref_batchsize="),
    ],
)  # fmt: skip
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


def test_a_measured_rule_of_ones_own():
    rule = vbs.Rule("sqrt-gain", lambda gain: gain**0.5, measured=True)
    [parameter], optimizer = make(trace=(2,), cls=vbs.ElasticOptimizer, rule=rule)
    updates = []
    optimizer.attach(updates.append)
    step(optimizer, parameter, ROWS)
    assert updates[0].lr == (pytest.approx(0.01 * 1.25**0.5),)
    assert optimizer.current_lr() == pytest.approx(updates[0].lr[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"differences": torch.zeros(3, 1)}, "not a state of a NoiseMeter: it has"),
        ({"base": torch.tensor([7.0])}, "over 7 samples, and this meter's over 1"),
        ({"averages": torch.zeros(3, 2)}, "of 2 parameter groups, and the optimizer"),
    ],
)
def test_a_state_of_another_format_or_of_other_groups_is_refused(changes, message):
    _, optimizer = make()
    state = optimizer.noise.state_dict()
    with pytest.raises(ValueError, match=message):
        optimizer.noise.load_state_dict(state | changes)


def test_the_log_shows_what_was_measured(caplog):
    [parameter], optimizer = make(trace=(2,), log_steps=1)
    with caplog.at_level("INFO"):
        step(optimizer, parameter, ROWS)
    assert "learning rate 0.0125, gain 1.25, noise scale 0.6666" in caplog.text


def test_an_epoch_that_was_not_prepared_for_does_not_count_what_was_not_seen():
    """The step under way had one minibatch, and now is one of two."""
    [parameter], optimizer = make(trace=(1, 2))
    optimizer.sampler.set_epoch(1)
    assert optimizer.sampler.plan.num_minibatches_of(0) == 2
    step(optimizer, parameter, ROWS)
    assert optimizer.noise.measure().square == 0.0
    step(optimizer, parameter, [[1.0, 0, 0]])
    step(optimizer, parameter, ROWS)
    assert optimizer.noise.measure().variance == pytest.approx(2.0)


def test_squares_that_overflow_are_told(caplog):
    """Gradients times 1e20: a gain of one is not what they say."""
    parameter, sampler, optimizer = one_weight(
        [8] * 6, "adascale", size=48, ref_batchsize=4, noise=True
    )
    for number, _ in enumerate(sampler):
        (parameter * (1e20 + number)).sum().backward()
        optimizer.step()
    with caplog.at_level(logging.WARNING):
        assert optimizer.noise.gain() == 1
        optimizer.noise.gain()
    assert caplog.text.count("squares of their gradients are not finite") == 1
