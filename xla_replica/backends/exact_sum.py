"""Gradients that add up as int32, in buckets, while the last backward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from xla_replica.backends.gradient_sum import GradientSum
from xla_replica.backends.overlapped_sum import bucketed
from xla_replica.backends.replica import Replica
from xla_replica.device.gradients import AccumulationNote, weak_hook
from xla_replica.device.row_units import RowTotal, RowUnits


class Slot:
    """The sum of one parameter's gradients.

    Attributes:
        total: The sum.
        is_early: Whether a gradient is rounded as soon as it is there: those are which
            autograd accumulates once in a minibatch. None: no minibatch has shown it.
        num_noted: How often it was accumulated in this minibatch.
        rounded: The minibatch's gradient, once it is added.
    """

    __slots__ = "bucket", "is_early", "num_noted", "parameter", "rounded", "total"

    def __init__(self, parameter: nn.Parameter, bucket: Bucket, total: RowTotal):
        self.parameter, self.bucket, self.total = parameter, bucket, total
        self.is_early: bool | None = None
        self.num_noted = 0
        self.rounded: torch.Tensor | None = None

    def add(self) -> None:
        """Adds ``.grad``."""
        self.rounded = self.parameter.grad
        self.total.add_(self.rounded)
        self.bucket.num_missing -= 1


class Bucket:
    """Sums of gradients in one tensor, of int32, which replicas sum.

    The mean of a float32 gradient takes the place of its sum, unless a device is lazy.

    Attributes:
        slots: By parameter.
        gradients: Where means are, by parameter.
        num_missing: Gradients that the backward pass under way has yet to compute.
        waits: Wait for its sums, which have begun.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        units: RowUnits,
        names: Mapping[nn.Parameter, str],
    ) -> None:
        self._units, self.num_missing = units, 0
        self.waits: list[Callable[[], None]] = []
        self.gradients = {p: torch.zeros_like(p.detach()) for p in parameters}
        totals = [units.total(names[each], each) for each in parameters]
        if not units.is_lazy:
            self._flat = torch.cat([total.parts[0].view(-1) for total in totals])
            sizes = [parameter.numel() for parameter in parameters]
            for parameter, total, low in zip(
                parameters, totals, self._flat.split(sizes)
            ):
                total.use(low)
                if parameter.dtype == torch.float32:  # data: it counts its own writes
                    gradient = low.view(torch.float32).view(parameter.shape).data
                    self.gradients[parameter] = gradient
        self.slots = {p: Slot(p, self, total) for p, total in zip(parameters, totals)}

    @property
    def parts(self) -> list[torch.Tensor]:
        """What replicas sum."""
        parts = [slot.total.parts for slot in self.slots.values()]
        if self._units.is_lazy:
            return [part for of_slot in parts for part in of_slot]
        return [self._flat, *(part for of_slot in parts for part in of_slot[1:])]

    def begin(self, begin_sum: Callable[[torch.Tensor], Callable[[], None]]) -> None:
        """Begins the sums."""
        for slot in self.slots.values():
            if slot.total.is_stale:
                slot.total.zero_()
        self.waits = [begin_sum(part) for part in self.parts]


