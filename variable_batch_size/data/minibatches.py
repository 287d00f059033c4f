"""`Minibatches`: one loop over a sampler, whose place a stateful loader can save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from variable_batch_size.data.ledger import Loop


class Minibatches(Iterator[list[int]]):
    """What iterating a `CustomSampler` gives: a replica's minibatches, and a state.

    torchdata's StatefulDataLoader asks for the state with every minibatch that it
    fetches, and saves the one that belongs to the last minibatch that it handed out,
    whatever it or its workers have prefetched since. The steps of that state are those
    that were handed out whole: a step that was begun is run again, as everywhere.

    Args:
        sampler: The sampler, which knows order and ledger.
        loader: What iterates it: torch's DataLoader, torchdata's, or anything.

    Raises:
        TypeError: At the first minibatch: the loader would hand out others than these,
            or in another order.
    """

    def __init__(self, sampler: Any, loader: Any = None) -> None:
        self._sampler = sampler
        self._loader = loader
        self._loop: Loop | None = None
        self._samples_at: Callable[[np.ndarray], np.ndarray] | None = None

    def __next__(self) -> list[int]:
        sampler, loop = self._sampler, self._loop or self._begin()
        if (part := sampler.ledger.next_of(loop)) is None:
            raise StopIteration
        samples = self._samples_at(np.arange(part.start, part.stop))
        return np.resize(samples, sampler.minibatch_size).tolist()

    def _begin(self) -> Loop:
        """Takes epoch and order as they are at the first minibatch's moment."""
        sampler = self._sampler
        check_loader(self._loader, sampler.dataset_length)
        self._loader = None
        plan = sampler.plan
        if sampler.ledger.new_loop().step < plan.num_steps:  # or its order may be gone
            self._samples_at = sampler.order_of(plan)
        self._loop = sampler.ledger.begin()
        return self._loop

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
        sampler = self._sampler
        loop = self._loop or sampler.ledger.new_loop()
        step = sampler.ledger.plan(loop.epoch).step(loop.step, sampler.rank)
        is_whole = step is not None and 0 < step.num_substeps <= loop.substep
        return {
            **sampler.state_dict(),
            "epoch": loop.epoch,
            "step": loop.step + is_whole,
            "order": sampler.order_digest(loop.epoch),
            "rank": sampler.rank,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begins where the steps of `state_dict` end, if the sampler is not there.

        The state of replica 0 loads on any number of replicas. Another one's may lack
        the steps in which it was idle.

        Raises:
            ValueError: It is of another run, or of another replica than 0; or the
                sampler is in another epoch, or was restored to another step.
        """
        sampler = self._sampler
        cursor = sampler.check_state(state, allow_changes=False)
        if state["rank"] != 0:
            raise ValueError(
                f"the loader's state is of replica {state['rank']}, which may lack "
                "steps in which that was idle: load replica 0's on every replica"
            )
        here = sampler.plan.first_step + sampler.plan.start_step
        if here == sampler.schedule_of(state).steps(cursor.epoch).start + cursor.step:
            return
        if sampler.epoch != cursor.epoch or sampler.ledger.is_placed:
            raise ValueError(
                f"the loader's state is at {cursor}, the sampler at {sampler.cursor}: "
                f"save after an update, or call sampler.set_epoch({cursor.epoch}) first"
            )
        sampler.resume_at(state)


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
    needed = {"in_order": True, "snapshot_every_n_steps": 1}
    for name, value in needed.items() if getattr(loader, "num_workers", 0) else ():
        if (got := getattr(loader, name, value)) != value:
            raise TypeError(
                f"{name}={got}: minibatches of a loader with workers come in another "
                f"order, or a restart skips some: pass {name}={value}, the default"
            )
