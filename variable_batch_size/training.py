"""`epochs`: the loop over epochs, with what belongs around it in its order."""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from variable_batch_size.checkpoint.checkpointer import Checkpointer
from variable_batch_size.optimizer import ElasticOptimizer
from variable_batch_size.runs.progress import Progress
from variable_batch_size.runs.run_log import RunLog
from xla_replica.common.arguments import check_choice, check_integer
from xla_replica.stopping import end_run

logger = logging.getLogger(__name__)
# Optimizers whose epochs have been asked for.
_BEGUN: weakref.WeakSet[ElasticOptimizer] = weakref.WeakSet()


@dataclasses.dataclass
class Epoch:
    """The minibatches of one epoch, on the device of this replica; iterate once.

    Attributes:
        number: Its number, from 0.
        log: The run's log; None without ``log=``.
        metric: Set it to what was measured, for a `Checkpointer` that keeps the best.
        has_run: Whether all its minibatches were trained, by this replica or others.
    """

    number: int
    _optimizer: ElasticOptimizer
    _loader: Iterable[Any]
    _model: nn.Module
    log: Any
    metric: float | None = None
    has_run: bool = False

    def __iter__(self) -> Iterator[Any]:
        """Yields this replica's minibatches; afterwards buffers are averaged.

        Raises ValueError if one was left out, since later steps would have its place.
        """
        yield from self._optimizer.replica.loader(self._loader)
        self._optimizer.average_buffers(self._model)
        # No step is left, or other members have trained them.
        is_passed = self._optimizer.epoch > self.number
        self.has_run = is_passed or self._optimizer.get_bs() == 0

    def add(self, loss: torch.Tensor) -> None:
        """Adds a minibatch's loss to the log, before ``step()``; see `RunLog.add`."""
        self.log.add(loss)

    def write(self, **values: float) -> None:
        """Logs what was measured after the epoch; see `RunLog.write`."""
        self.log.write(**values)


def epochs(
    optimizer: ElasticOptimizer,
    loader: Iterable[Any],
    num_epochs: int,
    *,
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | Checkpointer | None = None,
    every_updates: int | None = None,
    log: str | os.PathLike[str] | RunLog | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: bool | str | None = None,
    **parts: Any,
) -> Iterator[Epoch]:
    """Returns the epochs of a run that stops and resumes anywhere. Collective.

    It attaches, loads and saves in the only order that is right: the parts, the log,
    then the checkpointer; it begins every epoch for sampler and optimizer, averages
    buffers after its last minibatch, saves after your code for the epoch, and closes
    the log. A run that is complete has no epoch left, and a trace that ends early ends
    the run: both are told at once.

    Args:
        optimizer: The wrapper.
        loader: A loader whose ``batch_sampler`` is the optimizer's sampler.
        num_epochs: How many epochs the run has in all.
        model: The model; saved, and its buffers averaged over replicas.
        checkpoint: A folder, or a `Checkpointer` that is not attached; one whose
            ``load`` was called, as with ``allow_changes=True``, is not loaded again.
        every_updates: For a folder: see `Checkpointer`, which saves every 10 minutes.
        log: A file, or a `RunLog` that is not attached.
        settings: What a run must have in common with this one to resume it; the log's
            header tells them.
        progress: None: replica 0 says what the run begins with, then shows a bar in a
            terminal or a notebook, and elsewhere logs a line every ten seconds, with
            the loss if there is a log. ``"log"``: lines everywhere. False: nothing.
        **parts: What else the run is made of, by name: LR schedulers, a GraBSampler, a
            pruner. Schedulers and functions ``after_update`` are attached; what has a
            state is saved. The sampler's ``order`` is one without being named. A
            scheduler is stepped after every update: attach one that counts epochs
            yourself, with ``unit="epochs"``. Step a ReduceLROnPlateau yourself, after
            an epoch's last minibatch.

    Raises:
        TypeError, ValueError: The loader is another sampler's; or a part has no state
            and is not attached; or an option does not fit; or it is the second call.
    """
    check_integer("num_epochs", num_epochs, least=1)
    check_choice("progress", progress, (None, True, False, "log"))
    sampler = optimizer.sampler
    if optimizer in _BEGUN:
        raise ValueError(
            "epochs was called for this optimizer before: build model, sampler and "
            "optimizer anew; with checkpoint= the run continues"
        )
    if getattr(loader, "batch_sampler", loader) is not sampler:
        raise ValueError(
            "epochs: the loader's minibatches are not those of the optimizer's "
            "sampler: build it with DataLoader(dataset, batch_sampler=sampler)"
        )
    saved = _attached(optimizer, parts)
    run_log: Any = log
    if isinstance(log, (str, os.PathLike)):
        run_log = RunLog(log, optimizer, settings=settings)
    if run_log is not None:
        optimizer.attach(run_log)
        saved["log"] = run_log
    saver: Any = checkpoint
    if isinstance(checkpoint, (str, os.PathLike)):
        saver = Checkpointer(
            os.fspath(checkpoint), optimizer, every_updates=every_updates,
            settings=settings, model=model, **saved,
        )  # fmt: skip
    elif every_updates is not None:
        raise ValueError("every_updates= needs checkpoint=, a folder to save in")
    if saver is not None:
        if not saver.has_loaded:
            saver.num_epochs = num_epochs
            saver.load()
        optimizer.attach(saver)
    optimizer.follow_buffers(model)
    last = _last_epoch(optimizer, num_epochs)
    _BEGUN.add(optimizer)
    folder = None if saver is None else saver.folder
    shown = Progress(optimizer, sampler.num_updates(last), progress, run_log, folder)
    optimizer.attach(shown)
    numbers = range(sampler.epoch, last)
    made = (Epoch(n, optimizer, loader, model, run_log) for n in numbers)
    return _run(made, shown, saver)


