"""`CustomSampler`: deals the minibatches of every step to replicas."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

import xla_replica
from variable_batch_size.data.sampler_state import (
    VERSION,
    Place,
    check_fingerprint,
    check_state_keys,
    fingerprint,
    place_in,
)
from variable_batch_size.data.schedule import (
    EpochPlan,
    Schedule,
    check_positive_integer,
)
from variable_batch_size.traces.batch_trace import Trace, TraceSource

logger = logging.getLogger(__name__)

OrderProvider = Callable[[int], Sequence[int]] | Iterable[int]


class CustomSampler(Sampler[list[int]]):
    """A batch sampler whose global batch size follows a trace.

    Give it to a DataLoader as ``batch_sampler``. Each item is one minibatch of this
    replica: ``minibatch_size`` dataset indices. Replicas may get different numbers of
    minibatches in a step, and none where the step has fewer than there are replicas;
    the optimizer wrapper, which reads the same plan, keeps them together.

    Which samples a step uses depends on trace, seed and epoch alone, never on the
    number of replicas. So a state is an epoch and a step of it, and can be restored on
    any number of replicas. It is that of the last update the optimizer wrapper has
    made, whatever a prefetching loader has handed out since.

    Args:
        dataset: Anything with a length; or give ``dataset_size``.
        trace: See `Trace`.
        seed: Epoch e is shuffled by ``torch.randperm`` seeded with ``seed + e``.
        num_replicas: Default: of the replica that the caller runs in.
        rank: Default: of the replica that the caller runs in.
        minibatch_size: Samples in a minibatch, the shape the model sees.
        verbose: Log a summary at level INFO on rank 0.
        dataset_size: Number of samples, in place of ``dataset``.
        order: In place of the shuffle: a function from the epoch to a permutation of
            ``range(num_samples)``, or an iterable (such as a torch Sampler) that is
            iterated once an epoch. Must be the same on every replica.
        on_end: What follows the trace's last step; see `Schedule`.

    Raises:
        TraceError: The trace is bad or does not fit dataset and minibatch size.
        ValueError, TypeError: Another argument is.
    """

    def __init__(
        self,
        dataset: Any = None,
        trace: TraceSource | None = None,
        seed: int = 42,
        num_replicas: int | None = None,
        rank: int | None = None,
        minibatch_size: int = 32,
        verbose: bool = True,
        *,
        dataset_size: int | None = None,
        order: OrderProvider | None = None,
        on_end: str = "stop",
    ) -> None:
        if trace is None:
            raise TypeError("CustomSampler needs trace=, the batch size of every step")
        if num_replicas is None or rank is None:
            replica = xla_replica.current()
            num_replicas = (
                replica.num_replicas if num_replicas is None else num_replicas
            )
            rank = replica.rank if rank is None else rank
        check_positive_integer("num_replicas", num_replicas)
        if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
            raise TypeError(f"rank must be an integer, got {rank!r}")
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank={rank}; allowed are 0 to {num_replicas - 1}")
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise TypeError(f"seed must be an integer, got {seed!r}")
        if isinstance(order, Iterator):
            raise TypeError(
                "order= is an iterator, which one epoch uses up: pass a function from "
                "the epoch to an order, or an iterable such as a torch Sampler"
            )
        self.seed = int(seed)
        self.num_replicas = int(num_replicas)
        self.rank = int(rank)
        self.schedule = Schedule(
            Trace(trace), _num_samples(dataset, dataset_size), minibatch_size, on_end
        )
        self._order = order
        self._verbose = verbose
        self._committed: Place | None = None
        self._restored: Place | None = None
        self._order_digests: dict[int, str] = {}  # of the epoch under way
        self.set_epoch(0)

    @property
    def epoch(self) -> int:
        """The epoch that iterating yields now."""
        return self.plan.epoch

    @property
    def minibatch_size(self) -> int:
        """Samples in a minibatch."""
        return self.schedule.minibatch_size

    @property
    def num_epochs(self) -> float:
        """Epochs with at least one step: an integer, or ``math.inf``."""
        return self.schedule.num_epochs

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration yields.

        Of the epoch at which a restored run stands, what is left.

        Raises:
            TraceExhausted: The trace has ended and ``on_end='error'``.
            ValueError: A restored run stands in a later epoch.
        """
        self.plan: EpochPlan = self.plan_of(epoch)
        if self.plan.num_steps == 0:
            logger.warning(
                "epoch %d is empty: %s ended after %d steps",
                epoch,
                self.schedule.trace.name,
                len(self.schedule.trace),
            )
        elif self._verbose and self.rank == 0:
            logger.info(
                "epoch %d: %d steps from step %d on, %d of %d samples dropped",
                epoch,
                self.plan.num_steps - self.plan.start_step,
                self.plan.first_step + self.plan.start_step,
                self.plan.num_dropped_samples,
                self.plan.num_samples,
            )

    def plan_of(self, epoch: int) -> EpochPlan:
        """The plan of an epoch, from the step on at which a restored run stands in it.

        Raises:
            TraceExhausted, ValueError: See `set_epoch`.
        """
        plan = self.schedule.plan(epoch, self.num_replicas)
        restored = self._restored
        if restored is None or plan.epoch > restored.epoch:
            return plan
        if plan.epoch < restored.epoch:
            raise ValueError(
                f"set_epoch({epoch}): the restored run stands in epoch "
                f"{restored.epoch}; begin there, with "
                "`for epoch in range(sampler.epoch, num_epochs)`"
            )
        return dataclasses.replace(plan, start_step=restored.step)

    def commit(self, epoch: int, step: int) -> None:
        """Notes that the first ``step`` steps of ``epoch`` are done.

        The optimizer wrapper does so after every update; a loop without one may.
        """
        self._committed = Place(epoch, step)
        if self._restored is None:
            return
        first, end = self.schedule.steps(epoch)
        if epoch > self._restored.epoch or step >= end - first:
            self._restored = None  # another pass over that epoch is a whole one

    def state_dict(self) -> dict[str, Any]:
        """Integers and strings; no number of replicas.

        ``epoch`` and ``step``: the place behind the last committed update; ``order``: a
        digest of that epoch's order, if this replica has begun to run it.
        ``fingerprint``: what a run must have in common with this one to go on with it.
        """
        place = self._committed or Place(self.plan.epoch, self.plan.start_step)
        return {
            "version": VERSION,
            **place._asdict(),
            "order": self._order_digests.get(place.epoch),
            "fingerprint": self._fingerprint(),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_changes: bool = False
    ) -> None:
        """Goes on where `state_dict` was taken, on any number of replicas.

        The next iteration yields what is left of that epoch.

        Args:
            state: What `state_dict` gave.
            allow_changes: Take it although trace, dataset length, minibatch size or
                seed have changed; the steps done count, whatever samples they used.

        Raises:
            ValueError: They have changed, or there is no such step.
        """
        place = self.check_state(state, allow_changes)
        self._restored = self._committed = place
        digest = None if allow_changes else state.get("order")
        self._order_digests = {place.epoch: digest} if digest else {}
        self.set_epoch(place.epoch)

    def check_state(self, state: Mapping[str, Any], allow_changes: bool) -> Place:
        """Raises ValueError unless `load_state_dict` can take it; changes nothing."""
        check_state_keys(state)
        check_fingerprint(state["fingerprint"], self._fingerprint(), allow_changes)
        return place_in(state, self.schedule)

    def _fingerprint(self) -> dict[str, Any]:
        return fingerprint(self.schedule, self.seed, self._order is not None)

    def __len__(self) -> int:
        """Minibatches that this replica yields in this epoch."""
        return len(self.plan.minibatches(self.rank))

    def __bool__(self) -> bool:
        return True  # a sampler without minibatches is still a sampler

    def __iter__(self) -> Iterator[list[int]]:
        plan = self.plan
        order, size = self._epoch_order(plan.epoch), plan.minibatch_size
        self._check_order(plan, order)
        for minibatch in plan.minibatches(self.rank):
            yield order[minibatch * size : (minibatch + 1) * size].tolist()

    def _check_order(self, plan: EpochPlan, order: np.ndarray) -> None:
        """What is left of a restored epoch must be left of the same order."""
        digest = hashlib.sha256(np.ascontiguousarray(order, "<i8")).hexdigest()[:16]
        expected = self._order_digests.get(plan.epoch, digest)
        if plan.start_step and digest != expected:
            raise ValueError(
                f"epoch {plan.epoch} is gone on with behind step {plan.start_step}, "
                "and its order is another one: order= must be a function of the epoch, "
                "or have a state that is restored with the sampler's; if it is "
                "shuffled, this torch shuffles otherwise"
            )
        self._order_digests = {plan.epoch: digest}

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """``(num_samples,)`` int64: the permutation of this epoch."""
        num_samples = self.schedule.num_samples
        if self._order is None:
            generator = torch.Generator()
            generator.manual_seed(self.seed + epoch)
            return torch.randperm(num_samples, generator=generator).numpy()
        provided = self._order(epoch) if callable(self._order) else self._order
        order = np.asarray(
            provided
            if isinstance(provided, (np.ndarray, torch.Tensor))
            else [*provided]
        )
        is_permutation = (
            order.shape == (num_samples,)
            and order.dtype.kind in "iu"
            and bool((np.sort(order) == np.arange(num_samples)).all())
        )
        if not is_permutation:
            raise ValueError(
                f"order= gave an array of shape {order.shape} and dtype {order.dtype} "
                f"for epoch {epoch}; it must be a permutation of range({num_samples})"
            )
        return order


def _num_samples(dataset: Any, dataset_size: int | None) -> int:
    if (dataset is None) == (dataset_size is None):
        raise TypeError("CustomSampler needs either dataset= or dataset_size=")
    if dataset_size is not None:
        check_positive_integer("dataset_size", dataset_size)
        return int(dataset_size)
    try:
        return len(dataset)
    except TypeError as error:
        raise TypeError(
            f"dataset={dataset!r} has no length; pass a dataset with __len__, or "
            "dataset_size= for the number of samples"
        ) from error
