"""Samplers that are saved, abandoned or inspected midway, or get odd arguments."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.grab_xla import ordering
from support.grab_xla.ordering import KINDS

import xla_replica

N = 24


@pytest.mark.parametrize("stale", [False, True])
def test_instruments_begin_anew_in_a_restored_sampler(stale):
    options = {"record_norm": True, "record_herding": True, "stale_mean_herding": stale}
    sampler = KINDS["mean"].sampler(N, **options)
    ordering.take_steps(sampler, 0, list(sampler)[:8], N)
    state = sampler.state_dict()
    ordering.take_steps(sampler, 0, sampler.order[8:], N)
    for restored in (KINDS["mean"].sampler(N, **options), sampler):
        restored.load_state_dict(state)
        rest = list(restored)
        assert len(rest) == N - 8
        ordering.take_steps(restored, 0, rest, N)
        assert len(restored.sorter.grad_norms) == N - 8
        assert np.isfinite(restored.sorter.herding)


@pytest.mark.filterwarnings("ignore::grab_xla.GraBWarning")
def test_what_is_not_finite_is_not_herded():
    sampler = KINDS["mean"].sampler(N, record_herding=True, stale_mean_herding=True)
    for _ in range(2):
        rows = ordering.gradients(0, N)[list(sampler)]
        rows[3] = np.nan
        sampler.step(ordering.as_dict(rows))
        assert np.isfinite(sampler.sorter.herding)
        assert sampler.scalars().keys() == {"herding", "avg_grad_error"}


def test_a_bad_second_moment_changes_nothing():
    sampler, other = KINDS["adamean"].sampler(N), KINDS["adamean"].sampler(N)
    good = torch.full((13,), 4.0, dtype=torch.float64)
    bad = torch.tensor([np.nan, -1.0, np.inf, *good[3:]], dtype=torch.float64)
    for each in (sampler, other):
        list(each)
        each.sorter.update_v(good)
    sampler.sorter.update_v(bad)
    for epoch in range(3):
        for each in (sampler, other):
            ordering.take_steps(each, epoch, each.order, N)
        assert list(sampler) == list(other)


def test_a_look_at_the_rest_of_a_restored_epoch_changes_nothing():
    """Nor does another process."""
    sampler, restored = KINDS["mean"].sampler(N), KINDS["mean"].sampler(N)
    order = list(sampler)
    ordering.take_steps(sampler, 0, order[:8], N)
    restored.load_state_dict(sampler.state_dict())
    assert [list(restored) for _ in range(3)] == [order[8:]] * 3
    for each in (sampler, restored):
        ordering.take_steps(each, 0, order[8:], N)
    copy = pickle.loads(pickle.dumps(sampler))
    assert list(restored) == list(sampler) == list(copy)


def ordered_otherwise(rank, how):
    options = {"seed": rank} if how == "seed" else {"device": "meta"}
    KINDS["mean"].sampler(N, **options)


@pytest.mark.parametrize(
    ("how", "message"),
    [("seed", "disagree about the checksum of the first"), ("device", "device=meta")],
)
def test_replicas_that_cannot_agree_are_named(how, message):
    with pytest.raises((ValueError, xla_replica.ReplicaError), match=message):
        xla_replica.launch(ordered_otherwise, (how,), 2, "cpu")


@pytest.mark.parametrize("balance_type", ["mean", "pair", "recursive-pair"])
def test_no_sample_at_all_and_only_one(balance_type):
    sampler = KINDS[balance_type].sampler(1)
    for _ in range(3):
        assert list(sampler) == [0]
        sampler.step(ordering.as_dict(torch.zeros(0, 13)))
        sampler.step(ordering.as_dict(torch.ones(1, 13)))


def left_in_the_middle(rank):
    """Runs one whole step, then half a step of the same epoch, then another epoch."""
    sampler = KINDS["mean"].sampler(N)
    order = sampler(0)
    grads = ordering.gradients(0, N)
    held = grads[order[4 * rank : 4 * rank + 4]].clone()
    sampler.step(ordering.as_dict(held))
    held.zero_()  # A loop may overwrite gradients after use.
    sampler.after_update(SimpleNamespace(epoch=0, batch_size=8, minibatch_size=4))
    sampler.step(ordering.as_dict(grads[order[8 + 4 * rank : 12 + 4 * rank]]))
    return sampler(1).tolist()


def test_an_epoch_left_in_the_middle_of_a_step_orders_what_was_updated():
    sampler = KINDS["mean"].sampler(N)
    order = sampler(0)
    sampler.step(ordering.as_dict(ordering.gradients(0, N)[order[:8]]))
    expected = sampler(1).tolist()
    assert xla_replica.launch(left_in_the_middle, (), 2, "cpu") == [expected] * 2
