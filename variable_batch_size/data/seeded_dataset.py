"""`SeededDataset`: augmentation that depends on the sample and the epoch only."""

from __future__ import annotations

import hashlib
import operator
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import xla_replica
from xla_replica.common.arguments import check_integer


class SeededDataset(Dataset[Any]):
    """A dataset whose random numbers are seeded from (seed, epoch, sample).

    What ``dataset[i]`` draws from torch's CPU generator, Python's ``random`` and
    NumPy's global generator is then the same in every replica and loader worker. Their
    states are restored afterwards. Generators that the dataset owns are not seeded.
    Emulated replicas that load in their own threads take turns.

    Args:
        dataset: A map-style dataset with a length; ``.dataset`` has its attributes.
        seed: Any integer, equal on every replica.

    Raises:
        TypeError: ``seed`` is not an integer.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = check_integer("seed", seed)
        # Shared memory: persistent workers hold another copy of this object.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch for which samples are drawn now."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch in all workers; call it before iterating."""
        self._epoch.fill_(check_integer("epoch", epoch, least=0))

    def check_order(self, order: Any) -> None:
        """Raises ValueError if the dataset refuses an order; see `BlockDataset`."""
        if hasattr(self.dataset, "check_order"):
            self.dataset.check_order(order)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = range(len(self))[operator.index(index)]  # -1 is the last one, too
        # A hash, not a sum: seed + 1 must not be the next sample or epoch.
        name = f"{self.seed} {self.epoch} {sample}".encode()
        digest = hashlib.blake2b(name, digest_size=40).digest()
        with xla_replica.seeded(int.from_bytes(digest[:8], "little")):  # also a lock
            python_state, numpy_state = random.getstate(), np.random.get_state()
            try:
                random.seed(digest[8:24])
                np.random.seed(np.frombuffer(digest[24:], "<u4").astype(np.uint32))
                return self.dataset[index]
            finally:
                random.setstate(python_state)
                np.random.set_state(numpy_state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._epoch.is_shared():  # it was not sent by torch.multiprocessing
            self._epoch.share_memory_()
