"""A weight that is kept sparse: its mask, its past, and the gradient it collects."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import TensorWeakRef

from rigl_xla.layers.weights import Weight
from rigl_xla.topology import masks
from xla_replica import AccumulationHook, AccumulationNote, traits
from xla_replica.common.arguments import check_type


class Accumulated(NamedTuple):
    """A masked ``.grad`` as a backward pass has left it.

    Attributes:
        grad: The tensor.
        version: How often it had been written into.
        signs: The signs of its numbers.
    """

    grad: TensorWeakRef
    version: int
    signs: torch.Tensor


@dataclasses.dataclass(eq=False)
class SparseLayer:
    """A weight with its mask, where its connections have been, and their gradient.

    The past is kept in every update, whether or not anybody asks for it: what is
    computed only on demand would be another program.

    Attributes:
        weight: The parameter and where it is.
        sparsity: The sparsity it is to have.
        num_active: The number of connections it is to have now.
        mask: bool of the weight's shape, True where active; moved to its device.
        pattern: The pattern that its mask keeps, if any.
        ever: bool of the weight's shape, True where a connection was ever active.
            Default: as the mask, where nothing has moved yet.
        counts: int32 ``(4,)`` on the same device: connections that are active, that
            the last update grew and dropped, and that were ever active; replaced by
            every update, never written into.
        pending: This replica's dense gradient of the current step, summed over its
            backward passes.
        hooked: Whether ``.grad`` holds what backward passes of the current step have
            added, masked.
        accumulated: The ``.grad`` that they have added to, after the last of them.
        discarded: The pending ones whose ``.grad`` was taken away in this step.
        gradient: The dense gradient of earlier steps, over all replicas.
        has_gradients: Whether there was one since the last update.
        hooks: The hooks on the parameter, which `remove` removes.
    """

    weight: Weight
    sparsity: float
    num_active: int
    mask: torch.Tensor
    pattern: masks.RowPattern | None = None
    ever: torch.Tensor | None = None
    counts: torch.Tensor = dataclasses.field(init=False)
    pending: torch.Tensor | None = None
    hooked: bool = False
    accumulated: Accumulated | None = None
    discarded: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    has_gradients: bool = False
    hooks: list[Any] = dataclasses.field(default_factory=list)
    _pruner: Any = None  # a weak reference

    def __post_init__(self) -> None:
        parameter, ever = self.weight.parameter, self.ever
        num_ever = self.num_active if ever is None else int(ever.count_nonzero())
        self.mask = like(parameter, self.mask)
        self.ever = self.mask.clone() if ever is None else like(parameter, ever)
        counts = torch.tensor([self.num_active, 0, 0, num_ever], dtype=torch.int32)
        self.counts = counts.to(self.mask.device)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has in common: it has no ``.grad`` and no hooks."""
        return {**vars(self), "accumulated": None, "hooks": [], "_pruner": None}

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.weight.name

    @property
    def data(self) -> torch.Tensor:
        """The parameter, detached."""
        return self.weight.parameter.detach()

    # --- the parameter's hooks ------------------------------------------------------

    @property
    def pruner(self) -> Any:
        """The pruner that keeps the parameter sparse; None where nobody has it."""
        return self._pruner and self._pruner()

    @property
    def collects(self) -> bool:
        """Whether dense gradients of this step are needed."""
        return bool(self.pruner and self.pruner.collects)

    def hold(self, pruner: object) -> None:
        """Keeps the parameter sparse, in place of a layer whose pruner is gone.

        Hooks work until they are released, also when nobody has the pruner any more.
        """
        _watch_optimizers()
        parameter = self.weight.parameter
        if before := _holders.get(id(parameter)):
            before.remove()
        _holders[id(parameter)], self._pruner = self, weakref.ref(pruner)
        note = AccumulationNote(self._note_accumulation)
        self.hooks = [
            parameter.register_hook(AccumulationHook(self._mask_gradient)),
            parameter.register_post_accumulate_grad_hook(note),
        ]

    def remove(self) -> None:
        """Removes the hooks, and forgets what was collected."""
        for hook in self.hooks:
            hook.remove()
        self.hooks, self._pruner = [], None
        self.pending = self.gradient = self.discarded = None

    def check_bound(self) -> None:
        """Raises ValueError if the module has another parameter by now."""
        weight = self.weight
        if getattr(weight.module, weight.attribute, None) is not weight.parameter:
            raise ValueError(
                f"the model has other parameters now, such as {weight.name!r}, as "
                "after a move to XLA: build optimizer and pruner after the move"
            )

    def _mask_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns a gradient masked, before it is added or reduced; collects it."""
        self.follow(grad.device)
        self.has_gradients = True
        if self.collects:
            self.drop_discarded()
            # Autograd may have given the gradient to others too.
            dense = grad.detach().clone() if self.pending is None else grad.detach()
            self.pending = added(self.pending, dense)
        return torch.where(self.mask, grad, grad.new_zeros(()))

    def _note_accumulation(self, parameter: torch.Tensor) -> None:
        """Notes how a backward pass has left ``.grad``: with a masked gradient more."""
        self.hooked = True
        if self.collects:
            grad = parameter.grad
            assert grad is not None
            signs = torch.sign(grad.detach())
            self.accumulated = Accumulated(TensorWeakRef(grad), grad._version, signs)

    # --- the mask, and what is collected --------------------------------------------

    def follow(self, device: torch.device) -> None:
        """Moves the mask and its past to the parameter's device."""
        if self.mask.device != device:
            self.mask, self.ever = self.mask.to(device), self.ever.to(device)
            self.counts = self.counts.to(device)

    def mask_(self) -> None:
        """Zeroes inactive weights."""
        self.follow(self.data.device)
        zero_inactive_(self.data, self.mask)

    def drop_discarded(self, ends: bool = False) -> None:
        """Forgets what is pending if `zero_grad` has thrown it away since.

        Args:
            ends: Whether the step ends; otherwise a backward pass begins.
        """
        if not self.hooked:
            return
        grad, left = self.weight.parameter.grad, self.accumulated
        if grad is None:
            self.discarded = added(self.discarded, self.pending)
            self.pending, self.hooked = None, False
        elif self.pending is not None and left is not None:
            if grad is left.grad() and grad._version == left.version:
                return
            # It may have been zeroed in place. A masked gradient that was zero before
            # tells nothing: it may have been clipped, which comes before a step's end,
            # or replaced by another tensor.
            is_gone = ~(grad != 0).any()
            if ends or grad is not left.grad():
                is_gone = is_gone & (left.signs != 0).any()
            zero = self.pending.new_zeros(())
            self.pending = torch.where(is_gone, zero, self.pending)

    def end_backward(self) -> None:
        """Makes up for what was assigned to ``.grad`` after backward passes.

        If it is dense, it counts, and no pass does. If it is masked, it is made of
        passes: of those whose ``.grad`` was taken away too, as a mean of samples or a
        sum of tasks is, unless it has the signs of the last one (clipped, scaled).
        """
        self.drop_discarded(ends=True)
        before, left = self.discarded, self.accumulated
        self.discarded = self.accumulated = None
        grad = self.weight.parameter.grad
        if grad is None or left is None or grad is left.grad():
            return
        signs = torch.sign(grad.detach())
        is_dense = ((signs != 0) & ~self.mask).any()
        if before is not None:
            is_of_all = ~is_dense
            if self.hooked:
                is_of_all = is_of_all & (signs != left.signs).any()
            before = torch.where(is_of_all, before, before.new_zeros(()))
            self.pending = added(before, self.pending)
        if self.hooked and self.pending is not None:
            self.pending = torch.where(is_dense, grad.detach(), self.pending)
            zero_inactive_(grad.detach(), self.mask)

    def take_pending(self) -> torch.Tensor | None:
        """Returns what is pending, and begins anew."""
        own, self.pending, self.hooked = self.pending, None, False
        self.discarded = self.accumulated = None
        return own

    def add_assigned(self) -> torch.Tensor:
        """Adds what ``.grad`` has that no hook has seen, if it is a dense gradient.

        It is dense if it has a number outside of the mask: one that was masked tells
        nothing about growth. Those inside may have been there, masked, before.

        Returns:
            Bool, 0-d, on the device: whether it is.
        """
        grad = self.weight.parameter.grad.detach()
        is_dense = ((grad != 0) & ~self.mask).any()
        before = torch.zeros_like(grad) if self.pending is None else self.pending
        total = torch.where(self.mask, grad, before + grad)
        self.pending = torch.where(is_dense, total, before)
        return is_dense

    def replace_mask_(self, new: torch.Tensor, kept: torch.Tensor) -> None:
        """Takes the mask of an update, with where it and the present one are True."""
        self.ever.logical_or_(new)
        # 32 bits: on a CPU, a sum of bools is seven times as fast, and a layer of 2**31
        # weights has no gradient that could be sorted.
        active, stayed, ever = (
            mask.sum(dtype=torch.int32) for mask in (new, kept, self.ever)
        )
        before = self.counts[0]
        self.counts = torch.stack([active, active - stayed, before - stayed, ever])
        self.mask.copy_(new)


