"""One pass over a pool: rows of numbers for all samples, computed and kept in parts.

`score_pool` and `index_pool` are two uses of it: a row is a number or a projection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import inspect
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from per_sample_grad.pool.fingerprint import fingerprint
from per_sample_grad.pool.items import pool_digest
from per_sample_grad.pool.parts import DESCRIPTION, Contents, Parts, check_folder, deal
from per_sample_grad.pool.scores import LABELS, Passes, Scorer
from xla_replica.common.arguments import check_flag, check_integer, check_type
from xla_replica.common.files import locked

BLOCK_SIZE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolRun:
    """What is computed for every sample of a pool; call it on every replica.

    Attributes:
        contents: What the numbers are, in words.
        models: By the names that messages have for them.
        source: The pool's blocks.
        values: Maps a scorer, inputs and targets to rows, ``(block_size, *width)``.
        width: The shape of one sample's numbers.
        settings: Values for JSON that the numbers depend on besides those here.
        functions: What else computes them, by name.
        of_parameters: Whether they depend on which parameters are selected.
        labels: Which targets a block has.
        passes: What a scorer does.
        folder, part_size, tag, progress: Arguments of `score_pool`.
        check: Is given the first index and the numbers, on the host, of a part that
            was computed, before it is kept.
    """

    contents: Contents
    models: dict[str, nn.Module]
    source: BlockSource
    values: kinds.Values
    width: tuple[int, ...] = ()
    settings: dict[str, Any]
    functions: dict[str, Any] = dataclasses.field(default_factory=dict)
    of_parameters: bool
    labels: str
    passes: Passes
    folder: str | os.PathLike[str] | None
    part_size: int
    tag: str | None
    progress: bool
    check: Callable[[int, np.ndarray], object] | None = None

    def __post_init__(self) -> None:
        check_flag("progress", self.progress)
        check_integer("part_size", self.part_size, least=1)
        if self.folder is not None:
            check_folder(self.folder)
        check_type("tag", self.tag, str | None, "a text or None")
        for model in self.models.values():
            xla_replica.current().check_device(model.parameters())

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        """Returns all that the numbers depend on, as names and values for JSON."""
        replica, passes = xla_replica.current(), self.passes
        replica.sync()  # one program for all weights that are not computed yet
        # Without a folder nothing is continued, so that what cannot be described need
        # not be.
        tag = self.tag or "" if self.folder is None else self.tag
        found = {
            **self.settings,
            "labels": self.labels,
            "autocast": str(passes.autocast),
            "last_layer": passes.last_layer,
            "block_size": self.source.block_size,
            "device": replica.device.type,
            "tag": self.tag,
            "pool": pool_digest(self.source.dataset, tag),
        }
        computing = {
            **self.models,
            **self.functions,
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
        if self.of_parameters:
            params = passes.options.get("params")
            chosen = [selected(one, params) for one in self.models.values()]
            computing["params"] = [
                str({name: tuple(param.shape) for name, param in params.items()})
                for params in chosen
            ]
        return found | fingerprint(computing, tag)

    def collected(self) -> np.ndarray:
        """Returns all replicas' numbers, ``(n, *width)`` float32."""
        numbers = np.zeros((len(self.source), *self.width), dtype=np.float32)
        self.fill(numbers)
        replica = xla_replica.current()
        if replica.num_replicas == 1 or not numbers.size:
            return numbers
        # Every replica has zeros for the others' numbers. The bits are summed as
        # integers, so that -0.0 and NaN stay what they are.
        total = torch.from_numpy(numbers.view(np.int32)).to(replica.device)
        replica.all_reduce_([total])
        return replica.fetch([total])[0].numpy().view(np.float32)

    def fill(self, numbers: np.ndarray | None = None) -> Parts:
        """Computes what the folder lacks, and returns its parts.

        It returns as soon as all replicas have kept theirs. ``numbers`` gets what this
        replica reads or computes, ``(n, *width)``.

        Raises:
            ValueError: The folder has parts of something else.
        """
        replica, count = xla_replica.current(), len(self.source)
        folder = None if self.folder is None else Path(self.folder)
        description = {} if folder is None else self.description
        if replica.num_replicas > 1:
            replica.sync()
            _check_weights(replica, self.models, description)
        part_size = self.source.rounded_up(self.part_size)
        parts = Parts(count, part_size, folder, description, self.contents)
        parts.describe()
        if not count:
            return parts
        kept = np.stack(replica.all_gather_object(parts.kept()))
        found = kept.any(axis=0)
        is_filled = folder is None or found.all()
        with contextlib.nullcontext() if is_filled else self._locked(parts, folder):
            to_read, to_compute = deal(kept, replica.rank)
            for number in to_read:
                if not parts.is_intact(number):
                    parts.set_aside(number)
                    to_compute.append(number)
                elif numbers is not None:
                    numbers[slice(*parts.interval(number))] = parts.mapped(number)
            intervals = [parts.interval(n) for n in np.flatnonzero(found).tolist()]
            num_found = sum(stop - start for start, stop in intervals)
            self._compute(parts, to_compute, num_found, numbers)
            if folder is not None:
                replica.barrier()
        return parts

    @contextlib.contextmanager
    def _locked(self, parts: Parts, folder: Path) -> Iterator[None]:
        """Locks the folder in the block, and deletes what a killed run was writing.

        Raises:
            OSError: Another process computes for the folder.
        """
        replica, left = xla_replica.current(), parts.unfinished()
        lock = locked(folder / DESCRIPTION)
        with lock if replica.is_primary else contextlib.nullcontext(True) as is_free:
            if not all(replica.all_gather_object(is_free)):
                raise OSError(
                    errno.EBUSY,
                    f"{self.contents.function} is at work for this folder in "
                    "another process; wait until that has ended, or give another "
                    "folder",
                    str(folder),
                )
            for path in left:
                path.unlink(missing_ok=True)
            yield

    def _compute(
        self,
        parts: Parts,
        to_compute: Sequence[int],
        num_found: int,
        numbers: np.ndarray | None,
    ) -> None:
        """Computes parts, and keeps each while the next one is computed."""
        replica, size = xla_replica.current(), self.source.block_size
        intervals = [parts.interval(number) for number in to_compute]
        hidden = not (self.progress and replica.is_primary)
        with (
            tqdm(
                total=parts.count, initial=num_found, unit="samples", disable=hidden
            ) as bar,
            self._evaluating() as scorers,
            contextlib.closing(self._blocks(intervals)) as blocks,
            ThreadPoolExecutor(1) as writer,
        ):
            writing: Future[None] | None = None
            for number, (start, stop) in zip(to_compute, intervals):
                found = []
                for _ in range(start, stop, size):
                    found.append(self._values(scorers, *next(blocks)))
                    # An estimate for all the replicas; exact at the end.
                    done = size * replica.num_replicas
                    bar.update(min(done, parts.count - bar.n))
                if not replica.is_host:
                    # A lazy device has one transfer for a list, others for one tensor.
                    if not replica.is_lazy:
                        found = [torch.cat(found)[: stop - start]]
                    found = replica.fetch(found)
                rows = np.concatenate([block.numpy() for block in found])
                rows = rows[: stop - start]
                if self.check is not None:
                    self.check(start, rows)
                if numbers is not None:
                    numbers[start:stop] = rows
                if writing is not None:
                    writing.result()
                if parts.folder is not None:
                    writing = writer.submit(parts.write, number, rows)
            if writing is not None:
                writing.result()
            bar.update(parts.count - bar.n)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[list[Scorer]]:
        """Yields scorers of the models, which are in evaluation mode in the block."""
        replica, size = xla_replica.current(), self.source.block_size
        models = self.models.values()
        modes = [(m, m.training) for model in models for m in model.modules()]
        try:
            yield [Scorer(m.eval(), self.passes, size, replica) for m in models]
        finally:
            for module, mode in modes:
                module.training = mode

    def _blocks(self, intervals: list[Interval]) -> Generator[Any, None, None]:
        """Yields blocks on the device, loaded ahead; closing it stops the loading."""
        for batch in xla_replica.current().loader(self.source.batches(intervals)):
            yield from batch

    def _values(
        self, scorers: Sequence[Scorer], inputs: Any, targets: Any, given: Given
    ) -> torch.Tensor:
        """Returns the mean over the models, ``(block_size, *width)`` float32."""
        replica, each = xla_replica.current(), []
        for scorer in scorers:
            scorer.given = given if self.labels == "given" else None
            with noted(f"while {given} of the pool were {self.contents.computed}"):
                found = LABELS[self.labels](self.values, scorer, inputs, targets)
                each.append(found.detach().float())
            replica.sync()
        mean = each[0] if len(each) == 1 else sum(each[1:], each[0]) / len(each)
        replica.sync()
        return mean


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
    is_described = tensors.keys() <= description.keys()
    described = description if is_described else fingerprint(tensors)
    own = {name: described[name] for name in tensors}
    others = replica.all_gather_object(own)
    names = sorted({name for other in others for name in other})
    differing = [n for n in names if len({o.get(n) for o in others}) > 1]
    replica.check_agreement(
        f"the weights to score with ({len(differing)} of {len(names)} parameters and "
        "buffers differ)",
        {name: own.get(name) for name in differing[:3]},
        "Their scores would be mixed. Build the model once, before launch, load the "
        "same checkpoint on every replica, or call replica.broadcast_("
        "[*model.parameters(), *model.buffers()]); `with replica.seeded(0):` builds "
        "the same model on every replica.",
    )
