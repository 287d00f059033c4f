"""`BlockDataset`: files that are read in blocks, and a shuffle that respects them.

A shard, a row group of a Parquet file, a chunk of a stream: what is cheap to read is a
block, and what a step needs are samples. So blocks are read whole and kept for a while,
and the order visits them in windows of a few, within which samples are shuffled. It is
an order as any other: which samples a step uses does not depend on the number of
replicas, and a run that resumes within an epoch reads the blocks of one window.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any
from unittest import mock

import numpy as np
from torch.utils.data import Dataset
from torch.utils.data._utils import worker

from variable_batch_size.data.lazy_orders import IndexShuffle, LazyOrder, bijection
from xla_replica.common.arguments import check_fields, check_integer, checked

# From a position to the samples of a stream from there on.
OpenAt = Callable[[int], Iterable[Any]]


@dataclasses.dataclass(eq=False, repr=False)
class BlockShuffle(LazyOrder):
    """Visits blocks in windows of a few, and shuffles the samples of each window.

    `BlockDataset.shuffled` makes it. Sample s of the order is one of the blocks in its
    window, every one equally likely. Memory is a few numbers per block.

    Args:
        block_sizes: Samples of every block.
        window: How many blocks are shuffled together; one mixes no blocks.
        seed: Any integer. Blocks are in another order in every epoch, and samples, too.
        in_order: Whether windows are of successive blocks, in every epoch the same.

    Raises:
        ValueError, TypeError: An argument is out of range, or of the wrong type.
    """

    block_sizes: Any  # a sequence of integers
    window: int = checked(8, least=1)
    seed: int = 42
    in_order: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        self._starts = _starts_of(self.block_sizes)
        self.block_sizes, self.length = np.diff(self._starts), int(self._starts[-1])
        self._layout: tuple[int, list[np.ndarray]] = (-1, [])  # of the latest epoch

    @property
    def name(self) -> str:
        content = hashlib.sha256(self.block_sizes.astype("<i8").tobytes()).hexdigest()
        return (
            f"BlockShuffle(window={self.window}, seed={self.seed}, "
            f"in_order={self.in_order}) of {len(self.block_sizes)} blocks, sha256 "
            f"{content[:16]}"
        )

    def samples(
        self, epoch: int, num_samples: int, positions: np.ndarray
    ) -> np.ndarray:
        layout = self._layout  # replicas in threads may share the order
        if layout[0] != epoch:
            layout = self._layout = epoch, self._layout_of(epoch)
        blocks, slots, windows = layout[1]
        found = np.empty(len(positions), np.int64)
        window_of = np.searchsorted(windows, positions, side="right") - 1
        for window in np.unique(window_of):
            first, end = windows[window : window + 2].tolist()
            mine = window_of == window
            name = f"{self.seed} {epoch} window {window}"
            places = first + bijection(positions[mine] - first, end - first, name)
            slot = np.searchsorted(slots, places, side="right") - 1
            found[mine] = self._starts[blocks[slot]] + places - slots[slot]
        return found

    def _layout_of(self, epoch: int) -> list[np.ndarray]:
        """Returns blocks in their order, and where each and each window begins."""
        blocks = np.arange(len(self.block_sizes))
        if not self.in_order:
            blocks = bijection(blocks, len(blocks), f"{self.seed} {epoch} blocks")
        slots = _starts_of(self.block_sizes[blocks])
        return [blocks, slots, np.append(slots[:-1][:: self.window], slots[-1])]


@dataclasses.dataclass(eq=False, repr=False)
class BlockDataset(Dataset[Any]):
    """A map-style dataset over blocks of samples, which are read whole and kept.

    ::

        dataset = BlockDataset.from_parquet(paths, columns=["text"])
        order = dataset.shuffled(window=8, seed=42)
        sampler = CustomSampler(dataset, trace, order=order)
        loader = DataLoader(dataset, batch_sampler=sampler)

    Args:
        read_block: A function from the number of a block to its samples, which can be
            indexed: a list, an array, a table of pyarrow (whose samples are dicts). To
            be sent to workers that are spawned it must be picklable.
        block_sizes: Samples of every block.
        in_order: Whether blocks had better be read one after the other, as those of a
            stream: `shuffled` then keeps their order.

    Attributes:
        block_sizes: ``(num_blocks,)`` int64.
        num_blocks_read: How many blocks this object has read; a loader's workers have
            objects of their own.

    Raises:
        ValueError, TypeError: An argument is out of range, or of the wrong type. On
            reading: a block has another number of samples than ``block_sizes`` says.
    """

    read_block: Callable[[int], Any]
    block_sizes: Any  # a sequence of integers
    in_order: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        self._starts = _starts_of(self.block_sizes)
        self.block_sizes = np.diff(self._starts)
        self.num_blocks_read, self._num_kept = 0, 1
        self._kept: dict[int, Any] = {}  # the latest read is last
        self._reading = threading.Lock()  # emulated replicas may share the object

    @classmethod
    def from_parquet(
        cls,
        paths: str | PathLike[str] | Iterable[str | PathLike[str]],
        columns: Sequence[str] | None = None,
    ) -> BlockDataset:
        """Returns a dataset whose blocks are the row groups of Parquet files.

        Samples are dicts of Python values, one key per column. Only the footers are
        read now, and then row groups from which samples are asked for. Needs pyarrow
        (the extra ``parquet``).

        Args:
            paths: The files, in an order that must not change; or one file.
            columns: What is read; default: all columns. Reading raises pyarrow's
                ArrowInvalid, a ValueError, where a file has no such column.
        """
        from pyarrow.dataset import dataset  # of the extra

        paths = [paths] if isinstance(paths, (str, PathLike)) else paths
        found = (dataset(str(path), format="parquet") for path in paths)
        files = [file for each in found for file in each.get_fragments()]
        groups = [(file, group) for file in files for group in file.row_groups]
        places = [(file, group.id) for file, group in groups]
        sizes = [group.num_rows for _, group in groups]
        columns = None if columns is None else [*columns]
        return cls(functools.partial(_read_row_group, places, columns), sizes)

    @classmethod
    def from_stream(
        cls, open_at: OpenAt, num_samples: int, block_size: int = 1024
    ) -> BlockDataset:
        """Returns a dataset whose blocks are successive parts of a stream.

        Every replica (and every worker of its loader) reads the stream once, in order.

        Args:
            open_at: A function from a position to the stream's samples from there on.
                Where the stream cannot seek, ``lambda at: itertools.islice(stream(),
                at, None)`` reads what is before it.
            num_samples: How many samples an epoch has, from the stream's beginning.
            block_size: Samples in a block; the last one may have fewer.
        """
        check_integer("num_samples", num_samples, least=1)
        check_integer("block_size", block_size, least=1)
        starts = [*range(0, num_samples, block_size), num_samples]
        return cls(_StreamBlocks(open_at, starts), np.diff(starts), in_order=True)

    def shuffled(self, window: int = 8, seed: int = 42) -> BlockShuffle:
        """Returns an order for `CustomSampler`, and keeps as many blocks as it needs.

        Call it before the loader starts workers.

        Args:
            window: How many blocks are shuffled together, and held in memory.
            seed: Any integer.
        """
        order = BlockShuffle(self.block_sizes, window, seed, in_order=self.in_order)
        self._num_kept = window
        return order

    def check_order(self, order: Any) -> None:
        """Raises ValueError if an order would read blocks over and over.

        `CustomSampler` asks. Shuffles of all samples do, and windows of more blocks
        than are kept. An order of your own is not looked at.

        Args:
            order: As `CustomSampler` takes it; None for its own shuffle.
        """
        if not (order is None or isinstance(order, (IndexShuffle, BlockShuffle))):
            return
        num_blocks = int(np.count_nonzero(self.block_sizes))
        num_needed = min(getattr(order, "window", num_blocks), num_blocks)
        if num_needed > self._num_kept:
            name = getattr(order, "name", "the sampler's own shuffle")
            raise ValueError(
                f"{name} mixes {num_needed} blocks, and the dataset keeps "
                f"{self._num_kept}: pass order=dataset.shuffled(window, seed), called "
                f"last; window={len(self.block_sizes)} shuffles all"
            )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        index = range(len(self))[index]  # or an IndexError, which ends an iteration
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        block, row = self._block(number), index - int(self._starts[number])
        if hasattr(block, "to_pylist"):  # a table of pyarrow
            return block.slice(row, 1).to_pylist()[0]
        return block[row]

    def _block(self, number: int) -> Any:
        """Returns a block, which is read unless it is kept."""
        # A stream is read from where the window begins.
        first = number // self._num_kept * self._num_kept if self.in_order else number
        with self._reading:
            for each in range(first, number + 1):
                if each not in self._kept:
                    self._read(each)
            return self._kept[number]

    def _read(self, number: int) -> None:
        block, expected = self.read_block(number), self.block_sizes[number]
        if len(block) != expected:
            raise ValueError(
                f"block {number} has {len(block)} samples, and must have {expected}: "
                "files and streams must not change while a run lasts"
            )
        self.num_blocks_read += 1
        while len(self._kept) >= self._num_kept:
            del self._kept[next(iter(self._kept))]
        self._kept[number] = block

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": {}, "_reading": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _reading=threading.Lock())


def _read_row_group(groups: Sequence[Any], columns: Any, number: int) -> Any:
    """Returns a table of pyarrow: a row group, of files and the groups' numbers."""
    file, group = groups[number]
    return file.subset(row_group_ids=[group]).to_table(columns=columns)


