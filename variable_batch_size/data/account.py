"""What one optimizer has trained, and committed, of what a `Ledger` deals."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from variable_batch_size.data.ledger import Ledger
from variable_batch_size.data.schedule import Place
from variable_batch_size.data.standing import Standing


class Account(Standing):
    """Which minibatches one optimizer was handed, has trained and has committed.

    Args:
        ledger: That of its sampler, which holds it while the optimizer lives.
        key: What it updates; an account of the same takes its place.

    Attributes:
        owner: What makes its updates.
    """

    owner: Any = None

    def __init__(self, ledger: Ledger, key: int) -> None:
        super().__init__(ledger)
        self.begin_loop(is_followed=False)
        ledger.accounts[key] = self

    def begin_loop(self, is_followed: bool) -> None:
        """Notes that a loop begins; see `Ledger.followed`."""
        self._handed: deque[tuple[int, Place]] = deque()
        self._handing_thread = self._training_thread = 0
        # Whether the loop reads ahead; unknown before its first step().
        self._reads_ahead = False if is_followed else None

    def take(self, deal: int, place: Place, is_run: bool) -> None:
        """Notes a minibatch that is loaded next; or, if ``is_run``, trained next."""
        if is_run:
            self._handed.append((deal, place))
            self._handing_thread = threading.get_ident()

    def check(self) -> None:
        """Goes to the epoch of the minibatch that was handed out; changes nothing else.

        Raises:
            ValueError: It is not the next minibatch of this replica: the loop has left
                one out, or its data are from somewhere else, or the epoch is over.
            ReplicaError: This replica is idle in the step, or was and did not join it.
        """
        if self.is_waiting:
            raise self.not_ended()
        deal, place = self._handed[0] if self._handed else (self.ledger.deal, None)
        epoch = self.ledger.epoch if place is None else place.epoch
        if epoch != self.epoch or self.ended or self.idle or not self.announced:
            self.enter(epoch)
        if place is None:
            raise ValueError(
                "step() is for a minibatch that the sampler has not dealt: build the "
                "loader by DataLoader(dataset, batch_sampler=sampler), or iterate that"
            )
        if deal != self.ledger.deal:
            raise ValueError(
                f"step() is for a minibatch of step {place.step} that was dealt anew: "
                "iterate replica.loader(loader); begin a new loop after load_state_dict"
            )
        num_handed = len(self._handed)
        if self.strict and num_handed > 1:
            raise ValueError(
                f"{num_handed} minibatches were read and not trained: nothing may read "
                "ahead; iterate replica.loader(loader)"
            )
        if self._reads_ahead is None:
            self._reads_ahead = num_handed > 1
        self._training_thread = threading.get_ident()
        # Trainers read all minibatches of a step at once, and a thread any number.
        is_ahead = self._handed[-1][1].step != place.step and self._is_read_here()
        is_next = place[1:] == (self.number, self.substep)
        if (is_ahead and not self._reads_ahead) or not is_next:
            raise left_out(self.epoch)

    def train(self) -> bool:
        """Counts the minibatch as trained; returns whether it ends this replica's step.

        Call it after `check`.
        """
        self._handed.popleft()
        self.has_run = True
        self.substep += 1
        return self.now is not None and self.substep == self.now.num_substeps

    def commit(self) -> None:
        """Counts the step under way as done."""
        self.number, self.substep = self.number + 1, 0
        self.now = now = self.plan.step(self.number, self.ledger.rank)
        self.ended, self.idle = now is None, now is not None and now.idle
        self.ledger.is_placed, start = True, self.ledger.start
        if start is not None and (self.ended or self.epoch > start.epoch):
            self.ledger.start = None

    def not_ended(self) -> ValueError:
        """Returns the error of a step that other optimizers have not ended yet."""
        return ValueError(
            f"not all {len(self.ledger.accounts)} optimizers of this sampler have "
            "ended the step: call step() of each, and del one that is unused now"
        )

    def refuse_left_out(self, is_sure: bool) -> None:
        """Raises ValueError if the loop has ended and left out a minibatch.

        ``is_sure``: the training loop has ended, too.
        """
        is_sure |= self._reads_ahead is False and self._is_read_here()
        if is_sure and self._handed and self._training_thread:
            raise left_out(self.epoch)

    def _is_read_here(self) -> bool:
        """Returns whether the thread that calls is the one that reads and trains."""
        return threading.get_ident() == self._handing_thread == self._training_thread


def left_out(epoch: int) -> ValueError:
    """Returns the error of a loop that has left out a minibatch of an epoch."""
    return ValueError(
        f"step() was not called for a minibatch of epoch {epoch}: remove an "
        "accumulation of your own, since step() accumulates; to skip one, "
        "loss = 0 * sum(p.sum() for p in model.parameters())"
    )
