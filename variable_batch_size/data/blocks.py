"""`BlockDataset`: files that are read in blocks, and a shuffle that respects them.

A shard, a row group of a Parquet file, a chunk of a stream: what is cheap to read is a
block, and what a step needs are samples. So blocks are read whole and kept for a while,
and the order visits them in windows of a few, within which samples are shuffled. It is
an order as any other: which samples a step uses does not depend on the number of
replicas, and a run that resumes within an epoch reads the blocks of one window.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any
from unittest import mock

import numpy as np
from torch.utils.data import Dataset
from torch.utils.data._utils import worker

from variable_batch_size.data.lazy_orders import IndexShuffle, LazyOrder, bijection
from xla_replica.common.arguments import check_flag, check_function, check_integer

# Reads a block, by its number: samples that can be indexed, or a table of pyarrow.
ReadBlock = Callable[[int], Any]


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

    def __init__(
        self,
        block_sizes: Sequence[int] | np.ndarray,
        window: int = 8,
        seed: int = 42,
        *,
        in_order: bool = False,
    ) -> None:
        self.block_sizes = _checked_sizes(block_sizes)
        self.window = check_integer("window", window, least=1)
        self.seed = check_integer("seed", seed)
        self.in_order = check_flag("in_order", in_order)
        content = hashlib.sha256(self.block_sizes.astype("<i8").tobytes()).hexdigest()
        self._name = (
            f"BlockShuffle(window={window}, seed={seed}, in_order={in_order}) of "
            f"{len(self.block_sizes)} blocks, sha256 {content[:16]}"
        )
        self._starts = _starts_of(self.block_sizes)
        self.length = int(self._starts[-1])
        self._layout: tuple[int, list[np.ndarray]] = (-1, [])  # of the latest epoch

    @property
    def name(self) -> str:
        return self._name

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
        number = len(self.block_sizes)
        blocks = np.arange(number)
        if not self.in_order:
            blocks = bijection(blocks, number, f"{self.seed} {epoch} blocks")
        slots = _starts_of(self.block_sizes[blocks])
        windows = np.append(slots[:-1][:: self.window], slots[-1])
        return [blocks, slots, windows]


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

    def __init__(
        self,
        read_block: ReadBlock,
        block_sizes: Sequence[int] | np.ndarray,
        *,
        in_order: bool = False,
    ) -> None:
        self.block_sizes = _checked_sizes(block_sizes)
        self.in_order = check_flag("in_order", in_order)
        self.num_blocks_read = 0
        self._read_block = check_function("read_block", read_block)
        self._starts = _starts_of(self.block_sizes)
        self._num_kept = 1
        self._kept: OrderedDict[int, Any] = OrderedDict()  # the latest used is last
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
            columns: What is read; default: all columns.
        """
        if isinstance(paths, (str, PathLike)):
            paths = [paths]
        groups = _RowGroups([str(path) for path in paths], columns)
        return cls(groups, groups.sizes)

    @classmethod
    def from_stream(
        cls,
        open_at: Callable[[int], Iterable[Any]],
        num_samples: int,
        block_size: int = 1024,
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
        sizes = np.full(-(-num_samples // block_size), block_size)
        sizes[-1] -= sizes.sum() - num_samples
        return cls(_StreamBlocks(open_at, sizes), sizes, in_order=True)

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
        num_blocks = int(np.count_nonzero(self.block_sizes))
        if isinstance(order, BlockShuffle):
            if min(order.window, num_blocks) > self._num_kept:
                raise ValueError(
                    f"order= shuffles windows of {order.window} blocks, and the "
                    f"dataset keeps {self._num_kept}, so that it would read blocks "
                    "again for nearly every sample: pass order=dataset.shuffled("
                    f"window={order.window}, seed={order.seed}), called last"
                )
        elif (order is None or isinstance(order, IndexShuffle)) and (
            num_blocks > self._num_kept
        ):
            what = "the sampler's own shuffle" if order is None else order.name
            raise ValueError(
                f"the dataset reads samples in {num_blocks} blocks, and {what} would "
                "read one for nearly every sample: pass "
                "order=dataset.shuffled(window=8), which keeps 8 blocks in memory; "
                f"window={len(self.block_sizes)} shuffles all, and keeps all"
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
            self._kept.move_to_end(number)
            return self._kept[number]

    def _read(self, number: int) -> None:
        block, expected = self._read_block(number), self.block_sizes[number]
        if len(block) != expected:
            raise ValueError(
                f"block {number} has {len(block)} samples, and block_sizes says "
                f"{expected}: files and streams must not change while a run lasts, and "
                "a stream must have num_samples samples"
            )
        self.num_blocks_read += 1
        while len(self._kept) >= self._num_kept:
            self._kept.popitem(last=False)
        self._kept[number] = block

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": OrderedDict(), "_reading": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _reading=threading.Lock())


class _RowGroups:
    """Reads the row groups of Parquet files, numbered through all of them."""

    def __init__(self, paths: list[str], columns: Sequence[str] | None) -> None:
        self._paths = paths
        self._columns = None if columns is None else [*columns]
        self._footers: list[Any] = []  # of the files, which are parsed once
        self._places: list[tuple[int, int]] = []  # (file, row group)
        self.sizes: list[int] = []
        for file, path in enumerate(paths):
            with self._open(path) as opened:
                self._footers.append(opened.metadata)
                missing = {*(self._columns or ())} - {*opened.schema_arrow.names}
                if missing:
                    raise ValueError(
                        f"{path} has the columns {opened.schema_arrow.names}, and "
                        f"columns= asks for {sorted(missing)}"
                    )
                for group in range(opened.num_row_groups):
                    self._places.append((file, group))
                    self.sizes.append(opened.metadata.row_group(group).num_rows)

    @staticmethod
    def _open(path: str, footer: Any = None) -> Any:
        try:
            from pyarrow.parquet import ParquetFile
        except ImportError as error:
            raise ImportError(
                "BlockDataset.from_parquet needs pyarrow: pip install "
                "'elastic-xla[parquet]'"
            ) from error
        return ParquetFile(path, metadata=footer)

    def __call__(self, number: int) -> Any:
        file, group = self._places[number]
        with self._open(self._paths[file], self._footers[file]) as opened:
            return opened.read_row_group(group, columns=self._columns)


class _StreamBlocks:
    """Reads parts of a stream, which is opened anew to go back."""

    def __init__(
        self, open_at: Callable[[int], Iterable[Any]], sizes: np.ndarray
    ) -> None:
        self._open_at, self._sizes = open_at, sizes
        self._seeks = False  # whether open_at was seen to take a position
        self._next: int | None = None  # the block that the open stream is at
        self._stream: Iterator[Any] = iter(())

    def __call__(self, number: int) -> list[Any]:
        size = int(self._sizes[0])
        # Streams would split themselves if they saw that this is a worker.
        with mock.patch.object(worker, "_worker_info", None):
            if self._next is None or number < self._next:
                self._stream, self._next = iter(self._open(number * size)), number
            skipped = (number - self._next) * size
            self._next = number + 1
            end = skipped + int(self._sizes[number])
            return [*itertools.islice(self._stream, skipped, end)]

    def _open(self, position: int) -> Iterable[Any]:
        """Opens the stream; the first time, raises if it does not begin there."""
        if position and not self._seeks:
            parts = (itertools.islice(self._open_at(p), 16) for p in (0, position))
            if _are_equal(*map(list, parts)):
                raise ValueError(
                    f"open_at({position}) begins with the samples of open_at(0): "
                    "return dataset.skip(at), or use BlockDataset(..., in_order=True)"
                )
            self._seeks = True
        return self._open_at(position)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_next": None, "_stream": None}


def _are_equal(first: list[Any], second: list[Any]) -> bool:
    """Returns whether samples are known to be equal."""
    try:
        return pickle.dumps(first) == pickle.dumps(second)
    except (pickle.PicklingError, TypeError, AttributeError):
        return False


def _checked_sizes(block_sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the sizes as int64; raises TypeError or ValueError for bad ones."""
    sizes = np.asarray(block_sizes)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu":
        raise TypeError(
            "block_sizes must be a sequence of integers, got an array of shape "
            f"{sizes.shape} and dtype {sizes.dtype}"
        )
    if (sizes < 0).any() or not sizes.sum():
        raise ValueError(
            f"block_sizes must be >= 0 and not all 0, got {sizes.tolist()[:8]}"
        )
    return sizes.astype(np.int64)


def _starts_of(sizes: np.ndarray) -> np.ndarray:
    """Returns where each block begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes)])