# By the identity of the parameter, which its layer keeps alive.
_holders: MutableMapping[int, SparseLayer] = weakref.WeakValueDictionary()


def pruner_of(parameter: torch.Tensor) -> Any:
    """Returns the pruner that keeps a parameter sparse; None where nobody has it."""
    layer = _holders.get(id(parameter))
    return layer and layer.pruner


def check_hold(
    layers: Sequence[SparseLayer], optimizer: Any, skip_step: bool, pruner: object
) -> None:
    """Raises ValueError or TypeError unless ``pruner`` may keep the layers sparse.

    A wrapper that must be called after every backward pass, and decides when to update,
    has a true attribute ``steps_by_itself``.
    """
    check_type("optimizer", optimizer, Optimizer, "a torch optimizer, or a wrapper")
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strangers = [x.name for x in layers if id(x.weight.parameter) not in owned]
    if _held(layers, pruner):
        gc.collect()  # one that nobody has any more, but that refers to itself
    held = _held(layers, pruner)
    devices = {str(layer.data.device): layer.name for layer in layers}
    for is_wrong, why in (
        (skip_step and getattr(optimizer, "steps_by_itself", False),
         f"{type(optimizer).__name__} decides itself when to update, so that a "
         "topology update cannot replace it: build the pruner with skip_step=False"),
        (strangers,
         f"the optimizer does not train {strangers}, which are to be sparse: build it "
         "after the model was moved to its device, or put these into exclude="),
        (held,
         f"{held} are already kept sparse by another RigLScheduler: close() that one "
         "first (with skip_step=False its optimizer keeps it too)"),
        ("meta" in devices or len(devices) > 1,
         f"sparse weights must have their values on one device, got {devices}: build "
         "the pruner later, or put others into exclude="),
    ):  # fmt: skip
        if is_wrong:
            raise ValueError(why)


