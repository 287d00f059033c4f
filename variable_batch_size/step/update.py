"""What follows an update of the weights: callbacks, and LR schedulers in any unit."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

import torch

from variable_batch_size.gradient_noise.meter import NoiseMeter

UNITS = ("updates", "samples", "epochs", "iterations")


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
        idle: Whether this replica had no minibatch in the step.
        ends_epoch: Whether it is the last update of its epoch.
    """

    epoch: int
    step: int
    batch_size: int
    minibatch_size: int
    lr: tuple[Any, ...]
    idle: bool
    ends_epoch: bool


class Attached:
    """What runs after every update, and where its schedulers stand."""

    def __init__(self, noise: NoiseMeter | None) -> None:
        self._noise = noise
        self._callbacks: list[Callable[[Update], Any]] = []
        self._waiting: list[dict[str, Any]] = []  # states of schedulers yet to come

    def add(self, target: Any, unit: str, every: float) -> None:
        """See `as_callback`; a scheduler takes the next loaded state that waits."""
        callback = as_callback(target, unit, every, self._noise)
        if isinstance(callback, ScheduleIn) and any(
            getattr(each, "saves_updates", False) for each in self._callbacks
        ):
            raise ValueError(
                "attach: a scheduler behind a Checkpointer would be an update late in "
                "what it saves; attach it before"
            )
        if isinstance(callback, ScheduleIn) and self._waiting:
            callback.load_state_dict(self._waiting[0])
            del self._waiting[0]
        self._callbacks.append(callback)

    def run(self, update: Update) -> None:
        """Calls them all, in the order in which they were attached."""
        for callback in self._callbacks:
            callback(update)

    def state_dict(self) -> list[dict[str, Any]]:
        """Of the schedulers, in order."""
        return [each.state_dict() for each in self._schedules()] + self._waiting

    def check_state(self, states: list[dict[str, Any]]) -> None:
        """Raises ValueError unless `load_state_dict` can take ``states``."""
        for schedule, state in zip(self._schedules(), states):
            schedule.check_state(state)

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Takes what `state_dict` gave; states of schedulers to come wait for them.

        A scheduler without a state begins here, after the meter has loaded its own.
        """
        schedules = self._schedules()
        for schedule, state in zip(schedules, states):
            schedule.load_state_dict(state)
        for schedule in schedules[len(states) :]:
            schedule.begin_here()
        self._waiting = list(states[len(schedules) :])

    def _schedules(self) -> list[ScheduleIn]:
        return [each for each in self._callbacks if isinstance(each, ScheduleIn)]


def as_callback(
    target: Any, unit: str, every: float, noise: NoiseMeter | None
) -> Callable[[Update], Any]:
    """What is to be called after every update.

    Raises:
        TypeError: ``target`` is neither an LR scheduler nor a function, is a scheduler
            whose step needs a metric, or is a function with a unit; or scale-invariant
            iterations are not measured.
        ValueError: ``unit`` is unknown or ``every`` not positive.
    """
    if isinstance(target, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            "attach: ReduceLROnPlateau needs a metric; step it at the end of an epoch, "
            "or attach a function that does"
        )
    if unit not in UNITS:
        raise ValueError(f"attach: unit={unit!r}; allowed are {', '.join(UNITS)}")
    if not (isinstance(every, numbers.Real) and 0 < every < math.inf):
        raise ValueError(f"attach: every must be a positive number, got {every!r}")
    if hasattr(target, "get_last_lr") and not isinstance(target, type):
        return ScheduleIn(target, unit, every, noise)
    if not callable(target) or isinstance(target, type):
        raise TypeError(f"attach: {target!r} is neither an LR scheduler nor a function")
    if (unit, every) != ("updates", 1):
        raise TypeError(
            "attach: unit= and every= are for LR schedulers; a function runs after "
            "every update and can look at it"
        )
    return target


class ScheduleIn:
    """Steps an LR scheduler whenever training has come so many units further.

    Args:
        scheduler: A torch LR scheduler of the reference learning rate.
        unit: One of `UNITS`; ``iterations`` are scale-invariant ones, those of the
            noise meter's `progress`. The device is read for them only where what the
            host knows of the progress leaves open whether the scheduler is due.
        every: Units per step of the scheduler. With a fraction it may be stepped
            several times after one update.
        noise: Measures progress.

    Attributes:
        done: Units since it was attached; a lower bound of iterations.
        ticks: Steps of the scheduler since then.
    """

    def __init__(
        self, scheduler: Any, unit: str, every: float, noise: NoiseMeter | None
    ) -> None:
        if unit == "iterations" and noise is None:
            raise TypeError(
                "attach: unit='iterations' counts measured gains: use "
                "AdaScaleOptimizer, or another rule with noise=True"
            )
        self.scheduler = scheduler
        self.unit = unit
        self.every = every
        self.done = 0.0
        self.ticks = 0
        self._noise = noise
        self._begin = noise.progress if unit == "iterations" and noise else 0.0

    def __call__(self, update: Update) -> None:
        if self.unit == "iterations":
            self.done = self._iterations()
        else:
            self.done += {
                "updates": 1,
                "samples": update.batch_size,
                "epochs": int(update.ends_epoch),
            }[self.unit]
        due = math.floor(self.done / self.every)
        while self.ticks < due:
            self.scheduler.step()
            self.ticks += 1

    def _iterations(self) -> float:
        assert self._noise is not None
        low, high = (bound - self._begin for bound in self._noise.progress_bounds)
        # Of what the device has added up, rounding, since it was last read.
        slack = 1e-5 * (1 + high + self._begin - self._noise.last_read_progress)
        sure = math.floor((low - slack) / self.every)
        if sure == math.floor((high + slack) / self.every):
            return max(low - slack, 0.0)
        return self._noise.progress - self._begin

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, and the scheduler's own state."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "unit": self.unit,
            "every": self.every,
            "done": self.done,
            "ticks": self.ticks,
            "begin": self._begin,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError if it is of a scheduler in another unit."""
        if (state["unit"], state["every"]) != (self.unit, self.every):
            raise ValueError(
                f"the saved scheduler counted {state['unit']} by {state['every']}, and "
                f"the one attached in its place counts {self.unit} by {self.every}: "
                "attach the same schedulers in the same order"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave; see `check_state`."""
        self.check_state(state)
        if "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
        self.done, self.ticks = state["done"], int(state["ticks"])
        self._begin = state["begin"]

    def begin_here(self) -> None:
        """Goes on counting from the meter's progress, which has just been loaded."""
        if self.unit == "iterations" and self._noise is not None:
            self._begin = self._noise.progress - self.done
