"""What runs after an update: callbacks, and LR schedulers in any unit."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

from variable_batch_size.data.account import Account
from variable_batch_size.device_scalars import as_floats
from variable_batch_size.step.run import Run
from xla_replica import ReplicaError
from xla_replica.common.arguments import check_choice, check_number
from xla_replica.common.differences import check_same

logger = logging.getLogger(__name__)


class Update(NamedTuple):
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


def log(update: Update, run: Run) -> None:
    """Logs one line about an update on replica 0; every replica reads its device."""
    line = f"step {update.step}: batch size {update.batch_size}, "
    if update.weight is not None:
        [weight] = as_floats((update.weight,), run.replica)
        line += f"weight {weight:g}, "
    lrs = ", ".join(f"{lr:.6g}" for lr in as_floats(update.lr, run.replica))
    line += f"learning rate {lrs}"
    for name, value in (run.noise.measure()._asdict() if run.noise else {}).items():
        line += f", {name.replace('_', ' ')} {value:.6g}"
    if run.replica.is_primary:
        logger.info(line)


def check_attach(account: Account) -> None:
    """Raises ReplicaError if what is attached now would miss updates here alone.

    An epoch in which this replica is always idle may be over or have just begun, so it
    gets a warning.
    """
    plan = account.plan
    num_made = account.number - plan.start_step
    if not (account.announced and num_made and plan.has_idle_replicas):
        return
    text = (
        f"attach: this replica has joined {num_made} updates of epoch {plan.epoch}, "
        "and other replicas may not: call attach before optimizer.set_epoch"
    )
    if not account.ended:
        raise ReplicaError(text, account.ledger.rank)
    if not account.has_run:
        logger.warning(text)


Unit = Literal["updates", "samples", "epochs"]


class Attached:
    """The callbacks and schedulers that run after every update, in order.

    Attributes:
        callbacks: All of them.
        num_done: How many have run after the last update.
        has_entered: Whether the run has begun or was resumed, by `Checkpointer.load`.
    """

    has_entered = False

    def __init__(self, run: Run) -> None:
        self._run = run
        self.callbacks: list[Callable[[Update], Any]] = []
        self.num_done = 0

    def add(self, target: Any, unit: Unit, every: float) -> None:
        """Adds what `ElasticOptimizer.attach` was given; see there."""
        check_choice("attach: unit", unit, get_args(Unit))
        check_number("attach: every", every, above=0)
        owner = getattr(target, "__self__", target)  # of a method
        is_scheduler = hasattr(target, "get_last_lr")
        known = [*self.callbacks, *(each.scheduler for each in self._schedulers())]
        builder = getattr(target, "optimizer" if is_scheduler else "updates_of", None)
        groups = self._run.inner.param_groups
        savers = [each for each in self.callbacks if hasattr(each, "saves")]
        for is_wrong, why in (
            (getattr(builder, "param_groups", groups) is not groups,
             "was built with another optimizer: build it with this one"),
            (target in known, "is attached already, and would run twice"),
            (owner is not target and hasattr(owner, "get_last_lr"),
             "is a method of an LR scheduler: attach that"),
            (not is_scheduler and (unit, every) != ("updates", 1),
             "runs after every update, as a function, which may ask for "
             "update.ends_epoch: unit= and every= are for LR schedulers"),
            (any(is_scheduler or each.saves(owner) for each in savers),
             "comes after a Checkpointer: attach it before"),
            (is_scheduler and self.has_entered,
             "comes after Checkpointer.load(), which resumes it: attach it before"),
        ):  # fmt: skip
            if is_wrong:
                raise ValueError(f"attach: {target!r} {why}")
        if is_scheduler:
            target = AttachedScheduler(target, unit, every)
        self.callbacks.append(target)

    def run(self, update: Update) -> None:
        """Calls those that are not done, in the order in which they were attached."""
        for callback in self.callbacks[self.num_done :]:
            callback(update)
            self.num_done += 1

    def names(self) -> list[str]:
        """Returns what is attached, in order, as texts that other processes have."""
        found = [getattr(each, "scheduler", each) for each in self.callbacks]
        return [getattr(each, "__qualname__", type(each).__name__) for each in found]

    def next_rates(self, number: int = 100) -> dict[str, Any]:
        """Returns the learning rates after each of the schedulers' next steps, by name.

        Copies of the schedulers make them. Fewer where a schedule ends, or cannot be
        copied.
        """
        found: dict[str, Any] = {}
        schedulers = [each.scheduler for each in self._schedulers()]
        groups = [{**group, "params": []} for group in self._run.inner.param_groups]
        with contextlib.suppress(Exception):  # the user's, or a schedule's end
            step = schedulers[0].optimizer.step  # torch looks whether it is its own
            owner = SimpleNamespace(param_groups=groups, step=step, _opt_called=True)
            owners = {id(each.optimizer): owner for each in schedulers}
            copies = copy.deepcopy(schedulers, owners)
            for ahead in range(1, number + 1):
                for each in copies:
                    each.step()
                rates = tuple(float(group["lr"]) for group in groups)
                found[f"learning rates {ahead} updates ahead"] = rates
        return found

    def check_states(self, is_saved: Callable[[Any], bool]) -> None:
        """Raises ValueError if something has a state that nobody saves."""
        for callback in self.callbacks:
            owner = getattr(callback, "__self__", callback)
            if hasattr(owner, "state_dict") and not is_saved(owner):
                raise ValueError(
                    f"attach: {owner!r} has a state, which members that join a live "
                    "run would lack: pass it to Checkpointer as a part, by any name"
                )

    def drop_step(self) -> None:
        """Tells those that have a ``drop_step`` that minibatches are run again."""
        for callback in self.callbacks:
            owner = getattr(callback, "__self__", callback)
            getattr(owner, "drop_step", tuple)()

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns how far each scheduler has counted, and its own state, in order."""
        return [
            {
                "kind": type(each.scheduler).__name__,
                "scheduler": each.scheduler.state_dict(),
                **{name: getattr(each, name) for name in ("unit", "every", "done")},
            }
            for each in self._schedulers()
        ]

    def check_state(self, states: list[dict[str, Any]], may_lack: bool) -> None:
        """Raises ValueError unless `load_state_dict` can take ``states``.

        ``may_lack``: Whether there may be fewer schedulers than were saved.
        """
        attached = self.state_dict()
        lacking = [state["kind"] for state in states[len(attached) :]]
        if lacking and not may_lack:
            raise ValueError(
                f"the run that is loaded had {', '.join(lacking)} attached: attach the "
                "same schedulers before, or load with allow_changes=True"
            )
        what, remedy = "a saved scheduler is another one", "Attach them as they were"
        called = {name: f"its {name}" for name in ("kind", "unit", "every")}
        for state, own in zip(states, attached):
            check_same(state, own, what, remedy, called)

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Takes what `state_dict` returned; call it after `check_state`."""
        for each, state in zip(self._schedulers(), states):
            each.scheduler.load_state_dict(state["scheduler"])
            each.done = state["done"]

    def _schedulers(self) -> list[AttachedScheduler]:
        return [each for each in self.callbacks if isinstance(each, AttachedScheduler)]


@dataclasses.dataclass(eq=False)
class AttachedScheduler:
    """Steps an LR scheduler whenever training has come so many units further.

    Args:
        scheduler: A torch LR scheduler of the reference learning rate.
        unit: What is counted.
        every: Units per step of the scheduler. With a fraction it may be stepped
            several times after one update.
    """

    scheduler: Any
    unit: Unit
    every: float
    done: int = 0  # units since it was attached

    def __call__(self, update: Update) -> None:
        before = math.floor(self.done / self.every)
        size, ends = update.batch_size, update.ends_epoch
        self.done += {"updates": 1, "samples": size, "epochs": ends}[self.unit]
        for _ in range(before, math.floor(self.done / self.every)):
            self.scheduler.step()
