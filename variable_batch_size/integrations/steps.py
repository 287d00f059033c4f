"""Steps of a trace in the shapes in which trainers know their own.

What a trainer takes for a batch is a whole step of the trace: the list of the
minibatches that this replica has in it, which may be empty. A trainer's loop then runs
once per update on every replica. Nothing here needs a library.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optimizer import ElasticOptimizer


class Minibatches(list[Any]):
    """This replica's minibatches of one step: what callbacks get as the batch."""


class StepOptimizer(ElasticOptimizer):
    """Makes one update whenever a trainer counts one, on every process.

    Attributes:
        weight: Of the minibatch under way, with ``reduction='sum'``.
    """

    # What Accelerate asks of an optimizer that it need not wrap.
    _is_accelerate_prepared = True
    step_was_skipped = False

    weight: Any = None

    def end_minibatch(self) -> None:
        """Ends a minibatch; the step's last one on this process makes the update."""
        super().step(weight=self.weight)

    def step(self, closure: Any = None, *, weight: None = None) -> Any:
        """Makes an update; ``closure`` runs its minibatches, and leaves the last open.

        Returns what that returns. Does nothing without one: Hugging Face's trainer
        calls it after ``training_step``, which has made the update.
        """
        if closure is None:
            return None
        result = closure()
        (self.join_step if self.is_idle else self.end_minibatch)()
        return result


class Steps:
    """Yields the `Minibatches` of every step of an epoch that is left.

    Attributes:
        loader: What ``DataLoader(..., batch_sampler=sampler)`` has returned.
        batches: Its sampler.
    """

    loader: DataLoader[Any]
    batches: CustomSampler

    def begin(self, epoch: int, optimizer: Any, num_updates: int) -> None:
        """Begins an epoch, also of a dataset that wants to know, as SeededDataset.

        Raises ValueError unless the trainer has counted as many updates as are done.
        """
        sampler, done = self.batches, self.batches.ledger.global_step
        sampler.set_epoch(epoch)
        plan = sampler.plan
        if not done == num_updates == plan.first_step + plan.start_step:
            raise ValueError(
                f"the trainer begins epoch {epoch} after {num_updates} updates, the "
                f"sampler has {done}: load an elastic checkpoint, or build both anew"
            )
        optimizer.set_epoch(epoch)
        dataset: Any = self.loader.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Minibatches]:
        plan, source = self.batches.plan, iter(self.loader)
        for num in plan.num_substeps(self.batches.rank)[plan.start_step :].tolist():
            text = "change_batch_size within an epoch: replay the decided trace"
            refuse(text, self.batches.plan is not plan)
            yield Minibatches(itertools.islice(source, num))


def refuse(option: str, is_set: Any) -> None:
    """Raises ValueError if an option of a trainer is set that a trace cannot carry.

    Args:
        option: Its name, and what to do instead.
        is_set: Whether it is set.
    """
    if is_set:
        raise ValueError(f"not supported under a trace: {option}")
