"""Saved after any update on any number of replicas, a run ends as it would have.

Bit for bit: the data have sums that no order of summation rounds. Of rules that measure
or count, one replica goes on bit for bit, and has been through every state on the way.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.replicas import row
from support.resuming import CASE, global_samples, go_on_with_each, run

import xla_replica

BACKENDS = [
    row("cpu", 1),
    row("cpu", 2, slow=True),
    row("cpu", 3),
    row("cpu", 8, slow=True),
    row("xla", 1, slow=True),
    row("xla", 2, slow=True),
    row("xla", 3, slow=True),
    row("xla", 8),
]


@pytest.fixture(scope="module")
def alone():
    """The uninterrupted run on one replica, saved before and after every update."""
    with_local = xla_replica.launch(run, (CASE,), 1, "cpu")[0]
    assert len(with_local["states"]) == len(with_local["updates"]) + 1 > 15
    return with_local


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    return request.param


def test_what_is_saved_says_nothing_of_replicas(backend, alone):
    """Equal states: to go on with that of one replica is to go on with any."""
    outcomes = backend.run(run, CASE, timeout=180)
    assert global_samples(outcomes) == global_samples([alone])
    states = outcomes[0]["states"]
    assert len(states) == len(alone["states"])
    for received, expected in zip(states, alone["states"]):
        assert_equal(received, expected)


def test_from_every_update_the_run_ends_as_it_would_have(backend, alone):
    per_replica = backend.run(go_on_with_each, CASE, alone["states"], timeout=180)
    everything = global_samples([alone])
    num_updates = len(alone["updates"])
    for done, outcomes in enumerate(zip(*per_replica)):
        for outcome in outcomes:
            assert outcome["updates"] == list(range(done, num_updates))
            assert_equal(outcome["weights"], alone["weights"])
        assert global_samples(outcomes) == [
            (step, samples) for step, samples in everything if step >= done
        ]


# What counts in a state beside momentum and place: (case, schedule).
COUNTING = {
    "adascale": (dataclasses.replace(CASE, rule="adascale"), None),
    "adascale, scheduler in iterations": (
        dataclasses.replace(CASE, rule="adascale", optimizer="sgd"),
        ("iterations", 1.5),
    ),
    "adam-root": (
        dataclasses.replace(CASE, rule="adam-root", optimizer="adamw"),
        None,
    ),
    "linear, scheduler in samples": (CASE, ("samples", 20)),
}


@pytest.mark.parametrize("name", COUNTING)
def test_on_a_local_replica_every_state_comes_again(name):
    """From each state on: all later ones, and so learning rates and weights."""
    case, schedule = COUNTING[name]
    [whole] = xla_replica.launch(run, (case, None, True, schedule), 1, "cpu")
    num_updates, states = len(whole["updates"]), whole["states"]
    assert len(states) == num_updates + 1 > 15
    for done, state in enumerate(states):
        [rest] = xla_replica.launch(run, (case, state, True, schedule), 1, "cpu")
        assert rest["updates"] == list(range(done, num_updates))
        assert_equal(rest["states"], states[done + 1 :])
        assert_equal(rest["weights"], whole["weights"])


def assert_equal(received, expected):
    """Bit for bit, also the values that are no tensors."""
    assert type(received) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(received, expected)
    elif isinstance(expected, dict):
        assert received.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(received[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(received) == len(expected)
        for one, other in zip(received, expected):
            assert_equal(one, other)
    else:
        assert received == expected
