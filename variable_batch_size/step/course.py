"""Where a run goes between its updates: it begins, is restored, begins an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from variable_batch_size.step.together import refuse_waiting
from variable_batch_size.step.update import Updates


class Course(Updates):
    """The updates of a run that has the same replicas throughout; see `LiveUpdates`."""

    def enter(self, settings: Any, modules: Any, begin: Any, saver: Any) -> None:
        """Begins a run. A live one may be joined instead."""
        del settings, modules, saver
        begin()

    def between(self, function: Callable[[], Any]) -> Any:
        """Returns what a function of all replicas returns, between two updates.

        In a live run it runs again where a member is lost in it, see `after`.
        """
        return function()

    def restart(self) -> None:
        """Forgets what was accumulated before the sampler was placed elsewhere."""
        self.num_seen = 0
        self.clear()
        self.begin_minibatch()
        self.scaling.forget_given()

    def begin_epoch(self, epoch: int) -> None:
        """Goes to the first step of an epoch.

        Raises ReplicaError where other replicas would not begin it too.
        """
        refuse_waiting(self.account)
        is_lost = self.account.begin(epoch)
        if is_lost is None:
            return
        if is_lost:
            self.clear()
        self.gradients.refresh()
        self.scaling.note_given()
        self.begin_minibatch()
