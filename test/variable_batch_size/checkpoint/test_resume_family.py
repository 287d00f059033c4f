"""A run that is resumed after any update, on any number of replicas, ends the same.

It is the same bit for bit: the data have sums that no order of summation rounds. With
rules that measure or count, one replica reaches every later state bit for bit.
"""

from __future__ import annotations

import dataclasses

import pytest
from support.variable_batch_size.resuming import (
    CASE,
    assert_equal,
    global_samples,
    resume_from_each,
    run,
)
from support.xla_replica.replicas import TORCHTPU, TPU_LIKE, backends

import xla_replica

BACKENDS = [
    *backends("cpu", 1, 3, slow=(2, 5, 8)),
    *backends("xla", 3, slow=(1, 2, 8)),
    *TORCHTPU,
    TPU_LIKE,
]


@pytest.fixture(scope="module")
def alone():
    """Returns the uninterrupted run on one replica, with a state for every update."""
    [found] = xla_replica.launch(run, (CASE,), 1, "cpu")
    assert len(found["states"]) == len(found["updates"]) + 1 > 15
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_do_not_depend_on_the_number_of_replicas(backend, alone):
    """States are equal, so the state of one replica can be resumed on any number."""
    outcomes = backend.run(run, CASE, timeout=180)
    assert global_samples(outcomes) == global_samples([alone])
    states = outcomes[0]["states"]
    assert_equal(states, alone["states"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_resumed_from_every_update_the_run_ends_the_same(backend, alone):
    per_replica = backend.run(resume_from_each, CASE, alone["states"], timeout=180)
    everything = global_samples([alone])
    num_updates = len(alone["updates"])
    for done, outcomes in enumerate(zip(*per_replica)):
        for outcome in outcomes:
            assert outcome["updates"] == list(range(done, num_updates))
            assert_equal(outcome["weights"], alone["weights"])
        assert global_samples(outcomes) == [one for one in everything if one[0] >= done]


# Rules and schedulers that have states: changes of the case, and the schedule.
SGD, ADAMW = {"optimizer": "sgd"}, {"optimizer": "adamw"}
COUNTING = {
    "adascale": ({"rule": "adascale"}, None),
    "adascale, iterations": (SGD | {"rule": "adascale"}, ("iterations", 1.5)),
    "adam-root": (ADAMW | {"rule": "adam-root"}, None),
    "linear, samples": ({}, ("samples", 20)),
}


@pytest.mark.parametrize("name", COUNTING)
def test_on_a_local_replica_every_later_state_is_the_same(name):
    """Resumed from each state, with all learning rates and weights."""
    changes, schedule = COUNTING[name]
    case = dataclasses.replace(CASE, **changes)
    [whole] = xla_replica.launch(run, (case, None, True, schedule), 1, "cpu")
    num_updates, states = len(whole["updates"]), whole["states"]
    assert len(states) == num_updates + 1 > 15
    for done, state in enumerate(states):
        [rest] = xla_replica.launch(run, (case, state, True, schedule), 1, "cpu")
        assert rest["updates"] == list(range(done, num_updates))
        assert_equal(rest["states"], states[done + 1 :])
        assert_equal(rest["weights"], whole["weights"])