class _StreamBlocks:
    """Reads parts of a stream, which is opened anew to go back."""

    def __init__(self, open_at: OpenAt, starts: Sequence[int]) -> None:
        self._open_at, self._starts = open_at, starts
        self._seeks = False  # whether open_at was seen to take a position
        self._place: int | None = None  # where the open stream is
        self._stream: Iterator[Any] = iter(())

    def __call__(self, number: int) -> list[Any]:
        first, end = self._starts[number : number + 2]
        # Streams would split themselves if they saw that this is a worker.
        with mock.patch.object(worker, "_worker_info", None):
            if self._place is None or first < self._place:
                self._stream, self._place = iter(self._open(first)), first
            before, self._place = self._place, end
            return [*itertools.islice(self._stream, first - before, end - before)]

    def _open(self, position: int) -> Iterable[Any]:
        """Opens the stream; the first time, raises if it does not begin there."""
        if position and not self._seeks:
            if _digest(self._open_at(0)) == _digest(self._open_at(position)):
                raise ValueError(
                    f"open_at({position}) begins with the samples of open_at(0): "
                    "return dataset.skip(at), or use BlockDataset(..., in_order=True)"
                )
            self._seeks = True
        return self._open_at(position)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_place": None, "_stream": None}


def _digest(stream: Iterable[Any]) -> object:
    """Returns what is equal for streams whose first samples are known to be equal."""
    try:
        return pickle.dumps([*itertools.islice(stream, 16)])
    except (pickle.PicklingError, TypeError, AttributeError):
        return object()


def _starts_of(block_sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns where each block begins, and where the last one ends: int64."""
    sizes = np.asarray(block_sizes)
    are_integers = sizes.ndim == 1 and sizes.dtype.kind in "iu"
    if not are_integers or (sizes < 0).any() or not sizes.any():
        raise ValueError(
            "block_sizes must be a sequence of integers that must be >= 0 and not all "
            f"0, got {sizes.dtype} of shape {sizes.shape}: {sizes.tolist()!r:.60}"
        )
    return np.append(0, np.cumsum(sizes.astype(np.int64)))
