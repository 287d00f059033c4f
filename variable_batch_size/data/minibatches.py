"""`Minibatches`: one pass of a sampler, whose place a stateful loader can save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from variable_batch_size.data.schedule import Cursor, EpochPlan


class Minibatches(Iterator[list[int]]):
    """What iterating a `CustomSampler` gives: a replica's minibatches, and a state.

    torchdata's StatefulDataLoader asks for the state with every minibatch that it
    fetches, and saves the one that belongs to the last minibatch that it handed out,
    whatever it or its workers have prefetched since. The steps of that state are those
    that were handed out whole: a step that was begun is run again, as everywhere.

    Args:
        sampler: The sampler, which knows plan, order and replica.
        loader: What iterates it: torch's DataLoader, torchdata's, or anything.

    Attributes:
        resumes: Whether iterating the sampler goes on with this pass.

    Raises:
        TypeError: At the first minibatch: the loader would hand out others than these,
            or in another order.
    """

    def __init__(self, sampler: Any, loader: Any = None) -> None:
        self._sampler = sampler
        self._loader = loader
        self._plan = sampler.plan
        self._step, self._substep = self._plan.start_step, 0  # of the next one
        self._samples_at: Callable[[np.ndarray], np.ndarray] | None = None
        self._redone = sampler.redone  # the last redeal that it has followed
        self._num_dealt = self._num_stale = 0
        self._num_asked = self._num_stepped = self._num_handed_out = 0
        self._counted_at = 0  # minibatches that were read at the last step
        self._reads_ahead = True  # unless the first step shows that nobody does
        self.resumes = False

    def __next__(self) -> list[int]:
        sampler, self.resumes = self._sampler, False
        self._num_asked += 1
        samples_at = self._samples_at or self._begin()
        if (redone := sampler.redone) is not self._redone:
            self._step, self._substep = self._place(redone)
            self._num_stale = self._num_dealt
            self._redone = redone  # last: another thread may ask `is_stale`
        # Batch sizes to come may have changed.
        plan = self._plan = sampler.look(self._plan, self._next_step)
        if self._step >= plan.num_steps:
            if not self._reads_ahead and self._thread == threading.get_ident():
                self.refuse_left_out(self._num_asked - 1)
            raise StopIteration
        last = plan.num_minibatches_of(self._step) - 1
        number = min(self._substep * plan.num_replicas + sampler.rank, last)
        self._substep += 1
        self._num_dealt += 1
        sampler.num_yielded += 1
        part = plan.samples_of(self._step, number)
        samples = samples_at(np.arange(part.start, part.stop))
        sampler.on_handing_out()
        return np.resize(samples, sampler.minibatch_size).tolist()

    def _begin(self) -> Callable[[np.ndarray], np.ndarray]:
        """Takes plan and order as they are at the first minibatch's moment."""
        sampler = self._sampler
        sampler.begun, self._thread = self, threading.get_ident()
        check_loader(self._loader, sampler.dataset_length)
        self._loader = None
        plan = self._plan = sampler.plan
        samples_at = self._samples_at = sampler.order_of(plan)
        self._step, self._substep = plan.start_step, 0
        return samples_at

    def _place(self, redone: Cursor) -> tuple[int, int]:
        """Returns step and substep of the next minibatch after a redeal."""
        moved = self._sampler.moved
        if moved is not None and moved.epoch > self._plan.epoch:
            return self._plan.num_steps, 0
        if redone is self._redone or redone.epoch != self._plan.epoch:
            return self._step, self._substep
        return redone.step, 0

    def _next_step(self, plan: EpochPlan) -> int:
        """Goes to the step of this replica's next minibatch, or the end; returns it."""
        rank = self._sampler.rank
        while self._step < plan.num_steps and self._substep >= plan.num_substeps_of(
            self._step, rank
        ):
            self._step, self._substep = self._step + 1, 0
        return self._step

    # --- for a loader that reads ahead ----------------------------------------------

    def is_stale(self, number: int) -> bool:
        """Returns whether a minibatch, counted from 0, was dealt before a redeal."""
        return self._redone is not self._sampler.redone or number < self._num_stale

    def hand_out(self) -> None:
        """Counts a minibatch that leaves `Replica.loader`, to be run."""
        self._num_handed_out += 1
        self._sampler.on_handing_out()

    def goes_on(self) -> bool:
        """Returns whether a redeal has come after the end: then iterate once more."""
        is_behind = self._redone is not self._sampler.redone
        self.resumes = is_behind and not self.resumes  # a loader may ignore it
        return self.resumes

    def count_step(self, strict: bool) -> None:
        """Counts a minibatch as run, once for several optimizers.

        Args:
            strict: Whether nothing may be read ahead, since a redeal would lose it.

        Raises:
            ValueError: Something was read ahead, or the loop has left out a minibatch,
                as far as is known: loaders and trainers read ahead, too.
        """
        num_read = self._num_handed_out or self._num_asked
        if num_read == self._counted_at:
            return
        self._num_stepped, self._counted_at = self._num_stepped + 1, num_read
        if strict and num_read > self._num_stepped:
            raise ValueError(
                f"step() is at minibatch {self._num_stepped}, and the loop has read "
                f"{num_read}: iterate replica.loader(loader); nothing may read ahead"
            )
        if self._num_handed_out:
            self.refuse_left_out(num_read)
        elif self._num_stepped == 1:
            is_other = self._thread != threading.get_ident()
            self._reads_ahead = num_read > 1 or is_other

    def refuse_left_out(self, num_read: int | None = None) -> None:
        """Raises ValueError if the loop has left out minibatches of a training.

        Args:
            num_read: How many it has read; None if `Replica.loader` has counted them.
        """
        num_read = self._num_handed_out if num_read is None else num_read
        if 0 < self._num_stepped < num_read:
            raise left_out(self._plan.epoch)

    # --- for torchdata --------------------------------------------------------------

    @property
    def is_being_restored(self) -> bool:
        """Whether a loader that has a state made this pass, and has asked for nothing.

        Such a loader restores the sampler first, to the update that was the last one
        when a minibatch was fetched, and then the pass, whose state is the right one.
        """
        return hasattr(self._loader, "load_state_dict")

    def state_dict(self) -> dict[str, Any]:
        """Returns the sampler's state after the steps that were handed out whole."""
        plan, sampler = self._plan, self._sampler
        step, substep = self._place(sampler.redone)
        if substep and substep >= plan.num_substeps_of(step, sampler.rank):
            step += 1
        return {
            **sampler.state_dict(),
            "epoch": plan.epoch,
            "step": step,
            "order": sampler.order_digest(plan.epoch),
            "rank": sampler.rank,
            "num_replicas": sampler.num_replicas,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begins where the steps of `state_dict` end, if the sampler is not there.

        The state of replica 0 loads on any number of replicas. Another one's may lack
        the steps in which it was idle, and loads on the same replica alone.

        Raises:
            ValueError: It is of another run, or of a replica that is not this one; or
                the sampler is in another epoch, or was restored to another step.
        """
        sampler = self._sampler
        cursor = sampler.check_state(state, allow_changes=False)
        saved_on = (state["rank"], state["num_replicas"])
        if saved_on[0] != 0 and saved_on != (sampler.rank, sampler.num_replicas):
            raise ValueError(
                f"the loader's state is of replica {saved_on[0]} of {saved_on[1]}, "
                f"this is {sampler.rank} of {sampler.num_replicas}: load replica 0's"
            )
        plan = sampler.plan_after(state)
        here = sampler.plan.first_step + sampler.plan.start_step
        first = last = plan.first_step + cursor.step
        if saved_on[0] != 0:  # it has joined the steps in which it was idle, or not
            self._step, self._substep = cursor.step, 0
            last = plan.first_step + self._next_step(plan)
        if first <= here <= last:
            return
        if sampler.epoch != cursor.epoch or sampler.is_placed:
            raise ValueError(
                f"the loader's state is that after step {cursor.step} of epoch "
                f"{cursor.epoch}, and the sampler is at step {sampler.plan.start_step} "
                f"of epoch {sampler.epoch}: save it right after an update, with the "
                "optimizer's, or leave it out; without an elastic optimizer, call "
                f"sampler.set_epoch({cursor.epoch}) before you iterate the loader"
            )
        sampler.resume_at(state)


def left_out(epoch: int) -> ValueError:
    """Returns the error of a loop that has left out a minibatch of an epoch."""
    return ValueError(
        f"step() was not called for a minibatch of epoch {epoch}: remove an "
        "accumulation of your own, since step() accumulates; to skip one, "
        "loss = 0 * sum(p.sum() for p in model.parameters())"
    )


def loader_in(names: Mapping[str, Any], sampler: Any) -> Any:
    """Returns the loader that iterates a sampler in a function with these variables.

    None without one, and not another one that happens to be at hand there.
    """
    loader = names.get("loader")
    iterated = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    return loader if any(each is sampler for each in iterated) else None


def check_loader(loader: Any, dataset_length: int | None) -> None:
    """Raises unless a loader hands out these minibatches, in order.

    Args:
        loader: A DataLoader, or None.
        dataset_length: That of the dataset that the sampler was given, if any.

    Raises:
        TypeError: It changes their order.
        ValueError: Its dataset is another one than the sampler's.
    """
    dataset = getattr(loader, "dataset", None)
    length = len(dataset) if hasattr(dataset, "__len__") else dataset_length
    if dataset_length not in (None, length):
        raise ValueError(
            f"the loader's dataset has {length} samples, and CustomSampler's "
            f"{dataset_length}: give both the same, or CustomSampler dataset_size="
        )
    if not getattr(loader, "num_workers", 0):
        return
    if not getattr(loader, "in_order", True):
        raise TypeError(
            "minibatches of a loader with in_order=False would be counted in another "
            "order: build it with in_order=True, the default"
        )
    every = getattr(loader, "snapshot_every_n_steps", 1)
    if every != 1:
        raise TypeError(
            f"StatefulDataLoader(snapshot_every_n_steps={every}) skips minibatches "
            "when it is restored: pass snapshot_every_n_steps=1, the default"
        )
