"""What runs after an update: callbacks, and LR schedulers in any unit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import torch

from variable_batch_size.device_scalars import as_floats
from variable_batch_size.gradient_noise.meter import NoiseMeter
from xla_replica import Replica
from xla_replica.common.arguments import check_choice, check_number


@dataclasses.dataclass(frozen=True)
class Update:
    """One update of the weights, as attached callbacks see it.

    Attributes:
        epoch: Epoch of the update.
        step: Steps since the beginning of training, from 0.
        batch_size: Global batch size, in samples.
        minibatch_size: Samples of each minibatch that it was dealt in.
        lr: Effective learning rate of each parameter group. Where it is measured from
            the gradients (AdaScale) on an accelerator, a tensor of shape ``(1,)``, so
            ``float(lr[0])`` reads the device: do so on logging steps.
        idle: Whether this replica had no minibatch in the step; padding of a sharded
            model is one.
        ends_epoch: Whether it is the last update of its epoch.
        weight: The sum of the weights (tokens) of the step's minibatches, with
            ``reduction='sum'``, else None. On an accelerator a tensor of shape
            ``(1,)``, as ``lr``.
    """

    epoch: int
    step: int
    batch_size: int
    minibatch_size: int
    lr: tuple[Any, ...]
    idle: bool
    ends_epoch: bool
    weight: Any = None


def log_line(update: Update, noise: NoiseMeter | None, replica: Replica) -> str:
    """Returns one line about an update; reads the device."""
    line = f"step {update.step}: batch size {update.batch_size}, "
    if update.weight is not None:
        [weight] = as_floats((update.weight,), replica)
        line += f"weight {weight:g}, "
    lrs = ", ".join(f"{lr:.6g}" for lr in as_floats(update.lr, replica))
    line += f"learning rate {lrs}"
    for name, value in (noise.measure()._asdict() if noise else {}).items():
        line += f", {name.replace('_', ' ')} {value:.6g}"
    return line


# How much of each unit one update is; the noise meter counts the last one.
Unit = Literal["updates", "samples", "epochs", "iterations"]
UNITS: dict[str, Callable[[Update], int] | None] = {
    "updates": lambda update: 1,
    "samples": lambda update: update.batch_size,
    "epochs": lambda update: int(update.ends_epoch),
    "iterations": None,
}


class Attached:
    """The callbacks and schedulers that run after every update, in order.

    Attributes:
        is_empty: Whether there has been none, nor is one missing that was saved.
        num_done: How many have run after the last update.
    """

    def __init__(self, noise: NoiseMeter | None) -> None:
        self._noise = noise
        self._callbacks: list[Callable[[Update], Any]] = []
        self._waiting: list[dict[str, Any]] = []  # states of schedulers yet to come
        self._may_lack = False  # whether these may never come
        self.is_empty = True
        self.num_done = 0

    def add(self, target: Any, unit: Unit, every: float) -> None:
        """Adds what `ElasticOptimizer.attach` was given; see there."""
        if isinstance(target, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                "attach: ReduceLROnPlateau needs a metric; step it at the end of an "
                "epoch, and pass it to Checkpointer or epochs as a part, by any name"
            )
        schedulers = [each.scheduler for each in self._schedulers()]
        if target in [*self._callbacks, *schedulers]:
            raise ValueError(
                f"attach: {target!r} is attached already, and would run twice"
            )
        if hasattr(getattr(target, "__self__", None), "get_last_lr"):
            raise TypeError(
                f"attach: {target!r} is a method of an LR scheduler: attach that"
            )
        self.is_empty = False
        check_choice("attach: unit", unit, UNITS)
        check_number("attach: every", every, above=0)
        is_class = isinstance(target, type)
        if hasattr(target, "get_last_lr") and not is_class:
            target = AttachedScheduler(target, unit, every, self._noise)
        elif is_class or not callable(target):
            raise TypeError(
                f"attach: {target!r} is neither an LR scheduler nor a function"
            )
        elif (unit, every) != ("updates", 1):
            raise TypeError(
                "attach: unit= and every= are for LR schedulers; a function runs after "
                "every update and can look at it"
            )
        owner = getattr(target, "__self__", target)  # of a method
        for saver in self._callbacks:
            if getattr(saver, "saves", lambda part: False)(owner):
                raise ValueError(
                    f"attach: {target!r} comes after a Checkpointer: attach it before"
                )
        if self._waiting and isinstance(target, AttachedScheduler):
            target.load_state_dict(self._waiting[0])
            del self._waiting[0]
        self._callbacks.append(target)

    def run(self, update: Update) -> None:
        """Calls those that are not done, in the order in which they were attached.

        Raises ValueError where a saved run had more schedulers.
        """
        if self._waiting and not self._may_lack:
            kinds = [state["kind"] for state in self._waiting]
            raise ValueError(
                f"the run that was loaded had {', '.join(kinds)} attached, which this "
                "one lacks, so its learning rate would stay as it was saved: attach "
                "the same schedulers before training, or load with allow_changes=True"
            )
        for callback in self._callbacks[self.num_done :]:
            callback(update)
            self.num_done += 1

    def names(self) -> list[str]:
        """Returns what is attached, in order, as texts that other processes have."""
        found = [getattr(each, "scheduler", each) for each in self._callbacks]
        return [getattr(each, "__qualname__", type(each).__name__) for each in found]

    def check_states(self, is_saved: Callable[[Any], bool]) -> None:
        """Raises ValueError if something has a state that nobody saves."""
        for callback in self._callbacks:
            owner = getattr(callback, "__self__", callback)
            if hasattr(owner, "state_dict") and not is_saved(owner):
                raise ValueError(
                    f"attach: {owner!r} has a state, which members that join a live "
                    "run would lack: pass it to Checkpointer as a part, by any name"
                )

    def drop_step(self) -> None:
        """Tells those that have a ``drop_step`` that minibatches are run again."""
        for callback in self._callbacks:
            owner = getattr(callback, "__self__", callback)
            getattr(owner, "drop_step", tuple)()

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns the states of the schedulers, in order."""
        return [each.state_dict() for each in self._schedulers()] + self._waiting

    def check_state(self, states: list[dict[str, Any]]) -> None:
        """Raises ValueError unless `load_state_dict` can take ``states``."""
        for scheduler, state in zip(self._schedulers(), states):
            scheduler.check_state(state)

    def load_state_dict(
        self, states: list[dict[str, Any]], may_lack: bool = False
    ) -> None:
        """Takes what `state_dict` returned; schedulers may be attached later.

        Or, if this one ``may_lack`` some of them, never.
        """
        self._may_lack = may_lack
        schedulers = self._schedulers()
        for scheduler, state in zip(schedulers, states):
            scheduler.load_state_dict(state)
        for scheduler in schedulers[len(states) :]:
            scheduler.begin_here()
        self._waiting = list(states[len(schedulers) :])
        self.is_empty &= not self._waiting

    def _schedulers(self) -> list[AttachedScheduler]:
        return [each for each in self._callbacks if isinstance(each, AttachedScheduler)]


