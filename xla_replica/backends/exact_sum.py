"""Gradients that add up as integers, with the same bits everywhere.

Those of whole parameters in buckets, while the last backward pass runs; those of
parameters that FSDP2 shards as parts, where FSDP2 sums floats.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from xla_replica.backends.gradient_sum import GradientSum, Pass
from xla_replica.backends.overlapped_sum import BucketedSum, bucketed
from xla_replica.backends.sharded_sum import ShardedSum, groups_of
from xla_replica.common.trees import Tensors
from xla_replica.device.gradients import weak_hook
from xla_replica.device.row_units import RowTotal, RowUnits, num_rows
from xla_replica.device.sharded import is_sharded, local, use_memory, whole

Names = Mapping[nn.Parameter, str]


class Slot:
    """The sum of one parameter's gradients.

    Attributes:
        total: The sum.
        mean: Where their mean is, which takes the place of a sum of float32 numbers
            unless a device is lazy.
        is_early: Whether a gradient is rounded as soon as it is there: those are which
            autograd accumulates once in a minibatch. None: no minibatch has shown it.
        num_noted: How often it was accumulated in this minibatch.
        rounded: The minibatch's gradient, once it is added.
    """

    def __init__(self, parameter: nn.Parameter, bucket: Bucket, total: RowTotal):
        self.parameter, self.bucket, self.total = parameter, bucket, total
        self.mean = torch.zeros_like(parameter.detach())
        self.is_early: bool | None = None
        self.num_noted = 0
        self.rounded: torch.Tensor | None = None

    def use(self, memory: torch.Tensor) -> None:
        """Makes ``(n,)`` int32 the memory of the sum."""
        self.total.use(memory)
        if self.mean.dtype == torch.float32:  # data: it counts its own writes
            self.mean = memory.view(torch.float32).view(self.mean.shape).data

    def add(self) -> None:
        """Adds ``.grad``."""
        self.rounded = self.parameter.grad
        self.total.add_(self.rounded)
        self.bucket.num_missing -= 1


class Bucket:
    """Sums of gradients in one tensor, of int32, which replicas sum.

    Attributes:
        slots: By parameter.
        num_missing: Gradients that the backward pass under way has yet to compute.
        waits: Wait for its sums, which have begun.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], units: RowUnits, names: Names
    ) -> None:
        self._units, self.num_missing = units, 0
        self.waits: list[Callable[[], None]] = []
        self.slots = {p: Slot(p, self, units.total(names[p], p)) for p in parameters}
        if not units.is_lazy:
            slots = self.slots.values()
            sizes = [parameter.numel() for parameter in parameters]
            self._flat = torch.cat([slot.total.parts[0].view(-1) for slot in slots])
            for slot, memory in zip(slots, self._flat.split(sizes)):
                slot.use(memory)

    @property
    def parts(self) -> list[torch.Tensor]:
        """What replicas sum."""
        parts = [slot.total.parts for slot in self.slots.values()]
        if self._units.is_lazy:
            return [part for of_slot in parts for part in of_slot]
        return [self._flat, *(part for of_slot in parts for part in of_slot[1:])]


class ExactSum(BucketedSum):
    """Adds the gradients of every minibatch as integers, with the same bits everywhere.

    Between two minibatches ``.grad`` is None, and after a backward pass it is the
    gradient of that minibatch alone.

    Args:
        floats: Would sum the same gradients as floats.
        units: Those of all parameters.
        names: The parameters' there.
        overlap: Whether gradients are rounded, and sums begin, in the backward pass.
    """

    def __init__(
        self, floats: GradientSum, units: RowUnits, names: Names, overlap: bool
    ) -> None:
        super().__init__(floats.replica, floats.may_begin)
        self._units, self._names = units, names
        self._overlap = overlap and not self._is_lazy
        self._slots: dict[nn.Parameter, Slot] = {}
        self._divisor: int | torch.Tensor = 1
        self._is_last = False

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        """Holds sums of the parameters, about in the order in which they appear."""
        groups = bucketed(parameters[::-1])
        make = [Bucket(each, self._units, self._names) for each in groups]
        old, self._buckets = self._slots, make
        self._slots = {p: slot for each in make for p, slot in each.slots.items()}
        self.gradients = {p: slot.mean for p, slot in self._slots.items()}
        for parameter in old.keys() & self._slots.keys():
            self._slots[parameter].is_early = old[parameter].is_early
        if self._overlap:
            self._note_in_passes(parameters)

    def prepare_backward(self, now: Pass) -> None:
        self._is_last, self._overlaps = now.is_last, None
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.slots)

    def note(self, parameter: nn.Parameter) -> None:
        """Adds a gradient that autograd has accumulated, if it is whole."""
        slot = self._slots.get(parameter)
        if slot is None:  # unfrozen since
            return
        slot.num_noted += 1
        if self._may_sum(parameter) and slot.is_early and slot.num_noted == 1:
            with torch.no_grad():
                slot.add()
                if self._is_last:
                    self._begin(self._buckets)

    def _complete(self, bucket: Bucket) -> Tensors:
        for slot in bucket.slots.values():
            if slot.total.is_stale:
                slot.total.zero_()
        return bucket.parts

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

    def sum_(self, others: Tensors, divisor: Any) -> None:
        self._divisor = 1 if divisor is None else divisor
        if self._is_lazy:  # one collective
            own = [part for bucket in self._buckets for part in bucket.parts]
            self.replica.all_reduce_([*own, *others])
            return
        list(self._summed(others))

    def sum_zeros(self, others: Tensors) -> None:
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
            parameter.grad = slot.total.mean_into_(slot.mean, divisors)

    def clear(self) -> None:
        if self._are_under_way:  # nobody waits for them
            self.hold([*self._slots][::-1])
        for parameter, slot in self._slots.items():
            slot.num_noted, slot.rounded, parameter.grad = 0, None, None
        self._zero()


