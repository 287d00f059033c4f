"""Scoring a large pool of samples: fixed shapes, constant memory, resumable."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import xla_replica
from per_sample_grad.engine.capturing import capture
from per_sample_grad.engine.settings import listed, selected
from per_sample_grad.factors.factors import Factors
from per_sample_grad.factors.projection import Projection
from per_sample_grad.pool import blocks
from per_sample_grad.pool import scores as kinds
from per_sample_grad.pool.fingerprint import fingerprint
from per_sample_grad.pool.parts import Parts
from per_sample_grad.pool.scores import LABELS, SCORES, Score, Scorer, of_gradients
from xla_replica.common.arguments import check_choice, check_integer, check_type
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
        return f"PoolScores({self.name!r} of {len(self)} samples)"

    def top(self, k: int, *, skip_nan: bool = False) -> np.ndarray:
        """Returns the indices of the k highest scores, highest first, ties by index.

        Args:
            k: How many.
            skip_nan: Whether to leave out samples whose score is NaN.

        Raises:
            ValueError: There are not k samples, a score is NaN, or scores are rows.
        """
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


def score_pool(
    model: nn.Module,
    loader: DataLoader[Any] | Dataset[Any],
    *,
    score: str | Callable[[Factors], torch.Tensor] | Projection = "grad_norm",
    labels: str = "given",
    loss: kinds.Loss = kinds.cross_entropy,
    split: blocks.Split = blocks.split_batch,
    forward: kinds.Forward = kinds.call_model,
    batch_size: int | None = None,
    block_size: int = BLOCK_SIZE,
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
    deterministic. Memory grows by one score per sample. The model is on the
    replica's device, in evaluation mode during the call, and in its own after it.

    Args:
        model: Maps inputs to logits.
        loader: A dataset with a length, or a DataLoader of one, whose batch size,
            collation and workers are used; its order and sampler are not. Blocks are
            collated, not batches.
        score: ``"grad_norm"`` (``"grand"`` is another name); ``"egl"``, the same with
            expected labels; ``"el2n"``; ``"loss"``. Or a function that maps the
            `Factors` of a block of B = ``block_size`` samples to a tensor ``(B,)``,
            such as ``lambda factors: factors.dot(direction)``; it gives the samples of
            its block alone, in their order. Or a `Projection` of
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
        batch_size: How many samples a replica loads and moves together, rounded up to
            whole blocks; no score depends on it. None: the DataLoader's, or a block.
        block_size: How many samples one forward pass has: memory and speed depend on
            it, and scores up to rounding.
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
        **options: Options for `capture`, such as ``params``.

    Raises:
        ValueError: An option or a label is not allowed, or ``folder`` holds other
            scores.
        TypeError: The dataset has no length, a batch is of an unknown kind, an option
            is unknown or has the wrong type, or ``tag`` is missing.
        OSError: A part cannot be written; those before it are kept.
        ReplicaError: Replicas have different weights.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    inspect.signature(capture).bind(model, **options)  # another option is a TypeError
    check_type("tag", tag, str | None, "a text or None")
    row, name = _row(score)
    # By the model's own probabilities the mean gradient of a cross entropy is zero.
    allowed = ("given", "pseudo") if row.width else LABELS
    labels = row.labels or check_choice("labels", labels, allowed)
    xla_replica.current().check_device(model.parameters())
    source = blocks.BlockSource(loader, batch_size, block_size, split)
    part_size = source.rounded_up(check_integer("part_size", part_size, least=1))
    scorer = Scorer(model, loss, forward, options, source.block_size)
    run = PoolRun(scorer, source, row, labels)
    run.check_weights()
    parts, intervals = None, source.intervals(part_size)
    if folder is not None:
        function = score if callable(score) else str(score)
        description = {"count": len(source.dataset), "part_size": part_size}
        description |= run.description(name, function, tag)
        parts = Parts(Path(folder), description)
        parts.describe()
    return PoolScores(run.collected(intervals, parts, progress), name)


def _row(
    score: str | Callable[[Factors], torch.Tensor] | Projection,
) -> tuple[Score, str]:
    """Returns a score and its name."""
    if isinstance(score, Projection):
        rows = of_gradients(lambda r, losses: r.project(losses, score), (score.size,))
        return rows, "projection"
    if callable(score):
        row = of_gradients(lambda recorded, losses: score(recorded.backward(losses)))
        return row, getattr(score, "__name__", type(score).__name__)
    others = "a function of Factors or a Projection"
    return SCORES[check_choice("score", score, SCORES, others)], score


@dataclasses.dataclass(frozen=True)
class PoolRun:
    """What is computed for every sample of a pool; call it on every replica.

    Attributes:
        scorer: The model, and what its scores need.
        source: The pool's blocks.
        score: What each sample gets.
        labels: Which targets a block has.
    """

    scorer: Scorer
    source: blocks.BlockSource
    score: Score
    labels: str

    def description(self, name: str, function: Any, tag: str | None) -> dict[str, Any]:
        """Returns all that the numbers depend on, as names and values for JSON."""
        xla_replica.current().sync()  # one program for all weights not computed yet
        own = vars(self.scorer)
        # `check` changes no number, and selected parameters are described by shape.
        options = {**own["options"]}
        params, _ = options.pop("params", None), options.pop("check", None)
        computing = {
            "score function": function,
            "split": self.source.split,
            "collate": self.source.collate,
            **{name: own[name] for name in ("model", "loss", "forward")},
            "options": options,
        }
        if self.score.of_parameters:
            chosen = selected(self.scorer.model, params)
            computing["params"] = str({n: tuple(x.shape) for n, x in chosen.items()})
        return {
            "score": name,
            "labels": self.labels,
            "block_size": self.source.block_size,
            "device": xla_replica.current().device.type,
            "tag": tag,
            "pool": blocks.pool_digest(self.source.dataset, tag),
            **fingerprint(computing, tag),
        }

    def check_weights(self) -> None:
        """Raises ReplicaError unless all replicas have the same weights. Collective."""
        replica = xla_replica.current()
        if replica.num_replicas == 1:
            return
        replica.sync()
        model = self.scorer.model
        own = fingerprint(dict(model.named_parameters()) | dict(model.named_buffers()))
        others = replica.all_gather_object(own)
        differing = [n for n in own if any(o.get(n) != own[n] for o in others)]
        replica.check_agreement(
            f"the weights to score with (of {len(differing)} tensors)",
            {name: own[name] for name in differing[:3]},
            "Their scores would be mixed. Build the model once, before launch, load "
            "the same checkpoint on every replica, or call replica.broadcast_("
            "[*model.parameters(), *model.buffers()]); `with replica.seeded(0):` "
            "builds the same model on every replica.",
        )

    def collected(
        self, intervals: Sequence[blocks.Interval], parts: Parts | None, progress: bool
    ) -> np.ndarray:
        """Returns all replicas' scores, ``(n, *width)`` float32.

        Missing parts are dealt to the replicas in turn, and then those that are kept.

        Args:
            intervals: Those of the parts.
            parts: Where they are kept; None: nowhere.
            progress: Whether one replica shows a progress bar.
        """
        replica, count = xla_replica.current(), len(self.source.dataset)
        numbers = np.zeros((count, *self.score.width), dtype=np.float32)
        kept = np.zeros(len(intervals), dtype=bool)
        if parts is not None:
            kept = replica.all_gather_object(parts.kept(len(intervals)))[0]
        missing = []
        dealt = np.argsort(kept, kind="stable")[replica.rank :: replica.num_replicas]
        for number in dealt.tolist():
            rows = None if parts is None else parts.read(number)
            if rows is None:
                missing.append(number)
            else:
                numbers[slice(*intervals[number])] = rows
        found = sum(high - low for (low, high), done in zip(intervals, kept) if done)
        hidden = not (progress and replica.is_primary)
        with contextlib.ExitStack() as stack:
            for module in self.scorer.model.modules():
                stack.callback(setattr, module, "training", module.training)
            self.scorer.model.eval()
            bar: Any = tqdm(total=count, initial=found, unit="samples", disable=hidden)
            stack.enter_context(bar)
            scored = self._scored(intervals, missing, bar)
            for number, rows in stack.enter_context(contextlib.closing(scored)):
                numbers[slice(*intervals[number])] = rows
                if parts is not None:
                    parts.write(number, rows)
            bar.update(bar.total - bar.n)
        if parts is not None:
            replica.barrier()  # until all of them have kept their parts
            if replica.is_primary:
                parts.clear_unfinished()
        if replica.num_replicas == 1 or not numbers.size:
            return numbers
        # Every replica has zeros for the others' numbers. The bits are summed as
        # integers, so that -0.0 and NaN stay what they are.
        total = torch.from_numpy(numbers.view(np.int32)).to(replica.device)
        replica.all_reduce_([total])
        return replica.fetch([total])[0].numpy().view(np.float32)

    def _scored(
        self, intervals: Sequence[blocks.Interval], missing: Sequence[int], bar: Any
    ) -> Generator[tuple[int, np.ndarray], None, None]:
        """Yields the numbers and the scores of missing parts, loaded ahead."""
        replica, size = xla_replica.current(), self.source.block_size
        batches = self.source.batches([intervals[number] for number in missing])
        loaded = itertools.chain.from_iterable(replica.loader(batches))
        for number in missing:
            start, stop = intervals[number]
            scored = []
            for block in itertools.islice(loaded, -(-(stop - start) // size)):
                scored.append(self._score(*block))
                # An estimate for all the replicas; exact at the end.
                bar.update(min(size * replica.num_replicas, bar.total - bar.n))
            # A lazy device has one transfer for a list, others for one tensor.
            scored = scored if replica.is_lazy else [torch.cat(scored)]
            fetched = [each.numpy() for each in replica.fetch(scored)]
            yield number, np.concatenate(fetched)[: stop - start]

    def _score(self, inputs: Any, targets: Any, given: blocks.Given) -> torch.Tensor:
        """Returns the scores of a block, ``(block_size, *width)`` float32."""
        self.scorer.given = given if self.labels == "given" else None
        with blocks.noted(f"while {given} of the pool were scored"):
            found = LABELS[self.labels](self.score.values, self.scorer, inputs, targets)
        found = found.detach().float()
        xla_replica.current().sync()
        return found
