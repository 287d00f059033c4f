"""Steps and epochs: idle ones, changes that must not be made, and lockstep."""

from __future__ import annotations

import pytest
import torch
from support.variable_batch_size.elastic import Case, Training, large_batch_run
from support.variable_batch_size.wrapping import backward, idle_replica, make, run_epoch
from support.xla_replica.replicas import HAS_XLA, Backend, row

from xla_replica import ReplicaError


def test_idle_steps_are_joined_once():
    model, sampler, wrapper = idle_replica()
    assert len(sampler) == 2
    assert [wrapper.set_epoch(0), wrapper.set_epoch(0)] == [1, 0]
    assert run_epoch(model, sampler, wrapper) == [3, 2]


def test_optimizers_that_share_a_sampler_join_no_idle_step():
    _model, sampler, one = idle_replica()
    other = type(one)(one.inner, sampler, ref_batchsize=32, replica=one.replica)
    for each in (one, other):
        with pytest.raises(ReplicaError, match=r"2 optimizers .* lockstep=True"):
            each.set_epoch(0)


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


# --- in lockstep: a loop runs once per update, with or without minibatches ------------

# Steps of 1 to 5 minibatches on 3 replicas, in some of which two of them are idle, the
# first and the last of an epoch among them.
CASE = Case((4, 12, 20, 4, 8, 16), epochs=3, optimizer="sgd-heavy-ball", lr=2**-4)
DECAY = 0.9


def run(rank: int) -> dict[str, object]:
    """Trains with a scheduler and a collective in the loop; returns what was seen."""
    training = Training(CASE, lockstep=True)
    sampler, optimizer = training.sampler, training.optimizer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.inner, DECAY)
    met = []
    for epoch in range(CASE.epochs):
        sampler.set_epoch(epoch)
        assert optimizer.set_epoch(epoch) == 0
        plan, minibatches = sampler.plan, iter(sampler)
        for step, num in enumerate(plan.num_substeps(rank).tolist()):
            assert optimizer.is_idle == (num == 0)
            for _ in range(num):
                rows = next(minibatches)
                batch = training.inputs[rows], training.targets[rows]
                made = training.minibatch(*training.replica.send(batch))
            made = made if num else optimizer.join_step()
            assert made == 1
            scheduler.step()
            here = (plan.first_step + step, optimizer.get_lr())
            met.append(training.replica.all_gather_object(here))
    return {"weights": training.weights(), "met": met}


def refusals(rank: int) -> None:
    """Makes the wrong call: on one with a minibatch, and on an idle one."""
    training = Training(CASE, lockstep=True)
    optimizer = training.optimizer
    optimizer.set_epoch(0)
    wrong, told = optimizer.join_step, r"call backward\(\) and step\(\) for every one"
    if rank > 0:
        wrong, told = optimizer.step, r"call join_step\(\) in place of step\(\)"
    sum(p.sum() for p in training.model.parameters()).backward()
    with pytest.raises((ValueError, ReplicaError), match=told):
        wrong()


@pytest.mark.parametrize(
    "backend", [row("cpu", 1), row("cpu", 3, slow=HAS_XLA), row("xla", 3)]
)
def test_loops_with_schedulers_and_collectives_train_as_one_large_batch(backend):
    weights, updates = large_batch_run(CASE, decay=DECAY)
    for outcome in backend.run(run):
        torch.testing.assert_close(outcome["weights"], weights)
        # Replicas met after the same updates, with the same learning rates.
        assert [each for each in outcome["met"] if len({*each}) > 1] == []
        assert [each[0][0] for each in outcome["met"]] == [*range(len(updates))]


def test_each_of_the_two_calls_refuses_the_steps_of_the_other():
    Backend("cpu", 2).run(refusals)


def test_without_lockstep_there_is_nothing_to_join():
    with pytest.raises(ValueError, match="lockstep=False"):
        Training(CASE).optimizer.join_step()
