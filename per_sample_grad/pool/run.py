"""One replica's share of scoring a pool: reads, scores and keeps parts."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Iterator
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm

import xla_replica
from per_sample_grad.pool.blocks import Interval, Source
from per_sample_grad.pool.parts import Parts, deal
from per_sample_grad.pool.scores import (
    SCORES,
    Scoring,
    expected,
    last_called,
    pseudo,
)

Labels = Literal["given", "pseudo", "expected"]
LABELS: tuple[Labels, ...] = ("given", "pseudo", "expected")


@dataclasses.dataclass
class Run:
    """One replica's share."""

    replica: xla_replica.Replica
    source: Source
    parts: Parts
    score: str
    labels: Labels
    scorings: list[Scoring]
    progress: bool

    def all_scores(self) -> np.ndarray:
        """``(n,)``, this replica's and everybody else's."""
        replica, parts = self.replica, self.parts
        scores = np.zeros(parts.count, dtype=np.float32)
        if not len(parts):
            return scores
        kept = self._kept()
        to_read, to_score = deal(kept, replica.rank)
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
        return self._together(scores)

    def _kept(self) -> np.ndarray:
        """``(num_replicas, parts)`` bool: alike on every replica, as it is now."""
        replica = self.replica
        self.parts.clear_unfinished()
        own = self.parts.kept()
        if replica.num_replicas == 1:
            return own[None]
        everybody = replica.all_gather(torch.from_numpy(own).int().to(replica.device))
        return replica.fetch([everybody])[0].bool().numpy()

    def _together(self, scores: np.ndarray) -> np.ndarray:
        """The sum over replicas, each of which has zeros where others have scores.

        Of the bits as integers: -0.0 and NaN stay what they are.
        """
        replica = self.replica
        if replica.num_replicas == 1:
            return scores
        total = torch.from_numpy(scores.view(np.int32)).to(replica.device)
        replica.all_reduce_([total])
        return replica.fetch([total])[0].numpy().view(np.float32)

    def _blocks(self, intervals: list[Interval]) -> Generator[Any, None, None]:
        """Blocks on the device, loaded ahead, of one interval after the other."""
        for batch in self.replica.loader(self.source.batches(intervals)):
            yield from batch

    def _scored(self, count: int, blocks: Iterator[Any], bar: tqdm[Any]) -> np.ndarray:
        """Scores of the next ``count`` samples; one transfer to the host."""
        found = []
        for inputs, targets in itertools.islice(
            blocks, -(-count // self.source.block_size)
        ):
            found.append(self._values(inputs, targets))
            # All the replicas', about; exact at the end.
            done = self.source.block_size * self.replica.num_replicas
            bar.update(min(done, self.parts.count - bar.n))
        if not self.replica.is_lazy:  # elsewhere a list is one transfer as it is
            found = [torch.cat(found)]
        return torch.cat(self.replica.fetch(found))[:count].numpy()

    def _values(self, inputs: Any, targets: Any) -> torch.Tensor:
        """``(block_size,)`` float32: the mean over the models."""
        each = []
        for number in range(len(self.scorings)):
            each.append(self._values_of(number, inputs, targets))
            self.replica.sync()
        mean = sum(each[1:], each[0]) / len(each)
        self.replica.sync()
        return mean

    def _values_of(self, number: int, inputs: Any, targets: Any) -> torch.Tensor:
        scoring = self.scorings[number]
        if scoring.last_layer is None and self.score == "last_layer_grad_norm":
            name = last_called(scoring, inputs)
            self.replica.sync()
            scoring = dataclasses.replace(scoring, last_layer=name)
            self.scorings[number] = scoring
        function = SCORES[self.score]
        if self.labels == "expected":
            return expected(function, scoring, inputs).float()
        if self.labels == "pseudo":
            targets = pseudo(scoring, inputs)
        if targets is None:
            raise ValueError(
                f'labels="{self.labels}", but the pool\'s batches have no targets; '
                'give pairs (inputs, targets), a dict with "labels", split=, or '
                'labels="pseudo" or "expected"'
            )
        return function(scoring, inputs, targets).float()
