"""Sums of gradients that run while the backward pass computes other gradients.

Gradients are views of flat tensors, the buckets, so nothing is copied before or after a
sum. When the last gradient of a bucket has been accumulated, and the buckets before it
are on their way, its sum begins. Replicas begin the same sums in the same order,
whatever the order in which their gradients appear, and whether or not they have any.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from xla_replica.backends.gradient_sum import GradientSum
from xla_replica.backends.replica import Replica
from xla_replica.errors import ReplicaError

# A small bucket begins early; a large one has fewer collectives to wait for.
FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
# Room for the numbers that ride with the gradients, in the bucket that goes last.
TAIL = 64

Begin = Callable[[torch.Tensor], Any]


class Bucket:
    """Gradients of one dtype and device, in one flat tensor.

    Attributes:
        flat: ``(N + tail,)``.
        views: What each parameter's gradient is.
        waiting: Parameters whose gradient this backward pass has yet to compute.
        handle: What waits for the sum, once it has begun.
    """

    def __init__(self, parameters: list[nn.Parameter], tail: int) -> None:
        self.num_numbers = sum(parameter.numel() for parameter in parameters)
        first = parameters[0]
        self.flat = torch.zeros(
            self.num_numbers + tail, dtype=first.dtype, device=first.device
        )
        parts = self.flat[: self.num_numbers].split([p.numel() for p in parameters])
        # .data has a version counter of its own, so that a write to one gradient does
        # not look like a write to its neighbours.
        self.views = {p: _like(part, p).data for p, part in zip(parameters, parts)}
        self.waiting: set[nn.Parameter] = set()
        self.handle: Any = None


class OverlappedSum(GradientSum):
    """Sums buckets of gradients during the last backward pass of a step.

    The first step is summed when it is complete. It shows in which order gradients
    appear, by which buckets are filled from then on; and whether every gradient is
    accumulated once in a minibatch. Otherwise no sum may begin early. If so, ``.grad``
    is None between steps: the first backward pass then makes new gradients, and to move
    them into their bucket takes less than to zero the bucket and to add them.

    Args:
        replica: The replica.
        may_begin: See `GradientSum`.
        begin: Begins the sum of a tensor over replicas, in place; returns what has
            ``wait()``.
    """

    def __init__(
        self, replica: Replica, may_begin: Callable[[], bool], begin: Begin
    ) -> None:
        super().__init__(replica.all_reduce_, may_begin)
        self._replica = replica
        self._begin = begin
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._hooked: set[nn.Parameter] = set()
        # How often each gradient was accumulated in the last minibatch of a step.
        self._appeared: dict[nn.Parameter, int] = {}
        self._has_order = False
        self._once: bool | None = None  # unknown
        self._is_stale = False  # buckets hold the sums of the step before
        self._is_first = self._is_last = False
        self._num_begun = 0
        self._newest: nn.Parameter | None = None
        self._is_late = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [bucket.flat for bucket in self._buckets]

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        self._fill(list(parameters)[::-1])  # about the order in which they appear
        for parameter in parameters:
            if parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(_noter(weakref.ref(self)))
        self._has_order, self._once = False, None

    def _fill(self, parameters: list[nn.Parameter]) -> None:
        """Makes buckets of the parameters in this order, with the values they have."""
        before = {} if self._is_stale else self.gradients
        lists = bucketed(parameters)
        self._buckets = [
            Bucket(each, TAIL if index == len(lists) - 1 else 0)
            for index, each in enumerate(lists)
        ]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.views}
        self.gradients = {p: self._bucket_of[p].views[p] for p in parameters}
        self._is_stale = False
        with torch.no_grad():
            for parameter, gradient in self.gradients.items():
                if parameter in before:
                    gradient.copy_(before[parameter])
                parameter.grad = gradient

    # --- the backward pass ----------------------------------------------------------

    def expect(self, is_first: bool, is_last: bool) -> None:
        self._is_first = is_first
        self._is_last = is_last and bool(self._once)
        if self._is_last:
            for bucket in self._buckets:
                bucket.waiting = set(bucket.views)
        elif is_last:
            self._appeared.clear()

    def expect_none(self) -> None:
        if self._is_stale:
            self._zero()
        super().expect_none()
        self._is_first = self._is_last = False

    def note(self, parameter: nn.Parameter) -> None:
        """Takes note that autograd has accumulated into ``parameter.grad``."""
        bucket = self._bucket_of.get(parameter)
        if bucket is None:
            return
        self._is_late = self._is_late or bucket.handle is not None
        if self._once is None:
            self._appeared[parameter] = self._appeared.get(parameter, 0) + 1
        view = bucket.views[parameter]
        if self._is_first and parameter.grad is not view:
            with torch.no_grad():
                view.copy_(parameter.grad)
            parameter.grad = view
        if not self._is_last or self._is_late:
            return
        # Other hooks of this parameter may run after this one; those of the gradient
        # before it have run.
        newest, self._newest = self._newest, parameter
        if newest is None:
            self._is_last = self._may_begin()
            return
        bucket = self._bucket_of[newest]
        bucket.waiting.discard(newest)
        if newest.grad is not bucket.views[newest]:
            self._is_last = False  # who holds the gradients decides what becomes of it
            return
        # The last bucket takes others along, see `sum_`.
        while self._num_begun < len(self._buckets) - 1:
            if self._buckets[self._num_begun].waiting:
                return
            self._begin_next()

    def _begin_next(self) -> None:
        bucket = self._buckets[self._num_begun]
        bucket.handle = self._begin(bucket.flat)
        self._num_begun += 1

    def has_begun(self, parameter: nn.Parameter) -> bool:
        return self._bucket_of[parameter].handle is not None

    # --- the sum --------------------------------------------------------------------

    def sum_(self, *others: torch.Tensor, divisor: torch.Tensor | None = None) -> None:
        if self._is_late:
            raise ValueError(
                "a gradient was accumulated after its sum over replicas had begun: "
                "this step calls backward() more often than the first one did. Call it "
                "once per step(), on the sum of the losses, or pass overlap=False"
            )
        with torch.no_grad():
            tail = self._tail_of(others)
            while self._num_begun < len(self._buckets):
                self._begin_next()
            if tail is None:
                self._all_reduce_(others)
            for bucket in self._buckets:
                bucket.handle.wait()
                if divisor is not None and bucket is not self._buckets[-1]:
                    bucket.flat.div_(divisor)  # while the next sums are under way
            self._end_sums()
            if tail is not None:
                parts = tail.split([other.numel() for other in others])
                for other, part in zip(others, parts):
                    other.copy_(part.view_as(other))
                tail.zero_()
            if divisor is not None and self._buckets:
                self._buckets[-1].flat.div_(divisor)
            if not self._has_order:
                self._learn()
            if self._once is None and self._appeared:
                self._once = set(self._appeared.values()) == {1}

    def _tail_of(self, others: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns the others, in the last bucket; None if they do not fit in there."""
        size = sum(other.numel() for other in others)
        if not self._buckets or not 0 < size <= TAIL:
            return None
        last = self._buckets[-1]
        dtype = last.flat.dtype
        if any(torch.promote_types(other.dtype, dtype) != dtype for other in others):
            return None
        tail = last.flat[last.num_numbers : last.num_numbers + size]
        tail.copy_(torch.cat([other.reshape(-1) for other in others]))
        return tail

    def _learn(self) -> None:
        """Fills buckets in the order in which replica 0's gradients have appeared."""
        parameters = list(self.gradients)
        appeared = {parameter: place for place, parameter in enumerate(self._appeared)}
        places = [appeared.get(parameter, len(parameters)) for parameter in parameters]
        order = torch.tensor(places, device=self._replica.device).argsort(stable=True)
        self._replica.broadcast_([order])
        self._fill([parameters[index] for index in order.tolist()])
        self._has_order = True

    def _end_sums(self) -> None:
        for bucket in self._buckets:
            bucket.handle = None
        self._num_begun = 0
        self._is_first = self._is_last = False
        self._newest = None

    def forget(self) -> None:
        with contextlib.suppress(ReplicaError):  # of sums that nobody needs any more
            for bucket in self._buckets[: self._num_begun]:
                bucket.handle.wait()
        self._end_sums()
        self._is_late = False
        if not self._once:
            self._zero()
            return
        self._is_stale = True
        for parameter in self.gradients:
            parameter.grad = None

    def _zero(self) -> None:
        self._is_stale = False
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.flat.zero_()


def bucketed(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Returns the parameters in groups of one device and dtype, in their order.

    The last group is never empty of what comes last: it is the last to be complete.
    """
    groups: list[list[nn.Parameter]] = []
    num_bytes = 0
    for parameter in parameters:
        most = FIRST_BUCKET_BYTES if len(groups) == 1 else BUCKET_BYTES
        same = groups and (groups[-1][0].device, groups[-1][0].dtype) == (
            parameter.device,
            parameter.dtype,
        )
        if not same or num_bytes >= most:
            groups.append([])
            num_bytes = 0
        groups[-1].append(parameter)
        num_bytes += parameter.numel() * parameter.element_size()
    return groups


def _like(numbers: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Returns the numbers with the parameter's shape and, if it is dense, strides."""
    meta = torch.empty_like(parameter, device="meta")  # of any strides that are dense
    return numbers.as_strided(parameter.shape, meta.stride())


def _noter(owner: weakref.ref[OverlappedSum]) -> Callable[[torch.Tensor], None]:
    """Returns a hook that keeps nothing alive."""

    def note(parameter: torch.Tensor) -> None:
        found = owner()
        if found is not None:
            found.note(parameter)

    return note
