"""Scoring a large pool of samples: fixed shapes, constant memory, resumable."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tqdm import tqdm

import xla_replica
from per_sample_grad.pool_parts import (
    Parts,
    fingerprint,
    name_of,
    pool_digest,
    shapes_digest,
)
from per_sample_grad.pool_scores import PoolScores
from per_sample_grad.scores import SCORES, Loss, Scoring, expected, last_called, pseudo
from per_sample_grad.selection import selected

Labels = Literal["given", "pseudo", "expected"]
LABELS: tuple[Labels, ...] = ("given", "pseudo", "expected")
PART_SIZE = 4096
# Of `capture`'s options, those that change no score; and the selection, told apart.
_UNTOLD = ("params", "check", "budget")


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The default loss: logits ``(B, C)``, targets ``(B,)``."""
    return F.cross_entropy(logits, targets, reduction="none")


def score_pool(
    model: nn.Module | Sequence[nn.Module],
    loader: DataLoader[Any] | Dataset[Any],
    *,
    score: str = "grad_norm",
    labels: Labels = "given",
    loss: Loss = cross_entropy,
    last_layer: str | None = None,
    batch_size: int | None = None,
    autocast: torch.dtype | None = None,
    folder: str | os.PathLike[str] | None = None,
    part_size: int = PART_SIZE,
    progress: bool = True,
    **options: Any,
) -> PoolScores:
    """Scores every sample of a dataset; call it on every replica.

    Every batch has the same shape: the last one of a part repeats a sample. Memory
    does not grow with the pool but for one number per sample. On one machine the
    scores are the same, bit for bit, for any number of replicas, and equal up to
    rounding for any batch size. Models are on the replica's device; they are in
    evaluation mode meanwhile, and back in their mode afterwards.

    Args:
        model: From inputs to logits; or several, whose scores are averaged (GraNd and
            EL2N are means over trained models).
        loader: A dataset with a length, or a DataLoader of one, whose batch size,
            collation and workers are used; its order and sampler are not. A batch is
            ``(inputs, targets)``, or inputs alone where ``labels`` need no others.
        score: ``"grad_norm"`` (``"grand"`` is another name); ``"egl"``, the same with
            expected labels; ``"last_layer_grad_norm"``; ``"el2n"``; ``"loss"``.
        labels: ``"given"`` in the pool; ``"pseudo"``: the model's most probable;
            ``"expected"``: averaged over all classes by the model's probabilities,
            one pass per class.
        loss: From logits and targets to ``(B,)``.
        last_layer: Name of the module for ``"last_layer_grad_norm"``; None: the last
            one called.
        batch_size: Samples per replica and batch; a DataLoader has its own.
        autocast: Run forward passes in this dtype.
        folder: Keep what is scored here, and go on from there when called again. To
            be seen by all replicas if their number is to change.
        part_size: Samples that are kept together, independent of the batch size.
        progress: Show a bar, on one replica.
        **options: For `capture`; no ``params`` for ``"last_layer_grad_norm"``.

    Returns:
        All scores, on every replica.

    Raises:
        ValueError: An option is not one of those allowed, or ``folder`` holds scores
            of something else.
        TypeError: The dataset has no length.
    """
    if score not in SCORES:
        raise ValueError(f"score={score!r}; allowed are {', '.join(SCORES)}")
    labels = "expected" if score == "egl" else labels
    if labels not in LABELS:
        raise ValueError(f"labels={labels!r}; allowed are {', '.join(LABELS)}")
    if part_size < 1:
        raise ValueError(f"part_size={part_size} samples; give at least 1")
    if score == "last_layer_grad_norm" and options.get("params") is not None:
        raise ValueError(
            'params= beside score="last_layer_grad_norm", which is of all parameters '
            'of one layer; name the layer with last_layer=, or take score="grad_norm"'
        )
    replica = xla_replica.current()
    source = _source(loader, batch_size)
    parts = Parts(len(source), part_size, Path(folder) if folder is not None else None)
    models = [model] if isinstance(model, nn.Module) else list(model)
    if folder is not None:
        dtype = None if autocast is None else str(autocast)
        told = {"score": score, "labels": labels, "autocast": dtype}
        told |= {"last_layer": last_layer, "loss": name_of(loss)}
        parts.describe({**told, **_described(models, source.dataset, score, options)})
    scorings = [Scoring(m, loss, last_layer, options) for m in models]
    run = _Run(replica, source, parts, score, labels, scorings, autocast, progress)
    with _evaluating(models):
        return PoolScores(run.all_scores(), score)


def _described(
    models: Sequence[nn.Module], dataset: Any, score: str, options: dict[str, Any]
) -> dict[str, object]:
    """What tells this job from others that could be given the same folder."""
    told: dict[str, object] = {
        "model": fingerprint(models),
        "pool": pool_digest(dataset),
        "options": {
            key: repr(value)
            for key, value in sorted(options.items())
            if key not in _UNTOLD
        },
    }
    if score not in ("el2n", "loss"):
        chosen = [selected(model, options.get("params")) for model in models]
        told["params"] = shapes_digest(chosen)
    return told


