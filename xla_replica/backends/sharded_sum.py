"""Sums of the gradients of parameters that FSDP2 shards.

Of a parameter that ``torch.distributed.fsdp.fully_shard`` shards, every process holds a
part, a DTensor. While a module runs, FSDP2 puts the whole parameter in its place, and
while a backward pass runs, it sums the gradients of whole parameters and adds this
process's part of the sum to ``.grad``. Its collectives are those of the passes, so
every process must run every pass.
"""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from xla_replica.backends.gradient_sum import Begin, GradientSum, Pass
from xla_replica.common.trees import Tensors
from xla_replica.device.gradients import accumulation_hook, weak_hook
from xla_replica.device.sharded import is_sharded, local, use_memory

if TYPE_CHECKING:
    from xla_replica.backends.replica import Replica

Hook = Callable[[torch.Tensor], None]


def num_copies(tensor: Any) -> int:
    """Returns how many processes hold the same part of a DTensor as this one."""
    placements = enumerate(tensor.placements)
    copies = (tensor.device_mesh.size(n) for n, p in placements if p.is_replicate())
    return math.prod(copies)


def living(kind: type) -> list[Any]:
    """Returns all objects of a class that Python tracks.

    It asks every object for what it refers to, and an object refers to its class: a
    tenth of a second for a million.
    """
    classes = [kind]
    for each in classes:  # which grows
        classes += type.__subclasses__(each)
    # Not isinstance, which asks proxies for the class of what they stand for.
    return [each for each in gc.get_referrers(*classes) if issubclass(type(each), kind)]


