"""Recording what modules are called with, by hooks that are removed afterwards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from per_sample_grad.engine import graph
from per_sample_grad.engine.placement import Placement, RecordedModule, uncompiled
from per_sample_grad.errors import CoverageError, PerSampleError
from per_sample_grad.layers import batch_norm
from per_sample_grad.layers.registry import (
    JOINING,
    Call,
    Joining,
    memories,
    memory,
    why_no_rule,
)
from per_sample_grad.operations import wrong_operations
from per_sample_grad.operations.following import ORDINARY
from xla_replica import AccumulationHook
from xla_replica.common.arguments import check_integer
from xla_replica.common.trees import map_tensors, tensors_in


class RecordedCall(NamedTuple):
    """One call of a module: what its rule sees, and what it made in the graph."""

    owner: RecordedModule
    call: Call
    region: graph.Region
    shape: torch.Size  # of its output
    versions: tuple[int, ...]  # how often each tensor was changed in place before
    has_batch: bool = True  # whether its output may have rows for samples

    def counts(self, num_samples: int) -> bool:
        """Returns whether its output has the same number of rows for each sample."""
        dim = self.call.batch_dim
        if not self.has_batch or not -len(self.shape) <= dim < len(self.shape):
            return False
        return self.shape[dim] > 0 and self.shape[dim] % num_samples == 0


class EnclosingCall(NamedTuple):
    """One call of a module that holds parameters, with all it needs to run again."""

    name: str  # of the module in the model
    call: Call
    # One for each tensor that it returned and that has a graph, and which that is.
    regions: tuple[graph.Region, ...]
    positions: tuple[int, ...]
    shapes: tuple[torch.Size, ...]  # of these tensors
    autocast: Mapping[str, Any]  # the state of autocast then, arguments of it


class Recorder:
    """Hooks on every module that has a selected parameter.

    With ``enclosing`` the calls of all modules are recorded that hold such parameters,
    and not only of those that have a rule.
    """

    def __init__(
        self,
        placement: Placement,
        batch_dim: int | Mapping[str, int | None],
        enclosing: bool = False,
    ) -> None:
        self.enclosing: list[EnclosingCall] = []
        self._records_enclosing = enclosing
        self.calls: list[RecordedCall] = []  # of modules that have a rule, in order
        self.called = False  # whether any of the modules was called
        # Selected parameters of modules called while gradients were off.
        self.unrecorded: set[str] = set()
        # Whether hooks keep what operations save, as those of checkpoints, so that it
        # must not be read twice.
        self.saved_by_hooks = False
        self._placement = placement
        # By module name, and under "" of all others; and modules that return the same
        # for all samples.
        self._batch_dims, self._without_batch = {"": 0}, set[str]()
        if isinstance(batch_dim, int):
            self._batch_dims[""] = check_integer("batch_dim", batch_dim)
        else:
            self._name_batch_dims(batch_dim)
        self.batch_dim = self._batch_dims[""]
        self._handles: list[RemovableHandle] = []
        self._compiled: contextlib.AbstractContextManager[None] | None = None

    @property
    def modules(self) -> Sequence[nn.Module]:
        """All modules of the model, each once."""
        return list(self._placement.model.modules())

    def module(self, name: str) -> nn.Module:
        """Returns the module of this name."""
        return self._placement.model.get_submodule(name)

    def _name_batch_dims(self, batch_dim: object) -> None:
        if not isinstance(batch_dim, Mapping):
            batch_dim = {"": check_integer("batch_dim", batch_dim)}
        self._batch_dims |= {n: d for n, d in batch_dim.items() if d is not None}
        self._without_batch |= {n for n, d in batch_dim.items() if d is None}
        unknown = (self._batch_dims.keys() | self._without_batch) - {""}
        if unknown:
            unknown -= dict(self._placement.model.named_modules()).keys()
        if unknown:
            raise ValueError(
                f"batch_dim names {', '.join(sorted(unknown))}, which are not modules "
                'of the model; give names as model.named_modules() does, "" for all '
                "others"
            )

    def start(self) -> None:
        """Places the hooks; places none of them if one cannot be placed."""
        where = self._placement
        batch_norm.refuse_batch_statistics(where.normalising.items())
        try:
            if where.is_compiled:
                compiled = uncompiled(where.model)
                compiled.__enter__()
                self._compiled = compiled
            self._place_hooks()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._compiled is not None:
            compiled, self._compiled = self._compiled, None
            compiled.__exit__(None, None, None)

    def forget(self) -> None:
        """Keeps nothing of what was recorded."""
        self.calls.clear()
        self.enclosing.clear()

    def split(self, num_samples: int) -> tuple[list[RecordedCall], list[RecordedCall]]:
        """Returns the calls that have rules to be applied, and others.

        The latter return the same for all samples: what rows of a table or buffers of
        the model are computed from, and not what may be computed from the samples.
        """
        kept, dropped = [], []
        known: set[int] | None = None
        for each in self.calls:
            same = not each.has_batch
            if not same and not each.counts(num_samples):
                if known is None:
                    known = memories(self._placement.model)
                same = _is_constant(each, known)
            (dropped if same else kept).append(each)
        return kept, dropped

    def _place_hooks(self) -> None:
        # Each is put first: the output is replaced before the call is recorded, and
        # other hooks change it after that.
        where = self._placement
        if self._records_enclosing:
            for name, module in where.holders.items():
                self._hook(module, functools.partial(self._enclose, name))
        for module, owner in where.owners:
            record = functools.partial(self._record, owner)
            joining = JOINING.get(owner.rule)
            if joining is not None:
                record = functools.partial(self._record_joined, owner, joining)
            self._hook(module, record)
        for module in where.normalising.values():
            if batch_norm.needs_arithmetic(module):
                self._hook(module, batch_norm.output_by_arithmetic)
        for module in where.may_be_wrong:
            if wrong_operations.is_wrong_on_lazy_devices(module):
                self._hook(module, wrong_operations.right_output)

    def _hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        handle = module.register_forward_hook(hook, prepend=True, with_kwargs=True)
        self._handles.append(handle)

    def _record_joined(
        self,
        owner: RecordedModule,
        joining: Joining,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> Any:
        """Records a call as one that returns one tensor, and returns parts of that."""
        found = joining(module, out)
        if found is None:
            self._record(owner, module, args, kwargs, out)
            return out
        one, out = found
        self._record(owner, module, args, kwargs, one, is_joined=True)
        return out

    def _record(
        self,
        owner: RecordedModule,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        is_joined: bool = False,
    ) -> None:
        self.called = True
        if not torch.compiler.is_compiling():
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            self.saved_by_hooks |= hooks is not None
        if not torch.is_grad_enabled():
            self.unrecorded.update(owner.params.values())
        output = out[0] if isinstance(out, (tuple, list)) else out
        if (
            owner.rule is None
            or not isinstance(output, torch.Tensor)
            or not output.requires_grad
        ):
            return
        # As little as can be, since the forward pass has filled the caches.
        tensors = _tensors(args, kwargs)
        if type(output) not in ORDINARY or not ORDINARY.issuperset(map(type, tensors)):
            _refuse_traced(owner.name, [output, *tensors])
        dim = 0 if is_joined else self._batch_dims.get(owner.name, self.batch_dim)
        call = Call(module, *_detached(args, kwargs, tensors), dim)
        region = graph.region_of(tensors, output)
        versions = tuple([tensor._version for tensor in tensors])
        has_batch = owner.name not in self._without_batch
        self.calls.append(
            RecordedCall(owner, call, region, output.shape, versions, has_batch)
        )
        if self._records_enclosing and not is_joined:
            again = ((region,), (0,), (output.shape,), autocast_state(output))
            self.enclosing.append(EnclosingCall(owner.name, call, *again))

    def _enclose(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        if not torch.is_grad_enabled():
            return
        outputs = [out] if isinstance(out, torch.Tensor) else tensors_in(out)
        positions = [i for i, each in enumerate(outputs) if each.requires_grad]
        if not positions:
            return
        inputs, chosen = _tensors(args, kwargs), [outputs[i] for i in positions]
        dim = self._batch_dims.get(name, self.batch_dim)
        self.enclosing.append(
            EnclosingCall(
                name,
                Call(module, *_detached(args, kwargs, inputs), dim),
                tuple([graph.region_of(inputs, each) for each in chosen]),
                tuple(positions),
                tuple([each.shape for each in chosen]),
                autocast_state(chosen[0]),
            )
        )


def _refuse_traced(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raises CoverageError for the first of these that is not an ordinary tensor."""
    kind = next(kind for kind in map(type, tensors) if kind not in ORDINARY)
    raise CoverageError(
        f"module {name!r} was called with or returned a "
        f"{kind.__name__}: hooks cannot record what is being traced "
        "(scan_layers, torch.func, torch.jit). Capture the model without it"
    )


