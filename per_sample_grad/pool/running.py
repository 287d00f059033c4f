"""One pass over a pool: rows of numbers for all samples, computed and kept in parts.

`score_pool` and `index_pool` are two uses of it: a row is a number or a projection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import xla_replica
from per_sample_grad.engine.capturing import capture, selected
from per_sample_grad.pool import scores as kinds
from per_sample_grad.pool.blocks import BlockSource, Given, Interval, Split, noted
from per_sample_grad.pool.fingerprint import digest, fingerprint
from per_sample_grad.pool.parts import Contents, Parts, deal
from per_sample_grad.pool.scores import LABELS, Scorer
from xla_replica.common.arguments import check_flag, check_integer

BLOCK_SIZE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolRun:
    """What is computed for every sample of a pool; call it on every replica.

    Attributes:
        contents: What the numbers are, in words.
        models: By the names that messages have for them.
        values: Maps a scorer, inputs and targets to rows, ``(block_size, *width)``.
        width: The shape of one sample's numbers.

    The others are the arguments of `score_pool`.
    """

    contents: Contents
    models: dict[str, nn.Module]
    source: BlockSource
    values: kinds.Values
    width: tuple[int, ...] = ()
    labels: str
    loss: kinds.Loss
    split: Split
    forward: kinds.Forward
    last_layer: str | None = None
    autocast: torch.dtype | None
    options: dict[str, Any]
    folder: Path | None
    part_size: int
    tag: str | None
    progress: bool

    def __post_init__(self) -> None:
        check_integer("part_size", self.part_size, least=1)
        check_flag("progress", self.progress)
        if self.tag is not None and not isinstance(self.tag, str):
            raise TypeError(f"tag must be a text or None, got {self.tag!r}")

    def description(
        self,
        settings: dict[str, Any],
        functions: dict[str, Any],
        of_parameters: bool,
        tag: str | None,
    ) -> dict[str, Any]:
        """Returns all that the numbers depend on, as names and values for JSON.

        Args:
            settings: Values for JSON that the numbers depend on besides those here.
            functions: What else computes them.
            of_parameters: Whether they depend on which parameters are selected.
            tag: As for `fingerprint`.
        """
        replica = xla_replica.current()
        replica.sync()  # one program for all weights that are not computed yet
        found = {
            **settings,
            "labels": self.labels,
            "autocast": None if self.autocast is None else str(self.autocast),
            "last_layer": self.last_layer,
            "block_size": self.source.block_size,
            "device": replica.device.type,
            "tag": self.tag,
            "pool": _pool_digest(self.source.dataset),
        }
        computing = {
            **self.models,
            **functions,
            "labels function": LABELS[self.labels],
            "loss": self.loss,
            "split": self.split,
            "forward": self.forward,
            "collate": self.source.collate,
            # `check` changes no number, and selected parameters are described by shape.
            "options": {
                option: value
                for option, value in sorted(self.options.items())
                if option not in ("params", "check")
            },
        }
        if of_parameters:
            params = self.options.get("params")
            chosen = [selected(one, params) for one in self.models.values()]
            shapes = ({n: tuple(p.shape) for n, p in c.items()} for c in chosen)
            computing["params"] = [str(each) for each in shapes]
        return found | fingerprint(computing, tag)

    def collected(self, description: dict[str, Any]) -> np.ndarray:
        """Returns all replicas' numbers, ``(n, *width)`` float32."""
        parts = self._parts(description)
        numbers = np.zeros((parts.count, *self.width), dtype=np.float32)

        def receive(interval: Interval, values: np.ndarray) -> None:
            numbers[slice(*interval)] = values

        self._fill(parts, receive)
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
        self._fill(parts, lambda interval, values: None)
        xla_replica.current().barrier()
        return parts

    def _parts(self, description: dict[str, Any]) -> Parts:
        """Returns what the folder has, after a check that it is of this run."""
        replica = xla_replica.current()
        if replica.num_replicas > 1:
            replica.sync()
            _check_weights(replica, self.models, description)
        size = self.source.whole(self.part_size)
        parts = Parts(len(self.source), size, self.folder, description, self.contents)
        parts.describe()
        return parts

    def _fill(
        self, parts: Parts, receive: Callable[[Interval, np.ndarray], None]
    ) -> None:
        """Gives all numbers that are this replica's to read or to compute."""
        replica = xla_replica.current()
        options = (self.last_layer, self.autocast, replica, self.options)
        block_size = self.source.block_size
        scorers = [
            Scorer(one, self.forward, self.loss, block_size, *options)
            for one in self.models.values()
        ]
        modes = [(m, m.training) for one in self.models.values() for m in one.modules()]
        try:
            for one in self.models.values():
                one.eval()
            # Memory that is not touched, as on a lazy device, is not taken.
            rows = torch.empty(
                parts.size,
                *self.width,
                device=None if replica.is_lazy else replica.device,
            )
            _Share(replica, parts, self, scorers, rows).fill(receive)
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

    ``rows`` is where a part is computed, ``(part_size, *width)``.
    """

    replica: xla_replica.Replica
    parts: Parts
    run: PoolRun
    scorers: list[Scorer]
    rows: torch.Tensor

    def fill(self, receive: Callable[[Interval, np.ndarray], None]) -> None:
        """Computes what is missing, and gives it, and what is there, to ``receive``.

        What it is given is valid until it returns.
        """
        replica, parts = self.replica, self.parts
        if not len(parts):
            return
        parts.clear_unfinished()
        kept = np.stack(replica.all_gather_object(parts.kept()))
        to_read, to_compute = deal(kept, replica.rank)
        for number in to_read:
            values = parts.load(number)
            if values is None:
                to_compute.append(number)
            else:
                receive(parts.interval(number), values)
        found = np.flatnonzero(kept.any(axis=0))
        num_found = sum(stop - start for start, stop in map(parts.interval, found))
        hidden = not (self.run.progress and replica.is_primary)
        intervals = [parts.interval(number) for number in to_compute]
        with (
            tqdm(
                total=parts.count, initial=num_found, unit="samples", disable=hidden
            ) as bar,
            contextlib.closing(self._blocks(intervals)) as blocks,
        ):
            for number, (start, stop) in zip(to_compute, intervals):
                values = self._computed(stop - start, blocks, bar)
                parts.save(number, values)
                receive((start, stop), values)
            bar.update(parts.count - bar.n)

    def _blocks(self, intervals: list[Interval]) -> Generator[Any, None, None]:
        """Yields blocks on the device, loaded ahead; closing it stops the loading."""
        for batch in self.replica.loader(self.run.source.batches(intervals)):
            yield from batch

    def _computed(
        self, count: int, blocks: Iterator[Any], bar: tqdm[Any]
    ) -> np.ndarray:
        """Returns the numbers of the next ``count`` samples, in one transfer.

        They are valid until the next call.
        """
        block_size = self.run.source.block_size
        # A lazy device has one transfer for a list of tensors, and others for one.
        found: list[torch.Tensor] = []
        for number, block in enumerate(
            itertools.islice(blocks, -(-count // block_size))
        ):
            values = self._values(*block)
            if self.replica.is_lazy:
                found.append(values)
            else:
                self.rows[number * block_size : (number + 1) * block_size] = values
            # An estimate for all the replicas; exact at the end.
            done = block_size * self.replica.num_replicas
            bar.update(min(done, self.parts.count - bar.n))
        if self.replica.is_lazy:
            return torch.cat(self.replica.fetch(found))[:count].numpy()
        rows = self.rows[:count]
        return (rows if self.replica.is_host else self.replica.fetch([rows])[0]).numpy()

    def _values(self, inputs: Any, targets: Any, given: Given) -> torch.Tensor:
        """Returns the mean over the models, ``(block_size, *width)`` float32."""
        label = LABELS[self.run.labels]
        each = []
        for scorer in self.scorers:
            scorer.given = given if self.run.labels == "given" else None
            with noted(f"while {given} of the pool were {self.run.contents.computed}"):
                each.append(label(self.run.values, scorer, inputs, targets).float())
            self.replica.sync()
        mean = each[0] if len(each) == 1 else sum(each[1:], each[0]) / len(each)
        self.replica.sync()
        return mean
