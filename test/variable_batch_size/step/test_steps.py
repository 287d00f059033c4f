"""Steps and epochs of one replica: idle steps, and changes it must not make."""

from __future__ import annotations

import pytest
import torch
from support.variable_batch_size.wrapping import backward, idle_replica, make, run_epoch

from xla_replica import ReplicaError


def test_idle_steps_are_joined_once():
    model, sampler, wrapper = idle_replica()
    assert len(sampler) == 2
    assert [wrapper.set_epoch(0), wrapper.set_epoch(0)] == [1, 0]
    assert run_epoch(model, sampler, wrapper) == [3, 2]


def test_a_change_after_set_epoch_is_an_error_where_replicas_have_joined():
    model, _sampler, wrapper = make(trace=[32, 64, 32], replicas=2)
    wrapper.set_epoch(0)
    wrapper.set_lr((0.5,))  # replica 1 has done step 0 with 0.1
    backward(model)
    with pytest.raises(ReplicaError, match=r"before optimizer.set_epoch"):
        wrapper.step()


def test_between_epochs_the_learning_rate_may_change():
    model, sampler, wrapper = idle_replica()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        wrapper.set_epoch(epoch)
        run_epoch(model, sampler, wrapper)
        wrapper.set_lr((0.01,))


# --- epochs -------------------------------------------------------------------------


def test_epochs_follow_the_sampler():
    """A forgotten optimizer.set_epoch is harmless if no replica is idle at first."""
    model, sampler, wrapper = make(trace=128)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert sum(run_epoch(model, sampler, wrapper)) == 2
        assert wrapper.epoch == epoch


@pytest.mark.parametrize("rank", [0, 1])
def test_a_forgotten_set_epoch_is_an_error_where_idle_replicas_need_it(rank):
    model, _, wrapper = make(trace=[32, 64], rank=rank, replicas=2)
    backward(model)
    with pytest.raises(ReplicaError, match=r"call optimizer.set_epoch\(0\) before"):
        wrapper.step()


def test_stepping_past_the_epoch_is_an_error():
    model, sampler, wrapper = make()
    run_epoch(model, sampler, wrapper)
    with pytest.raises(ValueError, match=r"after the last of the 3 steps of epoch 0"):
        wrapper.step()


def test_sampler_and_optimizer_at_different_epochs_are_an_error():
    model, _, wrapper = make(trace=128)
    wrapper.set_epoch(1)
    backward(model)
    with pytest.raises(ValueError, match=r"at step 0 of epoch 1 and the sampler at ep"):
        wrapper.step()


def test_an_abandoned_epoch_warns_and_loses_its_gradients(caplog):
    model, sampler, wrapper = make()
    backward(model)
    wrapper.step()
    wrapper.set_epoch(0)
    assert "epoch 0 is abandoned after 0 of 3 steps: run every min" in caplog.text
    assert torch.equal(model.weight.grad, torch.zeros(1, 2))
    assert run_epoch(model, sampler, wrapper) == [0, 1, 0, 0, 1, 0, 0, 1]


def test_an_abandoned_epoch_is_an_error_on_several_replicas():
    model, _, wrapper = make(trace=128, replicas=2)
    wrapper.set_epoch(0)
    backward(model)
    wrapper.step()
    with pytest.raises(ReplicaError, match=r"abandoned after 0 of 2 steps, and the ot"):
        wrapper.set_epoch(1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_epoch_number_that_is_trained_twice_warns_or_is_an_error(replicas, caplog):
    model, sampler, wrapper = make(trace=128, replicas=replicas)
    wrapper.set_epoch(0)
    run_epoch(model, sampler, wrapper)
    assert not caplog.text
    message = "epoch 0 has been trained; another pass needs another"
    if replicas == 1:
        wrapper.set_epoch(0)
        assert message in caplog.text
        return
    with pytest.raises(ReplicaError, match=message):
        wrapper.set_epoch(0)


def test_set_epoch_past_the_end_of_the_trace():
    _, sampler, wrapper = make()
    sampler.set_epoch(7)
    assert wrapper.set_epoch(7) == 0
    assert wrapper.get_bs() == 0
