"""`LazyOrder`, `IndexShuffle`: orders of any length, evaluated where they are needed.

A permutation in memory takes eight bytes per sample, in every process, before an
epoch's first minibatch. Here the sample at a position is computed from seed, epoch and
position instead, by a keyed bijection of ``range(size)``: a Feistel network over two
digits in mixed radix, and cycle walking for the few results that are out of range
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4
and 5). This module does not use torch.
"""

from __future__ import annotations

import abc
import hashlib
import math

import numpy as np

from xla_replica.common.arguments import check_integer

# Sets up to this size are sorted by random keys: a Feistel network over few elements
# needs many rounds until all permutations are equally likely.
SORTED = 1024
Array = np.ndarray


def bijection(positions: np.ndarray, size: int, name: str) -> np.ndarray:
    """Returns where a permutation of ``range(size)`` takes some positions.

    Args:
        positions: ``(k,)`` integers in ``range(size)``.
        size: Any number from 1 to 2^62. Neither time nor memory grow with it.
        name: Decides the permutation: other names give independent ones.

    Returns:
        ``(k,)`` int64, on every machine the same.

    >>> bijection(np.arange(6), 6, "seed 1").tolist()
    [0, 1, 2, 5, 3, 4]
    """
    digest = hashlib.blake2b(name.encode(), digest_size=64).digest()
    keys = np.frombuffer(digest, "<u8").astype(np.uint64)  # of eight rounds
    if size <= SORTED:
        ranks = np.argsort(_mixed(np.arange(size, dtype=np.uint64) ^ keys[0]))
        return np.take(ranks, positions)
    high = math.isqrt(size - 1) + 1
    low = -(-size // high)  # size <= high * low < size + high
    radices = np.uint64(high), np.uint64(low)
    values = np.asarray(positions).astype(np.uint64)
    pending = np.arange(len(values))
    while len(pending):
        digits = [*np.divmod(values[pending], radices[1])]
        for number, key in enumerate(keys):
            moved, kept = number % 2, (number + 1) % 2
            digits[moved] += _mixed(digits[kept] ^ key) % radices[moved]
            digits[moved] %= radices[moved]
        values[pending] = walked = digits[0] * radices[1] + digits[1]
        pending = pending[walked >= size]
    return values.astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Returns 64 bits that look random for every input: SplitMix64's last lines.

    Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014,
    with the constants of Stafford's variant 13. Different inputs differ.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


class LazyOrder(abc.ABC):
    """An order whose samples are computed for some positions at a time.

    For ``CustomSampler(..., order=)``, which asks for one minibatch after the other.
    An order of your own has the two abstract members. Nobody checks that it is a
    permutation, since looking at all samples is what it avoids.

    Attributes:
        length: How many samples it is made for; None, the default: any number.
    """

    length: int | None = None

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What decides the order beside epoch and length; resuming compares it."""

    def checked_samples(self, epoch: int, num_samples: int, positions: Array) -> Array:
        """Returns `samples`; raises ValueError unless each is one in the range."""
        found = np.asarray(self.samples(epoch, num_samples, positions))
        fits = found.shape == positions.shape and found.dtype.kind in "iu"
        if not fits or ((found < 0) | (found >= num_samples)).any():
            raise ValueError(
                f"{type(self).__name__}.samples() must return {positions.shape} of "
                f"range({num_samples}), got {found.dtype} {found.shape}: {found!r:.60}"
            )
        return found

    @abc.abstractmethod
    def samples(self, epoch: int, num_samples: int, positions: Array) -> Array:
        """Returns the samples at ``positions``, ``(k,)`` integers, of an epoch's order.

        It must be a function of the arguments, the same on every replica.
        """

    def digest(self, epoch: int, num_samples: int) -> str:
        """Returns a hash of the name, and of the epoch's first samples."""
        positions = np.arange(min(num_samples, 64))
        first = self.checked_samples(epoch, num_samples, positions)
        told = f"{self.name} {epoch} {num_samples} {first.tolist()}"
        return hashlib.sha256(told.encode()).hexdigest()[:16]


class IndexShuffle(LazyOrder):
    """A shuffle of any number of samples in constant time and memory.

    ``CustomSampler(..., order=IndexShuffle(seed=42))`` is the choice for large sets.
    Every epoch has another permutation, which looks random and is the same on all
    machines and any number of replicas. It jumps all over the data: for files that are
    read in blocks, see `BlockDataset.shuffled`.

    Args:
        seed: Any integer.
    """

    def __init__(self, seed: int = 42) -> None:
        self.seed = check_integer("seed", seed)

    @property
    def name(self) -> str:
        return f"IndexShuffle(seed={self.seed})"

    def samples(self, epoch: int, num_samples: int, positions: Array) -> Array:
        return bijection(positions, num_samples, f"{self.name} {epoch}")
