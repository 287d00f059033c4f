"""Whether replicas agree: on hyperparameters, on orders, and on when to stop.

A replica's loop body does not run once per update (see `ElasticOptimizer`), so a
learning rate that it changes may drift from its peers' without anything to notice
here; and a signal reaches one process, or all of them at different moments, while a
replica that stops alone leaves its peers waiting. So every replica adds ballots to the
sum of the gradients: a hash of its hyperparameters, one of the epoch's order, and
whether it was asked to stop. That costs no collective, and no transfer until somebody
has to know.

Where one replica alone is asked to stop, as on one preempted host, the others hear of
it from copies of the sum that arrive on the host when the device gets to them, without
anybody waiting. A replica that hears of it asks too, so that in the next sum all do.
Where nothing can be read so, everybody looks from time to time. Clocks differ, so one
ballot says how much work replica 0 has done in that time: all read it where they look.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

import xla_replica
from variable_batch_size.data.schedule import Step
from variable_batch_size.part import Part
from variable_batch_size.step.gradients import StepGradients
from variable_batch_size.step.run import Run
from variable_batch_size.step.scaling import Scaling, hyperparameters
from xla_replica import ReplicaError
from xla_replica.device.gradients import weak_hook

# float32 holds integers below this exactly, in whatever order they are summed.
_EXACT = 2**24
_SETTINGS = (
    "learning rates, other settings, attached functions or trained parameters: change "
    "them alike, and call optimizer.attach(scheduler) in place of scheduler.step()"
)
_ORDERS = "the order of an epoch: seed what order= returns without the rank"

Parts = Mapping[str, Part]


class Ballots(Part):
    """Casts ballots and counts them, on one of several replicas.

    Hashes agree if their sum is the number of replicas times the own one.

    Args:
        run: That of the optimizer.
        gradients: Which parameters are trained.
        scaling: The state of the rule.
        parts: All parts of the update, this one among them.
    """

    hears = True  # of votes of other replicas, beside the training, on a GPU

    def __init__(
        self, run: Run, gradients: StepGradients, scaling: Scaling, parts: Parts
    ) -> None:
        self._run, self._replica = run, run.replica
        self._gradients, self._scaling, self._parts = gradients, scaling, parts
        replica, self._is_host = run.replica, run.replica.is_host
        if not (replica.is_lazy or run.sharded):
            gradients.on_change = weak_hook(self._agree_on_trained)
        # Of hyperparameters and of orders, added up over updates.
        self._differences = torch.zeros(2, device=replica.device)
        self._sums = self._own = torch.zeros(0)
        self._asked = False
        self._arriving: deque[Callable[[], torch.Tensor | None]] = deque()
        self.votes: Any = None  # summed; a list once they are read
        self._looks = not (self._is_host or replica.has_streams)
        self._hears = self.hears and replica.has_streams
        # Minibatches of the busiest replica since everybody has looked, how many are to
        # be made before the next look, and how many replica 0 proposes.
        self._made, self._look_after, self._proposed = 0, 1.0, 0.0
        self._looked_at = time.monotonic()

    # --- before the sum -------------------------------------------------------------

    def prepare(self, step: Step) -> None:
        """Casts the ballots of an update: `tensors` has ``(6,)`` float32.

        The hash of what is used and that of the order; one, and whether the order is
        known, which count replicas that cast these two; whether to stop; and on replica
        0, after how many minibatches everybody is to look again. The order is unknown
        where this replica has not begun to run it, since idle replicas join steps
        before that.
        """
        self._made += -(-step.num_minibatches // self._replica.num_replicas)
        hyper = hyperparameters(self._run.inner.param_groups)
        order = self._run.sampler.order_digest(step.epoch)
        self._cast({"hyperparameters": hyper, **self.common()}, order)

    def _cast(self, used: dict[str, Any], order: str | None) -> None:
        self._used = used if order is None else {**used, "order": order}
        modulus = _EXACT // self._replica.num_replicas
        own = zlib.crc32(repr(used).encode()) % modulus
        known = order is not None
        digest = zlib.crc32(order.encode()) % modulus if order is not None else 0
        if self._arriving:
            self._asked |= self._vote_arrived()
        self._asked |= xla_replica.stop_requested() is not None
        numbers = [own, digest, 1.0, float(known), float(self._asked), self._proposed]
        numbers += self.others()
        self._own = self._run.scalars.get("ballots", (tuple(numbers),)).reshape(-1)
        self._sums = self._own.clone()

    def common(self) -> dict[str, Any]:
        """Returns what is the same on all replicas beside hyperparameters, by name."""
        return {"rule": self._scaling.state_dict(), "trained": self._gradients.trained}

    def others(self) -> list[float]:
        """Returns further ballots, as a live run has."""
        return []

    def tensors(self) -> list[torch.Tensor]:
        return [self._sums]

    # --- after it -------------------------------------------------------------------

    def look(self, step: Step | None = None) -> None:
        """Counts the sums, and checks them where reading is free."""
        sums, own, is_cast = self._sums, self._own[:2], self._own[2:4]
        hashes, num_cast = sums[:2], sums[2:4]
        self._differences.add_((is_cast * (hashes - own * num_cast)).abs())
        self.votes = sums[2:].clone()  # computed by the update's own program
        if self._hears and not self._asked:
            self._arriving.append(self._replica.fetch_later(sums[4:5]))
        if self._is_host and self._differences.any():
            self.check()

    def _agree_on_trained(self) -> None:
        """Raises ReplicaError unless all replicas train other parameters from now on.

        One that did so alone would sum tensors of other sizes, which gloo aborts the
        process for. So it takes part in the next sum of its peers as it was, or in one
        that all make for this; the ballots differ in the first case.
        """
        self._cast({"trained": self._gradients.trained}, None)
        others: list[torch.Tensor] = []
        for part in self._parts.values():
            own = part.tensors()
            others += own if part is self else [torch.zeros_like(each) for each in own]
        self._gradients.sums.sum_zeros(others)
        self.look()
        self.check()

    def check(self) -> None:
        """Raises ReplicaError if replicas ever differed; reads the device."""
        [differences] = self._replica.fetch([self._differences])
        for difference, what in zip(differences.tolist(), (_SETTINGS, _ORDERS)):
            if difference != 0:
                raise ReplicaError(f"replicas differ in {what}", self._replica.rank)

    def _vote_arrived(self) -> bool:
        """Returns whether a vote of any replica has arrived on the host by now."""
        while self._arriving and (votes := self._arriving[0]()) is not None:
            self._arriving.popleft()
            if votes.item() > 0:
                self._arriving.clear()
                return True
        return False

    def stop_agreed(self, look: bool, every_seconds: float) -> bool:
        """Returns whether all replicas stop after the update that was counted last.

        A replica reads the sum only if it was asked itself: replicas that were all
        asked find the same sum, their number, at the same update. Where only some were
        asked, the others hear of it and ask too; where nothing can be read beside the
        training, an update at which everybody looks finds them.

        Args:
            look: Whether every replica looks at this update, also one that was not
                asked; the same on all of them. Reads the device. On a CPU, where
                reading is free, everybody always does.
            every_seconds: After how much time, by replica 0, everybody looks anyway
                where sums do not arrive beside the training.
        """
        look = look or (self._looks and self._made >= self._look_after)
        everybody = look or self._is_host
        if self.votes is None or not (self._asked or everybody):
            return False
        _, votes, proposed, *_ = self.read_votes()
        if not everybody:
            return votes == self._replica.num_replicas
        if self._looks and self._made:
            self._plan_look(proposed, every_seconds)
        return votes > 0

    def read_votes(self) -> list[float]:
        """Returns how many have voted, and the sums of their last ballots."""
        # Not `Replica.fetch`: that cuts the graph, and what XLA draws depends on cuts.
        if isinstance(self.votes, torch.Tensor):
            self.votes = self.votes.tolist()
        num_cast, _, *votes = self.votes
        return [num_cast, *votes]

    def _plan_look(self, proposed: float, every_seconds: float) -> None:
        """Plans the next look, and proposes the one after it.

        What is proposed was measured between the two looks before this one, at which
        the host waits for its device. At most twice as much work as the last time: what
        was measured may be past.
        """
        self._look_after = max(1.0, min(proposed, 2.0 * self._made))
        now = time.monotonic()
        if self._replica.is_primary:
            seconds = max(now - self._looked_at, 1e-9)
            self._proposed = self._made * every_seconds / seconds
        self._looked_at, self._made = now, 0