class GradientPlace:
    """Where the whole gradient of one parameter appears in a backward pass.

    Attributes:
        hooks: Called with every gradient before it is accumulated.
        rounding: Returns what is accumulated in its place, if there is a function.
        counts: Whether gradients count; else they become zero, and hooks do not run.
        has_new: Whether a gradient has appeared since this was made False.
        was_kept: Whether the parameter had a ``.grad`` when it appeared.
        whole: The parameter that modules compute with; None before it has been seen,
            so that gradients may have been missed.
        unit: Of a sharded parameter, a weak reference to the FSDP2 module that gathers
            it.
    """

    def __init__(self, parameter: torch.Tensor, unit: Any = None) -> None:
        self.hooks: list[Hook] = []
        self.rounding: Callable[[torch.Tensor], torch.Tensor | None] | None = None
        self.counts = True
        self.has_new = self.was_kept = False
        self._parameter, self.unit = weakref.ref(parameter), unit
        self.whole: torch.Tensor | None = None
        self._node: Any = None  # kept, because a parameter does not keep it

    def follow(self, whole: torch.Tensor) -> None:
        """Sees the gradients of ``whole``, which a module computes with."""
        if whole is not self.whole and whole.requires_grad:
            self._node = accumulation_hook(whole, weak_hook(self.run))
            self.whole = whole

    def run(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Sees a gradient; returns what is accumulated in its place, if anything.

        That is zeros if it does not count.
        """
        parameter = self._parameter()
        self.has_new = True
        self.was_kept = parameter is not None and parameter.grad is not None
        if not self.counts:
            return torch.zeros_like(gradient)
        for hook in self.hooks:
            hook(gradient)
        return None if self.rounding is None else self.rounding(gradient)


class ShardedParameters:
    """The parameters of one process that `fully_shard` shards, and their modules.

    Args:
        num_replicas: How many processes must share every parameter.

    Attributes:
        places: Of a parameter, where its gradient appears, if that is not ``.grad``.
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self.places: Any = WeakIdKeyDictionary()

    def add(self, parameters: Tensors) -> None:
        """Finds out which modules shard these parameters; nothing, if none does.

        Raises:
            TypeError: A parameter is sharded by something else, or among other
                processes than all replicas.
        """
        if not any(map(is_sharded, parameters)):
            return
        from torch.distributed.fsdp import FSDPModule

        new = [p for p in parameters if p not in self.places]
        wanted = {id(p) for p in new if is_sharded(p)}
        for unit in living(FSDPModule):
            own = []
            for each in (p for group in groups_of(unit) for p in group.fsdp_params):
                if id(parameter := each.sharded_param) in wanted:
                    place = GradientPlace(parameter, weakref.ref(unit))
                    self.places[parameter] = place
                    own.append((place, each))
            if own:
                unit.register_forward_pre_hook(functools.partial(_follow, own))
        for each in new:
            if is_sharded(each):
                self._check(each)
            self.places.setdefault(each, GradientPlace(each))

    def _check(self, parameter: Any) -> None:
        mesh = parameter.device_mesh
        *others, last = parameter.placements
        fits = last.is_shard() and all(each.is_replicate() for each in others)
        if parameter in self.places and fits and mesh.size() == self._num_replicas:
            return
        raise TypeError(
            f"a parameter of shape {tuple(parameter.shape)} has placements "
            f"{parameter.placements} on {mesh}, and this job has {self._num_replicas} "
            "replicas: call fully_shard with a mesh that covers all processes, of one "
            "dimension, or of two (replicas of shards). Tensor and pipeline "
            "parallelism are not supported"
        )


class ShardedSum(GradientSum):
    """Lets FSDP2 sum the gradients of every minibatch, so that each process has parts.

    Copies of shards sum in the step's last backward pass, and so do members of a live
    run, the parts of a module in one tensor as soon as FSDP2 goes on to the next
    module. What FSDP2 does not shard is summed when `sum_` is called.

    Args:
        replica: The replica.
        may_begin: See `GradientSum`.
        whole: Gradients of whole parameters add up without communication until the last
            backward pass, which takes their memory.
    """

    def __init__(
        self, replica: Replica, may_begin: Callable[[], bool], whole: bool = False
    ) -> None:
        super().__init__(replica, may_begin)
        self._shards: ShardedParameters = replica.shards
        self._begin, self.is_whole = replica.sums_parts(), whole
        self._places: list[GradientPlace] = []
        self._units: dict[Any, list[nn.Parameter]] = {}  # and what each of them gathers
        # Whose sum of this minibatch, and of one of the step, is in ``.grad``.
        self._reduced: set[nn.Parameter] = set()
        self._summed: set[nn.Parameter] = set()
        self._copied: dict[nn.Parameter, GradientPlace] = {}  # with copies of shards
        self._seen: list[bool] = []  # of these: which had a gradient in the first pass
        self._is_last = False
        self._newest: Any = None  # the unit that FSDP2 sums
        self._ready: set[Any] = set()  # units that it has summed
        # Of units, in this order: sums over members that have begun.
        self._begun: list[tuple[list[nn.Parameter], Callable[[], None]]] = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [local(gradient) for gradient in self.gradients.values()]

    @property
    def has_new(self) -> bool | None:
        return bool(self._reduced) or any(place.has_new for place in self._places)

    def hold(self, parameters: Sequence[nn.Parameter]) -> None:
        super().hold(parameters)
        places, self._units = self._shards.places, {}
        for parameter in self._sharded():
            self._units.setdefault(places[parameter].unit(), []).append(parameter)
        for unit in self._units:  # sums, not means over processes
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        self._places = [places.setdefault(p, GradientPlace(p)) for p in parameters]
        self._copied = {p: places[p] for p in self._sharded() if num_copies(p) > 1}
        for parameter, place in zip(parameters, self._places):
            if not is_sharded(parameter):
                place.follow(parameter)
        self._note_in_passes(self._sharded())

    # --- the passes -----------------------------------------------------------------

    def prepare_backward(self, now: Pass) -> None:
        if not now.is_first:
            self._check_copied()
        self._reduced.clear()
        self._begin = self.replica.sums_parts()
        self._is_last, self._newest, self._ready = now.is_last, None, set()
        for place in self._places:
            place.counts, place.has_new = now.counts, False
        for unit in self._units:
            is_summed = now.is_last or not self.is_whole
            unit.set_requires_gradient_sync(is_summed, recurse=False)
            unit.set_requires_all_reduce(now.is_last, recurse=False)
        for parameter in self._sharded():
            # FSDP2 adds to what there is, which may be zeros until the last pass.
            if now.is_last if self.accumulates_elsewhere(parameter) else now.is_first:
                parameter.grad = None
            elif now.is_first:
                parameter.grad = self.gradients[parameter].zero_()

    def note(self, parameter: nn.Parameter) -> None:
        """Takes note that FSDP2 has added the sum of its gradients to ``.grad``."""
        if parameter not in self.gradients:
            return
        is_kept = parameter.grad is self.gradients[parameter]
        if parameter in self._summed and not is_kept:
            return  # it has lost those of earlier minibatches
        self.gradients[parameter] = parameter.grad
        self._reduced.add(parameter)
        self._summed.add(parameter)
        unit = self._shards.places[parameter].unit()
        if self._is_last and self._begin and unit is not self._newest:
            self._ready.add(self._newest)
            self._begin_ready(self._begin)
            self._newest = unit

    def _check_copied(self) -> None:
        """Raises ValueError if FSDP2 would add gradients of different parameters.

        Those of a module that copies of shards are yet to sum are one tensor of it.
        """
        found = [place.has_new for place in self._copied.values()]
        if self.is_whole or found == (self._seen or found):
            self._seen = found
            return
        raise ValueError(
            "a minibatch of a model with copies of shards has gradients of other "
            "parameters than the step's first one: pass shard_gradients=False"
        )

    def _begin_ready(self, begin: Begin) -> None:
        """Begins sums over members, in an order that all of them have."""
        for unit, own in [*self._units.items()][::-1][len(self._begun) :]:
            if unit not in self._ready:
                return
            self._begun.append((own, begin(self._summand(own))))

    def _summand(self, own: list[nn.Parameter]) -> torch.Tensor:
        """Returns the memory of a module's gradients, which members sum in place."""
        for parameter in {*own} - self._summed:  # the step has no gradient of these
            parameter.grad = self.gradients[parameter].zero_()
        self._summed.update(own)
        return self._joined(own)

    def _joined(self, own: list[nn.Parameter]) -> torch.Tensor:
        """Moves gradients to one new tensor, and returns it."""
        gradients = [self.gradients[parameter] for parameter in own]
        flat = torch.cat([local(gradient).reshape(-1) for gradient in gradients])
        use_memory(gradients, flat)
        return flat

    def _part(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns what this replica has of the sum of a parameter's gradients."""
        return local(self.gradients[parameter])

    def has_begun(self, parameter: nn.Parameter) -> bool:
        place = self._shards.places.get(parameter)
        is_added = is_sharded(parameter) and place.has_new and place.was_kept
        return is_added or parameter in (self._summed if self._begun else self._reduced)

    def accumulates_elsewhere(self, parameter: nn.Parameter) -> bool:
        return parameter in self._copied or (self.is_whole and is_sharded(parameter))

    # --- the sum --------------------------------------------------------------------

    def sum_(self, others: Tensors, divisor: int | torch.Tensor | None) -> None:
        if [*self._sharded()] and not self._reduced:
            raise ValueError(
                "FSDP2 has not summed the gradients of this step in its last backward "
                "pass: call optimizer.set_epoch(epoch) before every epoch, and step() "
                "after every backward()"
            )
        for parameter in self._reduced:
            if self._shards.places[parameter].whole is None:
                raise ValueError(
                    f"a sharded parameter of shape {tuple(parameter.shape)} has a "
                    "gradient, but the module that fully_shard was called on has not "
                    "run its forward(): call the model, not one of its methods"
                )
        self._check_copied()
        if self._begin is not None:
            self._ready.update(self._units)
            self._summed.update(self.gradients)  # what has none is zero since the pass
            self._begin_ready(self._begin)
            self.replica.together([wait for _, wait in self._begun])
            self._begun = []
        whole = [self._part(p) for p in self.gradients if not is_sharded(p)]
        self.replica.all_reduce_([*whole, *others])
        if divisor is not None:
            self.divide_(divisor)

    def clip_(self, parameters: Tensors, max_norm: float) -> torch.Tensor:
        norm = self._norm(parameters)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(self.tensors, factor)
        return norm

    def _norm(self, parameters: Tensors) -> torch.Tensor:
        parts = [local(parameter.grad) for parameter in parameters]
        squares = [torch.linalg.vector_norm(p).double().square() for p in parts]
        squares = self.replica.sum_over_shards(squares, parameters)
        return torch.stack(squares).sum().sqrt()

    def clear(self) -> None:
        with torch.no_grad():
            for own, _ in self._begun:  # a sum that hangs may still write to theirs
                self._joined(own)
            pairs = zip(self.gradients.items(), self._places)
            for (parameter, gradient), place in pairs:
                place.counts = True
                if is_sharded(parameter):
                    parameter.grad = None
                    if place.whole is not None:  # the step was abandoned
                        place.whole.grad = None
                else:
                    gradient.zero_()
        self._summed.clear()
        self._seen = []
        self._begun = []
        for unit in self._units:
            _forget_accumulated(unit)

    def _sharded(self) -> Iterator[nn.Parameter]:
        return filter(is_sharded, self.gradients)


def _forget_accumulated(unit: Any) -> None:
    """Drops what FSDP2 has accumulated elsewhere than in ``.grad``.

    That is in another dtype than the gradients', or what copies were yet to sum. After
    a whole step there is nothing. No public function does it.
    """
    for group in groups_of(unit):
        group._partial_reduce_output = None
        getattr(group, "_partial_reduce_output_layout", {}).clear()
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):
                parameter.unsharded_accumulated_grad = None


def groups_of(unit: Any) -> list[Any]:
    """Returns FSDP2's own records of the parameters that it gathers when a unit runs.

    Each has ``fsdp_params``. No public function tells.
    """
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # of torch 2.13
    return [*filter(None, [state._fsdp_param_group] if groups is None else groups)]


def _follow(own: Iterable[tuple[GradientPlace, Any]], *_: Any) -> None:
    """Runs as a hook of a module, when FSDP2 has gathered its parameters."""
    for place, gathered in own:
        place.follow(gathered.unsharded_param)