def _tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Sequence[torch.Tensor]:
    """Returns the tensors in a call's arguments."""
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        return args
    return tensors_in((args, kwargs))


def _detached(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]
) -> Any:
    """Returns a call's arguments without graphs; ``tensors`` are those in them."""
    if tensors is args:
        return (tensors[0].detach(),), {}
    return map_tensors((args, kwargs), torch.Tensor.detach)


@functools.cache
def _without_autocast(kind: str) -> Mapping[str, Any]:
    return {"device_type": kind, "enabled": False}


def autocast_state(tensor: torch.Tensor) -> Mapping[str, Any]:
    """Returns the arguments of `torch.autocast` that hold for a tensor's device."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind):
        return _without_autocast(kind)
    dtype = torch.get_autocast_dtype(kind)
    return {"device_type": kind, "dtype": dtype, "enabled": True}


def _is_constant(recorded: RecordedCall, known: Collection[int]) -> bool:
    """Returns whether a call took no numbers of unknown origin.

    Known are integers, such as the ids of positions, what has a graph, which is looked
    at later, and memory that the model owns.
    """
    tensors = tensors_in((recorded.call.args, recorded.call.kwargs))
    unknown = [
        each
        for each in tensors
        if each.is_floating_point() and memory(each) not in known
    ]
    return len(unknown) <= len(recorded.region.inputs)


def check_versions(calls: Sequence[RecordedCall]) -> None:
    """Raises PerSampleError if an input was changed in place after its call."""
    for recorded in calls:
        tensors = _tensors(recorded.call.args, recorded.call.kwargs)
        if recorded.versions != tuple([tensor._version for tensor in tensors]):
            raise PerSampleError(
                f"the input of {recorded.owner} was changed in place after the module "
                "had used it, so its gradient cannot be computed (an ordinary backward "
                "pass fails likewise); use an operation that is not in place"
            )


def refuse_hidden(
    unrecorded: Collection[str], calls: Sequence[RecordedCall], reached: graph.Reached
) -> None:
    """Raises CoverageError for parameters used only within an autograd.Function."""
    if reached.custom is None:
        return
    seen = {name for recorded in calls for name in recorded.owner.params.values()}
    hidden = sorted(set(unrecorded) - seen - set(reached.outside))
    if hidden:
        raise CoverageError(
            f"modules with {', '.join(hidden)} were called without gradients, and the "
            "losses depend on none of these parameters, but on the "
            f"torch.autograd.Function {reached.custom}, which may have called the "
            "modules and hide their gradients (as reentrant checkpoints do): call "
            "these modules outside of it (for checkpoints: use_reentrant=False), or, "
            "if the losses really do not depend on them, leave these parameters out "
            "(params=)"
        )


def why_no_samples(recorded: RecordedCall, num_samples: int) -> str:
    """Returns why a call whose output has no row for each sample is not believed."""
    dim, shape = recorded.call.batch_dim, tuple(recorded.shape)
    count = shape[dim] if -len(shape) <= dim < len(shape) else "nothing"
    return (
        f"dimension {dim} of its output {shape} counts {count}, not a multiple of the "
        f"{num_samples} samples; set batch_dim (None for a module that returns the "
        "same for all samples), or give the module a batch dimension (position ids: "
        "expand them to one row per sample)"
    )


def why_dropped(
    calls: Sequence[RecordedCall], num_samples: int, names: Collection[str]
) -> dict[str, str]:
    """Returns why calls of modules with rules do not account for their parameters.

    Of calls that certainly return the same for all samples nothing more can be said
    than where that meets samples.
    """
    return {
        name: f"{each.owner}: {why_no_samples(each, num_samples)}"
        for each in calls
        if each.has_batch and each.shape[:1] != (1,)
        for name in each.owner.params.values()
        if name in names
    }


def why_outside(model: nn.Module, param: nn.Parameter) -> str:
    """Returns why no recorded call accounts for a use of this parameter."""
    for name, module in model.named_modules():
        if any(own is param for own in module.parameters(recurse=False)):
            reason = why_no_rule(module)
            of = f"{type(module).__name__} {name!r}"
            return reason or f"{of} has a rule, but this use is not its own call"
    return "no module owns it"


def refuse_hooked(params: Mapping[str, nn.Parameter]) -> None:
    """Raises PerSampleError for parameters whose gradient a hook may change.

    Hooks that change what is added to ``.grad``, which does not change in a capture,
    never run here (`xla_replica.AccumulationHook`, or after the addition), so they are
    safe.
    """
    hooked = [
        name
        for name, param in params.items()
        if param._backward_hooks and not AccumulationHook.all_on(param)
    ]
    if hooked:
        raise PerSampleError(
            f"{', '.join(hooked)} have gradient hooks (register_hook), which may "
            "change the summed gradient, but have no meaning for each sample's: remove "
            "the hooks (handle.remove()) while capturing, use "
            "register_post_accumulate_grad_hook instead, or leave these parameters "
            "out (params=)"
        )
