"""`CustomSampler`: deals the minibatches of every step to replicas."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

import xla_replica
from variable_batch_size.data.lazy_orders import LazyOrder
from variable_batch_size.data.minibatches import Minibatches, loader_in
from variable_batch_size.data.schedule import Cursor, EpochPlan, OnEnd, Schedule
from variable_batch_size.traces.batch_trace import Trace, TraceSource
from xla_replica.common.arguments import check_flag, check_integer
from xla_replica.common.differences import check_same

logger = logging.getLogger(__name__)

VERSION = 2  # of the state
OrderProvider = Callable[[int], Sequence[int]] | Iterable[int] | LazyOrder


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
            of it travels with the gradients. If it has a method ``follow_weights``,
            as `grab_xla.GraBSampler` has, that is given `update_weights`. A
            `LazyOrder`, such as `IndexShuffle`, is never in memory as a whole. A
            dataset with a method ``check_order``, as `BlockDataset` has, may refuse it.
        on_end: What follows the trace's last step; see `Schedule`.
        pad_minibatches: Allow batch sizes that are not multiples of ``minibatch_size``.
            The last minibatch of a step is then filled up with samples of its own,
            which `ElasticOptimizer.sample_weights` marks with zeros.

    Attributes:
        plan: The plan of the epoch that iterating yields now.
        schedule: The trace, cut into epochs.
        order: As it was given.
        num_yielded: Minibatches that all iterations have yielded so far.
        loops: Weak references to the newest update loop of every optimizer, by the id
            of its first parameter.
        waiting: Update loops that have ended the step under way, while loops of other
            optimizers of this sampler have not.
        newest_pass: The iteration that was made last; None before the first.
        begun: That which dealt its first minibatch last.
        on_handing_out: Called before a minibatch is loaded, and again before it is run
            if it was fetched ahead; in the threads in which that happens.
        redone: Where the last `redeal` went back to, another object each time.
        moved: Where the last `deal_to` went; iterations of epochs before it have ended.
        dataset_length: The length of ``dataset``; None with ``dataset_size``.

    Raises:
        TraceError: The trace is bad or does not fit the dataset and minibatch size.
        ValueError, TypeError: Another argument is out of range, or of the wrong type.
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
        on_end: OnEnd = "stop",
        pad_minibatches: bool = False,
    ) -> None:
        if trace is None:
            raise TypeError("CustomSampler needs trace=, the batch size of every step")
        if num_replicas is None or rank is None:
            replica = xla_replica.current()
            rank = replica.rank if rank is None else rank
            if num_replicas is None:
                num_replicas = replica.num_replicas
        if isinstance(order, Iterator):
            raise TypeError(
                "order= is an iterator: pass a function from the epoch to an order"
            )
        self.seed = check_integer("seed", seed, -(2**63), 2**63)  # as torch has it
        self.num_replicas = check_integer("num_replicas", num_replicas, least=1)
        self.rank = check_integer("rank", rank, 0, self.num_replicas - 1)
        trace = Trace(trace)
        if (dataset is None) == (dataset_size is None):
            raise TypeError("CustomSampler needs either dataset= or dataset_size=")
        if dataset_size is not None:
            num_samples = check_integer("dataset_size", dataset_size, least=1)
            self.dataset_length: int | None = None
        else:
            if isinstance(dataset, DataLoader):
                raise TypeError(
                    "give the dataset of a DataLoader, whose length counts batches"
                )
            try:
                num_samples = len(dataset)
            except TypeError as error:
                raise TypeError(
                    f"dataset={dataset!r} has no length; pass dataset_size="
                ) from error
            self.dataset_length = num_samples
        self.schedule = Schedule(
            trace, num_samples, minibatch_size, on_end, pad_minibatches
        )
        self._first_schedule = self.schedule  # without what `change_from` has changed
        self._changes: list[list[int]] = []  # (step, batch size)
        # Held while a minibatch is dealt; loaders do that in threads of their own.
        self._dealing = threading.Lock()
        self._dealt = -1  # the last step whose batch size this replica has used
        self.order = order
        self._verbose = check_flag("verbose", verbose)
        self._committed: Cursor | None = None
        self._restored: Cursor | None = None
        self._order_digests: dict[int, str] = {}  # of the epoch under way
        self._padded = False
        self._weights: dict[int, float] | None = None  # by batch size
        self.num_yielded = 0
        self.loops: dict[int, weakref.ref[Any]] = {}
        self.waiting: list[Any] = []
        self.redone: Cursor | None = None
        self.moved: Cursor | None = None
        self.newest_pass: Minibatches | None = None
        self.begun: Minibatches | None = None
        self.on_handing_out: Callable[[], object] = tuple  # nothing
        self.plan: EpochPlan = self.plan_of(0)
        if isinstance(order, type):
            raise TypeError(
                f"order={order.__name__} is a class: give {order.__name__}(...)"
            )
        if isinstance(order, LazyOrder) and order.length not in (None, num_samples):
            raise ValueError(
                f"order={order.name} is of {order.length} samples, and the dataset has "
                f"{num_samples}: make it for this dataset"
            )
        if hasattr(dataset, "check_order"):
            dataset.check_order(order)
        if order is not None and hasattr(order, "follow_weights"):
            order.follow_weights(self.update_weights)

    def __repr__(self) -> str:
        epoch, step, *_ = self.cursor
        return (
            f"CustomSampler({self.schedule.num_samples} samples, "
            f"{self.schedule.trace!r}, minibatch_size={self.minibatch_size}, "
            f"seed={self.seed}, rank={self.rank} of {self.num_replicas}, "
            f"at epoch={epoch}, step={step})"
        )

    @property
    def epoch(self) -> int:
        """The epoch that iterating yields now."""
        return self.plan.epoch

    @property
    def cursor(self) -> Cursor:
        """Where the run is: the steps that are done, not what a loader prefetches."""
        return self._committed or Cursor(self.plan.epoch, self.plan.start_step)

    @property
    def minibatch_size(self) -> int:
        """Samples in a minibatch."""
        return self.schedule.minibatch_size

    @property
    def num_epochs(self) -> float:
        """Epochs with at least one step: an integer, or ``math.inf``."""
        return self.schedule.num_epochs

    def num_updates(self, num_epochs: int) -> int:
        """Returns how many updates so many epochs have, or those that the trace has."""
        last = int(min(check_integer("num_epochs", num_epochs, 1), self.num_epochs))
        return self.schedule.steps(last - 1).stop

    def add_loop(self, loop: Any, parameter: Any) -> None:
        """Notes the newest update loop of a parameter; it counts while it is alive."""
        self.loops[id(parameter)] = weakref.ref(loop)

    @property
    def num_optimizers(self) -> int:
        """How many optimizers there are that were built with it."""
        return sum(each() is not None for each in self.loops.values())

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration yields, or what is left of it.

        Raises TraceExhausted if the trace has ended and ``on_end='error'``, and
        ValueError if a restored run is in a later epoch.
        """
        self.plan = self.plan_of(epoch)
        plan, trace = self.plan, self.schedule.trace
        if plan.num_steps == 0:
            logger.warning(
                f"epoch {epoch} is empty: {trace.name} ended after {len(trace)} steps"
            )
        elif self._verbose and self.rank == 0:
            logger.info(
                f"epoch {epoch}: {plan.num_steps - plan.start_step} steps from step "
                f"{plan.first_step + plan.start_step} on, {plan.num_dropped_samples} "
                f"of {plan.num_samples} samples dropped"
            )

    def plan_of(self, epoch: int) -> EpochPlan:
        """Returns the plan of an epoch from where it resumes; raises as `set_epoch`."""
        restored, start_step = self._restored, 0
        if restored is not None and epoch <= restored.epoch:
            if epoch < restored.epoch:
                raise ValueError(
                    f"set_epoch({epoch}): the restored run is in epoch "
                    f"{restored.epoch}; begin with range(sampler.epoch, num_epochs)"
                )
            start_step = restored.step
        return self._plan(self.schedule, epoch, start_step)

    def _plan(self, schedule: Schedule, epoch: int, start_step: int = 0) -> EpochPlan:
        plan = schedule.plan(epoch, self.num_replicas)
        return dataclasses.replace(plan, start_step=start_step, padded=self._padded)

    def follow_rule(
        self, lr_factor: Callable[[float], float], ref_batchsize: int
    ) -> None:
        """Notes how the learning rate follows the batch ratio; see `update_weights`."""
        sizes = np.unique(self.schedule.trace.batch_sizes).tolist()
        ratios = {size: size / ref_batchsize for size in sizes}
        weights = {size: lr_factor(r) / r for size, r in ratios.items()}
        self._weights = weights if len(set(weights.values())) > 1 else None

    def update_weights(self, epoch: int) -> np.ndarray | None:
        """Returns what every sample's gradient is multiplied by in its update.

        ``(num_samples,)`` float64, by position in the epoch's order; one in a step of
        the reference batch size. The loss is a mean over the step, so it is the LR
        rule's factor over the batch ratio. None if that is the same for all steps of
        the trace, as with the linear rule, or if the factor is measured.
        """
        if self._weights is None:
            return None
        plan = self.schedule.plan(epoch, self.num_replicas)
        sizes = plan.batch_sizes
        weights = np.ones(plan.num_samples)  # also of samples that no step uses
        of_steps = [self._weights[size] for size in sizes.tolist()]
        weights[: sizes.sum()] = np.repeat(of_steps, sizes)
        return weights

    def pad_steps(self) -> None:
        """Yields every replica as many minibatches in each step as replica 0.

        Those that it adds are padding, see `EpochPlan.num_real_samples`. The optimizer
        wrapper asks for it where every replica must run every pass.
        """
        self._padded = True
        self.plan = dataclasses.replace(self.plan, padded=True)

    def look(self, plan: EpochPlan, next_step: Callable[[EpochPlan], int]) -> EpochPlan:
        """Returns a pass's plan as it is now, and notes its next step as looked at."""
        with self._dealing:
            plan = self.plan if self.plan.epoch == plan.epoch else plan
            # The step that does not fit is looked at, too.
            self._dealt = max(self._dealt, plan.first_step + next_step(plan))
        return plan

    @contextlib.contextmanager
    def dealing_paused(self) -> Iterator[int]:
        """Deals nothing in the block; gives the last step that was looked at so far.

        Steps are numbered since training began. A loader that reads ahead waits.
        """
        with self._dealing:
            yield self._dealt

    def change_from(self, step: int, batch_size: int) -> None:
        """Changes the batch size from ``step`` on, which nobody may have looked at.

        Call `ElasticOptimizer.change_batch_size`, which finds such a step. Changes are
        part of the state. Raises as `Schedule.changed`.
        """
        self.schedule = self.schedule.changed(step, batch_size)
        self._changes.append([step, batch_size])
        self.plan = self.replanned(self.plan)

    def replanned(self, plan: EpochPlan) -> EpochPlan:
        """Returns a plan with the batch sizes that its steps have now."""
        return self._plan(self.schedule, plan.epoch, plan.start_step)

    def redeal(self, epoch: int, step: int) -> None:
        """Deals a step, the one under way, and what follows once more.

        Iterations go back when they are next asked, after their end too. What loaders
        have fetched ahead is dropped by `xla_replica.Replica.loader`.
        """
        self.redone = Cursor(epoch, step)

    def deal_to(self, rank: int, num_replicas: int, cursor: Cursor) -> None:
        """Goes on as another replica, from a cursor on, as `redeal` does."""
        self.rank, self.num_replicas = rank, num_replicas
        self._restored = cursor
        # The next epoch, where the script has chosen that already.
        self.plan = self.plan_of(max(cursor.epoch, self.plan.epoch))
        self.redone = self.moved = cursor

    def commit(self, epoch: int, step: int) -> None:
        """Notes, after every update, that ``step`` steps of ``epoch`` are done."""
        self._committed = Cursor(epoch, step)
        if self._restored is None:
            return
        if epoch > self._restored.epoch or step >= len(self.schedule.steps(epoch)):
            self._restored = None  # another pass over that epoch is a whole one

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
        if self.newest_pass is None or not self.newest_pass.is_being_restored:
            self.place_at(state, allow_changes)

    def place_at(self, state: Mapping[str, Any], allow_changes: bool) -> None:
        """Resumes at a state's cursor, which is then where the run is."""
        self._committed = self.resume_at(state, allow_changes)

    @property
    def is_placed(self) -> bool:
        """Whether updates or a loaded state say where the run is."""
        return self._committed is not None

    def resume_at(
        self, state: Mapping[str, Any], allow_changes: bool = False
    ) -> Cursor:
        """Yields the minibatches after a state's cursor next; returns that."""
        cursor = self.check_state(state, allow_changes)
        self.schedule = self._schedule_of(state)
        self._changes = [[*change] for change in state["changes"]]
        self._dealt = -1
        self._restored = cursor
        # At step 0 no order is fixed.
        is_of_epoch = cursor.step > 0 and not allow_changes and bool(state["order"])
        self._order_digests = {cursor.epoch: state["order"]} if is_of_epoch else {}
        self.plan = self.plan_of(cursor.epoch)
        return cursor

    def plan_after(self, state: Mapping[str, Any]) -> EpochPlan:
        """Returns the plan of a state's epoch, with the batch sizes that it tells."""
        return self._plan(self._schedule_of(state), state["epoch"])

    def check_state(self, state: Mapping[str, Any], allow_changes: bool) -> Cursor:
        """Returns the saved cursor; raises ValueError if it cannot be loaded."""
        if state.get("version") != VERSION:
            raise ValueError(
                f"the sampler's state has version {state.get('version')!r}, and this "
                f"library reads {VERSION}: pass a state_dict(), got {sorted(state)}"
            )
        if not allow_changes:
            check_same(
                state["fingerprint"],
                self.fingerprint(),
                "the sampler's state is of another run",
                "Restore it with the arguments it had, or pass allow_changes=True to "
                "resume at the same step with these",
            )
        epoch, name = state["epoch"], f"the state's step of epoch {state['epoch']}"
        num_steps = len(self._schedule_of(state).steps(epoch))
        return Cursor(epoch, check_integer(name, state["step"], 0, num_steps))

    def _schedule_of(self, state: Mapping[str, Any]) -> Schedule:
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
        batching = names.get("self")
        sampler = getattr(batching, "sampler", None)
        if isinstance(batching, BatchSampler) and sampler is self:
            raise TypeError(
                "CustomSampler yields whole minibatches: pass it as batch_sampler="
            )
        if getattr(batching, "num_processes", 1) > 1:  # Accelerate's BatchSamplerShard
            raise TypeError(
                f"{type(batching).__name__} would deal the minibatches of this replica "
                "to all processes once more: CustomSampler deals them to replicas "
                "itself, so leave its loader out of accelerator.prepare(...)"
            )
        if self.newest_pass is None or not self.newest_pass.resumes:
            self.newest_pass = Minibatches(self, loader_in(names, self))
        return self.newest_pass

    def order_of(self, plan: EpochPlan) -> Callable[[np.ndarray], np.ndarray]:
        """Returns a function from positions in an epoch's order to their samples.

        Raises ValueError if it is not an order, or not the one that was saved.
        """
        order, num_samples = self.order, plan.num_samples
        samples_at: Callable[[np.ndarray], np.ndarray]
        if isinstance(order, LazyOrder):
            digest = order.digest(plan.epoch, num_samples)
            samples_at = functools.partial(
                order.checked_samples, plan.epoch, num_samples
            )
        else:
            whole = self._epoch_order(plan.epoch)
            samples_at = whole.__getitem__
            content = whole.astype("<i8").tobytes()
            digest = hashlib.sha256(content).hexdigest()[:16]
        expected = self._order_digests.get(plan.epoch, digest)
        if plan.start_step and digest != expected:
            raise ValueError(
                f"resuming epoch {plan.epoch} after step {plan.start_step}, but its "
                "order differs from the saved one: order= must be a function of the "
                "epoch, or have a state that is restored with the sampler's; "
                "without order=, this version of torch shuffles differently"
            )
        self._order_digests = {plan.epoch: digest}
        return samples_at

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {"_dealing": None, "newest_pass": None}
        own |= {"on_handing_out": tuple, "loops": {}, "waiting": []}
        return vars(self) | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _dealing=threading.Lock())

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Returns the epoch's permutation: ``(num_samples,)`` integers."""
        num_samples = self.schedule.num_samples
        if self.order is None:
            generator = torch.Generator()
            generator.manual_seed(self.seed + epoch)
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
