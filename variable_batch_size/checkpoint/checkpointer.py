"""`Checkpointer`: a run that can be stopped at any moment and resumed anywhere."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import xla_replica
from variable_batch_size.checkpoint import files, random_state, save_and_stop, shards
from variable_batch_size.optimizer import ElasticOptimizer
from variable_batch_size.runs.run_log import RunLog
from variable_batch_size.step.attached import AttachedScheduler, Update
from xla_replica.common.arguments import check_choice, check_flag, check_type
from xla_replica.common.differences import check_same
from xla_replica.common.trees import map_tensors
from xla_replica.stopping import end_run

logger = logging.getLogger(__name__)

VERSION = 5


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
            instance where a script only loads. `xla_replica.request_stop` asks too.
        look_every_seconds: On accelerators, after how much time a replica looks whether
            another one was asked to stop, which costs a host round trip. Where all were
            asked, as by a signal to the job, they stop after the next update.
        settings: What else a run must have in common with this one to resume it.
        **parts: What else has ``state_dict`` and ``load_state_dict``, by name, such as
            ``model=model, grab=sampler``. The floating-point buffers of modules are
            averaged over replicas first.

    Attributes:
        best_metric: The best metric passed to `save` so far, or None.
        updates_of: The optimizer, the only one that this may be attached to.
        has_loaded: Whether `load` was called, other than for the best checkpoint.
        num_epochs: How many epochs the run has, if that is known; members of a live run
            must agree. `vbs.epochs` sets it, before it calls `load`.

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
        look_every_seconds: float = 2.0,
        settings: Mapping[str, Any] | None = None,
        **parts: Any,
    ) -> None:
        _check_parts(optimizer, parts)
        if "://" in str(folder):
            raise ValueError(f"folder={str(folder)!r} is not a path: mount the bucket")
        choices = ("max", "min", None)
        self._best = check_choice("best", best, choices, "a part by another name")
        self.folder = Path(folder)
        self.replica = optimizer.replica
        self.best_metric: float | None = None
        self.updates_of = self._optimizer = optimizer
        self._settings, self._parts = dict(settings or {}), parts
        self._form = {"the format": VERSION, "the names of parts": sorted(parts)}
        self._logs = [part for part in parts.values() if isinstance(part, RunLog)]
        self._modules = _modules(parts)
        optimizer.follow_buffers(self._modules)
        times = every_updates, every_minutes, keep, look_every_seconds
        self._times = save_and_stop.SaveTimes(self.replica, *times)
        self.has_loaded = False
        self.num_epochs: int | None = None
        self._loaded: Path | None = None  # by the last `load`
        # Where the run began, until this has been called after an update.
        self._begun: int | None = self.num_updates
        if stop_on:
            save_and_stop.listen(stop_on)

    @property
    def num_updates(self) -> int:
        """Updates that the run has made: the steps of the trace that are done."""
        return self._optimizer.sampler.ledger.global_step

    # --- after every update -----------------------------------------------------------

    def __call__(self, update: Update) -> None:
        """Saves and stops when it is time to: once per update, on every replica.

        Raises OSError if writing failed, and `xla_replica.Stopped` if all have saved
        because they were asked to stop.
        """
        if self.replica.is_primary:
            if self._begun is not None:  # told now, not by a save much later
                files.claim(self.folder, self.num_updates - 1)
            if update.ends_epoch and update.epoch == 1:
                self._warn_of_schedulers()
        is_due = self._times.due(self.num_updates)
        # After what may find that another member is lost, so that it can run again.
        self._begun = None
        if self._optimizer.asked_to_stop(is_due, self._times.look_every_seconds):
            self._stop()
        if is_due:
            self._save()

    def _warn_of_schedulers(self) -> None:
        for name, part in self._parts.items():
            if hasattr(part, "get_last_lr") and part.last_epoch == 0:
                logger.warning(
                    f"the scheduler {name}= has not stepped in two epochs: call "
                    "optimizer.attach(scheduler), or step it in every epoch"
                )

    def _stop(self) -> None:
        """Saves, and raises `Stopped`. Collective."""
        saved = self._save()
        # A collective, so that no replica leaves while replica 0 writes.
        request = save_and_stop.agreed_request(self.replica)
        for log in self._logs:
            log.close(request.reason)
        if self.replica.is_primary:  # a warning is seen without any set-up
            logger.warning(
                f"stopped after {self.num_updates} updates: {request.reason}. "
                f"Started again, the run continues from {saved}"
            )
        end_run()  # a notebook may begin another one
        raise xla_replica.Stopped(request.reason, request.exit_status)

    def saves(self, part: Any) -> bool:
        """Returns whether checkpoints hold the state of a part or attached scheduler.

        `ElasticOptimizer.attach` asks: what is attached later would be saved too old.
        """
        parts = self._parts.values()
        return isinstance(part, AttachedScheduler) or any(p is part for p in parts)

    # --- saving -----------------------------------------------------------------------

    def save(self, metric: float | None = None) -> Path | None:
        """Writes a checkpoint now, such as last in the loop over epochs. Collective.

        Returns its file on replica 0, None on the others.

        Saved here at the end of an epoch, the run resumes with the next one; saved
        automatically after the last update of an epoch, with what your loop does at the
        end of that epoch. Do not call this within a step, between two minibatches that
        have both changed BatchNorm's statistics.

        Args:
            metric: What was measured of the present weights; if it is the best so far,
                the checkpoint is kept, and named ``best-*.pt``. NaN is never best.

        Raises:
            OSError: Writing failed.
            ValueError: ``metric`` was passed without ``best=``, or there have been
                updates and this checkpointer is not attached.
            CheckpointError: The folder has checkpoints of a run with more updates; or
                the state of a part could not be loaded again.
        """
        has_stepped = self._optimizer.sampler.cursor.step > 0  # of any first epoch
        if has_stepped and self._begun not in (None, self.num_updates):
            raise ValueError(
                "save: the optimizer has made updates that this Checkpointer has not "
                "seen: call optimizer.attach(checkpointer) before training"
            )
        is_best = False
        if metric is not None:
            if self._best is None:
                raise ValueError(f"metric={metric} needs Checkpointer(best=)")
            sign, before = 1 if self._best == "max" else -1, self.best_metric
            is_better = before is None or sign * metric > sign * before
            if is_better and math.isfinite(metric):
                self.best_metric, is_best = float(metric), True
        save = partial(self._save, is_best, True)
        path: Path | None = self._optimizer.updates.between(save)
        return path

    def _save(self, is_best: bool = False, between_epochs: bool = False) -> Path | None:
        replica: Any = self.replica
        since, number = time.perf_counter(), self.num_updates
        replica.sync()
        random_numbers = replica.rng_state()
        # All modules at once: averaging resets the count of minibatches that weighs.
        self._optimizer.average_buffers(self._modules)
        for log in self._logs:
            log.event("checkpoint")
        state = self.snapshot()
        state["random"] = random_state.saved(replica, random_numbers)
        if between_epochs:
            self._begin_next_epoch(state["optimizer"]["elastic"]["sampler"])
        replica.sync()  # the sums in the state, on every replica alike
        name = self.folder / f"update-{number:08d}"
        path: Path | None = None
        with replica.writing(f"update {number}"):
            state, digests = shards.split(name, state, replica)
            if replica.is_primary:
                whole = replica.to_host(state) | {"digests": digests}
                path = self._write(number, whole, is_best)
        if path is not None:
            with contextlib.suppress(FileNotFoundError):  # others may be far ahead
                size, seconds = path.stat().st_size / 1e6, time.perf_counter() - since
                logger.info(f"saved {path}: {size:.1f} MB in {seconds:.2f} s")
        self._times.saved(number)
        # On XLA every program that runs advances them, also the one that saves.
        replica.set_rng_state(random_numbers)
        return path

    def _write(self, number: int, state: dict[str, Any], is_best: bool) -> Path:
        """Writes the state after so many updates, and deletes older files."""
        files.claim(self.folder, number)
        try:
            path = files.write(self.folder, number, state, is_best)
        except FileNotFoundError:  # others have tidied up what it was writing
            files.claim(self.folder, number)
            raise
        files.tidy(self.folder, self._times.keep)
        return path

    def newest(self) -> int:
        """Returns how many updates the newest checkpoint has."""
        return next((each.num_updates for each in files.saved_files(self.folder)), 0)

    def snapshot(self) -> dict[str, Any]:
        """Returns the state without random numbers, tensors where they are."""
        return {
            "form": self._form,
            "best": self.best_metric,
            "settings": self._settings,
            "optimizer": self._optimizer.state_dict(),
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
        }

    def _begin_next_epoch(self, place: dict[str, Any]) -> None:
        """Moves the sampler's saved place from the end of an epoch to the next."""
        schedule, epoch = self._optimizer.sampler.schedule, place["epoch"]
        if place["step"] >= len(schedule.steps(epoch)):
            # The order is that of the epoch that has ended.
            place |= {"epoch": epoch + 1, "step": 0, "order": None}

    # --- loading ----------------------------------------------------------------------

    def load(self, *, allow_changes: bool = False, best: bool = False) -> Path | None:
        """Resumes the newest checkpoint that is not damaged. Collective.

        Returns its file, or None if there is none. Damaged ones are passed over, with a
        warning. In a live run this is where a member joins, and blocks until it may: a
        run that others have begun is received from them, no file is read, and the
        folder is returned.

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
        self.has_loaded |= not best
        self._loaded = None
        begin = partial(self._resume, allow_changes, best)
        if best:
            begin()
            return self._loaded
        own = {**self._form, "settings": self._settings, "num_epochs": self.num_epochs}
        own["times to save"] = self._times.every_updates, self._times.every_minutes
        modules = {n: p for n, p in self._parts.items() if isinstance(p, nn.Module)}
        self._optimizer.updates.enter(own, modules, begin, self)
        return self._loaded

    def _resume(self, allow_changes: bool, best: bool) -> None:
        """Loads the checkpoint that replica 0 chooses, or a live member for itself."""
        find = partial(files.newest_whole, self.folder, best)
        if (path := self.replica.choose(find)) is None:
            return
        path = self.folder / path.name
        if not path.exists():
            raise files.CheckpointError(f"no {path}: all hosts must share the folder")
        self._load(path, files.load(path, mapped=True), allow_changes)

    def take(self, snapshot: dict[str, Any]) -> None:
        """Takes the `snapshot` of another member of a live run."""
        self._load(self.folder, snapshot, False)

    def change_members(self, generation: int) -> None:
        """Goes on with other members of a live run."""
        self._times.look_from(self.num_updates - 1)
        for log in self._logs:
            log.change_members(generation)

    def _load(self, path: Path, state: dict[str, Any], allow_changes: bool) -> None:
        """Takes a checkpoint's state, or another member's, see `snapshot`."""
        saved, own = state.get("form", {}), self._form
        if not allow_changes:
            saved, own = saved | state.get("settings", {}), own | self._settings
        remedy = (
            "Pass the same parts, or another folder; or, for other settings, call "
            "load(allow_changes=True) before vbs.epochs: docs/resuming.md#what-is-saved"
        )
        check_same(saved, own, f"{path} is of another run", remedy)
        parameters = [*self._modules.parameters()]
        state = shards.fill(self.folder, state, self.replica, parameters)
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
        self._loaded, self.best_metric = path, state["best"]
        self._begun = self.num_updates
        self._times.saved(self._begun)
        if self.replica.is_primary:
            epoch = self._optimizer.sampler.cursor.epoch
            logger.info(f"resuming {path}: {self._begun} updates, epoch {epoch}")


def _check_parts(optimizer: Any, parts: Mapping[str, Any]) -> None:
    """Raises unless a checkpoint of these would hold all that is trained, once."""
    check_type("optimizer", optimizer, ElasticOptimizer, "an elastic wrapper")
    for name, part in parts.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TypeError(
                f"{name}={part!r} is not an argument, and as a part has no state_dict"
            )
        if part is optimizer.inner or part is optimizer.sampler:
            raise ValueError(f"{name}= is saved with the wrapper: leave it out")
    order = optimizer.sampler.order
    is_saved = any(part is order for part in parts.values())
    if hasattr(order, "load_state_dict") and not is_saved:
        raise ValueError(
            "Checkpointer: the sampler's order= has a state, which would begin anew "
            f"where the run is resumed: pass order={order!r}, or by another name"
        )
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    if missing := trained.difference(_modules(parts).parameters()):
        raise ValueError(
            f"Checkpointer: {len(missing)} of the optimizer's parameters are in no "
            "part that is a module, and would not be saved: pass model=model"
        )


def _modules(parts: Mapping[str, Any]) -> nn.ModuleList:
    """Returns the parts that are modules."""
    return nn.ModuleList(p for p in parts.values() if isinstance(p, nn.Module))
