"""`Checkpointer`: a run that can be stopped at any moment and resumed anywhere."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import operator
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

import xla_replica
from variable_batch_size.checkpoint import files, random_state, save_and_stop, shards
from variable_batch_size.checkpoint.writer import Writer, detached
from variable_batch_size.data.schedule import Cursor, TraceExhausted
from variable_batch_size.optimizer import ElasticOptimizer
from variable_batch_size.runs.run_log import RunLog
from variable_batch_size.step.attached import AttachedScheduler, Update
from xla_replica import Replica
from xla_replica.common.arguments import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_type,
)
from xla_replica.common.differences import check_same
from xla_replica.common.trees import leaves, map_tensors, without_numpy
from xla_replica.stopping import end_run

logger = logging.getLogger(__name__)

VERSION = 2


class Restored(NamedTuple):
    """What a loaded run has done, and where it resumes.

    Attributes:
        path: The checkpoint.
        num_updates: Updates that the run has made.
        epoch: Where the loop begins; the sampler yields what is left of it.
        best: The best metric so far, or None.
    """

    path: Path
    num_updates: int
    epoch: int
    best: float | None


class Checkpointer:
    """Saves a run from time to time and where it is asked to stop, and restores it.

    Attach it to the optimizer, after everything else that has a state::

        checkpointer = vbs.Checkpointer("checkpoints", optimizer, model=model)
        checkpointer.load()
        optimizer.attach(checkpointer)
        for epoch in range(sampler.epoch, num_epochs):
            ...

    A checkpoint is one file, written by replica 0: any number of replicas resumes the
    run with the same samples at every step. It holds the state after an update;
    minibatches accumulated since are run again.

    On SIGTERM and SIGINT replicas agree on an update, save after it, and raise
    `xla_replica.Stopped` out of `step` or `set_epoch`; a script that does not catch it
    exits with status 143 (130 for SIGINT). Started again, it resumes from there.

    Args:
        folder: The folder of the checkpoints; several hosts must share it.
        optimizer: The wrapper, whose state includes the sampler's.
        every_updates: Save after every so many updates since training began.
        every_minutes: Save after about so many minutes; 10 if neither is given.
        keep: How many checkpoints to keep, the newest; the best one is kept too.
        best: Which metric passed to `save` is best, 'max' or 'min'.
        stop_on: Signals that ask an attached checkpointer to stop; empty for none, for
            instance where a script only loads.
        stop_poll, poll_seconds: A function that is called every ``poll_seconds`` in a
            thread, where it may take its time; if it raises, it is called again. A text
            that it returns is a reason to stop (a maintenance event of the machine).
        look_every_seconds: On XLA and TorchTPU, after how much time every replica looks
            whether another one was asked to stop, which costs a host round trip;
            replica 0's value counts. Where all were asked, as by a signal to the job,
            they stop after the next update; on GPUs, where one was, after about two.
        asynchronous: Write files in a thread beside the training, which waits only
            while the state is copied to the host. That copy is held until it is
            written; a save that comes before waits. What goes wrong is raised by the
            next update, `save`, `load` or `wait`: call `wait` after the loop.
        settings: What else a run must have in common with this one to resume it.
        **parts: What else has ``state_dict`` and ``load_state_dict``, by name, such as
            ``model=model, grab=sampler``. The floating-point buffers of modules are
            averaged over replicas first.

    Attributes:
        num_updates: Updates that the run has made.
        best_metric: The best metric passed to `save` so far, or None.
        updates_of: The optimizer, the only one that this may be attached to.
        has_loaded: Whether `load` was called, other than for the best checkpoint.

    Raises:
        ValueError, TypeError: An argument is out of range, or of the wrong type.
    """

    def __init__(
        self,
        folder: str | Path,
        optimizer: ElasticOptimizer,
        *,
        every_updates: int | None = None,
        every_minutes: float | None = None,
        keep: int = 3,
        best: Literal["max", "min"] | None = None,
        stop_on: Sequence[str | int] = ("SIGTERM", "SIGINT"),
        stop_poll: Callable[[], str | None] | None = None,
        poll_seconds: float = 5.0,
        look_every_seconds: float = 2.0,
        asynchronous: bool = False,
        settings: Mapping[str, Any] | None = None,
        **parts: Any,
    ) -> None:
        if every_updates is None and every_minutes is None:
            every_minutes = 10.0
        _check_parts(optimizer, parts)
        if "://" in str(folder):
            raise ValueError(
                f"folder={str(folder)!r} is not a path: mount the bucket (gcsfuse, "
                "s3fs) and pass the path of the mount"
            )
        check_integer("keep", keep, least=1)
        check_number("look_every_seconds", look_every_seconds, above=0)
        check_choice("best", best, ("max", "min", None))
        self._settings = dict(settings or {})
        _check_settings(self._settings)
        self.folder = Path(folder)
        self.replica: Replica = optimizer.replica
        self.num_updates = 0
        self.best_metric: float | None = None
        self.updates_of = self._optimizer = optimizer
        self._parts = parts
        modules = [part for part in parts.values() if isinstance(part, nn.Module)]
        self._modules = nn.ModuleList(modules)
        optimizer.follow_buffers(self._modules)
        self._keep, self._best, self._look_every = keep, best, look_every_seconds
        self._times = save_and_stop.SaveTimes(
            self.replica, every_updates, every_minutes
        )
        self._writer = Writer(asynchronous)
        self._proven: set[type] = set()  # of values, which were loaded once
        # Steps of schedulers that are parts, at the end of the first epoch: None before
        # that, and nothing once they were looked at again.
        self._num_steps: dict[str, int] | None = None
        self.has_loaded = False
        self._has_looked = False  # at the folder, for a run to resume
        # Where the run began, until this has been called after an update.
        self._begun: Cursor | None = optimizer.sampler.cursor
        if stop_on:
            save_and_stop.listen(stop_on)
        if stop_poll is not None:
            save_and_stop.poll_for_stop(stop_poll, poll_seconds, weakref.ref(self))

    def __call__(self, update: Update) -> None:
        """Saves and stops when it is time to: once per update, on every replica.

        Raises OSError if writing failed, and `xla_replica.Stopped` if all have saved
        because they were asked to stop.
        """
        self._writer.check()
        if update.ends_epoch:
            self._warn_of_schedulers()
        if self._begun is not None and self.replica.is_primary:
            self._check_folder()
        num_updates = self.num_updates + 1
        due = self._times.due(num_updates)
        # After what may find that another member is lost, so that it can run again.
        self.num_updates, self._begun = num_updates, None
        if self._optimizer.asked_to_stop(due, self._look_every):
            written = self._save() or self._writer.wait()
            # In it, so that no replica leaves while replica 0 writes.
            request = save_and_stop.agreed_request(self.replica)
            for log in self._logs():
                log.close(request.reason)
            if self.replica.is_primary:  # a warning is seen without any set-up
                logger.warning(
                    f"stopped after {self.num_updates} updates: {request.reason}. "
                    f"Started again, the run continues from {written}"
                )
            end_run()  # a notebook may begin another one
            raise xla_replica.Stopped(request.reason, request.exit_status)
        if due:
            self._save()

    def _warn_of_schedulers(self) -> None:
        """Warns, once, of parts that have not stepped in the second epoch."""
        found = {
            name: part.last_epoch
            for name, part in self._parts.items()
            if hasattr(part, "get_last_lr") and hasattr(part, "last_epoch")
        }
        for name, number in (self._num_steps or {}).items():
            if found[name] == number and self.replica.is_primary:
                logger.warning(
                    f"the scheduler {name}= has not stepped for an epoch: Checkpointer "
                    "saves it alone. Call optimizer.attach(scheduler), which steps it "
                    "after every update, or step it at the end of every epoch"
                )
        self._num_steps = found if self._num_steps is None else {}

    def saves(self, part: Any) -> bool:
        """Returns whether checkpoints hold the state of a part or attached scheduler.

        `ElasticOptimizer.attach` asks: what is attached later would be saved too old.
        """
        parts = self._parts.values()
        return isinstance(part, AttachedScheduler) or any(p is part for p in parts)

    def save(self, metric: float | None = None) -> Path | None:
        """Writes a checkpoint now, such as last in the loop over epochs. Collective.

        Returns its file on replica 0, None on the others. With ``asynchronous`` it is
        not written yet, and `wait` returns it.

        Saved here at the end of an epoch, the run resumes with the next one; saved
        automatically after the last update of an epoch, with what your loop does at the
        end of that epoch. Do not call this within a step, between two minibatches that
        have both changed BatchNorm's statistics.

        Args:
            metric: What was measured of the present weights; if it is the best so far,
                the checkpoint is kept as ``best-*.pt``.

        Raises:
            OSError: Writing failed.
            ValueError: ``metric`` was passed without ``best=``, or there have been
                updates and this checkpointer is not attached.
            TypeError: The state of a part could not be loaded again.
            CheckpointError: The folder has checkpoints of a run with more updates.
        """
        now = self._optimizer.sampler.cursor  # step 0 may be that of a chosen epoch
        if self._begun is not None and now.step > 0 and now != self._begun:
            raise ValueError(
                "save: the optimizer has made updates that this Checkpointer has not "
                "seen: call optimizer.attach(checkpointer) before training"
            )
        is_best, before = False, self.best_metric
        if metric is not None:
            if self._best is None:
                raise ValueError(
                    f"save(metric={metric!r}): Checkpointer needs best='max' or 'min'"
                )
            is_better = operator.gt if self._best == "max" else operator.lt
            if not math.isfinite(metric):
                logger.warning("save: metric %r is not finite and never best", metric)
            elif before is None or is_better(metric, before):
                is_best, self.best_metric = True, float(metric)
        return self._save(is_best, between_epochs=True)

    def wait(self) -> Path | None:
        """Returns when everything saved is on the disk; call it after the loop.

        Returns the file of the last asynchronous save on replica 0, None on the
        others. Raises what writing it has raised, as `save` does.
        """
        return self._writer.wait()

    def _save(self, is_best: bool = False, between_epochs: bool = False) -> Path | None:
        since = time.perf_counter()
        self._has_looked = True  # what is in the folder then is this run's, or an error
        self._writer.wait()  # before another state is copied
        self.replica.sync()
        random_numbers = self.replica.rng_state()
        # All modules at once: averaging resets the count of minibatches that weighs.
        self._optimizer.average_buffers(self._modules)
        for log in self._logs():
            log.event("checkpoint")
        state = self._snapshot()
        state["random"] = random_state.saved(self.replica, random_numbers)
        if between_epochs:
            cursor = state["optimizer"]["elastic"]["sampler"]
            schedule = self._optimizer.sampler.schedule
            if cursor["step"] >= len(schedule.steps(cursor["epoch"])):
                with contextlib.suppress(TraceExhausted):  # there is no next epoch
                    schedule.steps(cursor["epoch"] + 1)
                    # The order is that of the epoch that has ended.
                    cursor |= {"epoch": cursor["epoch"] + 1, "step": 0, "order": None}
        self.replica.sync()  # the sums in the state, on every replica alike
        name = self.folder / f"update-{self.num_updates:08d}"
        state, write_shards = shards.split(
            name, state, self.replica, self._writer.asynchronous
        )
        self._times.saved(self.num_updates)
        if self.replica.is_primary:
            state = detached(self.replica.to_host(state))

        def write() -> Path | None:
            parts = write_shards()
            if not self.replica.is_primary:
                return None
            return self._write(state | parts, is_best, since)

        path = self._writer.start(write)
        # On XLA every program that runs advances them, also the one that saves.
        self.replica.set_rng_state(random_numbers)
        return path

    def _logs(self) -> list[RunLog]:
        return [part for part in self._parts.values() if isinstance(part, RunLog)]

    def _snapshot(self) -> dict[str, Any]:
        """Returns the state without random numbers, tensors where they are."""
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        for name, part in parts.items():
            files.check_tensors(f"the state of {name}", part)
        state = {
            "version": VERSION,
            "num_updates": self.num_updates,
            "best": self.best_metric,
            "settings": self._settings,
            "optimizer": self._optimizer.state_dict(),
            "parts": parts,
        }
        # NumPy's numbers would not be loaded again.
        loadable: dict[str, Any] = without_numpy(state)
        return loadable

    def _write(self, state: dict[str, Any], is_best: bool, since: float) -> Path:
        num_updates = state["num_updates"]  # the run may have made more meanwhile
        kinds = {type(leaf) for leaf in leaves(state)}
        if not kinds <= self._proven:
            parts = {"optimizer": state["optimizer"], **state["parts"]}
            for name, part in parts.items():
                files.check_loadable(f"the state of {name}", part)
            self._proven |= kinds
        damaged = self._damaged_later()
        path = files.write(self.folder, num_updates, state)
        if is_best:
            files.copy_as_best(path)
        files.tidy(self.folder, self._keep, damaged)
        megabytes, seconds = path.stat().st_size / 1e6, time.perf_counter() - since
        logger.info(f"saved {path}: {megabytes:.1f} MB in {seconds:.2f} s")
        return path

    def _check_folder(self) -> None:
        """Raises now what would be raised by the first save, perhaps much later."""
        self._damaged_later()
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK):
            raise PermissionError(
                errno.EACCES, "checkpoints cannot be written", str(self.folder)
            )

    def _damaged_later(self) -> list[files.SavedFile]:
        """Returns files of more updates, which loading has passed over.

        Raises CheckpointError if one of them is whole: it is another run's.
        """
        most = self.num_updates if self._has_looked else -1
        saved = files.saved_files(self.folder)
        later = [file for file in saved if file.num_updates > most]
        for file in later:
            try:
                file.read_whole()
            except (files.CheckpointError, FileNotFoundError):
                continue
            raise files.CheckpointError(
                f"{file.path} has {file.num_updates} updates, and this run "
                f"{self.num_updates}: call load() before training, or change the folder"
            )
        return later

    def load(
        self, *, allow_changes: bool = False, best: bool = False
    ) -> Restored | None:
        """Resumes the newest checkpoint that is not damaged. Collective.

        Returns None if there is none. Damaged ones are passed over, with a warning. In
        a live run this is where a member joins, and blocks until it may: one that
        others have begun is received from them, and no file is read.

        Args:
            allow_changes: Also resume a run with other settings, trace, dataset length,
                minibatch size, seed or hyperparameters, of which the saved ones hold;
                see `ElasticOptimizer.load_state_dict`.
            best: Load the best checkpoint instead, to evaluate it, not to train on.

        Raises:
            CheckpointError: All are damaged, or a host does not see the one that
                replica 0 has chosen.
            ValueError: It is of another run; all differences are listed.
        """
        check_flag("allow_changes", allow_changes)
        check_flag("best", best)
        self._writer.wait()
        self._has_looked = True
        self.has_loaded |= not best
        if self.replica.is_live and not best:
            return self._enter(allow_changes)
        found = self._choose("best" if best else "update")
        return found and self._load(*found, allow_changes)

    def _enter(self, allow_changes: bool) -> Restored | None:
        """Joins a live run, or begins it."""

        def begin() -> None:
            found = files.newest_whole(self.folder, "update")
            if found is not None:
                self._load(found[0].path, found[1], allow_changes)

        def change(generation: int) -> None:
            self._times.look_from(self.num_updates)
            for log in self._logs():
                log.change_members(generation)

        settings = {
            "settings": self._settings,
            "parts": sorted(self._parts),
            "times to save": self._times.every,
        }
        self._optimizer.go_live(
            settings,
            snapshot=self._snapshot,
            load=lambda state: self._load(self.folder, state, False),
            begin=begin,
            changed=change,
            is_saved=lambda part: part is self or self.saves(part),
        )
        cursor = self._optimizer.sampler.cursor
        if not self.num_updates:
            return None
        return Restored(self.folder, self.num_updates, cursor.epoch, self.best_metric)

    def _load(self, path: Path, state: dict[str, Any], allow_changes: bool) -> Restored:
        """Takes a checkpoint's state, or another member's, see `_snapshot`."""
        version = state.get("version")
        if version != VERSION:
            raise ValueError(
                f"{path} is of format {version!r}, and this library reads {VERSION}: "
                "finish the run with the version that began it, or give it another "
                "folder"
            )
        other_run = f"{path} is of another run"
        if not allow_changes:
            remedy = (
                "Give the run another folder, or call Checkpointer.load("
                "allow_changes=True), before vbs.epochs where that runs the loop"
            )
            check_same(state["settings"], self._settings, other_run, remedy)
        saved, own = {"parts": sorted(state["parts"])}, {"parts": sorted(self._parts)}
        check_same(saved, own, other_run, "Pass the same parts to Checkpointer")
        groups = self._optimizer.param_groups
        trained = [parameter for group in groups for parameter in group["params"]]
        state = shards.fill(self.folder, state, self.replica, trained)
        # First what may refuse the state, before anything is changed. One after the
        # other is copied: this needs memory for the largest of them, not for all.
        copied = partial(map_tensors, function=torch.clone)
        self._optimizer.load_state_dict(
            copied(state["optimizer"]), allow_changes=allow_changes
        )
        for name, part in self._parts.items():
            part.load_state_dict(copied(state["parts"][name]))
        self._optimizer.follow_buffers(self._modules)
        if "random" in state:  # in a live run every minibatch has a seed
            random_state.restore(copied(state["random"]), self.replica)
        self.num_updates, self.best_metric = state["num_updates"], state["best"]
        self._times.saved(self.num_updates)
        self._begun = self._optimizer.sampler.cursor
        epoch = self._begun.epoch
        if self.replica.is_primary:
            logger.info(f"resuming {path}: {self.num_updates} updates, epoch {epoch}")
        return Restored(path, self.num_updates, epoch, self.best_metric)

    def _choose(self, kind: str) -> tuple[Path, Any] | None:
        """Returns the checkpoint that replica 0 has chosen and its state, if any."""
        found, problem = None, None
        if self.replica.is_primary:
            try:
                found = files.newest_whole(self.folder, kind)
            except files.CheckpointError as all_damaged:
                problem = str(all_damaged)
        own = found and found[0].path.name, problem
        name, problem = self.replica.all_gather_object(own)[0]
        if problem is not None:
            raise files.CheckpointError(problem)
        chosen = files.saved_file(self.folder / name) if name else None
        if chosen is None:
            return None
        if found is None:  # not replica 0
            with contextlib.suppress(files.CheckpointError, FileNotFoundError):
                found = chosen, chosen.read()
        num_missing = self.replica.all_gather_object(found is None).count(True)
        if found is None or num_missing:
            raise files.CheckpointError(
                f"{num_missing} replicas cannot read {chosen.path}, which replica 0 "
                "has chosen: all hosts must share the folder"
            )
        return chosen.path, found[1]


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raises unless a run with these settings could be resumed."""
    for name, value in settings.items():
        for leaf in leaves(value):
            is_plain = type(leaf) in (str, int, float, bool, type(None))
            if not is_plain or leaf != leaf:
                raise (ValueError if is_plain else TypeError)(
                    f"settings[{name!r}] has {leaf!r}, a {type(leaf).__name__}; "
                    "settings may be texts, numbers other than NaN, None, lists and "
                    "dicts of these"
                )