class IntegerScatter:
    """Scatters sums of integers for a `ShardedExactSum`, as long as that lives.

    FSDP2 copies gradients to the first memory that it asks for, and takes their sum
    from the second.

    Args:
        sums: The sum, whose gradients have the values of integers.
        inner: What FSDP2 would scatter with.
    """

    def __init__(self, sums: ShardedExactSum, inner: Any) -> None:
        self._sums = weakref.ref(sums)
        self._inner = inner._inner if isinstance(inner, IntegerScatter) else inner
        self._is_second = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, **more: Any) -> Any:
        """Returns memory of floats and of integers, by turns."""
        if sums := self._sums():
            dtype = sums.dtype if self._is_second else torch.float32
            self._is_second = not self._is_second
        return self._inner.allocate(size, dtype=dtype, **more)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, *more: Any, **of: Any
    ) -> Any:
        dtype = output_tensor.dtype
        if dtype == torch.int32:  # in its place
            input_tensor = input_tensor.view(dtype).copy_(input_tensor)
        return self._inner(output_tensor, input_tensor.to(dtype), *more, **of)


class ShardedExactSum(ShardedSum):
    """Adds gradients of which FSDP2 scatters the sums, as integers.

    A whole gradient is rounded to multiples of its rows' units before FSDP2 scatters
    it, which adds integers, or float64 where it keeps sums of several minibatches, and
    so without rounding. A replica adds its part to int32, or int64 where a step has
    many minibatches; members sum these.
    ``.grad`` is None but in a backward pass and, as the mean, in the update. A mean of
    float32 has the memory of its int32, in a backward pass too.

    Args:
        floats: Would sum the same gradients as floats.
        units: Those of all parameters.
        names: The parameters' there.
    """

    def __init__(self, floats: ShardedSum, units: RowUnits, names: Names) -> None:
        super().__init__(floats.replica, floats.may_begin, floats.is_whole)
        self._row_units, self._names = units, names
        self._totals: dict[nn.Parameter, torch.Tensor] = {}
        # Those of a module, one after another, by its first parameter.
        self._flats: dict[nn.Parameter, torch.Tensor] = {}
        self._rounded: set[str] = set()  # in this minibatch
        self._versions: dict[nn.Parameter, int] = {}  # of ``.grad``, when it was added
        self._divisor: int | torch.Tensor = 1
        # Of what FSDP2 has summed for a module: what is not added yet.
        self._rest = torch.empty(0)

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        super().hold(parameters)
        # FSDP2 keeps those of whole gradients, and over a mesh of copies of shards.
        keeps_sums = self.is_whole or any(
            p.device_mesh.ndim > 1 for p in self._sharded()
        )
        for unit in self._units:
            unit.set_all_reduce_hook(weak_hook(self._receive))
            if not keeps_sums:
                for group in groups_of(unit):  # no public function keeps what it has
                    scatter = IntegerScatter(self, group._reduce_scatter_comm)
                    group._reduce_scatter_comm = scatter
        for parameter, place in zip(parameters, self._places):
            place.rounding = weak_hook(self._round, self._names[parameter])

    # --- the passes -----------------------------------------------------------------

    def prepare_backward(self, now: Pass) -> None:
        super().prepare_backward(now)
        self._rounded.clear()
        self._summed.clear()  # it is in totals, and no longer in ``.grad``

    def _round(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.dtype == torch.float16:
            raise TypeError(
                f"exact=: the gradient of {name!r} is float16, which cannot hold the "
                "integers that FSDP2 sums: compute in bfloat16 or float32"
            )
        if name in self._rounded:
            raise ValueError(
                f"exact=: the gradient of {name!r} was accumulated twice in a "
                "minibatch: with FSDP2 call backward() once per step(), and checkpoint "
                "with use_reentrant=False"
            )
        self._rounded.add(name)
        return self._row_units.rounded(name, gradient)

    @property
    def dtype(self) -> torch.dtype:
        """The integers of sums."""
        return torch.int64 if self._row_units.is_wide else torch.int32

    def _receive(self, flat: torch.Tensor) -> None:
        """Takes what FSDP2 has summed for a module, before it becomes ``.grad``."""
        if flat.dtype not in (self.dtype, torch.float64):
            raise TypeError(
                f"exact=: FSDP2 sums gradients in {flat.dtype}, which rounds: with "
                "copies of shards, shard_gradients=False or a custom reduce-scatter "
                "pass mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64) to "
                "fully_shard"
            )
        self._check_added(not self._rest.numel())
        self._rest = flat

    def note(self, parameter: nn.Parameter) -> None:
        """Adds this replica's part of a parameter, in the order in which FSDP2 goes on.

        Parts are padded to the largest one.
        """
        dim, length = _split(parameter)
        num_padded = length * (parameter.numel() // max(1, parameter.shape[dim]))
        self._check_added(num_padded <= self._rest.numel())
        if parameter in self.gradients:
            self._add(parameter, self._rest[: local(parameter).numel()])
            parameter.grad = self.gradients[parameter]  # what FSDP2 has made is freed
            self._versions[parameter] = local(parameter.grad)._version
        self._rest = self._rest[num_padded:]
        if self.replica.is_host and not self._rest.numel():
            # FSDP2 keeps it until the pass ends, for the sake of devices' streams.
            self._rest.untyped_storage().resize_(0)
        super().note(parameter)

    def _add(self, parameter: nn.Parameter, multiples: torch.Tensor) -> None:
        self._part(parameter).add_(multiples.to(self.dtype))

    def _part(self, parameter: nn.Parameter) -> torch.Tensor:
        if parameter not in self._totals:
            own = [parameter]
            if is_sharded(parameter):
                own = self._units[self._shards.places[parameter].unit()]
            self._summand(own)
        return self._totals[parameter]

    def _summand(self, own: list[nn.Parameter]) -> torch.Tensor:
        """Returns the totals of a module's parameters, or of a whole one."""
        if own[0] not in self._flats:
            sizes = [local(parameter).numel() for parameter in own]
            flat = local(own[0]).new_zeros(sum(sizes), dtype=self.dtype)
            self._flats[own[0]] = flat
            self._totals.update(zip(own, flat.split(sizes)))
            if is_sharded(own[0]) and own[0].element_size() == self.dtype.itemsize:
                use_memory([self.gradients[p] for p in own], flat.view(own[0].dtype))
        return self._flats[own[0]]

    def _check_added(self, fits: bool) -> None:
        """Raises ValueError unless what FSDP2 has summed fits these parameters."""
        if not fits:
            raise ValueError(
                "exact=: a module that fully_shard was called on has gradients that "
                "this optimizer does not use: give all of them to one optimizer, and "
                "change requires_grad in an attached function, or between epochs"
            )

    def end_minibatch(self) -> None:
        """Adds the gradients that FSDP2 does not sum."""
        self._check_added(not self._rest.numel())
        self._rest = torch.empty(0)
        for parameter, gradient in self.gradients.items():
            version = self._versions.pop(parameter, None)
            is_same = parameter.grad is gradient and local(gradient)._version == version
            if version is not None and not is_same:
                raise ValueError(
                    "a gradient was changed after backward(), when it was added: "
                    "clip by max_grad_norm=, or change it in a step hook"
                )
            if not is_sharded(parameter) and parameter.grad is not None:
                self._add(parameter, parameter.grad.reshape(-1))
            if parameter in self._reduced or not is_sharded(parameter):
                parameter.grad = None  # it is in its total

    # --- the sum --------------------------------------------------------------------

    def sum_(self, others: Tensors, divisor: Any) -> None:
        self._divisor = 1 if divisor is None else divisor
        super().sum_(others, None)

    def commit(self) -> None:
        """Makes ``.grad`` the means that the sums amount to; weighted ones are sums."""
        divisors = self._row_units.divisors(self._divisor)
        for parameter, gradient in self.gradients.items():
            total = self._part(parameter)
            if total.numel():
                mean, by_row = local(gradient), divisors[self._rows(parameter)]
                multiples = total.view(len(by_row), -1)
                mean.copy_((multiples / by_row).view(mean.shape))
            parameter.grad = gradient

    def _rows(self, parameter: Any) -> slice:
        """Returns which of all rows this replica's part of a parameter has."""
        rows = self._row_units.rows[self._names[parameter]]
        if num_rows(parameter) == 1 or not is_sharded(parameter):
            return rows
        dim, length = _split(parameter)
        if dim > 0:  # it has a part of all of them
            return rows
        first = rows.start + parameter.device_mesh.get_coordinate()[-1] * length
        return slice(first, first + len(local(parameter)))

    def _norm(self, parameters: Tensors) -> torch.Tensor:
        """Returns the norm of whole gradients, as torch does, one after another."""
        norms = [torch._foreach_norm([whole(p.grad)])[0] for p in parameters]
        return torch.linalg.vector_norm(torch.stack(norms))

    def clear(self) -> None:
        super().clear()
        self._totals, self._flats, self._versions = {}, {}, {}
        self._rest = torch.empty(0)
        for parameter in self.gradients:
            parameter.grad = None


def _split(parameter: Any) -> tuple[int, int]:
    """Returns which dimension of a parameter is split, and how long most parts are."""
    dim, mesh = parameter.placements[-1].dim, parameter.device_mesh
    return dim, -(-parameter.shape[dim] // mesh.size(mesh.ndim - 1))
