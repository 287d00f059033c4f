"""`Checkpointer`: a run that can be stopped at any moment, and goes on anywhere."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

import xla_replica
from variable_batch_size.checkpoint import files
from variable_batch_size.checkpoint.checks import (
    Standing,
    check_arguments,
    check_folder,
    check_plain,
    check_same_parts,
    check_settings,
    check_told,
    check_version,
)
from variable_batch_size.checkpoint.files import CheckpointError
from variable_batch_size.checkpoint.random_state import (
    random_state,
    restore_random_state,
)
from variable_batch_size.checkpoint.save_times import SaveTimes
from variable_batch_size.checkpoint.stop_poll import poll_for_stop
from variable_batch_size.checkpoint.stop_reason import agreed_request
from variable_batch_size.data.schedule import TraceExhausted
from variable_batch_size.optimizer import ElasticOptimizer
from variable_batch_size.step.attached import Update
from xla_replica import Replica

logger = logging.getLogger(__name__)

VERSION = 1


class Stateful(Protocol):
    """Anything with a state: a model, a scheduler, a `GraBSampler`, a pruner."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class Restored(NamedTuple):
    """Where a loaded run stands.

    Attributes:
        path: The checkpoint.
        num_updates: Updates that it has made.
        epoch: Where the loop begins; the sampler yields what is left of it.
        best: The best metric so far, if any was saved.
    """

    path: Path
    num_updates: int
    epoch: int
    best: float | None


