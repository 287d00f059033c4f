"""`CustomSampler`: deals the minibatches of every step to replicas."""

from __future__ import annotations

import functools
import hashlib
import logging
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler

import xla_replica
from variable_batch_size.data.lazy_orders import LazyOrder
from variable_batch_size.data.ledger import Ledger
from variable_batch_size.data.minibatches import Minibatches, loader_in
from variable_batch_size.data.schedule import Cursor, EpochPlan, OnEnd, Schedule
from variable_batch_size.traces.batch_trace import Trace, TraceSource
from xla_replica.common.arguments import check_flag, check_integer
from xla_replica.common.differences import check_same

logger = logging.getLogger(__name__)

VERSION = 2  # of the state
OrderProvider = Callable[[int], Sequence[int]] | Iterable[int] | LazyOrder


def _of_ledger(name: str, doc: str) -> Any:
    """Returns an attribute of a sampler that its ledger has; it cannot be assigned."""
    return property(operator.attrgetter(f"ledger.{name}"), doc=doc)


class CustomSampler(Sampler[list[int]]):
    """A batch sampler whose global batch size follows a trace.

    Pass it to a DataLoader as ``batch_sampler``. Each item is one minibatch of this
    replica: ``minibatch_size`` dataset indices. Replicas may get different numbers of
    minibatches in a step, and none where the step has fewer than there are replicas;
    the optimizer wrapper reads the same plan and keeps them together.

    Which samples a step uses depends on trace, seed and epoch alone. A state is
    therefore an epoch and a step of it, for any number of replicas. It is the state
    after the optimizer wrapper's last update, whatever a loader has prefetched since.

    Args:
        dataset: Anything with a length; or pass ``dataset_size``.
        trace: The global batch size of every step; see `Trace`.
        seed: Epoch e is shuffled by ``torch.randperm`` seeded with ``seed + e``.
        num_replicas, rank: Default: those of the replica that the caller runs in.
        minibatch_size: Samples in a minibatch, the batch size that the model sees.
        verbose: Log a summary of each epoch at level INFO on rank 0.
        dataset_size: Number of samples, in place of ``dataset``.
        order: In place of the shuffle: a function from the epoch to a permutation of
            ``range(num_samples)``, or an iterable (such as a torch Sampler) that is
            iterated once an epoch. It must be the same on every replica: a digest
            of it travels with the gradients. A `LazyOrder`, such as `IndexShuffle`, is
            never in memory as a whole. A dataset with a method ``check_order``, as
            `BlockDataset` has, may refuse it.
        on_end: What follows the trace's last step; see `Schedule`.
        pad_minibatches: Allow batch sizes that are not multiples of ``minibatch_size``.
            The last minibatch of a step is then filled up with samples of its own,
            which `ElasticOptimizer.sample_weights` marks with zeros.

    Attributes:
        seed: As it was given.
        order: As it was given.
        ledger: Which minibatches were dealt, and trained by whom.
        dataset: As it was given.
        dataset_length: The length of ``dataset``; None with ``dataset_size``.

    Raises:
        TraceError: The trace is bad or does not fit the dataset and minibatch size.
        ValueError, TypeError: Another argument is out of range, or of the wrong type.
    """

    schedule: Schedule = _of_ledger("schedule", "The trace, cut into epochs.")
    rank: int = _of_ledger("rank", "The replica that it deals to.")
    num_replicas: int = _of_ledger("num_replicas", "How many replicas share the steps.")
    epoch: int = _of_ledger("epoch", "The epoch that iterating yields now.")
    cursor: Cursor = _of_ledger("cursor", "The steps that are done, not prefetched.")
    minibatch_size: int = _of_ledger("schedule.minibatch_size", "In samples.")
    # An integer, or ``math.inf``.
    num_epochs: float = _of_ledger("schedule.num_epochs", "Epochs that have a step.")

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
        on_end: OnEnd = "stop",
        pad_minibatches: bool = False,
    ) -> None:
        if num_replicas is None or rank is None:
            here = xla_replica.current()
            rank = here.rank if rank is None else rank
            num_replicas = here.num_replicas if num_replicas is None else num_replicas
        if (dataset is None) == (dataset_size is None):
            raise TypeError("CustomSampler needs either dataset= or dataset_size=")
        num_samples = len(dataset) if dataset_size is None else dataset_size
        check_integer("dataset_size", num_samples, least=1)
        if isinstance(order, LazyOrder) and order.length not in (None, num_samples):
            raise ValueError(
                f"order={order.name} is of {order.length} samples, and the dataset has "
                f"{num_samples}: make it for this dataset"
            )
        if hasattr(dataset, "check_order"):
            dataset.check_order(order)
        self.dataset, self.order = dataset, order
        self.dataset_length = None if dataset is None else num_samples
        self.seed = check_integer("seed", seed, -(2**63), 2**63)  # as torch has it
        num_replicas = check_integer("num_replicas", num_replicas, least=1)
        rank = check_integer("rank", rank, 0, num_replicas - 1)
        source: Any = trace  # None is refused
        # Without what `change_from` has changed.
        self._first_schedule = schedule = Schedule(
            Trace(source), num_samples, minibatch_size, on_end, pad_minibatches
        )
        self._changes: list[list[int]] = []  # (step, batch size)
        self.ledger = Ledger(schedule, rank, num_replicas)
        self._verbose = check_flag("verbose", verbose)
        self._order_digests: dict[int, str] = {}  # of the epoch under way
        self._newest: Minibatches | None = None

    def __repr__(self) -> str:
        at = f"rank {self.rank} of {self.num_replicas}, {self.cursor}"
        return f"CustomSampler({self.schedule.trace!r}, {self.fingerprint()}, {at})"

    @property
    def plan(self) -> EpochPlan:
        """The plan of `epoch`, from where a loaded state resumes it."""
        return self.ledger.plan(self.ledger.epoch)

    def num_updates(self, num_epochs: int) -> int:
        """Returns how many updates so many epochs have, or those that the trace has."""
        last = int(min(check_integer("num_epochs", num_epochs, 1), self.num_epochs))
        return self.schedule.steps(last - 1).stop

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration yields, or what is left of it.

        Raises ValueError if a restored run is in a later epoch.
        """
        plan, trace = self.ledger.begin_epoch(epoch), self.schedule.trace
        self.ledger.epoch = epoch
        if plan.num_steps == 0:
            logger.warning(
                f"epoch {epoch} is empty: {trace.name} ended after {len(trace)} steps: "
                "docs/variable_batch_size.md#schedule"
            )
        elif self._verbose and self.rank == 0:
            logger.info(
                f"epoch {epoch}: {plan.num_steps - plan.start_step} steps from step "
                f"{plan.first_step + plan.start_step} on, {plan.num_dropped_samples} "
                f"of {plan.num_samples} samples dropped"
            )

    def change_from(self, step: int, batch_size: int) -> None:
        """Changes the batch size from ``step`` on, which nobody may have looked at.

        Call `ElasticOptimizer.change_batch_size`, which finds such a step. Changes are
        part of the state. Raises as `Schedule.changed`.
        """
        self.ledger.replan(self.schedule.changed(step, batch_size))
        self._changes.append([step, batch_size])

    def state_dict(self) -> dict[str, Any]:
        """Returns the cursor after the last update, for any number of replicas.

        ``order``: a digest of that epoch's order, if this replica has begun to run it;
        ``fingerprint``: what a run must have in common with this one to resume it.
        """
        return {
            "version": VERSION,
            **self.cursor._asdict(),
            "order": self.order_digest(self.cursor.epoch),
            "fingerprint": self.fingerprint(),
            "changes": [*self._changes],
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_changes: bool = False
    ) -> None:
        """Resumes where `state_dict` was called, on any number of replicas.

        Args:
            state: What `state_dict` returned.
            allow_changes: Accept the state although trace, dataset length, minibatch
                size or seed have changed; the steps that are done still count as done.
                Default: ValueError, as always where there is no such step.

        torchdata's StatefulDataLoader calls it, too, with a state that is too old, and
        loads that of `Minibatches` afterwards: the former changes nothing.
        """
        if self._newest is None or not self._newest.is_being_restored:
            self.resume_at(state, allow_changes)

    def resume_at(self, state: Mapping[str, Any], allow_changes: bool = False) -> None:
        """Deals the minibatches after a state's cursor next."""
        cursor = self.check_state(state, allow_changes)
        self._changes = [[*change] for change in state["changes"]]
        # At step 0 no order is fixed.
        is_of_epoch = cursor.step > 0 and not allow_changes and bool(state["order"])
        self._order_digests = {cursor.epoch: state["order"]} if is_of_epoch else {}
        self.ledger.load(self.schedule_of(state), cursor)

    def check_state(self, state: Mapping[str, Any], allow_changes: bool) -> Cursor:
        """Returns the saved cursor; raises ValueError if it cannot be loaded."""
        if state.get("version") != VERSION:
            raise ValueError(
                f"the sampler's state has version {state.get('version')!r}, and this "
                f"library reads {VERSION}: pass a state_dict(), got {sorted(state)}"
            )
        if not allow_changes:
            what = "the sampler's state is of another run"
            remedy = "Restore it with the arguments it had, or pass allow_changes=True"
            check_same(state["fingerprint"], self.fingerprint(), what, remedy)
        epoch, name = state["epoch"], f"the state's step of epoch {state['epoch']}"
        num_steps = len(self.schedule_of(state).steps(epoch))
        return Cursor(epoch, check_integer(name, state["step"], 0, num_steps))

    def schedule_of(self, state: Mapping[str, Any]) -> Schedule:
        """Returns the schedule with the batch sizes that a state tells."""
        schedule = self._first_schedule
        for step, batch_size in state["changes"]:
            schedule = schedule.changed(step, batch_size)
        return schedule

    def order_digest(self, epoch: int) -> str | None:
        """Returns a digest of an epoch's order; None unless its iteration has begun."""
        return self._order_digests.get(epoch)

    def fingerprint(self) -> dict[str, Any]:
        """Returns what decides which samples every step uses, at a constant cost.

        A resumed run must have the same one, and so must every replica.
        """
        schedule, order = self._first_schedule, self.order
        trace, shuffled = schedule.trace, order is None
        given = order.name if isinstance(order, LazyOrder) else "given"
        return {
            "trace": f"{len(trace)} steps, sha256 {trace.digest[:16]}",
            "on_end": schedule.on_end,
            "num_samples": schedule.num_samples,
            "minibatch_size": schedule.minibatch_size,
            "seed": self.seed if shuffled else None,
            "order": "shuffled" if shuffled else given,
            "pad_minibatches": schedule.pad_minibatches,
        }

    def __len__(self) -> int:
        """Returns how many minibatches this replica yields in this epoch."""
        return self.plan.num_remaining(self.rank)

    def __bool__(self) -> bool:
        return True  # a sampler without minibatches is still a sampler

    def __iter__(self) -> Minibatches:
        names = sys._getframe(1).f_locals
        caller = names.get("self")
        sampler = getattr(caller, "sampler", None)
        is_batched = isinstance(caller, BatchSampler) and sampler is self
        # The second is Accelerate's BatchSamplerShard.
        if is_batched or getattr(caller, "num_processes", 1) > 1:
            raise TypeError(
                f"{type(caller).__name__} would deal these minibatches once more: pass "
                "batch_sampler=, and leave the loader out of accelerator.prepare(...)"
            )
        self._newest = Minibatches(self, loader_in(names, self))
        return self._newest

    def order_of(self, plan: EpochPlan) -> Callable[[np.ndarray], np.ndarray]:
        """Returns a function from positions in an epoch's order to their samples.

        Raises ValueError if it is not an order, or not the one that was saved.
        """
        order, size = self.order, plan.num_samples
        samples_at: Callable[[np.ndarray], np.ndarray]
        if isinstance(order, LazyOrder):
            digest = order.digest(plan.epoch, size)
            samples_at = functools.partial(order.checked_samples, plan.epoch, size)
        else:
            whole = self._epoch_order(plan.epoch)
            samples_at = whole.__getitem__
            digest = hashlib.sha256(whole.astype("<i8").tobytes()).hexdigest()[:16]
        if plan.start_step and digest != self._order_digests.get(plan.epoch, digest):
            raise ValueError(
                f"resuming epoch {plan.epoch}, whose order differs from the saved one: "
                "order= must be a function of the epoch, or have a state that is "
                "restored; without it this version of torch shuffles differently"
            )
        self._order_digests = {plan.epoch: digest}
        return samples_at

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Returns the epoch's permutation: ``(num_samples,)`` integers."""
        num_samples = self.schedule.num_samples
        if self.order is None:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            return torch.randperm(num_samples, generator=generator).numpy()
        order: Any = self.order(epoch) if callable(self.order) else self.order
        if not isinstance(order, (np.ndarray, torch.Tensor)):
            order = [*order]
        found = np.asarray(order)
        fits = found.shape == (num_samples,) and found.dtype.kind in "iu"
        if not fits or (np.sort(found) != np.arange(num_samples)).any():
            raise ValueError(
                f"order= must be a permutation of range({num_samples}), got "
                f"{found.dtype} of shape {found.shape} for epoch {epoch}"
            )
        return found