def _check_parts(optimizer: Any, parts: Mapping[str, Any]) -> None:
    """Raises unless a checkpoint of these would hold all that is trained, once."""
    check_type("optimizer", optimizer, ElasticOptimizer, "an elastic wrapper")
    saved: set[nn.Parameter] = set()
    for name, part in parts.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TypeError(
                f"Checkpointer: {name}={part!r} is not an argument, and as a part it "
                "has no state_dict and load_state_dict"
            )
        if part is optimizer.inner or part is optimizer.sampler:
            raise ValueError(
                f"Checkpointer: {name} is saved with the wrapper: leave it out"
            )
        told_by = getattr(part, "updates_of", optimizer)
        if not any(told_by is own for own in (optimizer, *parts.values())):
            raise ValueError(
                f"Checkpointer: {name}={part!r} tells of the updates of another "
                "optimizer: build it with the one that this checkpointer saves"
            )
        if isinstance(part, nn.Module):
            saved.update(part.parameters())
    order = optimizer.sampler.order
    has_state = hasattr(order, "state_dict") and hasattr(order, "load_state_dict")
    if has_state and not any(part is order for part in parts.values()):
        raise ValueError(
            "Checkpointer: the sampler's order= has a state, which would begin anew "
            f"where the run is resumed: pass order={order!r}, or by another name"
        )
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    missing = len(set(trained) - saved)
    if missing:
        raise ValueError(
            f"Checkpointer: {missing} of the optimizer's parameters are in no part "
            "that is a module, and would not be saved: pass model=model"
        )