def _run(
    made: Iterable[Epoch], shown: Progress, saver: Checkpointer | None
) -> Iterator[Epoch]:
    """Yields epochs, each begun and then saved, and ends the run after the last one."""
    optimizer, log = shown.optimizer, shown.log
    with shown.bar:
        for epoch in made:
            optimizer.sampler.set_epoch(epoch.number)
            optimizer.set_epoch(epoch.number)
            yield epoch
            if not epoch.has_run:
                raise ValueError(
                    f"epoch {epoch.number} was left before its last minibatch: train "
                    "all of it, or `break` out of both loops to end the training"
                )
            if saver is not None:
                saver.save(epoch.metric)
    if log is not None:
        log.close()
    if saver is not None:
        end_run()


def _attached(optimizer: ElasticOptimizer, parts: dict[str, Any]) -> dict[str, Any]:
    """Attaches what runs after updates; returns the parts that have a state to save."""
    order, saved = optimizer.sampler.order, dict(parts)
    if hasattr(order, "state_dict") and order not in parts.values():
        saved["order"] = order
    for name, part in [*saved.items()]:
        # One that needs a metric is stepped in the loop's body.
        if hasattr(part, "get_last_lr") and not isinstance(part, ReduceLROnPlateau):
            optimizer.attach(saved.pop(name))  # its state is in the optimizer's
        elif hasattr(part, "after_update"):
            optimizer.attach(part.after_update)
        elif not hasattr(part, "load_state_dict"):
            raise TypeError(
                f"epochs: {name}={part!r} is neither an option nor a part of the run, "
                "with load_state_dict() or after_update(); give a list's one by one"
            )
    return saved


def _last_epoch(optimizer: ElasticOptimizer, num_epochs: int) -> int:
    """Returns how many epochs the trace has, at most; says so if they are fewer."""
    sampler, trace = optimizer.sampler, optimizer.sampler.schedule.trace
    last = int(min(num_epochs, sampler.num_epochs))
    if last < num_epochs and optimizer.replica.is_primary:
        logger.warning(
            f"{trace.name} ends after {len(trace)} steps, in epoch {last - 1}, and so "
            f"does training: for {num_epochs} epochs pass on_end='hold' or 'cycle'"
        )
    if sampler.epoch >= last and optimizer.replica.is_primary:
        logger.warning(
            f"the run is complete: all {last} epochs were trained. For more, raise "
            "num_epochs; for another run, give another checkpoint folder"
        )
    return last
