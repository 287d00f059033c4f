"""One pass over a pool: scores of all samples, computed and kept in parts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import xla_replica
from per_sample_grad.engine.settings import selected
from per_sample_grad.pool.blocks import BlockSource, Interval, noted, pool_digest
from per_sample_grad.pool.fingerprint import fingerprint
from per_sample_grad.pool.parts import Parts
from per_sample_grad.pool.scores import LABELS, Score, Scorer


@dataclasses.dataclass(frozen=True)
class PoolRun:
    """What is computed for every sample of a pool; call it on every replica.

    Attributes:
        scorers: By the names that messages have for their models.
        source: The pool's blocks.
        score: What each sample gets.
        labels: Which targets a block has.
    """

    scorers: Mapping[str, Scorer]
    source: BlockSource
    score: Score
    labels: str

    def description(self, name: str, function: Any, tag: str | None) -> dict[str, Any]:
        """Returns all that the numbers depend on, as names and values for JSON."""
        xla_replica.current().sync()  # one program for all weights not computed yet
        models = {key: scorer.model for key, scorer in self.scorers.items()}
        shared = vars(next(iter(self.scorers.values())))
        # `check` changes no number, and selected parameters are described by shape.
        options = {**shared["options"]}
        params, _ = options.pop("params", None), options.pop("check", None)
        computing = {
            **models,
            "score function": function,
            "split": self.source.split,
            "collate": self.source.collate,
            **{n: shared[n] for n in ("loss", "forward", "autocast", "last_layer")},
            "options": options,
        }
        if self.score.of_parameters:
            chosen = [selected(model, params) for model in models.values()]
            computing["params"] = [
                str({name: tuple(param.shape) for name, param in each.items()})
                for each in chosen
            ]
        found = {
            "score": name,
            "labels": self.labels,
            "block_size": self.source.block_size,
            "device": xla_replica.current().device.type,
            "tag": tag,
            "pool": pool_digest(self.source.dataset, tag),
        }
        return found | fingerprint(computing, tag)

    def check_weights(self, description: Mapping[str, str]) -> None:
        """Raises ReplicaError unless all replicas have the same weights. Collective."""
        replica = xla_replica.current()
        if replica.num_replicas == 1:
            return
        replica.sync()
        tensors = {
            f"{key}.{name}": tensor
            for key, scorer in self.scorers.items()
            for name, tensor in (
                *scorer.model.named_parameters(),
                *scorer.model.named_buffers(),
            )
        }
        if not tensors.keys() <= description.keys():
            description = fingerprint(tensors)
        own = {name: description[name] for name in tensors}
        others = replica.all_gather_object(own)
        differing = [n for n in own if any(o.get(n) != own[n] for o in others)]
        replica.check_agreement(
            f"the weights to score with ({len(differing)} of {len(own)} parameters and "
            "buffers differ)",
            {name: own[name] for name in differing[:3]},
            "Their scores would be mixed. Build the model once, before launch, load "
            "the same checkpoint on every replica, or call replica.broadcast_("
            "[*model.parameters(), *model.buffers()]); `with replica.seeded(0):` "
            "builds the same model on every replica.",
        )

    def collected(
        self, intervals: Sequence[Interval], parts: Parts | None, progress: bool
    ) -> np.ndarray:
        """Returns all replicas' scores, ``(n, *width)`` float32.

        Args:
            intervals: Those of the parts.
            parts: Where they are kept; None: nowhere.
            progress: Whether one replica shows a progress bar.
        """
        replica, count = xla_replica.current(), len(self.source.dataset)
        numbers = np.zeros((count, *self.score.width), dtype=np.float32)
        kept = np.zeros(len(intervals), dtype=bool)
        with contextlib.ExitStack() as stack:
            if parts is not None:
                kept = replica.all_gather_object(parts.kept(len(intervals)))[0]
                if not kept.all():
                    stack.enter_context(parts.locked())
            self._fill(numbers, intervals, parts, kept, progress)
            if parts is not None:
                replica.barrier()  # until all of them have kept their parts
        if replica.num_replicas == 1 or not numbers.size:
            return numbers
        # Every replica has zeros for the others' numbers. The bits are summed as
        # integers, so that -0.0 and NaN stay what they are.
        total = torch.from_numpy(numbers.view(np.int32)).to(replica.device)
        replica.all_reduce_([total])
        return replica.fetch([total])[0].numpy().view(np.float32)

    def _fill(
        self,
        numbers: np.ndarray,
        intervals: Sequence[Interval],
        parts: Parts | None,
        kept: np.ndarray,
        progress: bool,
    ) -> None:
        """Writes what this replica reads or scores to ``numbers``, ``(n, *width)``.

        Missing parts are dealt to the replicas in turn, and then those that are kept.
        """
        replica, size = xla_replica.current(), self.source.block_size
        missing = []
        dealt = np.argsort(kept, kind="stable")[replica.rank :: replica.num_replicas]
        for number in dealt.tolist():
            rows = None if parts is None else parts.read(number)
            if rows is None:
                missing.append(number)
            else:
                numbers[slice(*intervals[number])] = rows
        done = np.flatnonzero(kept).tolist()
        found = sum(intervals[n][1] - intervals[n][0] for n in done)
        hidden = not (progress and replica.is_primary)
        with contextlib.ExitStack() as stack:
            for scorer in self.scorers.values():
                for module in scorer.model.modules():
                    stack.callback(setattr, module, "training", module.training)
                scorer.model.eval()
            bar: Any = tqdm(
                total=len(numbers), initial=found, unit="samples", disable=hidden
            )
            stack.enter_context(bar)
            blocks = self._blocks([intervals[number] for number in missing])
            stack.enter_context(contextlib.closing(blocks))
            for number in missing:
                start, stop = intervals[number]
                scored = []
                for _ in range(start, stop, size):
                    scored.append(next(blocks))
                    # An estimate for all the replicas; exact at the end.
                    bar.update(min(size * replica.num_replicas, bar.total - bar.n))
                # A lazy device has one transfer for a list, others for one tensor.
                scored = scored if replica.is_lazy else [torch.cat(scored)]
                fetched = [each.numpy() for each in replica.fetch(scored)]
                numbers[start:stop] = rows = np.concatenate(fetched)[: stop - start]
                if parts is not None:
                    parts.write(number, rows)
            bar.update(bar.total - bar.n)

    def _blocks(
        self, intervals: Sequence[Interval]
    ) -> Generator[torch.Tensor, None, None]:
        """Yields the scores of blocks, which are loaded ahead.

        They are means over the models, ``(block_size, *width)`` float32.
        """
        replica = xla_replica.current()
        for batch in replica.loader(self.source.batches(intervals)):
            for inputs, targets, given in batch:
                each = []
                for scorer in self.scorers.values():
                    scorer.given = given if self.labels == "given" else None
                    with noted(f"while {given} of the pool were scored"):
                        labelled = LABELS[self.labels]
                        found = labelled(self.score.values, scorer, inputs, targets)
                        each.append(found.detach().float())
                    replica.sync()
                mean = each[0] if len(each) == 1 else sum(each[1:], each[0]) / len(each)
                replica.sync()
                yield mean