def _held(layers: Sequence[SparseLayer], pruner: object) -> list[str]:
    """Returns names of the layers that another pruner keeps sparse."""
    holders = {x.name: pruner_of(x.weight.parameter) for x in layers}
    return [name for name, other in holders.items() if other not in (None, pruner)]


@functools.cache
def _watch_optimizers() -> None:
    """Looks at the steps of all optimizers of this process, from now on.

    One hook for all pruners, never removed: a pruner may be collected as garbage while
    an optimizer runs its hooks.
    """
    register_optimizer_step_post_hook(_refuse_stranger)


def _refuse_stranger(optimizer: Optimizer, *_: object) -> None:
    """Raises RuntimeError if an optimizer has stepped the weights of another's."""
    for group in optimizer.param_groups:
        for pruner in filter(None, map(pruner_of, group["params"])):
            # A wrapper shares its state with the optimizer inside it.
            if optimizer.state is not pruner.optimizer.state:
                raise RuntimeError(
                    f"a {type(optimizer).__name__} that this pruner was not built with "
                    "has stepped sparse weights: close() the pruner and build it anew"
                )


def added(one: torch.Tensor | None, other: torch.Tensor | None) -> Any:
    """Returns the sum of those that are not None."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def like(parameter: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the mask on the parameter's device and in its memory format.

    What a mask selects has its format: gradients of channels-last weights keep theirs.
    """
    mask = mask.contiguous().to(parameter.device)
    if parameter.is_contiguous():
        return mask
    return torch.empty_like(parameter.detach(), dtype=torch.bool).copy_(mask)


def zero_inactive_(tensor: torch.Tensor, mask: torch.Tensor) -> None:
    """Zeroes ``tensor``, in place, where ``mask`` is False; NaN too."""
    zero = tensor.new_zeros(())
    if traits(tensor).is_lazy:
        tensor.copy_(torch.where(mask, tensor, zero))
    else:  # half the time of a copy
        torch.where(mask, tensor, zero, out=tensor)
