"""`SeededDataset`: augmentation that depends on the sample and the epoch alone."""

from __future__ import annotations

import contextlib
import hashlib
import operator
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

import xla_replica


class SeededDataset(Dataset):
    """A dataset whose random numbers are seeded from (seed, epoch, sample).

    What ``dataset[i]`` draws from torch's CPU generator, Python's ``random`` and
    NumPy's global generator is then the same in whichever replica and loader worker it
    runs; the generators are put back afterwards. Generators of the dataset's own are
    not seeded. Emulated replicas that load in their own threads take turns.

    Attributes:
        dataset: The inner one; its attributes are reached through it.
        seed: As given.

    Args:
        dataset: A map-style dataset: ``len(dataset)`` and ``dataset[i]``.
        seed: Any integer, equal on every replica.

    Raises:
        TypeError: ``dataset`` is iterable-style or has no length, or ``seed`` is no
            integer.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if isinstance(dataset, IterableDataset) or not is_map:
            raise TypeError(
                f"SeededDataset: {type(dataset).__name__} has no numbered samples to "
                "seed by; pass a map-style dataset, with __getitem__ and __len__"
            )
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise TypeError(f"seed must be an integer, got {seed!r}")
        self.dataset = dataset
        self.seed = int(seed)
        # Shared memory: persistent workers hold another copy of this object.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch that samples are drawn for now."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch, in all workers; call it before iterating, as a sampler's.

        Raises:
            TypeError, ValueError: ``epoch`` is no integer of at least 0.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, (int, np.integer)):
            raise TypeError(f"epoch must be an integer, got {epoch!r}")
        if epoch < 0:
            raise ValueError(f"epoch={epoch}; it must be at least 0")
        self._epoch.fill_(int(epoch))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = operator.index(index)
        if sample < 0:  # the same sample under its other name
            sample += len(self)
        with _drawn_from(self.seed, self.epoch, sample):
            return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Sample by sample: a batch has no seed."""
        return [self[index] for index in indices]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._epoch.is_shared():  # not by way of torch.multiprocessing
            self._epoch.share_memory_()


@contextlib.contextmanager
def _drawn_from(seed: int, epoch: int, sample: int) -> Iterator[None]:
    """Seeds the three global generators for one sample, then puts them back."""
    # A hash, not a sum: seed + 1 must not be the next sample or epoch.
    name = f"{seed} {epoch} {sample}".encode()
    digest = hashlib.blake2b(name, digest_size=40).digest()
    with xla_replica.seeded(int.from_bytes(digest[:8], "little")):  # also a lock
        python_state, numpy_state = random.getstate(), np.random.get_state()
        try:
            random.seed(digest[8:24])
            np.random.seed(np.frombuffer(digest[24:], dtype="<u4").astype(np.uint32))
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
