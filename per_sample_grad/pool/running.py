"""One pass over a pool: rows of numbers for all samples, computed and kept in parts.

`score_pool` and `index_pool` are two uses of it: a row is a number or a projection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import inspect
import itertools
import math
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import xla_replica
from per_sample_grad.engine.capturing import capture
from per_sample_grad.engine.settings import selected
from per_sample_grad.pool import scores as kinds
from per_sample_grad.pool.blocks import BlockSource, Given, Interval, noted
from per_sample_grad.pool.fingerprint import digest, fingerprint
from per_sample_grad.pool.parts import DESCRIPTION, Contents, Parts, check_folder, deal
from per_sample_grad.pool.scores import LABELS, Passes, Scorer
from per_sample_grad.pool.writing import PIECE_BYTES, Writer
from xla_replica.common.arguments import check_flag, check_integer
from xla_replica.common.files import locked

BLOCK_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Keeping:
    """Where numbers are kept; the attributes are arguments of `score_pool`."""

    folder: str | os.PathLike[str] | None
    part_size: int
    tag: str | None

    def __post_init__(self) -> None:
        check_integer("part_size", self.part_size, least=1)
        if self.folder is not None:
            check_folder(self.folder)
        if self.tag is not None and not isinstance(self.tag, str):
            raise TypeError(f"tag must be a text or None, got {self.tag!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolRun:
    """What is computed for every sample of a pool; call it on every replica.

    Attributes:
        contents: What the numbers are, in words.
        models: By the names that messages have for them.
        source: The pool's blocks.
        values: Maps a scorer, inputs and targets to rows, ``(block_size, *width)``.
        width: The shape of one sample's numbers.
        labels: Which targets a block has.
        passes: What a scorer does.
        keeping: Where the numbers are kept.
        progress: Whether one replica shows a progress bar.
        check: Is given the first index and the numbers, on the host, of samples that
            were computed, before they are kept.
    """

    contents: Contents
    models: dict[str, nn.Module]
    source: BlockSource
    values: kinds.Values
    width: tuple[int, ...] = ()
    labels: str
    passes: Passes
    keeping: Keeping
    progress: bool
    check: Callable[[int, np.ndarray], None] | None = None

    def __post_init__(self) -> None:
        check_flag("progress", self.progress)

    def description(
        self,
        settings: dict[str, Any],
        functions: dict[str, Any],
        of_parameters: bool,
    ) -> dict[str, Any]:
        """Returns all that the numbers depend on, as names and values for JSON.

        Args:
            settings: Values for JSON that the numbers depend on besides those here.
            functions: What else computes them.
            of_parameters: Whether they depend on which parameters are selected.
        """
        replica, passes = xla_replica.current(), self.passes
        replica.sync()  # one program for all weights that are not computed yet
        found = {
            **settings,
            "labels": self.labels,
            "autocast": None if passes.autocast is None else str(passes.autocast),
            "last_layer": passes.last_layer,
            "block_size": self.source.block_size,
            "device": replica.device.type,
            "tag": self.keeping.tag,
            "pool": _pool_digest(self.source.dataset),
        }
        computing = {
            **self.models,
            **functions,
            "labels function": LABELS[self.labels],
            "loss": passes.loss,
            "split": self.source.split,
            "forward": passes.forward,
            "collate": self.source.collate,
            # `check` changes no number, and selected parameters are described by shape.
            "options": {
                option: value
                for option, value in sorted(passes.options.items())
                if option not in ("params", "check")
            },
        }
        if of_parameters:
            params = passes.options.get("params")
            chosen = [selected(one, params) for one in self.models.values()]
            shapes = ({n: tuple(p.shape) for n, p in c.items()} for c in chosen)
            computing["params"] = [str(each) for each in shapes]
        tag = self.keeping.tag
        if self.keeping.folder is None:
            # Nothing is continued, so what cannot be described need not be.
            tag = tag or ""
        return found | fingerprint(computing, tag)

    def collected(self, description: dict[str, Any]) -> np.ndarray:
        """Returns all replicas' numbers, ``(n, *width)`` float32."""
        parts = self._parts(description)
        padded = self.source.whole(parts.count)
        numbers = np.zeros((padded, *self.width), dtype=np.float32)
        self._fill(parts, numbers)
        numbers = numbers[: parts.count]
        replica = xla_replica.current()
        if replica.num_replicas == 1 or not numbers.size:
            return numbers
        # Every replica has zeros for the others' numbers. The bits are summed as
        # integers, so that -0.0 and NaN stay what they are.
        total = torch.from_numpy(numbers.view(np.int32)).to(replica.device)
        replica.all_reduce_([total])
        return replica.fetch([total])[0].numpy().view(np.float32)

    def filled(self, description: dict[str, Any]) -> Parts:
        """Returns the parts in the folder as soon as all replicas have kept theirs."""
        parts = self._parts(description)
        self._fill(parts, None)
        return parts

    def _parts(self, description: dict[str, Any]) -> Parts:
        """Returns what the folder has, after a check that it is of this run."""
        replica, folder = xla_replica.current(), self.keeping.folder
        if replica.num_replicas > 1:
            replica.sync()
            _check_weights(replica, self.models, description)
        parts = Parts(
            len(self.source),
            self.source.whole(self.keeping.part_size),
            None if folder is None else Path(folder),
            description,
            self.contents,
        )
        parts.describe()
        return parts

    def _fill(self, parts: Parts, numbers: np.ndarray | None) -> None:
        """Computes, or reads, all numbers that are this replica's."""
        replica = xla_replica.current()
        scorers = [
            Scorer(one, self.passes, self.source.block_size, replica)
            for one in self.models.values()
        ]
        modes = [(m, m.training) for one in self.models.values() for m in one.modules()]
        try:
            for one in self.models.values():
                one.eval()
            _Share(replica, parts, self, scorers, numbers).fill()
        finally:
            for module, mode in modes:
                module.training = mode


