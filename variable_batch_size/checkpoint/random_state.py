"""The state of random numbers, of a run on any number of replicas."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from xla_replica import Replica


def random_state(replica: Replica, own: torch.Tensor) -> dict[str, Any]:
    """Of replica 0's process, and of every replica's device. Collective.

    ``own`` is what this replica's ``rng_state()`` was; ``devices`` is
    ``(num_replicas, length)`` uint8, of those that were there.
    """
    replica.sync()  # what this replica has pending is no part of the collective
    sent = replica.send(own.to(torch.int32))
    _, keys, *rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [torch.from_numpy(keys.astype(np.int64)), *rest],
        "python": [version, list(internal), gauss],
        "devices": replica.all_gather(sent).to(torch.uint8),
    }


def restore_random_state(state: dict[str, Any], replica: Replica) -> None:
    """Puts back what `random_state` gave.

    A replica that was not there, or is of another kind, is seeded from what was: its
    dropout then differs from the uninterrupted run's, and from other replicas', as it
    should.
    """
    if replica.is_primary:  # other processes may have been seeded by rank
        keys, *rest = state["numpy"]
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(state["torch"])
    devices = state["devices"]
    like_own = devices.shape[1] == len(replica.rng_state())
    if like_own and replica.rank < len(devices):
        # A copy: torch 2.13 ignores where in its storage a view begins, and crashes.
        replica.set_rng_state(devices[replica.rank].clone())
        return
    seed = hashlib.sha256(devices[0].numpy().tobytes()).digest()[:4]
    replica.seed(int.from_bytes(seed, "little"))
