"""A run that is resumed after any update, on any number of replicas, ends the same.

It is the same bit for bit: the data have sums that no order of summation rounds.
"""

import pytest
from support.variable_batch_size import resuming
from support.variable_batch_size.resuming import CASE, assert_equal, global_samples
from support.xla_replica.replicas import TORCHTPU, TPU_LIKE, backends

import xla_replica

BACKENDS = [*backends("cpu", 1, 3, slow=(2, 5, 8)), *backends("xla", 2, slow=(1, 3, 8))]
BACKENDS += [*TORCHTPU, TPU_LIKE]


@pytest.fixture(scope="module")
def alone():
    """Returns the uninterrupted run on one replica, with a state for every update."""
    [found] = xla_replica.launch(resuming.run, (CASE,), 1, "cpu")
    assert len(found["states"]) == len(found["updates"]) + 1 > 15
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_do_not_depend_on_the_number_of_replicas(backend, alone):
    outcomes = backend.run(resuming.run, CASE, timeout=180)
    assert global_samples(outcomes) == global_samples([alone])
    assert_equal(outcomes[0]["states"], alone["states"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_resumed_from_every_update_the_run_ends_the_same(backend, alone):
    given = CASE, alone["states"]
    per_replica = backend.run(resuming.resume_from_each, *given, timeout=180)
    everything, num_updates = global_samples([alone]), len(alone["updates"])
    for done, outcomes in enumerate(zip(*per_replica)):
        for outcome in outcomes:
            assert outcome["updates"] == list(range(done, num_updates))
            assert_equal(outcome["weights"], alone["weights"])
        assert global_samples(outcomes) == [one for one in everything if one[0] >= done]
