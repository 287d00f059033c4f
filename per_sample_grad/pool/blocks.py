"""A pool of samples as blocks: fixed batches, however many are loaded at a time.

A matrix product may round differently for another number of rows, or in another row.
So the pool is cut into blocks of consecutive indices once and for all: a sample is
always in the same row of the same block, collated with the same neighbours. What is
loaded and moved together is a number of whole blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from per_sample_grad.pool.fingerprint import digest, fingerprint
from xla_replica.common.arguments import check_integer

Interval = tuple[int, int]
Split = Callable[[Any], tuple[Any, Any]]

# Keys of targets in a dict, as Hugging Face's collators and datasets name them.
TARGETS = ("labels", "label")
_UNDERSTOOD = (
    "understood are a tensor (inputs alone), a pair (inputs, targets), and a dict with "
    f"the targets under one of the keys {', '.join(TARGETS)}; for anything else pass "
    "split=, a function from a batch to (inputs, targets or None)"
)
# Attributes of a DataLoader that say how samples are loaded, not which, nor in what
# order.
_LOADER_OPTIONS = (
    "num_workers", "worker_init_fn", "pin_memory", "timeout", "prefetch_factor",
    "multiprocessing_context",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Given:
    """A block's targets and place in the pool; it stays on the host.

    Attributes:
        first: The index of the block's first sample.
        last: That of its last one, without copies.
        targets: The targets of its samples, or None.
    """

    first: int
    last: int
    targets: Any

    def __str__(self) -> str:
        return f"samples {self.first} to {self.last}"


@contextlib.contextmanager
def noted(what: str) -> Iterator[None]:
    """Adds a note to an exception that leaves the block, from Python 3.11 on."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(what)
        raise


class BlockSource:
    """The blocks of a dataset, or of a DataLoader's with its collation and workers."""

    def __init__(
        self,
        loader: DataLoader[Any] | Dataset[Any],
        batch_size: int | None,
        block_size: int,
        split: Split,
    ) -> None:
        """Checks the arguments, which are those of `score_pool`."""
        self.block_size = check_integer("block_size", block_size, least=1)
        if not isinstance(loader, DataLoader):
            loader = DataLoader(loader, block_size)
        if loader.batch_sampler is None:
            raise ValueError(
                "the pool: a DataLoader with batch_size=None does not collate; give "
                "the dataset itself, or a DataLoader with a batch size"
            )
        self.dataset: Any = loader.dataset
        self.collate: Callable[[list[Any]], Any] = loader.collate_fn
        self._options = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
        self.split = split
        len(self.dataset)  # what has none is a TypeError
        size = (loader.batch_size or block_size) if batch_size is None else batch_size
        self._batch_size = self.rounded_up(check_integer("batch_size", size, least=1))

    def rounded_up(self, samples: int) -> int:
        """Returns this number of samples, rounded up to whole blocks."""
        return -(-samples // self.block_size) * self.block_size

    def intervals(self, size: int) -> list[Interval]:
        """Returns intervals of so many samples that make up the pool."""
        count = len(self.dataset)
        return [(start, min(start + size, count)) for start in range(0, count, size)]

    def batches(self, intervals: Sequence[Interval]) -> Iterator[list[Any]]:
        """Yields lists of blocks ``(inputs, targets, Given)`` over intervals.

        Each interval begins with a new block, and its last block repeats the last
        sample. One DataLoader serves all, so that its workers start once.
        """
        asked = [
            range(first, min(first + self._batch_size, stop))
            for start, stop in intervals
            for first in range(start, stop, self._batch_size)
        ]
        collate = functools.partial(_collate_blocks, self.collate, self.block_size)
        how = self._options | {"batch_sampler": map(list, asked), "collate_fn": collate}
        batches = iter(DataLoader(self.dataset, **how))
        for indices in asked:
            where = f"samples {indices[0]} to {indices[-1]}"
            with noted(f"while {where} of the pool were loaded"):
                blocks = []
                for first, block in zip(indices[:: self.block_size], next(batches)):
                    inputs, targets = self.split(block)
                    last = min(first + self.block_size - 1, indices[-1])
                    blocks.append((inputs, targets, Given(first, last, targets)))
            yield blocks


def _collate_blocks(
    collate: Callable[[list[Any]], Any], size: int, samples: list[Any]
) -> list[Any]:
    """Collates samples in blocks; copies of the last sample fill the last block."""
    full = samples + [samples[-1]] * (-len(samples) % size)
    return [collate(full[first : first + size]) for first in range(0, len(full), size)]


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Returns inputs, and targets or None; the default ``split`` of `score_pool`.

    Args:
        batch: A tensor (inputs alone); ``(inputs,)`` or ``(inputs, targets)``, a tuple
            or a list; a dict, whose ``"labels"`` or ``"label"`` are the targets and
            whose other entries are the inputs.

    Raises:
        ValueError: A tuple has another length, or a dict has both keys or no inputs.
        TypeError: The batch is anything else.

    >>> split_batch({"input_ids": 1, "attention_mask": 2, "labels": 3})
    ({'input_ids': 1, 'attention_mask': 2}, 3)
    """
    if isinstance(batch, torch.Tensor):
        return batch, None
    if isinstance(batch, Mapping):
        found = [key for key in TARGETS if key in batch]
        inputs = {key: value for key, value in batch.items() if key not in found}
        if len(found) > 1 or not inputs:
            raise ValueError(
                f"a batch of the pool is a dict of {', '.join(map(repr, batch))}, and "
                "it is not clear which are inputs and which targets; " + _UNDERSTOOD
            )
        return inputs, batch[found[0]] if found else None
    if isinstance(batch, tuple | list):
        if len(batch) not in (1, 2):
            raise ValueError(
                f"a batch of the pool has {len(batch)} items; {_UNDERSTOOD}"
            )
        return batch[0], batch[1] if len(batch) == 2 else None
    raise TypeError(f"a batch of the pool is a {type(batch).__name__}; {_UNDERSTOOD}")


def compared_items(count: int) -> list[int]:
    """Returns the positions of the items that are compared, of a pool of so many.

    >>> compared_items(3), len(compared_items(10_000))
    ([0, 1, 2], 100)
    """
    number = min(count, max(3, math.isqrt(count)))
    return np.linspace(0, count - 1, number).round().astype(int).tolist()


def pool_digest(dataset: Any, tag: str | None) -> str:
    """Returns a hash of what a dataset shows of itself, and of some of its items.

    Raises TypeError if its items are others every time, unless ``tag`` stands for them.
    """
    indices = compared_items(len(dataset))
    with torch.random.fork_rng(devices=[]):  # so that scoring draws the same numbers
        first, second = (
            # What cannot be described in an item is not compared.
            fingerprint({"item": [dataset[index] for index in indices]}, tag="")
            for _ in range(2)
        )
    if first != second and tag is None:
        raise TypeError(
            "the items of the pool are others every time that they are read, so nobody "
            "can tell whether another run has the same: leave random augmentation out, "
            "seed it by the sample, or pass tag=, a text of your own that stands for "
            "them: change the text whenever they change"
        )
    items = first if first == second else None
    return digest(repr((fingerprint({"pool": dataset}, tag), items)))
