"""Recording what modules are called with, by hooks that leave no trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from per_sample_grad.engine import graph
from per_sample_grad.engine.frozen_norms import needs_arithmetic, replace_output
from per_sample_grad.errors import CouplingError, CoverageError, PerSampleError
from per_sample_grad.layers import Rule, rule_of, why_no_rule
from per_sample_grad.layers.batch_norm import uses_batch_statistics
from per_sample_grad.layers.call import Call, detached, tensors_in


@dataclasses.dataclass(frozen=True)
class Use:
    """One recorded call of a module that has a rule.

    Attributes:
        name: Of the module in the model.
        call: The module and its arguments.
        rule: What is known of it.
        region: Where it stands in the graph.
        shape: Of its output.
        versions: How often each tensor argument had been changed in place.
    """

    name: str
    call: Call
    rule: Rule
    region: graph.Region
    shape: torch.Size
    versions: tuple[int, ...]

    def __str__(self) -> str:
        return f"{type(self.call.module).__name__} {self.name!r}"


class Recorder:
    """Hooks on every module that has a rule and a selected parameter.

    Attributes:
        uses: What was called, in order.
        called: Whether any module that has a selected parameter was.
        unrecorded: Names of selected parameters of modules that were called while
            gradients were off.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[int, str],
        batch_dim: int | Mapping[str, int],
    ) -> None:
        self.uses: list[Use] = []
        self.called = False
        self.unrecorded: set[str] = set()
        self._model = model
        self._names = names
        self._dims = _dims(model, batch_dim)
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Places the hooks; all or none."""
        refuse_batch_statistics(self._model)
        default = self._dims[""]
        try:
            for name, module in self._model.named_modules():
                rule = rule_of(module)
                if own := self._selected_of(module, rule is not None):
                    note = self._note(own)
                    self._handles.append(module.register_forward_pre_hook(note))
                if rule is not None and self._owns_selected(module):
                    hook = self._hook(name, rule, self._dims.get(name, default))
                    self._handles.append(
                        # First, so that other hooks' changes come after it.
                        module.register_forward_hook(
                            hook, prepend=True, with_kwargs=True
                        )
                    )
                if needs_arithmetic(module):
                    # Before the record is made.
                    self._handles.append(
                        module.register_forward_hook(
                            replace_output, prepend=True, with_kwargs=True
                        )
                    )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, name: str, rule: Rule, batch_dim: int) -> Callable[..., None]:
        def record(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
        ) -> None:
            output = out[0] if isinstance(out, tuple | list) else out
            if not isinstance(output, torch.Tensor) or not output.requires_grad:
                return
            tensors = list(tensors_in((args, kwargs)))
            for tensor in (*tensors, output):
                _refuse_tracing(name, tensor)
            call = Call(module, detached(args), detached(kwargs), batch_dim)
            region = graph.Region(
                graph.edge_of(output), graph.input_nodes((args, kwargs))
            )
            versions = tuple(tensor._version for tensor in tensors)
            self.uses.append(Use(name, call, rule, region, output.shape, versions))

        return record

    def _note(self, own: Collection[str]) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            del module, args
            self.called = True
            if not torch.is_grad_enabled():
                self.unrecorded.update(own)

        return note

    def _selected_of(self, module: nn.Module, recurse: bool) -> list[str]:
        params = module.parameters(recurse)
        return [self._names[id(p)] for p in params if id(p) in self._names]

    def _owns_selected(self, module: nn.Module) -> bool:
        return any(id(param) in self._names for param in module.parameters())


def _dims(model: nn.Module, batch_dim: int | Mapping[str, int]) -> dict[str, int]:
    """The batch dimension of every module that has one of its own, and ``""``."""
    if isinstance(batch_dim, int):
        return {"": batch_dim}
    unknown = sorted(set(batch_dim) - set(dict(model.named_modules())))
    if unknown:
        raise ValueError(
            f"batch_dim names {', '.join(unknown)}, which are no modules of the "
            'model; give names as model.named_modules() does, "" for all others'
        )
    return {"": 0, **batch_dim}


def check_versions(uses: Sequence[Use]) -> None:
    """Raises PerSampleError if an input was changed in place since."""
    for use in uses:
        tensors = tensors_in((use.call.args, use.call.kwargs))
        if use.versions != tuple(tensor._version for tensor in tensors):
            raise PerSampleError(
                f"the input of {use} was changed in place after the module had used "
                "it, so its gradient cannot be had (an ordinary backward pass fails "
                "likewise); use an operation that is not in place"
            )


def refuse_hidden(
    unrecorded: Collection[str],
    uses: Sequence[Use],
    reached: graph.Reached,
    names: Mapping[int, str],
) -> None:
    """Raises CoverageError for parameters used only within an autograd.Function."""
    if reached.custom is None:
        return
    params = (param for use in uses for param in use.call.module.parameters())
    seen = {names[id(param)] for param in params if id(param) in names}
    hidden = sorted(set(unrecorded) - seen - set(reached.outside))
    if hidden:
        raise CoverageError(
            f"modules with {', '.join(hidden)} were called without gradients, the "
            "losses depend on none of these, but on the torch.autograd.Function "
            f"{reached.custom}, which may have called them and hide their gradients "
            "(as reentrant checkpoints do): call these modules outside of it (for "
            "checkpoints: use_reentrant=False), or, if the losses really do not "
            "depend on them, leave these parameters out (params=)"
        )


def why_outside(model: nn.Module, param: nn.Parameter) -> str:
    """Why a use of a parameter was recorded with none of the modules that own it."""
    for name, module in model.named_modules():
        if any(own is param for own in module.parameters(recurse=False)):
            reason = why_no_rule(module)
            of = f"{type(module).__name__} {name!r}"
            return reason or f"{of} has a rule, but this use is not its own call"
    return "no module owns it"


def refuse_hooked(params: Mapping[str, nn.Parameter]) -> None:
    """Raises PerSampleError for parameters whose gradient a hook may change.

    Hooks that run after a gradient was accumulated see ``.grad``, which does not change
    here: they do not run, and are no matter.
    """
    hooked = [name for name, param in params.items() if param._backward_hooks]
    if hooked:
        raise PerSampleError(
            f"{', '.join(hooked)} have gradient hooks (register_hook), which may "
            "change the summed gradient, but have no meaning for each sample's: remove "
            "the hooks (handle.remove()) while capturing, use "
            "register_post_accumulate_grad_hook instead, or leave these parameters "
            "out (params=)"
        )


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raises CouplingError if a BatchNorm normalises by its batch."""
    names = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and uses_batch_statistics(module)
    ]
    if names:
        raise CouplingError(
            f"BatchNorm normalises by statistics of the batch in {', '.join(names)}: "
            "a sample's loss then depends on the other samples, and has no gradient of "
            "its own. Freeze the statistics (module.eval() on these modules, with "
            "track_running_stats=True), or use GroupNorm or LayerNorm"
        )


def _refuse_tracing(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise CoverageError(
            f"module {name!r} was called with or returned a {type(tensor).__name__}: "
            "hooks cannot record what is being traced (scan_layers, torch.func, "
            "torch.jit). Capture the model without it"
        )
