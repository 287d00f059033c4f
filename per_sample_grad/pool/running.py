"""One pass over a pool: scores of all samples, computed and kept in parts."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import xla_replica
from per_sample_grad.engine.settings import selected
from per_sample_grad.pool.blocks import BlockSource, Given, Interval, noted
from per_sample_grad.pool.fingerprint import fingerprint
from per_sample_grad.pool.items import pool_digest
from per_sample_grad.pool.parts import DESCRIPTION, Parts, deal
from per_sample_grad.pool.scores import LABELS, Passes, Score, Scorer
from xla_replica.common.arguments import check_flag, check_integer, check_type
from xla_replica.common.files import locked


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolRun:
    """What is computed for every sample of a pool; call it on every replica.

    Attributes:
        models: By the names that messages have for them.
        source: The pool's blocks.
        score: What each sample gets.
        name: The name of the score.
        function: What computes it besides, to be described.
        labels: Which targets a block has.
        passes: What a scorer does.
        folder, part_size, tag, progress: Arguments of `score_pool`.
    """

    models: dict[str, nn.Module]
    source: BlockSource
    score: Score
    name: str
    function: Any
    labels: str
    passes: Passes
    folder: str | os.PathLike[str] | None
    part_size: int
    tag: str | None
    progress: bool

    def __post_init__(self) -> None:
        check_flag("progress", self.progress)
        check_integer("part_size", self.part_size, least=1)
        paths = (str, os.PathLike, type(None))
        check_type("folder", self.folder, paths, "the path of a folder")
        check_type("tag", self.tag, str | None, "a text or None")
        for model in self.models.values():
            xla_replica.current().check_device(model.parameters())

    def _description(self) -> dict[str, Any]:
        """Returns all that the numbers depend on, as names and values for JSON."""
        replica, passes = xla_replica.current(), self.passes
        replica.sync()  # one program for all weights that are not computed yet
        found = {
            "score": self.name,
            "labels": self.labels,
            "autocast": str(passes.autocast),
            "last_layer": passes.last_layer,
            "block_size": self.source.block_size,
            "device": replica.device.type,
            "tag": self.tag,
            "pool": pool_digest(self.source.dataset, self.tag),
        }
        computing = {
            **self.models,
            "score function": self.function,
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
        if self.score.of_parameters:
            params = passes.options.get("params")
            chosen = [selected(one, params) for one in self.models.values()]
            computing["params"] = [
                str({name: tuple(param.shape) for name, param in params.items()})
                for params in chosen
            ]
        return found | fingerprint(computing, self.tag)

    def collected(self) -> np.ndarray:
        """Returns all replicas' scores, ``(n, *width)`` float32.

        Raises:
            ValueError: The folder has parts of something else.
        """
        numbers = np.zeros((len(self.source), *self.score.width), dtype=np.float32)
        self._fill(numbers)
        replica = xla_replica.current()
        if replica.num_replicas == 1 or not numbers.size:
            return numbers
        # Every replica has zeros for the others' numbers. The bits are summed as
        # integers, so that -0.0 and NaN stay what they are.
        total = torch.from_numpy(numbers.view(np.int32)).to(replica.device)
        replica.all_reduce_([total])
        return replica.fetch([total])[0].numpy().view(np.float32)

    def _fill(self, numbers: np.ndarray) -> None:
        """Writes what this replica reads or computes to ``numbers``, ``(n, *width)``.

        It returns as soon as all replicas have kept their parts in the folder.
        """
        replica, count = xla_replica.current(), len(self.source)
        folder = None if self.folder is None else Path(self.folder)
        description = {} if folder is None else self._description()
        if replica.num_replicas > 1:
            replica.sync()
            _check_weights(replica, self.models, description)
        part_size = self.source.rounded_up(self.part_size)
        parts = Parts(count, part_size, folder, description)
        parts.describe()
        if not count:
            return
        kept = np.stack(replica.all_gather_object(parts.kept()))
        found = kept.any(axis=0)
        is_filled = folder is None or found.all()
        with contextlib.nullcontext() if is_filled else self._locked(parts, folder):
            to_read, to_compute = deal(kept, replica.rank)
            for number in to_read:
                if not parts.is_intact(number):
                    parts.set_aside(number)
                    to_compute.append(number)
                else:
                    numbers[slice(*parts.interval(number))] = parts.mapped(number)
            intervals = [parts.interval(n) for n in np.flatnonzero(found).tolist()]
            num_found = sum(stop - start for start, stop in intervals)
            self._compute(parts, to_compute, num_found, numbers)
            if folder is not None:
                replica.barrier()

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
                    "score_pool is at work for this folder in another process; wait "
                    "until that has ended, or give another folder",
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
        numbers: np.ndarray,
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
            with noted(f"while {given} of the pool were scored"):
                values = self.score.values
                found = LABELS[self.labels](values, scorer, inputs, targets)
                each.append(found.detach().float())
            replica.sync()
        mean = each[0] if len(each) == 1 else sum(each[1:], each[0]) / len(each)
        replica.sync()
        return mean


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
