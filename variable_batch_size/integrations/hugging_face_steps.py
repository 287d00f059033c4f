"""Steps of a trace in the shapes in which Hugging Face's trainer knows its own.

An optimizer that steps once for every batch; and a sampler and a dataset of batches
that are lists of minibatches. Nothing here needs the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optimizer import ElasticOptimizer


class StepOptimizer(ElasticOptimizer):
    """Makes one update when the trainer calls `step`, on every process.

    The trainer runs callbacks between the last backward pass and that call.
    """

    # What Accelerate asks of an optimizer that it need not wrap.
    _is_accelerate_prepared = True
    step_was_skipped = False

    _last_weight: Any = None

    def accumulate(self, weight: torch.Tensor, is_last: bool) -> None:
        """Ends a minibatch, but that of the step's last one is left to `step`."""
        if is_last:
            self._last_weight = weight
        else:
            super().step(weight=weight)

    def step(  # type: ignore[override]
        self, closure: None = None, *, weight: None = None
    ) -> int:
        """Makes the update of the step under way; returns 1."""
        if self.is_idle:
            return self.join_step()
        weight, self._last_weight = self._last_weight, None
        return super().step(closure, weight=weight)

    def change_batch_size(self, batch_size: int) -> int:
        """Raises TypeError: the trainer has been told how many steps there are."""
        raise TypeError(
            f"change_batch_size({batch_size!r}): the trainer counts the steps of the "
            "trace before it trains. Write the change into the trace, or train in a "
            "loop of your own"
        )


class StepSampler(Sampler[list[list[int]]]):
    """Yields, for every step of the epoch, this process's minibatches of it.

    Each item is a list of lists of dataset indices; empty where the process is idle,
    and for steps that a resumed run has done: the trainer skips so many items.
    """

    def __init__(self, sampler: CustomSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[list[int]]]:
        plan = self.sampler.plan
        minibatches = iter(self.sampler)
        for step, number in enumerate(plan.num_substeps(self.sampler.rank).tolist()):
            number = number if step >= plan.start_step else 0
            yield [next(minibatches) for _ in range(number)]

    def __len__(self) -> int:
        return self.sampler.plan.num_steps


class Minibatches(Dataset[Any]):
    """A dataset of minibatches; an index is the list of a minibatch's samples."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitem__(self, samples: list[int]) -> Any:
        many = getattr(self.dataset, "__getitems__", None)
        return self.collate(
            many(samples) if many else [self.dataset[sample] for sample in samples]
        )
