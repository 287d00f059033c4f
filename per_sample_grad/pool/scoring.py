"""Scoring a large pool of samples: fixed shapes, constant memory, resumable."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import xla_replica
from per_sample_grad.engine.capturing import selected
from per_sample_grad.pool import parts as part_files
from per_sample_grad.pool import scores as kinds
from per_sample_grad.pool.blocks import BlockSource, Interval, Split, split_batch
from per_sample_grad.pool.scores import LABELS, SCORES, Scorer
from xla_replica.common.arguments import check_choice, check_flag, check_integer

PART_SIZE = 4096
BLOCK_SIZE = 64


@dataclasses.dataclass(frozen=True)
class PoolScores:
    """One score per sample of a pool.

    Attributes:
        scores: ``(n,)`` float32; ``scores[i]`` is that of ``dataset[i]``.
        name: The name of the score.
    """

    scores: np.ndarray
    name: str

    def __len__(self) -> int:
        return len(self.scores)

    def top(self, k: int) -> np.ndarray:
        """Returns the indices of the k highest scores, highest first, ties by index.

        Raises:
            ValueError: There are not k samples, or a score is NaN.
        """
        check_integer("top: k", k, least=0, most=len(self))
        bad = np.flatnonzero(np.isnan(self.scores))
        if len(bad):
            raise ValueError(
                f"{len(bad)} scores are NaN, the first that of sample {bad[0]}: the "
                "model's output or loss is not finite there; leave these samples out "
                "of the pool"
            )
        return np.argsort(-self.scores, kind="stable")[:k]

    def to_frame(self) -> pd.DataFrame:
        """Returns a table with the columns ``index`` and ``score``."""
        return pd.DataFrame({"index": np.arange(len(self)), "score": self.scores})

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_frame` as CSV."""
        self.to_frame().to_csv(path, index=False)

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_frame` as Parquet.

        Raises:
            ImportError: Neither pyarrow nor fastparquet is installed.
        """
        try:
            self.to_frame().to_parquet(path, index=False)
        except ImportError as error:
            raise ImportError(
                "to_parquet: pandas writes Parquet with pyarrow or fastparquet, and "
                "neither can be imported; pip install pyarrow, or use to_csv"
            ) from error


def score_pool(
    model: nn.Module | Sequence[nn.Module],
    loader: DataLoader[Any] | Dataset[Any],
    *,
    score: str = "grad_norm",
    labels: str = "given",
    loss: kinds.Loss = kinds.cross_entropy,
    split: Split = split_batch,
    forward: kinds.Forward = kinds.call_model,
    last_layer: str | None = None,
    batch_size: int | None = None,
    block_size: int = BLOCK_SIZE,
    autocast: torch.dtype | None = None,
    folder: str | os.PathLike[str] | None = None,
    part_size: int = PART_SIZE,
    progress: bool = True,
    **options: Any,
) -> PoolScores:
    """Returns the scores of all samples of a dataset; call it on every replica.

    The pool is computed in blocks of ``block_size`` consecutive samples; copies of the
    last sample fill the last block. A sample's score is the same, bit for bit, for any
    batch size, part size and number of replicas: on one kind of device with one version
    of torch and one number of threads, and where the model's operations are
    deterministic. Memory grows by one number per sample. Models are on the replica's
    device; they are in evaluation mode during the call, and in their own after it.

    Args:
        model: Maps inputs to logits; or several models, whose scores are averaged
            (GraNd and EL2N are means over trained models).
        loader: A dataset with a length, or a DataLoader of one, whose batch size,
            collation and workers are used; its order and sampler are not. Blocks are
            collated, not batches.
        score: ``"grad_norm"`` (``"grand"`` is another name); ``"egl"``, the same with
            expected labels; ``"last_layer_grad_norm"``; ``"el2n"``; ``"loss"``.
        labels: ``"given"`` in the pool; ``"pseudo"``: the model's most probable;
            ``"expected"``: averaged over all classes by the model's probabilities,
            one pass per class.
        loss: Maps logits and targets to ``(B,)``.
        split: Maps a collated block to inputs and targets, or None for these. By
            default a tensor is inputs alone, a pair is ``(inputs, targets)``, and a
            dict has targets under ``"labels"`` or ``"label"``.
        forward: Maps the model and inputs to logits. By default ``model(tensor)``,
            ``model(**dict)`` or ``model(*tuple)``, and ``.logits`` of what it returns.
        last_layer: The name of the module for ``"last_layer_grad_norm"``; None: the
            last one called.
        batch_size: How many samples a replica loads and moves together, rounded up to
            whole blocks; no score depends on it. None: the DataLoader's, or a block.
        block_size: How many samples one forward pass has: memory and speed depend on
            it, and scores up to rounding.
        autocast: The dtype of forward passes; None: as they are.
        folder: Where to keep what is scored. Another call continues from there, with
            any batch size and number of replicas if all of them see it.
        part_size: How many samples are kept together, rounded up to whole blocks: what
            a replica loses when it is killed.
        progress: Whether one replica shows a progress bar.
        **options: Options for `capture`; ``params`` is not allowed with
            ``"last_layer_grad_norm"``.

    Raises:
        ValueError: An option is not allowed, or ``folder`` holds other scores.
        TypeError: The dataset has no length, a batch is of an unknown kind, or an
            option has the wrong type.
    """
    row = SCORES[check_choice("score", score, SCORES)]
    labels = row.labels or check_choice("labels", labels, LABELS)
    check_integer("part_size", part_size, least=1)
    check_flag("progress", progress)
    if not row.takes_params and options.get("params") is not None:
        raise ValueError(
            f"params= is not allowed with score={score!r}, which selects the "
            "parameters itself; name the layer with last_layer=, or use "
            'score="grad_norm"'
        )
    source = BlockSource(loader, batch_size, block_size, split)
    path = Path(folder) if folder is not None else None
    parts = part_files.Parts(len(source), source.whole(part_size), path)
    models = [model] if isinstance(model, nn.Module) else list(model)
    if folder is not None:
        description = {
            "score": score,
            "labels": labels,
            "autocast": None if autocast is None else str(autocast),
            "last_layer": last_layer,
            "loss": part_files.name_of(loss),
            "split": part_files.name_of(split),
            "forward": part_files.name_of(forward),
            "block_size": block_size,
            "model": [part_files.model_digest(one) for one in models],
            "pool": part_files.pool_digest(source.dataset),
            # `check` changes no score, and selected parameters are described by shape.
            "options": {
                name: repr(value)
                for name, value in sorted(options.items())
                if name not in ("params", "check")
            },
        }
        if row.of_parameters:
            chosen = [selected(one, options.get("params")) for one in models]
            shapes = [[(n, list(p.shape)) for n, p in c.items()] for c in chosen]
            description["params"] = part_files.digest(shapes)
        parts.describe(description)
    replica = xla_replica.current()
    scorers = [
        Scorer(one, forward, loss, block_size, last_layer, autocast, replica, options)
        for one in models
    ]
    run = _Run(replica, source, parts, score, labels, scorers, progress)
    modes = [(m, m.training) for one in models for m in one.modules()]
    try:
        for one in models:
            one.eval()
        return PoolScores(run.all_scores(), score)
    finally:
        for module, mode in modes:
            module.training = mode


@dataclasses.dataclass(frozen=True)
class _Run:
    """One replica's share of scoring a pool: reads, scores and keeps parts."""

    replica: xla_replica.Replica
    source: BlockSource
    parts: part_files.Parts
    score: str
    labels: str
    scorers: list[Scorer]
    progress: bool

    def all_scores(self) -> np.ndarray:
        """Returns all replicas' scores, ``(n,)`` float32."""
        replica, parts = self.replica, self.parts
        scores = np.zeros(parts.count, dtype=np.float32)
        if not len(parts):
            return scores
        parts.clear_unfinished()
        kept = np.stack(replica.all_gather_object(parts.kept()))
        to_read, to_score = part_files.deal(kept, replica.rank)
        for number in to_read:
            scores[slice(*parts.interval(number))] = parts.load(number)
        found = np.flatnonzero(kept.any(axis=0))
        num_found = sum(stop - start for start, stop in map(parts.interval, found))
        hidden = not (self.progress and replica.is_primary)
        intervals = [parts.interval(number) for number in to_score]
        with (
            tqdm(
                total=parts.count, initial=num_found, unit="samples", disable=hidden
            ) as bar,
            contextlib.closing(self._blocks(intervals)) as blocks,
        ):
            for number, (start, stop) in zip(to_score, intervals):
                values = self._scored(stop - start, blocks, bar)
                parts.save(number, values)
                scores[start:stop] = values
            bar.update(parts.count - bar.n)
        if replica.num_replicas == 1:
            return scores
        # Every replica has zeros for the others' scores. The bits are summed as
        # integers, so that -0.0 and NaN stay what they are.
        total = torch.from_numpy(scores.view(np.int32)).to(replica.device)
        replica.all_reduce_([total])
        return replica.fetch([total])[0].numpy().view(np.float32)

    def _blocks(self, intervals: list[Interval]) -> Generator[Any, None, None]:
        """Yields blocks on the device, loaded ahead; closing it stops the loading."""
        for batch in self.replica.loader(self.source.batches(intervals)):
            yield from batch

    def _scored(self, count: int, blocks: Iterator[Any], bar: tqdm[Any]) -> np.ndarray:
        """Returns the scores of the next ``count`` samples, in one transfer."""
        block_size = self.source.block_size
        found = []
        for inputs, targets in itertools.islice(blocks, -(-count // block_size)):
            found.append(self._values(inputs, targets))
            # An estimate for all the replicas; exact at the end.
            done = block_size * self.replica.num_replicas
            bar.update(min(done, self.parts.count - bar.n))
        if not self.replica.is_lazy:  # a lazy device has one transfer for a list
            found = [torch.cat(found)]
        return torch.cat(self.replica.fetch(found))[:count].numpy()

    def _values(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Returns the mean over the models, ``(block_size,)`` float32."""
        score, label = SCORES[self.score].values, LABELS[self.labels]
        each = []
        for scorer in self.scorers:
            each.append(label(score, scorer, inputs, targets).float())
            self.replica.sync()
        mean = sum(each[1:], each[0]) / len(each)
        self.replica.sync()
        return mean