class Checkpointer:
    """Saves a run every so often and where it is asked to stop, and brings it back.

    Attach it to the optimizer, behind everything else that has a state::

        checkpointer = vbs.Checkpointer("checkpoints", optimizer, model=model)
        checkpointer.load()
        optimizer.attach(checkpointer)
        for epoch in range(sampler.epoch, num_epochs):
            ...

    A checkpoint is one file, written by replica 0, that says nothing of replicas: the
    run goes on on any number of them with the same samples at every step. It stands
    behind an update; minibatches accumulated since are run again.

    On SIGTERM and SIGINT replicas agree on an update, save behind it, and raise
    `xla_replica.Stopped` out of `step` or `set_epoch`; a script that does not catch it
    exits with status 143 (130 for SIGINT). Started again, it goes on from there.

    Args:
        folder: Where checkpoints are; on several hosts, storage that all of them share.
        optimizer: The wrapper, whose state includes the sampler's.
        every_updates: Save after every so many updates, counted from the beginning of
            training.
        every_minutes: Save after about so many minutes; 10 if neither is given.
        keep: Checkpoints kept, the newest. The best one is kept beside them.
        best: Which metric given to `save` is best, 'max' or 'min'.
        stop_on: Signals that ask to stop, an attached one; empty for none, as where a
            script only loads.
        stop_poll: Called every ``poll_seconds`` in a thread of its own; a text it
            returns is a reason to stop (a maintenance event of the machine).
        poll_seconds: See ``stop_poll``.
        look_every: On an accelerator, updates after which every replica looks whether
            another one was asked to stop: a host round trip. Where all have been
            asked, as by a signal to the whole job, they stop after the next update.
        settings: What else a run must have in common with this one to go on with it.
        **parts: What else has a state, by name: ``model=model, grab=sampler``. The
            floating-point buffers of modules are averaged over replicas first.

    Raises:
        ValueError, TypeError: An argument is out of range or of the wrong type.
    """

    # For `ElasticOptimizer.attach`: what is attached behind it would lag when resumed.
    saves_updates = True

    def __init__(
        self,
        folder: str | Path,
        optimizer: ElasticOptimizer,
        *,
        every_updates: int | None = None,
        every_minutes: float | None = None,
        keep: int = 3,
        best: str | None = None,
        stop_on: Sequence[str | int] = ("SIGTERM", "SIGINT"),
        stop_poll: Callable[[], str | None] | None = None,
        poll_seconds: float = 5.0,
        look_every: int = 100,
        settings: Mapping[str, Any] | None = None,
        **parts: Stateful,
    ) -> None:
        if every_updates is None and every_minutes is None:
            every_minutes = 10.0
        check_arguments(optimizer, keep, best, look_every, parts)
        check_folder(folder)
        check_plain("settings", settings or {})
        self.folder = Path(folder)
        self.replica: Replica = optimizer.replica
        self.num_updates = 0
        self.best_metric: float | None = None
        self._optimizer = optimizer
        self._parts = parts
        self._keep = keep
        self._best = best
        self._look_every = look_every
        self._settings = dict(settings or {})
        self._times = SaveTimes(self.replica, every_updates, every_minutes)
        self._is_proven = False  # that what it writes can be loaded
        self._begun = self._standing()
        if stop_on:
            _catch(stop_on)
        if stop_poll is not None:
            poll_for_stop(stop_poll, poll_seconds, weakref.ref(self))

    def __call__(self, update: Update) -> None:
        """Saves and stops where it is time to: once per update, on every replica.

        Raises:
            xla_replica.Stopped: All replicas were asked to stop, and have saved.
            OSError: Writing failed.
        """
        del update
        self.num_updates += 1
        due = self._times.due(self.num_updates)
        look = due or self.num_updates % self._look_every == 0
        if self._optimizer.asked_to_stop(look):
            self._stop()
        if due:
            self._save()

    def save(self, metric: float | None = None) -> Path | None:
        """Writes a checkpoint now, say last in the loop over epochs. Collective.

        At the end of an epoch the run will go on with the next one. (After one that was
        written behind its last update by itself, it goes on with what your loop does
        at the end of that epoch.) Do not call it within a step, between two minibatches
        of which both have changed BatchNorm's statistics.

        Args:
            metric: Of the weights as they are; if it is the best so far, the
                checkpoint is kept as ``best-*.pt``.

        Returns:
            The file, on replica 0.

        Raises:
            OSError: Writing failed.
            ValueError: ``metric`` was given without ``best=``, or there have been
                updates and this was not attached.
            TypeError: A part's state cannot be loaded again.
            CheckpointError: The folder has checkpoints of a run that is further.
        """
        return self._save(metric, between_epochs=True)

    def _save(
        self, metric: float | None = None, between_epochs: bool = False
    ) -> Path | None:
        since = time.perf_counter()
        check_told(self._begun, self._standing())
        is_best = self._is_best(metric)
        if is_best:
            self.best_metric = float(metric)  # type: ignore[arg-type]
        self.replica.sync()
        random_numbers = self.replica.rng_state()
        state = self._state(random_numbers)
        if between_epochs:
            _begin_next_epoch(state, self._optimizer)
        self.replica.sync()  # what was summed for it, on every replica alike
        self._times.saved(self.num_updates)
        path = None
        if self.replica.is_primary:
            path = self._write(self.replica.to_host(state), is_best, since)
        # On XLA every program that runs, also one that saves, moves them on.
        self.replica.set_rng_state(random_numbers)
        return path

    def _write(self, state: dict[str, Any], is_best: bool, since: float) -> Path:
        newer = files.saved_files(self.folder)[:1]
        if newer and newer[0].num_updates > self.num_updates:
            raise CheckpointError(
                f"{newer[0].path} has {newer[0].num_updates} updates, and this run "
                f"{self.num_updates}: call load() before training, or give the run "
                "another folder"
            )
        path = files.write(self.folder, self.num_updates, state)
        self._prove(path)
        if is_best:
            files.copy_as_best(path)
        files.tidy(self.folder, self._keep)
        logger.info(
            "saved %s: %.1f MB in %.2f s",
            path,
            path.stat().st_size / 1e6,
            time.perf_counter() - since,
        )
        return path

    def load(
        self, *, allow_changes: bool = False, best: bool = False
    ) -> Restored | None:
        """Goes on with the newest checkpoint that is whole. Collective.

        Damaged files are renamed, with a warning, and the one before is used.

        Args:
            allow_changes: Also a run with other settings, trace, dataset length,
                minibatch size or seed; see `CustomSampler.load_state_dict`.
            best: The best one in place of the newest: to evaluate it, not to go on.

        Returns:
            Where the run stands; None if there is no checkpoint.

        Raises:
            CheckpointError: All are damaged, or a host does not see the one that
                replica 0 has chosen.
            ValueError: It is of another run; all differences are listed.
        """
        self.replica.sync()  # what replicas have pending is no part of a collective
        found = self._choose("best" if best else "update")
        if found is None:
            return None
        path, state = found
        check_version(state, VERSION, path)
        if not allow_changes:
            check_settings(state["settings"], self._settings, path)
        check_same_parts(state["parts"], self._parts, path)
        # First what refuses another run, before anything is touched.
        self._optimizer.load_state_dict(state["optimizer"], allow_changes=allow_changes)
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])
        restore_random_state(state["random"], self.replica)
        self.num_updates, self.best_metric = state["num_updates"], state["best"]
        self._times.saved(self.num_updates)
        self._begun = self._standing()
        epoch = self._optimizer.sampler.epoch
        if self.replica.is_primary:
            logger.info(
                "going on with %s: %d updates, epoch %d", path, self.num_updates, epoch
            )
        return Restored(path, self.num_updates, epoch, self.best_metric)

    def _standing(self) -> Standing:
        place = self._optimizer.sampler.state_dict()
        return Standing(self.num_updates, place["epoch"], place["step"])

    def _stop(self) -> None:
        """Saves, waits until that is done, and raises on every replica."""
        self._save()
        self.replica.barrier()  # nobody leaves while replica 0 writes
        request = agreed_request(self.replica)
        raise xla_replica.Stopped(request.reason, request.exit_status)

    def _state(self, random_numbers: torch.Tensor) -> dict[str, Any]:
        # Together: averaging forgets how many minibatches the buffers are of.
        modules = [p for p in self._parts.values() if isinstance(p, nn.Module)]
        self._optimizer.average_buffers(nn.ModuleList(modules))
        return {
            "version": VERSION,
            "num_updates": self.num_updates,
            "best": self.best_metric,
            "settings": self._settings,
            "optimizer": self._optimizer.state_dict(),
            "parts": {n: p.state_dict() for n, p in self._parts.items()},
            "random": random_state(self.replica, random_numbers),
        }

    def _is_best(self, metric: float | None) -> bool:
        if metric is None:
            return False
        if self._best is None:
            raise ValueError(
                f"save(metric={metric!r}): Checkpointer needs best='max' or 'min' to "
                "know what is better"
            )
        if not abs(metric) < float("inf"):
            logger.warning("save: metric %r is not finite and never best", metric)
            return False
        before = self.best_metric
        return before is None or (
            metric > before if self._best == "max" else metric < before
        )

    def _prove(self, path: Path) -> None:
        """The first file of a run is read back: some states save and do not load."""
        if self._is_proven:
            return
        try:
            files.parse(path.read_bytes())
        except Exception as error:  # unpickling raises many kinds
            path.unlink()
            raise TypeError(
                "the state of a part has values that torch.load(weights_only=True) "
                f"refuses; states may have tensors, numbers, texts, lists and dicts: "
                f"{error}"
            ) from error
        self._is_proven = True

    def _choose(self, kind: str) -> tuple[Path, Any] | None:
        """The same file on every replica, whole on each of them."""
        found, error = None, None
        if self.replica.is_primary:
            try:
                found = files.newest_whole(self.folder, kind)
            except CheckpointError as all_damaged:
                error = all_damaged
        status = -1 if error else int(found is not None)
        digest = found[0].digest if found else "0" * 32
        name = [status, *(int(digest[i : i + 4], 16) for i in range(0, 32, 4))]
        status, *parts = self._broadcast(name)
        if status < 0:
            raise error or CheckpointError("all checkpoints are damaged")
        own_files = files.saved_files(self.folder, kind)
        if status == 0:
            if self._sum(bool(own_files)):
                raise CheckpointError(
                    f"other replicas see checkpoints in {self.folder}, and replica 0 "
                    "sees none: all hosts must share the folder"
                )
            return None
        digest = "".join(f"{part:04x}" for part in parts)
        if found is None:  # not the master
            for file in own_files:
                if file.digest == digest and (content := file.content()) is not None:
                    found = file, content
        num_missing = self._sum(found is None)
        if found is None or num_missing:
            raise CheckpointError(
                f"{num_missing} replicas do not see the checkpoint that replica 0 has "
                f"chosen in {self.folder}: all hosts must share the folder"
            )
        return found[0].path, files.parse(found[1])

    def _sum(self, number: int) -> int:
        """Over replicas."""
        total = self.replica.send(torch.tensor([int(number)]))
        self.replica.all_reduce_([total])
        return int(self.replica.fetch([total])[0].item())

    def _broadcast(self, numbers: list[int]) -> list[int]:
        tensor = self.replica.send(torch.tensor(numbers))
        self.replica.broadcast_([tensor])
        return self.replica.fetch([tensor])[0].tolist()


def _catch(signals: Sequence[str | int]) -> None:
    try:
        xla_replica.catch_signals(signals)
    except RuntimeError as error:  # such as in a thread that another library runs
        logger.warning("signals will not ask this run to stop: %s", error)


def _begin_next_epoch(state: dict[str, Any], optimizer: ElasticOptimizer) -> None:
    """A place at the end of an epoch becomes the beginning of the next."""
    place = state["optimizer"]["elastic"]["sampler"]
    schedule = optimizer.sampler.schedule
    if place["step"] < schedule.num_steps(place["epoch"]):
        return
    with contextlib.suppress(TraceExhausted):  # there is no next one
        schedule.steps(place["epoch"] + 1)
        place |= {"epoch": place["epoch"] + 1, "step": 0}
