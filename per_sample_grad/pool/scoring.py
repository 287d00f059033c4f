"""Scoring a large pool of samples: fixed shapes, constant memory, resumable."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import xla_replica
from per_sample_grad.engine.capturing import capture, selected
from per_sample_grad.factors.factors import Factors
from per_sample_grad.pool import parts as part_files
from per_sample_grad.pool import scores as kinds
from per_sample_grad.pool.blocks import (
    BlockSource,
    Given,
    Interval,
    Split,
    noted,
    split_batch,
)
from per_sample_grad.pool.fingerprint import digest, fingerprint
from per_sample_grad.pool.scores import LABELS, SCORES, Score, Scorer
from xla_replica.common.arguments import check_choice, check_flag, check_integer

PART_SIZE = 4096
BLOCK_SIZE = 64


@dataclasses.dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        known = self.scores[~np.isnan(self.scores)]
        values = f", {known.min():.4g} to {known.max():.4g}" if len(known) else ""
        missing = len(self) - len(known)
        return (
            f"PoolScores({self.name!r} of {len(self)} samples{values}"
            f"{f', {missing} NaN' if missing else ''})"
        )

    def top(self, k: int, *, skip_nan: bool = False) -> np.ndarray:
        """Returns the indices of the k highest scores, highest first, ties by index.

        Args:
            k: How many.
            skip_nan: Whether to leave out samples whose score is NaN.

        Raises:
            ValueError: There are not k samples, or a score is NaN.
        """
        check_flag("top: skip_nan", skip_nan)
        missing = np.flatnonzero(np.isnan(self.scores))
        if len(missing) and not skip_nan:
            first = ", ".join(map(str, missing[:5]))
            raise ValueError(
                f"top: {len(missing)} of {len(self)} scores are NaN, which has no rank "
                f"(samples {first}{', ...' if len(missing) > 5 else ''}): the model's "
                "output or loss is not finite there. Repair that, or leave these "
                "samples out with top(k, skip_nan=True)"
            )
        check_integer("top: k", k, least=0, most=len(self) - len(missing))
        # NaN is sorted to the end.
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
    score: str | Callable[[Factors], torch.Tensor] = "grad_norm",
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
    tag: str | None = None,
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
            expected labels; ``"last_layer_grad_norm"``; ``"el2n"``; ``"loss"``. Or a
            function that maps the `Factors` of a block of B = ``block_size`` samples to
            a tensor ``(B,)``, such as ``lambda factors: factors.dot(direction)``; it
            gives the samples of its block alone, in their order.
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
            any batch size and number of replicas if all of them see it. What computes
            scores must be the same: code, closures, attributes and weights are
            compared.
        part_size: How many samples are kept together, rounded up to whole blocks: what
            a replica loses when it is killed.
        tag: With ``folder``, a text of your own for what cannot be compared, such as
            an open file that ``forward`` reads or a function written in C. Change the
            text whenever that changes.
        progress: Whether one replica shows a progress bar.
        **options: Options for `capture`; ``params`` is not allowed with
            ``"last_layer_grad_norm"``.

    Raises:
        ValueError: An option or a label is not allowed, or ``folder`` holds other
            scores.
        TypeError: The dataset has no length, a batch is of an unknown kind, an option
            is unknown or has the wrong type, or ``tag`` is missing.
        OSError: A part cannot be written; those before it are kept.
        ReplicaError: Replicas have different weights.
    """
    _check_names(options)
    row, name = _row(score, options)
    labels = row.labels or check_choice("labels", labels, LABELS)
    check_integer("part_size", part_size, least=1)
    check_flag("progress", progress)
    if tag is not None and not isinstance(tag, str):
        raise TypeError(f"tag must be a text or None, got {tag!r}")
    models = _models(model)
    source = BlockSource(loader, batch_size, block_size, split)
    replica = xla_replica.current()
    description: dict[str, Any] = {}
    if folder is not None or replica.num_replicas > 1:
        replica.sync()  # one program for all weights that are not computed yet
    if folder is not None:
        description = {
            "score": name,
            "labels": labels,
            "autocast": None if autocast is None else str(autocast),
            "last_layer": last_layer,
            "block_size": block_size,
            "device": replica.device.type,
            "tag": tag,
            "pool": _pool_digest(source.dataset),
        }
        computing = {
            **models,
            "score function": score if callable(score) else row.values,
            "labels function": LABELS[labels],
            "loss": loss,
            "split": split,
            "forward": forward,
            "collate": source.collate,
            # `check` changes no score, and selected parameters are described by shape.
            "options": {
                option: value
                for option, value in sorted(options.items())
                if option not in ("params", "check")
            },
        }
        if row.of_parameters:
            params = options.get("params")
            chosen = [selected(one, params) for one in models.values()]
            shapes = ({n: tuple(p.shape) for n, p in c.items()} for c in chosen)
            computing["params"] = [str(each) for each in shapes]
        description |= fingerprint(computing, tag)
    if replica.num_replicas > 1:
        _check_weights(replica, models, description)
    path = None if folder is None else Path(folder)
    parts = part_files.Parts(len(source), source.whole(part_size), path, description)
    parts.describe()
    scorers = [
        Scorer(one, forward, loss, block_size, last_layer, autocast, replica, options)
        for one in models.values()
    ]
    run = _Run(replica, source, parts, row.values, labels, scorers, progress)
    modes = [(m, m.training) for one in models.values() for m in one.modules()]
    try:
        for one in models.values():
            one.eval()
        return PoolScores(run.all_scores(), name)
    finally:
        for module, mode in modes:
            module.training = mode


