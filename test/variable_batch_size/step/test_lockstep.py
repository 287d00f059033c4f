"""In lockstep, a replica's loop runs once per update, with or without minibatches."""

from __future__ import annotations

import pytest
import torch
from support.variable_batch_size.elastic import Case, Training, large_batch_run
from support.xla_replica.replicas import HAS_XLA, Backend, row

from xla_replica import ReplicaError

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
