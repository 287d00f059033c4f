"""Indexing a pool: the projection of every sample's gradient, kept in parts."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from per_sample_grad.engine.settings import selected
from per_sample_grad.factors.projection import Projection
from per_sample_grad.pool import scores as kinds
from per_sample_grad.pool.blocks import BlockSource, Split, split_batch
from per_sample_grad.pool.gradient_index import (
    KEPT,
    GradientIndex,
    checked_index,
    which_finite,
)
from per_sample_grad.pool.parts import INDEXED
from per_sample_grad.pool.running import BLOCK_SIZE, PoolRun, check_options
from per_sample_grad.pool.scores import Passes, Scorer
from xla_replica.common.arguments import check_choice, check_flag

PART_SIZE = 1024
LABELS = ("given", "pseudo")
# Counts changes after which the same projections are rounded in another way, so that
# parts of earlier ones must not be continued.
VERSION = 4
_KEEP = "keep them with keep_nan=True, which search(..., skip_nan=True) leaves out"


def index_pool(
    model: nn.Module,
    loader: DataLoader[Any] | Dataset[Any],
    *,
    size: int,
    seed: int = 0,
    labels: str = "given",
    loss: kinds.Loss = kinds.cross_entropy,
    split: Split = split_batch,
    forward: kinds.Forward = kinds.call_model,
    batch_size: int | None = None,
    block_size: int = BLOCK_SIZE,
    autocast: torch.dtype | None = None,
    folder: str | os.PathLike[str] | None = None,
    part_size: int = PART_SIZE,
    tag: str | None = None,
    keep_nan: bool = False,
    progress: bool = True,
    **options: Any,
) -> GradientIndex:
    """Returns projections of the gradients of all samples; call it on every replica.

    They are those of `Factors.project`, the parameters' one after the other. Blocks,
    bits, kills, replicas and folders are as for `score_pool`.

    Args:
        model: As for `score_pool`, but one.
        loader: As for `score_pool`.
        size: The most numbers that the projection of a sample has; see `Projection`.
        seed: What draws the projection.
        labels: ``"given"`` in the pool, or ``"pseudo"``: the model's most probable.
        loss, split, forward, batch_size, block_size, autocast, tag, progress: As for
            `score_pool`.
        folder: Where to keep the projections: ``4 size`` bytes per sample in parts,
            and what they depend on in pool.json. `open_index` opens it without the
            model. None keeps them in memory, on every replica, for queries and small
            pools.
        part_size: How many samples are kept together, rounded up to whole blocks.
        keep_nan: Whether projections that are not finite are kept, to be left out later
            by ``skip_nan=True``; else they are an error, before their part is kept.
        **options: Options for `capture`, such as ``params``.

    Raises:
        ValueError: An option or a label is not allowed, the pool is empty, a projection
            is not finite, or ``folder`` holds something else.
        TypeError: As for `score_pool`, or there are several models.
        OSError: A part cannot be written; those before it are kept. Or replicas do not
            see the same folder.
        ReplicaError: Replicas have different weights.
    """
    check_options(index_pool, options)
    if not isinstance(model, nn.Module):
        raise TypeError(
            "model must be a torch.nn.Module, got a "
            f"{type(model).__name__}; index several models one after the other, each "
            "in a folder of its own, and add what their searches find"
        )
    check_choice("labels", labels, LABELS)
    check_flag("keep_nan", keep_nan)
    projection = Projection(selected(model, options.get("params")), size, seed=seed)

    def values(scorer: Scorer, inputs: Any, targets: Any) -> torch.Tensor:
        return scorer.answers(inputs, targets, lambda r, x: r.project(x, projection))

    run = PoolRun(
        contents=INDEXED,
        models={"model": model},
        source=BlockSource(loader, batch_size, block_size, split),
        values=values,
        width=(projection.size,),
        settings={
            "size": size,
            "seed": projection.seed,
            "projection version": projection.version,
            "index version": VERSION,
            "dtype": "float32",
            **{KEPT + name: list(kept) for name, kept in projection.kept.items()},
        },
        of_parameters=True,
        labels=labels,
        passes=Passes(loss, forward, autocast, options),
        folder=folder,
        part_size=part_size,
        tag=tag,
        progress=progress,
        check=None if keep_nan else functools.partial(which_finite, remedy=_KEEP),
    )
    if not len(run.source):
        raise ValueError("index_pool: the pool has no samples")
    if folder is not None:
        return checked_index(run.fill(), verify=False)
    rows = run.collected()
    return GradientIndex(run.description, len(rows), lambda number: rows, len(rows))
