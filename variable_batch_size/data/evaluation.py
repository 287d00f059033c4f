"""`EvaluationSampler`: every sample once, over all replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from xla_replica import Replica
from xla_replica.backends.registry import given_or_current
from xla_replica.common.arguments import check_integer


class EvaluationSampler(Sampler[list[int]]):
    """Deals batches to the replicas in turn: every sample once, and none twice.

    ::

        loader = DataLoader(dataset, batch_sampler=vbs.EvaluationSampler(dataset, 256))
        correct = torch.zeros(1, device=replica.device)
        for x, y in replica.loader(loader):
            correct += (model(x).argmax(1) == y).sum()
        replica.all_reduce_([correct])  # all replicas', once, after the loop
        accuracy = replica.fetch([correct])[0].item() / len(dataset)

    Replicas may have different numbers of batches, so that the loop has no collective.
    The last batch of all may be smaller, which is one more program on XLA, where
    `Replica.loader` ends a program with each batch, so that the sum is the same on all.

    Args:
        dataset: Anything with a length, in samples.
        batch_size: Samples of a batch on one replica.
        replica: Default: the one the caller runs in.
    """

    ends_graphs = True

    def __init__(
        self, dataset: Sized, batch_size: int, *, replica: Replica | None = None
    ) -> None:
        self.batch_size = check_integer("batch_size", batch_size, least=1)
        samples, replica = range(len(dataset)), given_or_current(replica)
        starts = samples[replica.rank * batch_size :: replica.num_replicas * batch_size]
        self._batches = [samples[start : start + batch_size] for start in starts]

    def __len__(self) -> int:
        """Returns how many batches this replica has."""
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return map(list, self._batches)