class AttachedScheduler:
    """Steps an LR scheduler whenever training has come so many units further.

    Args:
        scheduler: A torch LR scheduler of the reference learning rate.
        unit: A key of `UNITS`; ``iterations`` are scale-invariant ones, those of the
            noise meter's `progress`. The device is read for them only where what the
            host knows of the progress leaves open whether the scheduler is due.
        every: Units per step of the scheduler. With a fraction it may be stepped
            several times after one update.
        noise: Measures progress.
    """

    def __init__(
        self, scheduler: Any, unit: Unit, every: float, noise: NoiseMeter | None
    ) -> None:
        self._amount = UNITS[unit]
        if self._amount is None and noise is None:
            raise TypeError(
                "attach: unit='iterations' counts measured gains: use "
                "AdaScaleOptimizer, or another rule with noise=True"
            )
        if self._amount is None and noise is not None and noise.weighted:
            raise TypeError(
                "attach: unit='iterations' would read the device after every update "
                "with reduction='sum', where the host does not know the batch ratio: "
                "count 'updates' or 'samples', and look at noise.progress when you log"
            )
        self.scheduler = scheduler
        self._unit = unit
        self._every = every
        self._noise = noise
        self._begin = noise.progress if self._amount is None and noise else 0.0
        self._done = 0.0  # units since it was attached; a lower bound of iterations
        self._ticks = 0  # steps of the scheduler since then

    def __call__(self, update: Update) -> None:
        if self._amount is None:
            self._done = self._iterations()
        else:
            self._done += self._amount(update)
        due = math.floor(self._done / self._every)
        while self._ticks < due:
            self.scheduler.step()
            self._ticks += 1

    def _iterations(self) -> float:
        assert self._noise is not None
        low, high = (bound - self._begin for bound in self._noise.progress_bounds)
        # The rounding of what the device has added up since it was last read.
        slack = 1e-5 * (1 + high + self._begin - self._noise.last_read_progress)
        sure = math.floor((low - slack) / self._every)
        if sure == math.floor((high + slack) / self._every):
            return max(low - slack, 0.0)
        return self._noise.progress - self._begin

    def state_dict(self) -> dict[str, Any]:
        """Returns how far it has counted, and the scheduler's own state."""
        return {
            "kind": type(self.scheduler).__name__,
            "scheduler": self.scheduler.state_dict(),
            "unit": self._unit,
            "every": self._every,
            "done": self._done,
            "ticks": self._ticks,
            "begin": self._begin,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state is of another kind or unit of scheduler."""
        kind = type(self.scheduler).__name__
        own = f"a {kind} in {self._unit} by {self._every}"
        saved = f"a {state['kind']} in {state['unit']} by {state['every']}"
        if saved != own:
            raise ValueError(
                f"the saved scheduler was {saved}, and the one attached in its place "
                f"is {own}: attach the same schedulers in the same order"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` returned; see `check_state`."""
        self.check_state(state)
        self.scheduler.load_state_dict(state["scheduler"])
        self._done, self._ticks = state["done"], state["ticks"]
        self._begin = state["begin"]

    def begin_here(self) -> None:
        """Continues to count from the meter's progress, which has just been loaded."""
        if self._amount is None and self._noise is not None:
            self._begin = self._noise.progress - self._done
