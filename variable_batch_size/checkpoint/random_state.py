"""The states of random number generators in a checkpoint."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch

from xla_replica import Replica


def saved(replica: Replica, own: torch.Tensor) -> dict[str, Any]:
    """Returns what the generators of replica 0 and of all devices hold. Collective."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [kind, keys.tolist(), *rest],
        "python": random.getstate(),
        # (num_replicas, length) uint8
        "devices": torch.stack(replica.gather_at_rest(own)),
    }


def restore(state: dict[str, Any], replica: Replica) -> None:
    """Restores what `saved` returned.

    A replica that is new, or on a device of another kind, is seeded from the saved
    state: its dropout differs from that of the other replicas, as it should.
    """
    if replica.is_primary:  # other processes may have been seeded by rank
        np.random.set_state(tuple(state["numpy"]))
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
    devices = state["devices"]
    same_kind = devices.shape[1] == len(replica.rng_state())
    if same_kind and replica.rank < len(devices):
        # A copy: torch 2.13 ignores where in its storage a view begins, and crashes.
        replica.set_rng_state(devices[replica.rank].clone())
        return
    replica.seed(zlib.crc32(devices[0].numpy().tobytes()))
