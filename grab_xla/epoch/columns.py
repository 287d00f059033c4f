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

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import xla_replica
from grab_xla.gradients.row_copies import interleaved
from xla_replica import LocalReplica, Replica
from xla_replica.common.arguments import check_choice, check_flag

SCHEMES = ("sharded", "gather")
# A large share has whole lanes of a TPU, for which its compiler writes less code.
_LARGE, _LANES = 1024, 128


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns that this replica holds of every vector, and how.

    ``num_columns`` is d; ``exact`` is as for `GraBSampler`.
    """

    replica: Replica
    num_columns: int
    scheme: str
    device: torch.device
    dtype: torch.dtype
    exact: bool = False

    def __post_init__(self) -> None:
        check_choice("scheme", self.scheme, SCHEMES)
        if check_flag("exact", self.exact) and self.scheme != "gather":
            raise ValueError(f"exact=True needs scheme='gather', got {self.scheme!r}")
        if self.replica.is_live and not self.exact:
            raise ValueError(
                "a live run needs GraBSampler(..., exact=True, scheme='gather')"
            )

    @functools.cached_property
    def joins_updates(self) -> bool:
        """Whether replicas exchange steps, and rows may have to wait for an update."""
        return self.exact or self.replica.num_replicas > 1

    @functools.cached_property
    def shards(self) -> bool:
        """Whether replicas share the columns."""
        return self.scheme == "sharded" and self.replica.num_replicas > 1

    @functools.cached_property
    def num_own(self) -> int:
        """How many columns each replica holds, because the last share is filled up."""
        if not self.shards:
            return self.num_columns
        num_own = math.ceil(self.num_columns / self.replica.num_replicas)
        return math.ceil(num_own / _LANES) * _LANES if num_own > _LARGE else num_own

    def in_sequence(self, rows_BD: Tensor) -> Tensor:
        """Returns its columns of all replicas' rows, in the order's order. Collective.

        Row b of replica r is the (b W + r)-th.
        """
        return interleaved(self._of_all_replicas(rows_BD))

    def of_minibatches(
        self, own: Sequence[Tensor], num_minibatches: int, minibatch_size: int
    ) -> Iterator[Tensor]:
        """Yields its columns of an update's minibatches, in the order's order.

        Collective. Minibatch k of a step was run by replica k mod W. In every round
        each replica exchanges one minibatch, zeros if it has none left. The same
        programs serve every batch size: one exchanges, one balances a minibatch.
        """
        rounds, num_replicas = list(own), self.replica.num_replicas
        if len(rounds) * num_replicas < num_minibatches:
            zeros = torch.zeros(minibatch_size, self.num_columns, dtype=self.dtype)
            rounds.append(zeros.to(self.replica.device))
        # Now what is sent is data, so that every replica runs the same program.
        self.replica.sync()
        for first, sent in zip(range(0, num_minibatches, num_replicas), rounds):
            received = self._of_all_replicas(sent)
            minibatches = [rows.clone() for rows in received.unbind(0)]
            self.replica.sync()
            yield from minibatches[: num_minibatches - first]

    def _of_all_replicas(self, rows_BD: Tensor) -> Tensor:
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

    def own(self, vectors_VD: Tensor) -> Tensor:
        """Returns this replica's columns of ``(V, d)``; zeros are after the last."""
        if not self.shards:
            return vectors_VD
        first = self.replica.rank * self.num_own
        return self._filled(vectors_VD)[:, first : first + self.num_own].clone()

    def whole(self, vectors_VD: Tensor) -> Tensor:
        """Returns whole vectors, ``(V, d)``, from all replicas' columns. Collective."""
        if len(vectors_VD) == 0:
            return vectors_VD.new_zeros(0, self.num_columns)
        if not self.shards:
            return vectors_VD
        parts = self.replica.all_gather(vectors_VD)
        return parts.transpose(0, 1).flatten(1)[:, : self.num_columns]

    def _filled(self, vectors_VD: Tensor) -> Tensor:
        missing = self.num_own * self.replica.num_replicas - self.num_columns
        return torch.nn.functional.pad(vectors_VD, (0, missing))


def replica_for(replica: Replica | None, device: torch.device | str | None) -> Replica:
    """Returns the replica that balances: the caller's, unless it is told otherwise.

    Raises:
        ValueError: Replicas that balance together cannot do so on another device.
    """
    found = replica or xla_replica.current()
    if device is None or torch.device(device).type == found.device.type:
        return found
    if found.num_replicas > 1:
        raise ValueError(
            f"device={device}, but the caller is {found}: leave it out, or pass "
            "replica=xla_replica.LocalReplica(device) for a sampler of its own"
        )
    return LocalReplica(device, "another device was asked for")