class ExactSum(GradientSum):
    """Adds the gradients of every minibatch as integers, with the same bits everywhere.

    Between two minibatches ``.grad`` is None, and after a backward pass it is the
    gradient of that minibatch alone.

    Args:
        replica, may_begin: See `GradientSum`.
        units: Those of all parameters.
        names: The parameters' there.
        overlap: Whether gradients are rounded, and sums begin, in the backward pass.
    """

    def __init__(
        self,
        replica: Replica,
        may_begin: Callable[[], bool],
        units: RowUnits,
        names: Mapping[nn.Parameter, str],
        overlap: bool,
    ) -> None:
        super().__init__(replica, may_begin)
        self._units, self._names = units, names
        self._overlap = overlap and not replica.is_lazy
        self._buckets: list[Bucket] = []
        self._slots: dict[nn.Parameter, Slot] = {}
        self._hooked: set[nn.Parameter] = set()
        self._divisor: int | torch.Tensor = 1
        self._is_last = False
        self._overlaps: bool | None = False  # None: `may_begin` is to be asked

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        """Holds sums of the parameters, about in the order in which they appear."""
        backwards = parameters[::-1]
        groups = [[p] for p in backwards] if self._is_lazy else bucketed(backwards)
        make = [Bucket(each, self._units, self._names) for each in groups]
        old, self._buckets = self._slots, make
        self._slots = {p: slot for each in make for p, slot in each.slots.items()}
        self.gradients = {p: g for each in make for p, g in each.gradients.items()}
        for parameter, slot in self._slots.items():
            if parameter in old:
                slot.is_early = old[parameter].is_early
            if self._overlap and parameter not in self._hooked:
                self._hooked.add(parameter)
                AccumulationNote(weak_hook(self.note)).register_first(parameter)

    def prepare_backward(
        self, is_first: bool, is_last: bool, divisor: int | None, counts: bool
    ) -> None:
        self._is_last, self._overlaps = is_last, None
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.slots)

    def note(self, parameter: nn.Parameter) -> None:
        """Adds a gradient that autograd has accumulated, if it is whole."""
        slot = self._slots.get(parameter)
        if slot is None:  # unfrozen since
            return
        slot.num_noted += 1
        if self._overlaps is None:
            self._overlaps = self._may_begin()
        is_whole = slot.is_early and slot.num_noted == 1
        if not (self._overlaps and is_whole and AccumulationNote.all_on(parameter)):
            return
        with torch.no_grad():
            slot.add()
            if self._is_last:
                self._begin(lambda bucket: not bucket.num_missing)

    def _begin(self, is_whole: Callable[[Bucket], bool]) -> None:
        """Begins the next sums, always in the same order."""
        for bucket in self._buckets:
            if not bucket.waits:
                if not is_whole(bucket):
                    return
                bucket.begin(self._replica.begin_sum)

    def has_begun(self, parameter: nn.Parameter) -> bool:
        slot = self._slots[parameter]
        return slot.rounded is not None or bool(slot.bucket.waits)

    def use_zeros(self) -> None:
        pass  # sums are zero

    def end_minibatch(self) -> None:
        """Adds the gradients that are not added yet."""
        for parameter, slot in self._slots.items():
            if slot.rounded is None:
                slot.add()
            elif slot.num_noted > 1:
                raise ValueError(
                    "a gradient was accumulated twice in a minibatch, unlike before: "
                    "call backward() once per step(), or pass overlap=False"
                )
            elif slot.rounded is not parameter.grad:
                raise ValueError(
                    "a gradient was replaced after backward(), when it was added: "
                    "change it in a step hook, or pass overlap=False"
                )
            if slot.is_early is None and slot.num_noted:
                slot.is_early = slot.num_noted == 1
            slot.num_noted, slot.rounded, parameter.grad = 0, None, None

    def sum_(self, others: Sequence[torch.Tensor], divisor: Any) -> None:
        self._divisor = 1 if divisor is None else divisor
        if self._is_lazy:  # one collective
            own = [part for bucket in self._buckets for part in bucket.parts]
            self._replica.all_reduce_([*own, *others])
            return
        self._begin(lambda bucket: True)
        if others:
            self._replica.all_reduce_(others)
        for bucket in self._buckets:
            while bucket.waits:
                bucket.waits[0]()
                del bucket.waits[0]

    def sum_zeros(self, others: Sequence[torch.Tensor]) -> None:
        self._zero()
        self.sum_(others, None)
        self._zero()

    def _zero(self) -> None:
        for slot in self._slots.values():
            if self._is_lazy:
                slot.total.zero_()
            else:
                slot.total.is_stale = True

    def commit(self) -> None:
        """Makes ``.grad`` the means that the sums amount to; weighted ones are sums."""
        divisors = self._units.divisors(self._divisor)
        for parameter, slot in self._slots.items():
            gradient = self.gradients[parameter]
            parameter.grad = slot.total.mean_into_(gradient, divisors)

    def clear(self) -> None:
        if any(bucket.waits for bucket in self._buckets):
            # Nobody waits for these sums, which write to their buckets until they end.
            self.hold([*self._slots][::-1])
        for parameter, slot in self._slots.items():
            parameter.grad = slot.rounded = None
            slot.num_noted = 0
        self._zero()
