"""A pool as blocks: fixed batches, whatever the number that are loaded at a time.

A matrix product may round differently for another number of rows, or in another row.
So the pool is cut into blocks of consecutive indices once and for all: a sample is
always in the same row of the same block, collated with the same neighbours. What is
loaded and moved together is a number of whole blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from per_sample_grad.pool.feeding import Split, checked_split

Interval = tuple[int, int]
# Of a DataLoader: how samples are loaded, not which of them and in what order.
_KEPT = (
    "num_workers",
    "worker_init_fn",
    "pin_memory",
    "timeout",
    "prefetch_factor",
    "multiprocessing_context",
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A dataset and how to make blocks of it.

    Attributes:
        dataset: With a length.
        block_size: Samples in a block.
        batch_size: Samples that are loaded together, rounded up to whole blocks.
        collate: From a list of ``block_size`` samples to a batch.
        split: From a batch to inputs and targets.
        options: For a DataLoader.
    """

    dataset: Any
    block_size: int
    batch_size: int
    collate: Callable[[list[Any]], Any]
    split: Split
    options: dict[str, Any]

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, intervals: Sequence[Interval]) -> Iterator[list[Any]]:
        """Lists of blocks ``(inputs, targets)`` over intervals, each from its start.

        The last block of an interval repeats the last sample. One DataLoader for all,
        so that its workers start once.
        """
        whole = -(-self.batch_size // self.block_size) * self.block_size
        loader = DataLoader(
            self.dataset,
            batch_sampler=_Indices(intervals, whole),
            collate_fn=_Blocks(self.collate, self.block_size),
            **self.options,
        )
        for batch in loader:
            yield [checked_split(self.split, block) for block in batch]


@dataclasses.dataclass(frozen=True)
class _Indices:
    """The indices of intervals, so many at a time."""

    intervals: Sequence[Interval]
    size: int

    def __iter__(self) -> Iterator[list[int]]:
        for start, stop in self.intervals:
            for first in range(start, stop, self.size):
                yield list(range(first, min(first + self.size, stop)))


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Collates samples in blocks, the last one full of its last sample."""

    collate: Callable[[list[Any]], Any]
    size: int

    def __call__(self, samples: list[Any]) -> list[Any]:
        full = samples + [samples[-1]] * (-len(samples) % self.size)
        return [
            self.collate(full[first : first + self.size])
            for first in range(0, len(full), self.size)
        ]


def source_of(
    loader: DataLoader[Any] | Dataset[Any],
    batch_size: int | None,
    block_size: int,
    split: Split,
) -> Source:
    """The blocks of a dataset, or of a DataLoader's.

    Raises:
        TypeError: It has no length.
        ValueError: A size is not positive, or a DataLoader does not collate.
    """
    options: dict[str, Any] = {}
    dataset: Any = loader
    collate: Any = default_collate
    if isinstance(loader, DataLoader):
        dataset, collate = loader.dataset, loader.collate_fn
        options = {name: getattr(loader, name) for name in _KEPT}
        batch_size = loader.batch_size if batch_size is None else batch_size
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"score_pool: a {type(dataset).__name__} has no length and no indices to "
            "report scores by; give a dataset with __len__ and __getitem__"
        )
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:
        raise ValueError(
            "score_pool: a DataLoader with batch_size=None does not collate; give the "
            "dataset itself, or a DataLoader with a batch size"
        )
    for name, size in (("batch_size", batch_size), ("block_size", block_size)):
        if size is not None and size < 1:
            raise ValueError(f"score_pool: {name}={size}; give a positive number")
    return Source(
        dataset, block_size, batch_size or block_size, collate, split, options
    )