@dataclasses.dataclass
class _Run:
    """One replica's share: every part whose number is its rank modulo the replicas."""

    replica: xla_replica.Replica
    source: _Source
    parts: Parts
    score: str
    labels: Labels
    scorings: list[Scoring]
    autocast: torch.dtype | None
    progress: bool

    def all_scores(self) -> np.ndarray:
        """``(n,)``, this replica's and everybody else's."""
        replica, parts = self.replica, self.parts
        own = range(replica.rank, len(parts), replica.num_replicas)
        scores = np.zeros(parts.count, dtype=np.float32)
        hidden = not (self.progress and replica.is_master)
        with tqdm(total=parts.count, unit="samples", disable=hidden) as bar:
            for number in own:
                start, stop = parts.interval(number)
                found = parts.load(number)
                if found is None:
                    found = self._scored(start, stop, bar)
                    parts.save(number, found)
                scores[start:stop] = found
                # All the replicas', about; exact at the end of a part.
                bar.n = min(parts.count, stop)
                bar.refresh()
        if replica.num_replicas == 1:
            return scores
        # Zeros elsewhere, so that the sum is exact.
        total = torch.from_numpy(scores).to(replica.device)
        replica.sum_([total])
        return replica.fetch([total])[0].numpy()

    def _scored(self, start: int, stop: int, bar: tqdm[Any]) -> np.ndarray:
        """Scores of an interval of the pool; one transfer to the host."""
        found = []
        batches = self.source.batches(start, stop)
        for batch in self.replica.loader(batches):
            total = None
            for number, scoring in enumerate(self.scorings):
                values = self._values(number, scoring, batch)
                total = values if total is None else total + values
            assert total is not None
            found.append(total / len(self.scorings))
            self.replica.sync()
            bar.update(self.source.batch_size)
        values = torch.cat(self.replica.fetch(found))
        return values[: stop - start].float().numpy()

    def _values(self, number: int, scoring: Scoring, batch: Any) -> torch.Tensor:
        inputs, targets = _split(batch, self.labels)
        device = inputs.device.type
        enabled = self.autocast is not None
        with torch.autocast(device, dtype=self.autocast, enabled=enabled):
            if scoring.last_layer is None and self.score == "last_layer_grad_norm":
                name = last_called(scoring, inputs)
                scoring = dataclasses.replace(scoring, last_layer=name)
                self.scorings[number] = scoring
            function = SCORES[self.score]
            if self.labels == "expected":
                return expected(function, scoring, inputs, self.replica.sync)
            if self.labels == "pseudo":
                targets = pseudo(scoring, inputs)
            if targets is None:
                raise ValueError(
                    f'labels="{self.labels}", but the pool\'s batches have no targets; '
                    'give pairs (inputs, targets), or labels="pseudo" or "expected"'
                )
            return function(scoring, inputs, targets).float()


@dataclasses.dataclass(frozen=True)
class _Source:
    """A dataset and how to make batches of it."""

    dataset: Any
    batch_size: int
    options: dict[str, Any]

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, start: int, stop: int) -> DataLoader[Any]:
        """Batches of one size over an interval; the last repeats its last sample."""
        count = -(-(stop - start) // self.batch_size) * self.batch_size
        order = [min(start + i, stop - 1) for i in range(count)]
        size = self.batch_size
        chosen = [order[i : i + size] for i in range(0, count, size)]
        return DataLoader(self.dataset, batch_sampler=chosen, **self.options)


def _source(loader: DataLoader[Any] | Dataset[Any], batch_size: int | None) -> _Source:
    options: dict[str, Any] = {}
    dataset: Any = loader
    if isinstance(loader, DataLoader):
        dataset, size = loader.dataset, batch_size or loader.batch_size
        options = {
            "collate_fn": loader.collate_fn,
            "num_workers": loader.num_workers,
            "worker_init_fn": loader.worker_init_fn,
        }
    else:
        size = batch_size
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"score_pool: a {type(dataset).__name__} has no length and no indices to "
            "report scores by; give a dataset with __len__ and __getitem__"
        )
    if size is None or size < 1:
        raise ValueError(
            f"score_pool: batch_size={size}; give a positive number, or a DataLoader "
            "with a batch size"
        )
    return _Source(dataset, size, options)


def _split(batch: Any, labels: Labels) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(batch, torch.Tensor):
        if labels == "given":
            raise ValueError(
                'labels="given", but the pool\'s batches are inputs alone; give '
                'pairs (inputs, targets), or labels="pseudo" or "expected"'
            )
        return batch, None
    inputs = batch[0]
    return inputs, batch[1] if len(batch) > 1 else None


@contextlib.contextmanager
def _evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    modes = [(m, m.training) for model in models for m in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
