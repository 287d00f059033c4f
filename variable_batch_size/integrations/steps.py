"""Steps of a trace in the shapes in which trainers know their own.

An optimizer that steps once for every batch; and, for Hugging Face's trainer, a sampler
and a dataset of batches that are lists of minibatches. Nothing here needs a library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset, Sampler

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optimizer import ElasticOptimizer


class StepOptimizer(ElasticOptimizer):
    """Makes one update when a trainer calls `step`, on every process.

    Trainers run callbacks between the last backward pass and that call.

    Attributes:
        weight: Of the minibatch under way, with ``reduction='sum'``.
    """

    # What Accelerate asks of an optimizer that it need not wrap.
    _is_accelerate_prepared = True
    step_was_skipped = False

    weight: Any = None

    def accumulate(self) -> None:
        """Ends a minibatch that is not the step's last one on this process."""
        super().step(weight=self.weight)

    def step(
        self, closure: Callable[[], Any] | None = None, *, weight: None = None
    ) -> Any:
        """Makes the update of the step under way, after what ``closure`` runs of it.

        Returns what that returns.
        """
        result = closure() if closure else None
        if self.is_idle:
            self.join_step()
        else:
            super().step(weight=self.weight)
        return result


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