def _check_names(options: dict[str, Any]) -> None:
    """Raises TypeError for an option that neither `score_pool` nor `capture` has."""
    own = inspect.signature(score_pool).parameters
    allowed = {**own, **inspect.signature(capture).parameters}
    unknown = ", ".join(sorted(options.keys() - allowed.keys()))
    if unknown:
        known = ", ".join(sorted(allowed.keys() - {"model", "loader", "options"}))
        raise TypeError(f"score_pool: unknown option {unknown}; allowed are {known}")


def _row(
    score: str | Callable[[Factors], torch.Tensor], options: dict[str, Any]
) -> tuple[Score, str]:
    """Returns a score and its name."""
    if callable(score):
        return kinds.of_factors(score), getattr(score, "__name__", type(score).__name__)
    row = SCORES[check_choice("score", score, SCORES, "a function of Factors")]
    if not row.takes_params and options.get("params") is not None:
        raise ValueError(
            f"params= is not allowed with score={score!r}, which selects the "
            "parameters itself; name the layer with last_layer=, or use "
            'score="grad_norm"'
        )
    return row, score


def _models(model: nn.Module | Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Returns models by the names that messages have for them."""
    if isinstance(model, nn.Module):
        return {"model": model}
    models = list(model) if isinstance(model, Iterable) else [model]
    wrong = [one for one in models if not isinstance(one, nn.Module)]
    if wrong or not models:
        raise TypeError(
            "model must be a torch.nn.Module or a sequence of them, got a "
            f"{type(wrong[0] if wrong else model).__name__}"
        )
    return {f"model[{number}]": one for number, one in enumerate(models)}


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
        "[*model.parameters(), *model.buffers()]). Emulated replicas are threads that "
        "draw from one generator: torch.manual_seed(0) does not give them the same "
        "model, `with replica.seeded(0):` does.",
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
class _Run:
    """One replica's share of scoring a pool: reads, scores and keeps parts."""

    replica: xla_replica.Replica
    source: BlockSource
    parts: part_files.Parts
    score: kinds.Values
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
            values = parts.load(number)
            if values is None:
                to_score.append(number)
            else:
                scores[slice(*parts.interval(number))] = values
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
        for block in itertools.islice(blocks, -(-count // block_size)):
            found.append(self._values(*block))
            # An estimate for all the replicas; exact at the end.
            done = block_size * self.replica.num_replicas
            bar.update(min(done, self.parts.count - bar.n))
        if not self.replica.is_lazy:  # a lazy device has one transfer for a list
            found = [torch.cat(found)]
        return torch.cat(self.replica.fetch(found))[:count].numpy()

    def _values(self, inputs: Any, targets: Any, given: Given) -> torch.Tensor:
        """Returns the mean over the models, ``(block_size,)`` float32."""
        label = LABELS[self.labels]
        each = []
        for scorer in self.scorers:
            scorer.given = given if self.labels == "given" else None
            with noted(f"while {given} of the pool were scored"):
                each.append(label(self.score, scorer, inputs, targets).float())
            self.replica.sync()
        mean = sum(each[1:], each[0]) / len(each)
        self.replica.sync()
        return mean
