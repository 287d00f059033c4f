"""Scoring a large pool of samples: fixed shapes, constant memory, resumable."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import xla_replica
from per_sample_grad.engine.selection import selected
from per_sample_grad.pool.blocks import source_of
from per_sample_grad.pool.feeding import Forward, Split, call_model, split_batch
from per_sample_grad.pool.parts import (
    Parts,
    fingerprint,
    name_of,
    pool_digest,
    shapes_digest,
)
from per_sample_grad.pool.result import PoolScores
from per_sample_grad.pool.run import LABELS, Labels, Run
from per_sample_grad.pool.scores import SCORES, Loss, Scoring

PART_SIZE = 4096
BLOCK_SIZE = 64
# Of `capture`'s options, one that changes no score; and the selection, told apart.
_UNTOLD = ("params", "check")


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
    split: Split = split_batch,
    forward: Forward = call_model,
    last_layer: str | None = None,
    batch_size: int | None = None,
    block_size: int = BLOCK_SIZE,
    autocast: torch.dtype | None = None,
    folder: str | os.PathLike[str] | None = None,
    part_size: int = PART_SIZE,
    progress: bool = True,
    **options: Any,
) -> PoolScores:
    """Scores every sample of a dataset; call it on every replica.

    The pool is computed in blocks of ``block_size`` consecutive samples, the last one
    full of copies of its last sample. A sample is always in the same row of the same
    block, so that its score is the same, bit for bit, for any batch size, part size
    and number of replicas: on one kind of device with one version of torch and one
    number of threads, and where the model's operations are deterministic. Memory does
    not grow with the pool but for one number per sample. Models are on the replica's
    device; they are in evaluation mode meanwhile, and back in their mode afterwards.

    Args:
        model: From inputs to logits; or several, whose scores are averaged (GraNd and
            EL2N are means over trained models).
        loader: A dataset with a length, or a DataLoader of one, whose batch size,
            collation and workers are used; its order and sampler are not. Blocks are
            collated, not batches.
        score: ``"grad_norm"`` (``"grand"`` is another name); ``"egl"``, the same with
            expected labels; ``"last_layer_grad_norm"``; ``"el2n"``; ``"loss"``.
        labels: ``"given"`` in the pool; ``"pseudo"``: the model's most probable;
            ``"expected"``: averaged over all classes by the model's probabilities,
            one pass per class.
        loss: From logits and targets to ``(B,)``.
        split: From a collated block to inputs and targets, or None for these. Without
            it: a tensor is inputs alone, a pair is ``(inputs, targets)``, a dict has
            targets under ``"labels"`` or ``"label"``.
        forward: From model and inputs to logits. Without it: ``model(tensor)``,
            ``model(**dict)`` or ``model(*tuple)``, and ``.logits`` of what comes back.
        last_layer: Name of the module for ``"last_layer_grad_norm"``; None: the last
            one called.
        batch_size: Samples that a replica loads and moves together, rounded up to
            whole blocks; no score depends on it. None: the DataLoader's, or a block.
        block_size: Samples in one forward pass: memory and speed depend on it, and
            scores up to rounding.
        autocast: Run forward passes in this dtype.
        folder: Keep what is scored here, and go on from there when called again, with
            any batch size and number of replicas if all of them see it.
        part_size: Samples that are kept together, rounded up to whole blocks: what a
            replica loses when it is killed.
        progress: Show a bar, on one replica.
        **options: For `capture`; no ``params`` for ``"last_layer_grad_norm"``.

    Returns:
        All scores, on every replica.

    Raises:
        ValueError: An option is not one of those allowed, or ``folder`` holds scores
            of something else.
        TypeError: The dataset has no length, or a batch is nothing that is understood.
    """
    labels = "expected" if score == "egl" else labels
    _check_options(score, labels, part_size, options)
    source = source_of(loader, batch_size, block_size, split)
    whole = -(-part_size // block_size) * block_size
    parts = Parts(len(source), whole, Path(folder) if folder is not None else None)
    models = [model] if isinstance(model, nn.Module) else list(model)
    if folder is not None:
        dtype = None if autocast is None else str(autocast)
        told = {"score": score, "labels": labels, "autocast": dtype}
        told |= {"last_layer": last_layer, "loss": name_of(loss)}
        told |= {"split": name_of(split), "forward": name_of(forward)}
        told |= {"block_size": block_size}
        parts.describe({**told, **_described(models, source.dataset, score, options)})
    replica = xla_replica.current()
    scorings = [
        Scoring(
            model=one,
            forward=forward,
            loss=loss,
            block_size=block_size,
            last_layer=last_layer,
            autocast=autocast,
            device=replica.device.type,
            cut=replica.sync,
            compiles=replica.is_lazy,
            options=options,
        )
        for one in models
    ]
    run = Run(replica, source, parts, score, labels, scorings, progress)
    with _evaluating(models):
        return PoolScores(run.all_scores(), score)


def _check_options(
    score: str, labels: str, part_size: int, options: dict[str, Any]
) -> None:
    if score not in SCORES:
        raise ValueError(f"score={score!r}; allowed are {', '.join(SCORES)}")
    if labels not in LABELS:
        raise ValueError(f"labels={labels!r}; allowed are {', '.join(LABELS)}")
    if part_size < 1:
        raise ValueError(f"part_size={part_size} samples; give at least 1")
    if score == "last_layer_grad_norm" and options.get("params") is not None:
        raise ValueError(
            'params= beside score="last_layer_grad_norm", which is of all parameters '
            'of one layer; name the layer with last_layer=, or take score="grad_norm"'
        )


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
