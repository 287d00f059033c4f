"""Parts of an update: ballots of replicas, weights of minibatches, and clipping.

Replicas agree on hyperparameters, on orders, and on when to stop. A replica's loop body
does not run once per update (see `ElasticOptimizer`), so a learning rate that it
changes may drift from its peers' without anything to notice here; and a signal reaches
one process, or all of them at different moments, while a replica that stops alone
leaves its peers waiting. So every replica adds ballots to the sum of the gradients: a
hash of its hyperparameters, one of the epoch's order, and whether it was asked to stop.
That costs no collective, and no transfer until somebody has to know.

Where one replica alone is asked to stop, as on one preempted host, the others find out
when they look at the sum, which each does from time to time, and ask too. In the next
sum all do.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Mapping
from typing import Any

import torch

import xla_replica
from variable_batch_size.data.account import Account
from variable_batch_size.data.schedule import Step
from variable_batch_size.device_scalars import dtype_for
from variable_batch_size.part import Part
from variable_batch_size.step.gradients import StepGradients
from variable_batch_size.step.run import Run
from variable_batch_size.step.scaling import Scaling, hyperparameters
from xla_replica import ReplicaError
from xla_replica.common.arguments import check_number
from xla_replica.device.gradients import weak_hook
from xla_replica.device.row_units import SmallSum

Parts = Mapping[str, Part]
# float32 holds integers below this exactly, in whatever order they are summed.
_EXACT = 2**24
_SETTINGS = (
    "learning rates, other settings, attached functions or trained parameters: change "
    "them alike, and call optimizer.attach(scheduler) in place of scheduler.step()"
)
_ORDERS = "the order of an epoch: seed what order= returns without the rank"


class Ballots(Part):
    """Casts ballots and counts them, on one of several replicas.

    Hashes agree if their sum is the number of replicas times the own one.

    Args:
        run: That of the optimizer.
        gradients: Which parameters are trained.
        scaling: The state of the rule.
        parts: All parts of the update, this one among them.
    """

    def __init__(
        self, run: Run, gradients: StepGradients, scaling: Scaling, parts: Parts
    ) -> None:
        self._run, self._replica = run, run.replica
        self._gradients, self._scaling, self._parts = gradients, scaling, parts
        if not (run.replica.is_lazy or run.sharded):
            gradients.on_change = weak_hook(self._agree_on_trained)
        # Of hyperparameters and of orders, added up over updates.
        self._differences = torch.zeros(2, device=run.replica.device)
        self._sums = self._own = torch.zeros(0)
        self._asked = False
        self.votes: Any = None  # summed; a list once they are read
        self._looked_at = time.monotonic()

    # --- before the sum -------------------------------------------------------------

    def prepare(self, step: Step) -> None:
        """Casts the ballots of an update: `tensors` has ``(6,)`` float32.

        The hash of what is used and that of the order; one, and whether the order is
        known, which count replicas that cast these two; whether to stop; and whether a
        live run is to meet. The order is unknown where this replica has not begun to
        run it, since idle replicas join steps before that.
        """
        hyper = hyperparameters(self._run.inner.param_groups)
        order = self._run.sampler.order_digest(step.epoch)
        self._cast({"hyperparameters": hyper, **self.common()}, order)

    def _cast(self, used: dict[str, Any], order: str | None) -> None:
        self._used = used if order is None else {**used, "order": order}
        modulus = _EXACT // self._replica.num_replicas
        texts = repr(used), order or ""  # whose checksum is 0
        self._asked |= xla_replica.stop_requested() is not None
        answers = True, order is not None, self._asked, self._replica.wants_change
        hashes = [zlib.crc32(text.encode()) % modulus for text in texts]
        numbers = tuple(map(float, (*hashes, *answers)))
        self._own = self._run.scalars.get("ballots", (numbers,)).reshape(-1)
        self._sums = self._own.clone()

    def common(self) -> dict[str, Any]:
        """Returns what is the same on all replicas beside hyperparameters, by name."""
        return {"rule": self._scaling.state_dict(), "trained": self._gradients.trained}

    def tensors(self) -> list[torch.Tensor]:
        return [self._sums]

    # --- after it -------------------------------------------------------------------

    def look(self, step: Step | None = None) -> None:
        """Counts the sums, and checks them where reading is free."""
        sums, own, is_cast = self._sums, self._own[:2], self._own[2:4]
        hashes, num_cast = sums[:2], sums[2:4]
        self._differences.add_((is_cast * (hashes - own * num_cast)).abs())
        self.votes = sums[2:].clone()  # computed by the update's own program
        if self._replica.is_host and self._differences.any():
            self.check()

    def _agree_on_trained(self) -> None:
        """Raises ReplicaError unless all replicas train other parameters from now on.

        One that did so alone would sum tensors of other sizes, which gloo aborts the
        process for. So it takes part in the next sum of its peers as it was, or in one
        that all make for this; the ballots differ in the first case.
        """
        self._cast({"trained": self._gradients.trained}, None)
        tensors = [each for part in self._parts.values() for each in part.tensors()]
        others = [t if t is self._sums else torch.zeros_like(t) for t in tensors]
        self._gradients.sums.sum_zeros(others)
        self.look()
        self.check()

    def check(self) -> None:
        """Raises ReplicaError if replicas ever differed; reads the device."""
        [differences] = self._replica.fetch([self._differences])
        for difference, what in zip(differences.tolist(), (_SETTINGS, _ORDERS)):
            if difference != 0:
                raise ReplicaError(f"replicas differ in {what}", self._replica.rank)

    def stop_agreed(self, look: bool, every_seconds: float) -> bool:
        """Returns whether all replicas stop after the update that was counted last.

        A replica that was asked reads the sum of every update: replicas that were all
        asked find their number at the same one. The others look from time to time, and
        ask too from then on if one of them was asked.

        Args:
            look: Whether every replica looks at this update, also one that was not
                asked; the same on all of them. Reads the device. On a CPU, where
                reading is free, everybody always does.
            every_seconds: After how much time this replica looks on its own.
        """
        everybody, now = look or self._replica.is_host, time.monotonic()
        is_time = self._asked or now - self._looked_at >= every_seconds
        if self.votes is None or not (everybody or is_time):
            return False
        self._looked_at = now
        votes = self.read_votes()[2]
        if everybody:
            return votes > 0
        self._asked |= votes > 0
        return votes == self._replica.num_replicas

    def read_votes(self) -> list[float]:
        """Returns how many have voted, how many know the order, and their votes."""
        # Not `Replica.fetch`: that cuts the graph, and what XLA draws depends on cuts.
        if isinstance(self.votes, torch.Tensor):
            self.votes = self.votes.tolist()
        found: list[float] = self.votes
        return found


class Weights(Part):
    """How many tokens the minibatches of a step have: the divisor of its gradient.

    Dividing by their sum makes the mean over all tokens of the step, whatever replica
    ran which minibatch. float32 counts exactly up to 2^24 tokens.

    Attributes:
        weight: The step's: a number on a CPU, where reading is free, else ``(1,)``.
        ratio: It over ``ref_weight``, if there is one.
    """

    weight: Any = None
    ratio: Any = None

    def __init__(self, run: Run, gradients: StepGradients) -> None:
        self._run, self._replica, self._gradients = run, run.replica, gradients
        size = run.sampler.minibatch_size
        self._places = self._replica.send(torch.arange(size, dtype=torch.float32))
        self._was_read = False  # `of_samples`, in this minibatch
        self._dtype = dtype_for(run.parameters())
        self._slot = SmallSum(1, self._dtype, self._replica, run.sums.is_exact)

    def of_minibatch(self, weight: Any, account: Account) -> torch.Tensor:
        """Returns the weight of the next minibatch, ``(1,)``, on the device.

        Args:
            weight: What `ElasticOptimizer.step` was given: a number, a tensor with one
                element, or None. It is not read from a device.
            account: At a minibatch of which some may be padding.

        Raises:
            TypeError, ValueError: It is missing; or is negative, infinite or NaN, as
                far as that can be seen without a read; or the loss counts padding.
        """
        if self._run.sampler.schedule.pad_minibatches:
            was_read, self._was_read = self._was_read, False
            num_real, size = account.num_real_samples, len(self._places)
            if num_real < size and not was_read:
                raise ValueError(
                    f"{size - num_real} of {size} samples of this minibatch are "
                    "padding: call (losses * optimizer.sample_weights).sum().backward()"
                )
            weight = num_real if weight is None else weight
        if account.is_padding:
            weight = 0
        if weight is None:
            raise TypeError(
                "step() with reduction='sum' needs weight=, the loss's number of tokens"
            )
        if isinstance(weight, torch.Tensor) and weight.is_cpu:
            weight = 0 + weight.item()  # also of a bool
        if isinstance(weight, torch.Tensor):
            return weight.detach().reshape(1).to(self._replica.device, self._dtype)
        check_number("step: weight", weight, least=0)
        return self._replica.scalar(weight, self._dtype)

    def of_samples(self, num_real: int) -> torch.Tensor:
        """Returns ``(minibatch_size,)``: 1 for so many real samples, then 0."""
        self._was_read = True
        number = self._run.scalars.get("samples", float(num_real))
        return (self._places < number).to(number.dtype)

    def end_minibatch(self, weight: torch.Tensor | None) -> None:
        self._slot.add(weight)

    def tensors(self) -> list[torch.Tensor]:
        return [self._slot.total]

    def commit(self, step: Step) -> None:
        """Divides gradients by the step's weight.

        A step of weight zero has an infinite divisor, which makes its gradient zero.
        """
        total = self._slot.value().clone()
        self.weight = total.item() if self._replica.is_host else total
        if is_zero(self.weight):
            self._gradients.refuse_nonzero()
        self._gradients.sums.divide_(torch.where(total > 0, total, math.inf))
        if self._run.ref_weight is not None:
            self.ratio = self.weight / self._run.ref_weight

    def clear(self) -> None:
        self._slot.total.zero_()


class Clipping(Part):
    """Clips a step's gradient to a global norm.

    Attributes:
        norm: The last update's norm before it was clipped; None before it.
    """

    norm: torch.Tensor | None = None

    def __init__(self, run: Run, gradients: StepGradients, max_norm: float) -> None:
        self._run, self._sums, self._max_norm = run, gradients.sums, max_norm

    def commit(self, step: Step) -> None:
        # In an order that no replica and no resumed run has for itself.
        trained = [p for p in self._run.parameters() if p in self._sums.gradients]
        self.norm = self._sums.clip_(trained, self._max_norm)


def is_zero(weight: Any) -> bool:
    """Returns whether a minibatch's weight is known to be zero, without a transfer."""
    return not (isinstance(weight, torch.Tensor) and not weight.is_cpu) and not weight
