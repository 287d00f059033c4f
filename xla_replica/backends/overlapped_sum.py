"""Sums of gradients that run while the backward pass computes other gradients.

Gradients are views of flat tensors, the buckets, so nothing is copied after a sum. When
the last gradient of a bucket has been accumulated, and the buckets before it are on
their way, its sum begins. Replicas begin the same sums in the same order, whatever the
order in which their gradients appear, and whether or not they have any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xla_replica.backends.gradient_sum import GradientSum, Pass, divide_
from xla_replica.common.trees import Tensors, copy_parts_
from xla_replica.device.device_traits import traits
from xla_replica.device.gradients import AccumulationNote

if TYPE_CHECKING:
    from xla_replica.backends.replica import Replica

# A small bucket begins early; a large one has fewer collectives to wait for. A model
# that fits into the first one has one: to begin two takes longer than one can hide.
FIRST_BUCKET_BYTES = 8 * 2**20
BUCKET_BYTES = 25 * 2**20
# Room for the numbers that ride with the gradients, in the bucket that goes last.
TAIL = 64
# Dtypes of such a range that half of a gradient is exact, if not smaller than 1e-37.
WIDE = (torch.float32, torch.float64, torch.bfloat16)


class Bucket:
    """Gradients of one dtype and device, in one flat tensor.

    Attributes:
        numbers: ``(N,)``: all gradients, one after another.
        flat: ``(N + tail,)``: the same numbers, and room for more.
        factor: What multiplies the gradients before their sum, which then need not be
            divided; None: nothing does, on no replica.
        places: Where each parameter's gradient is, in order.
        num_missing: Gradients that the last backward pass has yet to compute.
        waits: Wait for its sum, once that has begun.
    """

    def __init__(self, parameters: list[nn.Parameter], index: int, tail: int) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = parameters[0].detach().new_zeros(sum(sizes) + tail)
        self.numbers = self.flat[: sum(sizes)]
        parts = zip(parameters, self.numbers.split(sizes))
        self.places = [Place(p, index, _like(part, p)) for p, part in parts]
        self.num_missing = 0
        self.factor: float | None = None
        self.waits: list[Callable[[], None]] = []


class Place:
    """Where the gradient of one parameter is.

    Attributes:
        parameter: The parameter.
        index: The number of its bucket.
        part: The gradient's numbers in the bucket, of the parameter's shape.
        view: The same numbers as ``.grad``. A view has a count of writes of its own,
            so that a write to one gradient does not look like one to its neighbours.
        is_missing: Whether the last backward pass has yet to compute the gradient.
        is_divided: Whether the gradient is divided already.
        is_elsewhere: Whether minibatches accumulate in a tensor of autograd's so far.
    """

    def __init__(self, parameter: nn.Parameter, index: int, part: torch.Tensor) -> None:
        self.parameter, self.index, self.part = parameter, index, part
        self.view = part.data
        self.is_missing = self.is_divided = self.is_elsewhere = False

    def take(self, factor: float | None = None) -> None:
        """Makes ``.grad`` the view in the bucket, of what it holds times ``factor``."""
        view, gradient = self.view, self.parameter.grad
        if gradient is view:
            if not traits(view).is_lazy and view.data_ptr() != self.part.data_ptr():
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(view.shape)} was "
                    "given other memory, as model.to(...) and model.half() do: call "
                    "them before the optimizer is built"
                )
            if factor is not None:
                self.part.mul_(factor)
            return
        self.parameter.grad = view
        if gradient is None:
            return
        gradient = gradient.detach()
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if factor is None:
            view.copy_(gradient)
        else:
            torch.mul(gradient, factor, out=view)


class BucketedSum(GradientSum):
    """Sums buckets of gradients, in the same order on every replica.

    A bucket's sum may begin in the last backward pass of a step, after which ``waits``
    of the bucket are there; the others' begin in `sum_`.
    """

    def __init__(self, replica: Replica, may_begin: Callable[[], bool]) -> None:
        super().__init__(replica, may_begin)
        self._buckets: list[Any] = []
        self._overlaps: bool | None = False  # None: `may_begin` is to be asked

    def _may_sum(self, parameter: nn.Parameter) -> bool:
        """Returns whether a gradient that `note` is told of may be summed now.

        Other hooks than notes may still change it, or look at its numbers.
        """
        if self._overlaps is None:
            self._overlaps = self.may_begin()
            # At once: between passes over memory it takes several times as long.
            others = [p for p in self.gradients if not AccumulationNote.all_on(p)]
            self._hooked = {id(parameter) for parameter in others}
        return self._overlaps and id(parameter) not in self._hooked

    def _begin(self, buckets: Iterable[Any], is_pass: bool = True) -> None:
        """Begins the next sums; in a backward pass of those that lack nothing."""
        for bucket in buckets:
            if not bucket.waits:
                if is_pass and bucket.num_missing:
                    return
                parts = self._complete(bucket)
                bucket.waits = [self.replica.begin_sum(part) for part in parts]

    def _complete(self, bucket: Any) -> Tensors:
        """Brings in what a bucket lacks; returns what replicas sum of it."""
        raise NotImplementedError

    def _summed(self, others: Tensors) -> Iterator[Any]:
        """Sums what is not summed yet, and the others; yields buckets as they come."""
        self._begin(self._buckets, is_pass=False)
        for bucket in self._buckets:
            for wait in bucket.waits:
                wait()
            bucket.waits = []
            yield bucket
        # After buckets that are summed only now, as on a slice: all sum in one order.
        self.replica.all_reduce_(others)

    @property
    def _are_under_way(self) -> bool:
        """Whether sums have begun, which write to their buckets until they end."""
        return any(bucket.waits for bucket in self._buckets)


class OverlappedSum(BucketedSum):
    """Sums buckets of gradients during the last backward pass of a step.

    The first step is summed when it is complete. It shows in which order gradients
    appear, by which buckets are filled from then on; and whether every gradient is
    accumulated once in a minibatch. Otherwise no sum may begin early. ``.grad`` of
    those that appeared is None between steps: the first backward pass then makes new
    gradients, and to move them into their bucket takes less than to zero the bucket and
    to add them. On the host, where memory is slow, they are moved in the last pass of
    the step, with what others have added.

    To divide by a power of two does not round, so that is done before the sum, where
    the gradient is at hand. By other numbers the sum is divided, which rounds once.
    """

    def __init__(self, replica: Replica, may_begin: Callable[[], bool]) -> None:
        super().__init__(replica, may_begin)
        self._held: list[nn.Parameter] = []
        # Looked up once per gradient: a parameter's hash is computed in Python.
        self._place_of: dict[nn.Parameter, Place] = {}
        self._has_order = False
        # How often each gradient was accumulated in the last minibatch of a step.
        self._appeared: dict[nn.Parameter, int] = {}
        self._once: bool | None = None  # unknown
        self._end()

    def _end(self) -> None:
        """Ends a step: nothing is known of the next backward pass."""
        self._is_first = self._moves_later = False
        self._counts = False  # how often gradients appear
        self._overlaps = self._is_late = False
        self._divide_by(None)
        for bucket in self._buckets:
            bucket.waits = []
            for place in bucket.places:
                place.is_divided = False

    # --- which parameters -----------------------------------------------------------

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [bucket.numbers for bucket in self._buckets]

    def order(self) -> list[int] | None:
        if not self._has_order:
            return None
        places = {parameter: place for place, parameter in enumerate(self._held)}
        return [places[parameter] for parameter in self.gradients]

    def follow(self, order: list[int] | None) -> None:
        for parameter in self.gradients:
            parameter.grad = None
        self._has_order = order is not None
        held = self._held
        self._fill([held[place] for place in order] if order else held[::-1])

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        self._held = list(parameters)
        self._fill(self._held[::-1])  # about the order in which they appear
        self._note_in_passes(parameters)
        self._has_order, self._once = False, None

    def _fill(self, parameters: list[nn.Parameter]) -> None:
        """Makes buckets of the parameters in this order, with what ``.grad`` holds."""
        lists = bucketed(parameters)
        self._buckets = [
            Bucket(each, index, TAIL if each is lists[-1] else 0)
            for index, each in enumerate(lists)
        ]
        places = {p.parameter: p for bucket in self._buckets for p in bucket.places}
        self._place_of = places
        self.gradients = {parameter: place.view for parameter, place in places.items()}
        self._end()
        for place in places.values():
            place.take()

    # --- the backward pass ----------------------------------------------------------

    def prepare_backward(self, now: Pass) -> None:
        self._end()
        self._is_first = now.is_first
        is_host = self.replica.is_host
        self._moves_later = bool(self._once) and not now.is_last and is_host
        # A lazy device would compile a program for each number; see `sum_`.
        self._divide_by(None if self._is_lazy else now.divisor)
        if now.is_last and self._once is None:
            self._counts = True
            self._appeared.clear()
        elif now.is_last and self._once:
            self._overlaps = None
            for bucket in self._buckets:
                bucket.num_missing = len(bucket.places)
                for place in bucket.places:
                    place.is_missing = True

    def use_zeros(self) -> None:
        for bucket in self._buckets:
            bucket.flat.zero_()
        super().use_zeros()

    def note(self, parameter: nn.Parameter) -> None:
        place = self._place_of.get(parameter)
        if place is None:  # unfrozen since
            return
        if self._counts:
            self._appeared[parameter] = self._appeared.get(parameter, 0) + 1
        if self._overlaps:  # of what earlier gradients' notes have all seen by now
            self._begin(self._buckets[:-1])  # the last takes others along, see `sum_`
        is_whole = self._may_sum(parameter)
        self._is_late |= is_whole and not place.is_missing
        held = self.gradients[parameter] if place.is_elsewhere else place.view
        if parameter.grad is not held and not self._is_first:
            return  # who holds the gradients decides what becomes of it
        if self._moves_later:
            self.gradients[parameter], place.is_elsewhere = parameter.grad, True
            return
        if place.is_elsewhere:
            self._hold_view(place)
        if not is_whole or self._is_late:
            place.take()
            return
        bucket = self._buckets[place.index]
        place.take(bucket.factor)
        place.is_divided, place.is_missing = bucket.factor is not None, False
        bucket.num_missing -= 1

    def _complete(self, bucket: Bucket) -> Tensors:
        self._gather(bucket)
        rest = [place.part for place in bucket.places if not place.is_divided]
        if rest and bucket.factor is not None:
            are_all = len(rest) == len(bucket.places)
            torch._foreach_mul_([bucket.numbers] if are_all else rest, bucket.factor)
        return [bucket.flat]

    def _gather(self, bucket: Bucket) -> None:
        """Brings in gradients to which the last backward pass has added nothing."""
        for place in bucket.places:
            if place.is_elsewhere:
                place.take()
                self._hold_view(place)

    def _hold_view(self, place: Place) -> None:
        """Makes the view in its bucket the gradient that is held, again."""
        self.gradients[place.parameter], place.is_elsewhere = place.view, False

    def _divide_by(self, divisor: int | None) -> None:
        """Takes the number that `sum_` divides by, None if it is not known yet."""
        is_power_of_two = divisor is not None and divisor.bit_count() == 1
        factor = 1 / (divisor or 1) if is_power_of_two else None
        for bucket in self._buckets:
            bucket.factor = factor if bucket.flat.dtype in WIDE else None

    def has_begun(self, parameter: nn.Parameter) -> bool:
        return bool(self._buckets[self._place_of[parameter].index].waits)

    # --- the sum --------------------------------------------------------------------

    def sum_(self, others: Tensors, divisor: int | torch.Tensor | None) -> None:
        if self._is_late:
            raise ValueError(
                "a gradient was accumulated twice in the last minibatch of a step: "
                "call backward() once per step(), or pass overlap=False"
            )
        self._divide_by(divisor if isinstance(divisor, int) else None)
        with torch.no_grad():
            tail = self._tail_of(others)
            for bucket in self._summed(others if tail is None else []):
                if divisor is not None and bucket.factor is None:
                    # While the next sums are under way.
                    divide_([bucket.numbers], divisor)
            if tail is not None:
                copy_parts_(others, tail)
        if self._once is None and self._appeared:
            self._once = set(self._appeared.values()) == {1}
        if not self._has_order:
            self._learn_order()

    def sum_zeros(self, others: Tensors) -> None:
        self._has_order = True  # buckets stay, and with them what they hold
        for bucket in self._buckets:
            self._gather(bucket)
        super().sum_zeros(others)

    def _tail_of(self, others: Tensors) -> torch.Tensor | None:
        """Returns the others, in the last bucket; None if they do not fit in there."""
        size = sum(other.numel() for other in others)
        if not self._buckets or not 0 < size <= TAIL:
            return None
        last = self._buckets[-1]
        dtype = last.flat.dtype
        if any(torch.promote_types(other.dtype, dtype) != dtype for other in others):
            return None
        # What is in the rest of the tail is summed too, and nobody reads it.
        tail = last.flat[len(last.numbers) :][:size]
        torch.cat([other.reshape(-1).to(dtype) for other in others], out=tail)
        return tail

    def _learn_order(self) -> None:
        """Fills buckets in the order in which replica 0's gradients have appeared."""
        parameters = list(self.gradients)
        appeared = {parameter: place for place, parameter in enumerate(self._appeared)}
        places = [appeared.get(parameter, len(parameters)) for parameter in parameters]
        order = torch.tensor(places, device=self.replica.device).argsort(stable=True)
        self.replica.broadcast_([order])
        self._fill([parameters[index] for index in order.tolist()])
        self._has_order = True

    def clear(self) -> None:
        if self._are_under_way:  # nobody waits for them
            for parameter in self.gradients:
                parameter.grad = None
            self._fill(list(self.gradients))
        self._end()
        for place in self._place_of.values():
            if place.is_elsewhere:
                self._hold_view(place)
        for parameter, gradient in self.gradients.items():
            if parameter in self._appeared:
                parameter.grad = None
            else:
                gradient.zero_()


def bucketed(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Returns the parameters in groups of one device and dtype, in their order.

    The first group is a small one.
    """
    groups: list[list[nn.Parameter]] = []
    kind: tuple[torch.device, torch.dtype] | None = None
    num_bytes = 0
    for parameter in parameters:
        most = FIRST_BUCKET_BYTES if len(groups) == 1 else BUCKET_BYTES
        own = parameter.device, parameter.dtype
        if own != kind or num_bytes >= most:
            kind, num_bytes = own, 0
            groups.append([])
        groups[-1].append(parameter)
        num_bytes += parameter.numel() * parameter.element_size()
    return groups


def _like(numbers: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Returns the numbers with the parameter's shape and, if it is dense, strides."""
    meta = torch.empty_like(parameter, device="meta")  # of any strides that are dense
    return numbers.as_strided(parameter.shape, meta.stride())