def check_options(function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Raises TypeError for an option that neither the function nor `capture` has."""
    own = inspect.signature(function).parameters
    allowed = {**own, **inspect.signature(capture).parameters}
    unknown = ", ".join(sorted(options.keys() - allowed.keys()))
    if unknown:
        known = ", ".join(sorted(allowed.keys() - {"model", "loader", "options"}))
        raise TypeError(
            f"{function.__name__}: unknown option {unknown}; allowed are {known}"
        )


def _check_weights(
    replica: xla_replica.Replica,
    models: dict[str, nn.Module],
    description: dict[str, Any],
) -> None:
    """Raises ReplicaError unless all replicas have the same weights. Collective."""
    tensors = {
        f"{model}.{name}": tensor
        for model, one in models.items()
        for name, tensor in (*one.named_parameters(), *one.named_buffers())
    }
    own = {n: description[n] for n in tensors if n in description}
    own = own or fingerprint(tensors)
    if len(set(replica.all_gather_object(digest(repr(own))))) == 1:
        return
    others = replica.all_gather_object(own)
    names = {name for other in others for name in other}
    differing = sorted(n for n in names if len({o.get(n) for o in others}) > 1)
    replica.check_agreement(
        f"the weights to score with ({len(differing)} of {len(names)} parameters and "
        "buffers differ)",
        {name: own.get(name) for name in differing[:3]},
        "Their scores would be mixed. Build the model once, before launch, load the "
        "same checkpoint on every replica, or call replica.broadcast_("
        "[*model.parameters(), *model.buffers()]); `with replica.seeded(0):` builds "
        "the same model on every replica.",
    )


def _pool_digest(dataset: Any) -> str | None:
    """Returns a hash of the first, middle and last item; None if items are random."""
    indices = sorted({0, len(dataset) // 2, len(dataset) - 1}) if len(dataset) else []
    with torch.random.fork_rng(devices=[]):  # so that scoring draws the same numbers
        first, second = (
            # What cannot be described in an item is not compared.
            digest(repr(fingerprint({"item": [dataset[i] for i in indices]}, tag="")))
            for _ in range(2)
        )
    return first if first == second else None


@dataclasses.dataclass(frozen=True)
class _Share:
    """One replica's share of a run: reads, computes and keeps parts.

    ``numbers`` has room for those of all samples, in whole blocks; with None they are
    in the folder alone.
    """

    replica: xla_replica.Replica
    parts: Parts
    run: PoolRun
    scorers: list[Scorer]
    numbers: np.ndarray | None

    def fill(self) -> None:
        """Reads what is there, and computes what is missing."""
        replica, parts = self.replica, self.parts
        if not len(parts):
            return
        kept = np.stack(replica.all_gather_object(parts.kept()))
        found = kept.any(axis=0)
        with self._alone() if not found.all() else contextlib.nullcontext():
            to_read, to_compute = deal(kept, replica.rank)
            to_compute += [number for number in to_read if not self._has_read(number)]
            self._compute(
                to_compute, [parts.interval(n) for n in np.flatnonzero(found)]
            )
            if parts.folder is not None:
                replica.barrier()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Sees that no other run computes for the folder, and deletes what one left."""
        folder, left = self.parts.folder, self.parts.unfinished()
        if folder is None:
            yield
            return
        with contextlib.ExitStack() as locks:
            is_free = True
            if self.replica.is_primary:
                is_free = locks.enter_context(locked(folder / DESCRIPTION))
            if not all(self.replica.all_gather_object(is_free)):
                raise OSError(
                    errno.EBUSY,
                    f"{self.run.contents.function} is at work for this folder in "
                    "another process; wait until that has ended, or give another "
                    "folder",
                    str(folder),
                )
            for path in left:
                path.unlink(missing_ok=True)
            yield

    def _has_read(self, number: int) -> bool:
        """Reads a part that is kept; sets it aside, and returns False, if damaged."""
        if not self.parts.is_whole(number):
            self.parts.set_aside(number)
            return False
        if self.numbers is not None:
            self.numbers[slice(*self.parts.interval(number))] = self.parts.mapped(
                number
            )
        return True

    def _compute(self, to_compute: Sequence[int], found: Sequence[Interval]) -> None:
        """Computes parts, beside a bar that begins with the samples that are found."""
        parts = self.parts
        intervals = [parts.interval(number) for number in to_compute]
        num_found = sum(stop - start for start, stop in found)
        hidden = not (self.run.progress and self.replica.is_primary)
        keeps = parts.folder is not None
        with (
            tqdm(
                total=parts.count, initial=num_found, unit="samples", disable=hidden
            ) as bar,
            contextlib.closing(self._blocks(intervals)) as blocks,
            Writer() as writer,
        ):
            for number, interval in zip(to_compute, intervals):
                if keeps:
                    writer.begin(parts.begin(number, self.run.width))
                for piece in self._pieces(interval, blocks, bar):
                    if keeps:
                        writer.add(piece)
                if keeps:
                    writer.finish()
            bar.update(parts.count - bar.n)

    def _blocks(self, intervals: list[Interval]) -> Generator[Any, None, None]:
        """Yields blocks on the device, loaded ahead; closing it stops the loading."""
        for batch in self.replica.loader(self.run.source.batches(intervals)):
            yield from batch

    def _pieces(
        self, interval: Interval, blocks: Iterator[Any], bar: tqdm[Any]
    ) -> Iterator[np.ndarray]:
        """Yields the numbers of a part: of blocks on a host, else after one transfer.

        Each stays as it is until the next but one is asked for.
        """
        source, replica = self.run.source, self.replica
        for first in range(*interval, self._piece_size):
            count = min(first + self._piece_size, interval[1]) - first
            room = self._room(first, source.whole(count))
            rows = there = torch.from_numpy(room)
            if not (replica.is_host or replica.is_lazy):
                there = torch.empty_like(rows, device=replica.device)
            found = []
            for out in there.split(source.block_size):
                place = None if replica.is_lazy else out
                found.append(self._values(*next(blocks), place))
                # An estimate for all the replicas; exact at the end.
                done = source.block_size * replica.num_replicas
                bar.update(min(done, self.parts.count - bar.n))
            if not replica.is_host:
                # A lazy device has one transfer for a list of tensors, others for one.
                fetched = replica.fetch(found if replica.is_lazy else [there[:count]])
                rows[:count] = torch.cat(fetched)[:count]
            if self.run.check is not None:
                self.run.check(first, room[:count])
            yield room[:count]

    @functools.cached_property
    def _piece_size(self) -> int:
        """How many samples are computed before they are written: whole blocks."""
        if not self.replica.is_host:
            return self.parts.size
        most = max(1, PIECE_BYTES // (4 * math.prod(self.run.width)))
        return min(self.parts.size, self.run.source.whole(most))

    def _room(self, first: int, count: int) -> np.ndarray:
        """Returns where these samples' numbers belong; there are two rooms in turn."""
        if self.numbers is not None:
            return self.numbers[first : first + count]
        return next(self._rooms)[:count]

    @functools.cached_property
    def _rooms(self) -> Iterator[np.ndarray]:
        shape = (self._piece_size, *self.run.width)
        return itertools.cycle(np.empty(shape, dtype=np.float32) for _ in range(2))

    def _values(
        self, inputs: Any, targets: Any, given: Given, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the mean over the models, ``(block_size, *width)`` float32.

        That is in ``out``, if there is one.
        """
        label = LABELS[self.run.labels]
        each = []
        for scorer in self.scorers:
            scorer.given = given if self.run.labels == "given" else None
            scorer.out = out if len(self.scorers) == 1 else None
            with noted(f"while {given} of the pool were {self.run.contents.computed}"):
                each.append(label(self.run.values, scorer, inputs, targets).float())
            self.replica.sync()
        mean = each[0] if len(each) == 1 else sum(each[1:], each[0]) / len(each)
        self.replica.sync()
        return mean if out is None or mean is out else out.copy_(mean)
