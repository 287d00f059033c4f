"""Scoring a large pool of samples: fixed shapes, constant memory, resumable."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import xla_replica
from per_sample_grad.engine.capturing import capture
from per_sample_grad.engine.settings import listed
from per_sample_grad.factors.factors import Factors
from per_sample_grad.factors.projection import Projection
from per_sample_grad.pool import scores as kinds
from per_sample_grad.pool.blocks import BlockSource, Split, split_batch
from per_sample_grad.pool.parts import Parts
from per_sample_grad.pool.running import PoolRun
from per_sample_grad.pool.scores import LABELS, SCORES, Score, Scorer, of_gradients
from xla_replica.common.arguments import (
    check_choice,
    check_flag,
    check_integer,
    check_type,
)
from xla_replica.common.later import pd

BLOCK_SIZE, PART_SIZE = 64, 4096


@dataclasses.dataclass(frozen=True, repr=False)
class PoolScores:
    """One score per sample of a pool, or one row of a projection.

    Attributes:
        scores: ``(n,)`` or ``(n, k)`` float32; ``scores[i]`` is that of ``dataset[i]``.
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
            ValueError: There are not k samples, a score is NaN, or scores are rows.
        """
        check_flag("top: skip_nan", skip_nan)
        if self.scores.ndim > 1:
            raise ValueError(
                "top: rows of a projection have no rank; sort scores.scores @ query"
            )
        missing = np.flatnonzero(np.isnan(self.scores))
        if len(missing) and not skip_nan:
            raise ValueError(
                f"top: {len(missing)} of {len(self)} scores are NaN, which has no rank "
                f"(samples {listed([*map(str, missing)])}): the model's output or loss "
                "is not finite there. Repair that, or leave these samples out with "
                "top(k, skip_nan=True)"
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


def score_pool(
    model: nn.Module | Sequence[nn.Module],
    loader: DataLoader[Any] | Dataset[Any],
    *,
    score: str | Callable[[Factors], torch.Tensor] | Projection = "grad_norm",
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
    deterministic. Memory grows by one score per sample. Models are on the replica's
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
            gives the samples of its block alone, in their order. Or a `Projection` of
            the selected parameters: the score is then a row, every sample's gradient
            as `Capture.project` projects it.
        labels: ``"given"`` in the pool; ``"pseudo"``: the model's most probable;
            ``"expected"``: averaged over all classes by the model's probabilities,
            one pass per class, which a projection cannot be.
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
        part_size: How many samples are kept together, rounded up to whole blocks. A
            replica that is killed loses the part it was computing.
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
    inspect.signature(capture).bind(model, **options)  # another option is a TypeError
    check_flag("progress", progress)
    paths = (str, os.PathLike, type(None))
    check_type("folder", folder, paths, "the path of a folder")
    check_type("tag", tag, str | None, "a text or None")
    dtypes = "a torch.dtype, such as torch.bfloat16, or None"
    check_type("autocast", autocast, torch.dtype | None, dtypes)
    row, name = _row(score, options)
    # By the model's own probabilities the mean gradient of a cross entropy is zero.
    allowed = ("given", "pseudo") if row.width else LABELS
    labels = row.labels or check_choice("labels", labels, allowed)
    models = _models(model)
    for one in models.values():
        xla_replica.current().check_device(one.parameters())
    source = BlockSource(loader, batch_size, block_size, split)
    part_size = source.rounded_up(check_integer("part_size", part_size, least=1))
    settings = loss, forward, autocast, last_layer, options, source.block_size
    scorers = {key: Scorer(one, *settings) for key, one in models.items()}
    run = PoolRun(scorers, source, row, labels)
    description: dict[str, Any] = {}
    if folder is not None:
        function = score if callable(score) else str(score)
        description = {"count": len(source.dataset), "part_size": part_size}
        description |= run.description(name, function, tag)
    run.check_weights(description)
    parts = None
    if folder is not None:
        parts = Parts(Path(folder), description)
        parts.describe()
    intervals = source.intervals(part_size)
    return PoolScores(run.collected(intervals, parts, progress), name)


def _row(
    score: str | Callable[[Factors], torch.Tensor] | Projection, options: dict[str, Any]
) -> tuple[Score, str]:
    """Returns a score and its name."""
    if isinstance(score, Projection):
        rows = of_gradients(lambda r, losses: r.project(losses, score), (score.size,))
        return rows, "projection"
    if callable(score):
        row = of_gradients(lambda recorded, losses: score(recorded.backward(losses)))
        return row, getattr(score, "__name__", type(score).__name__)
    others = "a function of Factors or a Projection"
    row = SCORES[check_choice("score", score, SCORES, others)]
    if not row.takes_params and options.get("params") is not None:
        raise ValueError(
            f"params= is not allowed with score={score!r}, which selects the "
            "parameters itself; name the layer with last_layer=, or use "
            'score="grad_norm"'
        )
    return row, score


def _models(model: Any) -> dict[str, nn.Module]:
    """Returns models by the names that messages have for them."""
    is_one = isinstance(model, nn.Module) or not isinstance(model, Iterable)
    models: list[Any] = [model] if is_one else [*model]
    for one in models or [model]:
        allowed = "a torch.nn.Module or a sequence of them"
        check_type("model", one, nn.Module, allowed)
    return {"model" if is_one else f"model[{n}]": one for n, one in enumerate(models)}
