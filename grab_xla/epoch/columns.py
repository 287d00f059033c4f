"""Which replicas balance together, and which columns of gradients each one holds.

Every replica computes the gradients of its own samples, all columns of them; balancing
goes through the samples of all replicas, one after the other. There are two schemes,
which give the same signs as one replica that has all samples:

- 'sharded': replicas exchange columns for rows, so that each holds its share of the
  columns of every sample and of the accumulators. One `Replica.all_reduce_` per tile
  adds up partial inner products. Each replica receives B d (W - 1) / W numbers of
  gradients per step and (rows x (rows + accumulators)) numbers of inner products.
- 'gather': every replica receives the gradients of all others, B d (W - 1) numbers, and
  repeats the whole balancing. There is no sum, but W times the work, traffic and
  accumulators.

W replicas, B samples of each per step, d columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import xla_replica
from xla_replica import LocalReplica, Replica
from xla_replica.common.arguments import check_choice, check_flag

SCHEMES = ("sharded", "gather")
# A large share has whole lanes of a TPU, for which its compiler writes less code.
_LARGE, _LANES = 1024, 128


class Columns:
    """The columns that this replica holds of every vector, and how.

    ``num_columns`` is d, ``shards`` whether the scheme shares columns, and ``num_own``
    how many each replica holds, because the last share is filled up. ``joins_updates``:
    rows may have to wait for an update, where there are several replicas or ``exact``.
    """

    def __init__(
        self,
        replica: Replica,
        num_columns: int,
        scheme: str,
        device: torch.device,
        dtype: torch.dtype,
        exact: bool = False,
    ) -> None:
        check_choice("scheme", scheme, SCHEMES)
        if check_flag("exact", exact) and scheme != "gather":
            raise ValueError(f"exact=True needs scheme='gather', got {scheme!r}")
        if replica.is_live and not exact:
            raise ValueError(
                "a live run needs GraBSampler(..., exact=True, scheme='gather')"
            )
        self.exact, self.joins_updates = exact, exact or replica.num_replicas > 1
        self.replica, self.num_columns = replica, num_columns
        self.device, self.dtype = device, dtype
        self.shards = scheme == "sharded" and replica.num_replicas > 1
        num_shards = replica.num_replicas if self.shards else 1
        self.num_own = math.ceil(num_columns / num_shards)
        if self.shards and self.num_own > _LARGE:
            self.num_own = math.ceil(self.num_own / _LANES) * _LANES
        self._num_filled = self.num_own * num_shards

    def of_all_replicas(self, rows_BD: Tensor) -> Tensor:
        """Returns its columns of all rows, ``(W, B, num_own)``. Collective."""
        if self.replica.num_replicas == 1:
            return rows_BD.unsqueeze(0)
        if not self.shards:
            return self.replica.all_gather(rows_BD)
        # Slices: a reshape that splits the columns takes a TPU's compiler 5 s.
        parts = self._filled(rows_BD).split(self.num_own, dim=1)
        return self.replica.all_to_all(torch.stack(parts))

    def all_reduce_(self, partial: list[Tensor]) -> None:
        """Adds partial inner products over the shards, in place. Collective."""
        if self.shards:
            self.replica.all_reduce_(partial)

    def own(self, vectors_VD: Tensor, fill: float = 0.0) -> Tensor:
        """Returns this replica's columns of ``(V, d)``; ``fill`` is after the last."""
        if not self.shards:
            return vectors_VD
        first = self.replica.rank * self.num_own
        return self._filled(vectors_VD, fill)[:, first : first + self.num_own].clone()

    def whole(self, vectors_VD: Tensor) -> Tensor:
        """Returns whole vectors, ``(V, d)``, from all replicas' columns. Collective."""
        if len(vectors_VD) == 0:
            return vectors_VD.new_zeros(0, self.num_columns)
        if not self.shards:
            return vectors_VD
        parts = self.replica.all_gather(vectors_VD)
        return parts.transpose(0, 1).flatten(1)[:, : self.num_columns]

    def _filled(self, vectors_VD: Tensor, fill: float = 0.0) -> Tensor:
        missing = self._num_filled - self.num_columns
        return torch.nn.functional.pad(vectors_VD, (0, missing), value=fill)


def replica_for(
    num_replicas: int | None, rank: int | None, device: torch.device | str | None
) -> Replica:
    """Returns the replica that balances: the caller's, or a separate one.

    Only replicas that sum with one another, on their own device, can be asked for.
    """
    current = xla_replica.current()
    if device is not None and torch.device(device).type != current.device.type:
        if num_replicas != 1 and current.num_replicas > 1:
            raise ValueError(
                f"device={device}, but the caller is {current}, whose sums are there: "
                "leave device out, or pass num_replicas=1 for a separate sampler"
            )
        return LocalReplica(device, "a device was asked for")
    if (num_replicas, rank) in ((1, None), (1, 0)) and current.num_replicas > 1:
        return LocalReplica(current.device, "num_replicas=1 was asked for")
    if num_replicas not in (None, current.num_replicas) or (
        rank not in (None, current.rank)
    ):
        raise ValueError(
            f"num_replicas={num_replicas}, rank={rank}, but the caller is {current}: "
            "leave both out, or pass num_replicas=1 for a separate sampler"
        )
    return current
