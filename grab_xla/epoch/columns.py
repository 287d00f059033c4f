"""How the columns of gradients and accumulators lie on the replicas.

Every replica computes the gradients of its own samples, all columns of them; balancing
goes through the samples of all replicas, one after the other. Two schemes, with the
same signs as one replica that has them all:

- 'sharded': replicas exchange columns for rows, so that each holds its share of the
  columns of every sample, and of the accumulators. Partial inner products are added up
  with one `Replica.all_reduce_` per tile. Each replica receives B d (W - 1) / W numbers
  of
  gradients per step and (rows x (rows + accumulators)) numbers of inner products.
- 'gather': every replica receives the gradients of all the others, B d (W - 1) numbers,
  and repeats the whole balancing. No sum; W times the work, traffic and accumulators.

W replicas, B samples of each per step, d columns.
"""

from __future__ import annotations

import math

import torch

from xla_replica import Replica

SCHEMES = ("sharded", "gather")


class Columns:
    """The columns that this replica holds of every vector.

    Args:
        replica: One of those that balance together.
        num_columns: d, of a whole vector.
        scheme: See the module.

    Attributes:
        num_columns: d.
        num_own: Columns on this replica; the last ones are filled up with zeros so
            that all replicas hold as many.
    """

    def __init__(self, replica: Replica, num_columns: int, scheme: str) -> None:
        if scheme not in SCHEMES:
            raise ValueError(
                f"scheme={scheme!r} is unknown; allowed are {', '.join(SCHEMES)}"
            )
        self._replica = replica
        self.num_columns = num_columns
        self.shards = scheme == "sharded" and replica.num_replicas > 1
        num_shards = replica.num_replicas if self.shards else 1
        self.num_own = math.ceil(num_columns / num_shards)
        self._num_filled = self.num_own * num_shards

    def of_all_replicas(self, rows_BD: torch.Tensor) -> torch.Tensor:
        """``(W, B, num_own)``: own columns of the rows of every replica. Collective."""
        if self._replica.num_replicas == 1:
            return rows_BD.unsqueeze(0)
        if not self.shards:
            return self._replica.all_gather(rows_BD)
        parts = self._filled(rows_BD).unflatten(1, (-1, self.num_own))
        return self._replica.all_to_all(parts.transpose(0, 1).contiguous())

    def all_reduce_(self, partial: list[torch.Tensor]) -> None:
        """Adds partial inner products over the shards, in place. Collective."""
        if self.shards:
            self._replica.all_reduce_(partial)

    def own(self, vectors_VD: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """``(V, num_own)``: this replica's columns of whole vectors.

        Args:
            vectors_VD: ``(V, d)``.
            fill: In the columns behind the last.
        """
        if not self.shards:
            return vectors_VD
        first = self._replica.rank * self.num_own
        return self._filled(vectors_VD, fill)[:, first : first + self.num_own].clone()

    def whole(self, vectors_VD: torch.Tensor) -> torch.Tensor:
        """``(V, d)``: the vectors whose columns the replicas hold. Collective."""
        if len(vectors_VD) == 0:
            return vectors_VD.new_zeros(0, self.num_columns)
        if not self.shards:
            return vectors_VD
        parts = self._replica.all_gather(vectors_VD)
        return parts.transpose(0, 1).flatten(1)[:, : self.num_columns]

    def _filled(self, vectors_VD: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        missing = self._num_filled - self.num_columns
        return torch.nn.functional.pad(vectors_VD, (0, missing), value=fill)
