"""What an epoch costs on XLA: no transfer, and no compilation after the first."""

from __future__ import annotations

import pytest
from support.grab_xla import ordering
from support.grab_xla.ordering import BALANCING, KINDS
from support.xla_replica.replicas import ONE_XLA_BACKEND

import xla_replica

RUNS = [
    *((name, {}) for name in BALANCING),
    ("mean", {"prob_balance": True}),
    ("mean", dict.fromkeys(["record_norm", "record_herding", "stale_mean_herding"], 1)),
    ("mean", {"normalize_grads": True, "tile_size": 5}),
]
NUM_SAMPLES = 44  # with steps of 16: two whole ones and one of 12


def count_epochs(rank: int) -> list[list]:
    """Returns, for each run and epoch, counts of its beginning and of its steps."""
    replica = xla_replica.current()
    own_batch = 16 // replica.num_replicas
    counted = []
    for name, options in RUNS:
        sampler = KINDS[name].sampler(NUM_SAMPLES, **options)
        epochs = []
        for epoch in range(4):
            rows = ordering.gradients(epoch, NUM_SAMPLES)
            with xla_replica.count(replica) as beginning:
                order = list(sampler)
            with xla_replica.count(replica) as steps:
                for batch in ordering.batches(order, own_batch):
                    grads = replica.send(ordering.as_dict(rows[batch]))
                    sampler.step(grads, indices=batch)
                    replica.sync()
            epochs.append((beginning, steps))
        counted.append(epochs)
    return counted


@pytest.mark.parametrize("backend", ONE_XLA_BACKEND)
def test_steps_read_nothing_and_compile_nothing_new(backend):
    """The placements' transfer, as an epoch begins, does not cut a new program."""
    for replica in backend.run(count_epochs, timeout=120):
        for run, epochs in zip(RUNS, replica, strict=True):
            for epoch, (beginning, steps) in enumerate(epochs):
                assert steps.transfers == 0, (run, epoch)
                assert beginning.transfers <= backend.num_replicas, (run, epoch)
                assert steps.fallbacks == beginning.fallbacks == {}, (run, epoch)
                compiled = steps.compilations + beginning.compilations
                assert epoch == 0 or compiled == 0, (run, epoch)
