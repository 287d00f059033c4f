"""Python objects that replicas gather and compare, as bytes in tensors."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xla_replica.errors import ReplicaError

if TYPE_CHECKING:
    from xla_replica.backends.replica import Replica

# What is sent at first; longer values take a second round.
_FIRST_BYTES = 1024


def gather_objects(replica: Replica, value: Any) -> list[Any]:
    """Returns every replica's ``value``; see `Replica.all_gather_object`."""
    own = pickle.dumps(value)
    if replica.num_replicas == 1:
        return [pickle.loads(own)]
    replica.sync()
    width = _FIRST_BYTES
    while True:
        words = np.empty(1 + width // 4, np.int32)  # the length, and so many bytes
        words[0] = len(own)
        words[1:] = np.frombuffer(own[:width].ljust(width, b"\0"), np.int32)
        rows = replica.all_gather(replica.send(torch.from_numpy(words)))
        [rows] = replica.fetch([rows])
        lengths = rows[:, 0].tolist()
        if max(lengths) <= width:
            # What follows the end of a pickle is not read.
            return [pickle.loads(row[1:].tobytes()) for row in rows.numpy()]
        # A power of two, so that few programs are compiled.
        width = 1 << (max(lengths) - 1).bit_length()


def check_equal(replica: Replica, what: str, value: Any, remedy: str) -> None:
    """Raises unless all bring an equal ``value``; see `Replica.check_agreement`."""
    if replica.num_replicas == 1:
        return
    values = replica.all_gather_object(value)
    others = [rank for rank, other in enumerate(values) if other != values[0]]
    if others:
        mine, theirs = values[0], values[others[0]]
        if isinstance(mine, dict) and isinstance(theirs, dict):
            names = [n for n in mine | theirs if mine.get(n) != theirs.get(n)]
            mine, theirs = ({n: v.get(n) for n in names} for v in (mine, theirs))
        ranks = ", ".join(map(str, others[:8])) + ", ..." * (len(others) > 8)
        raise ReplicaError(
            f"replicas disagree about {what}: replica 0 has {mine!r}, replica "
            f"{others[0]} has {theirs!r}, and {len(others)} of "
            f"{replica.num_replicas} differ from replica 0 (rank {ranks}). {remedy}",
            others[0],
        )
