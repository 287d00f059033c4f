"""Recording what modules are called with, by hooks that are removed afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from per_sample_grad.engine.settings import Settings
from per_sample_grad.errors import CoverageError
from per_sample_grad.factors.forms import Versions
from per_sample_grad.layers import normalisation, registry
from per_sample_grad.layers.registry import Call, Rule, why_no_rule
from per_sample_grad.operations import nodes
from xla_replica.common.trees import map_tensors, tensors_in

_ORDINARY = frozenset((torch.Tensor, nn.Parameter))
# Attributes of a module that torch.compile(module) or module.compile() has changed.
_COMPILED = frozenset(("dynamo_ctx", "_compiled_call_impl"))
_TRACED = (
    "module {!r} was called with or returned a {}: hooks cannot record what is being "
    "traced (scan_layers, torch.func, torch.jit). Capture the model without it"
)


@dataclasses.dataclass(frozen=True)
class RecordedModule:
    """A module of the model whose calls are recorded.

    Attributes:
        name: Its name in the model.
        kind: Its class, or for an operation that and the class it happens in.
        rule: Its layer rule; None: it has none.
        params: Its selected parameters, from names in it to those in the model.
        names: Those in the model, each once.
        places: Where it holds them: a module's parameters, the key, and the parameter.
        reads: The tensors of the module that its rule reads.
    """

    name: str
    kind: str
    rule: Rule | None
    params: Mapping[str, str]
    names: tuple[str, ...]
    places: tuple[tuple[Mapping[str, Any], str, nn.Parameter], ...] = ()
    reads: Sequence[torch.Tensor] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


class RecordedCall(NamedTuple):
    """One call of a module: what its rule sees, and what it made in the graph.

    Attributes:
        owner: The module.
        call: What the rule sees.
        output: Where the gradient of its output arrives.
        shape: The shape of its output.
        inputs: Its inputs that have a graph.
        versions: Those of the tensors that its rule reads.
        has_batch: Whether its output may have rows for samples.
        is_late: Whether its rule runs a node of the graph, which it can when the
            backward pass is over.
    """

    owner: RecordedModule
    call: Call
    output: GradientEdge
    shape: torch.Size
    inputs: tuple[GradientEdge, ...] = ()
    versions: Versions = Versions(())
    has_batch: bool = True
    is_late: bool = False

    @property
    def identity(self) -> Hashable:
        """What must be equal for two calls to be the same, but for their data."""
        params, module = tuple(self.owner.params.items()), self.call.module
        call = self.call.batch_dim, self.shape, self.has_batch, module.training
        return (self.owner.name, self.owner.rule, params, *call)

    @property
    def floats(self) -> list[torch.Tensor]:
        """The tensors of floats among its arguments."""
        given = tensors_in((self.call.args, self.call.kwargs))
        return [each for each in given if each.is_floating_point()]

    def why_no_rows(self, num_samples: int) -> str:
        """Returns why its output does not count as having rows for samples."""
        dim, shape = self.call.batch_dim, tuple(self.shape)
        count = shape[dim] if -len(shape) <= dim < len(shape) else "nothing"
        return (
            f"dimension {dim} of its output {shape} counts {count}, not a multiple of "
            f"the {num_samples} samples; set batch_dim (None: it returns the same for "
            "all samples), or give it a row for each sample"
        )


@dataclasses.dataclass(eq=False)
class Recorder:
    """What hooks on the modules of a model that have selected parameters record.

    Attributes:
        settings: Those of the capture.
        calls: Those of modules that have a rule, in order.
        unrecorded: Parameters of modules that were called while gradients were off.
        saved_by_hooks: Whether hooks keep what operations save, as those of
            checkpoints do, so that it must not be read twice.
    """

    settings: Settings
    calls: list[RecordedCall] = dataclasses.field(default_factory=list)
    unrecorded: set[str] = dataclasses.field(default_factory=set)
    saved_by_hooks: bool = False

    def place_hooks(self) -> contextlib.ExitStack:
        """Places the hooks, all or none; closing what it returns removes them."""
        modules = [*self.settings.model.named_modules()]
        if any(isinstance(each, normalisation.NORMALISING) for _, each in modules):
            normalisation.refuse_batch_statistics(self.settings.model)
        how = {"prepend": True, "with_kwargs": True}  # before others of the module
        with contextlib.ExitStack() as placed:
            for name, module in modules:
                if not _COMPILED.isdisjoint(vars(module)):
                    _run_as_written(module, placed)
                for hook in self._hooks_of(name, module):
                    placed.callback(module.register_forward_hook(hook, **how).remove)
            return placed.pop_all()

    def _hooks_of(self, name: str, module: nn.Module) -> list[Callable[..., Any]]:
        """Returns the hooks of a module; the last one runs first."""
        hooks: list[Callable[..., Any]] = []
        rule = None if why_no_rule(module) else registry.RULES[type(module)]
        # A module with a rule is one layer, whatever modules are in it.
        layer = [("", module)] if rule is None else [*module.named_modules()]
        known = self.settings.names
        places = {
            f"{prefix}.{key}".removeprefix("."): (each._parameters, key, param)
            for prefix, each in layer
            for key, param in each._parameters.items()
            if id(param) in known
        }
        if places:
            params = {n: known[id(place[2])] for n, place in places.items()}
            reads: Sequence[torch.Tensor] = ()
            if rule is not None and rule not in registry.ONLY_ARGUMENTS:
                # A forward pass that trains may write into buffers, which then are of
                # no gradient.
                buffers = () if module.training else module.buffers()
                reads = [*module.parameters(), *buffers]
            kind, names = type(module).__name__, tuple(dict.fromkeys(params.values()))
            held = tuple(places.values())
            owner = RecordedModule(name, kind, rule, params, names, held, reads)
            hooks.append(functools.partial(self._record, owner))
        # The output is replaced before the call is recorded.
        if isinstance(module, normalisation.NORMALISING):
            hooks.append(normalisation.right_output)
        return hooks

    def _record(
        self,
        owner: RecordedModule,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        """Records a call of a module, by its first output."""
        if not torch.compiler.is_compiling():
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            self.saved_by_hooks |= hooks is not None
        if not torch.is_grad_enabled():
            self.unrecorded.update(owner.names)
            return
        output = out[0] if isinstance(out, (tuple, list)) else out
        is_recorded = owner.rule is not None and isinstance(output, torch.Tensor)
        if not is_recorded or not output.requires_grad:
            return
        tensors = tensors_in((args, kwargs))
        others = [k for k in map(type, (output, *tensors)) if k not in _ORDINARY]
        if others:
            raise CoverageError(_TRACED.format(owner.name, others[0].__name__))
        # `functional_call` puts other tensors in the places of parameters.
        if any(held.get(key) is not param for held, key, param in owner.places):
            return
        default, given = self.settings.default_batch_dim, self.settings.batch_dim
        # None: what it returns is the same for all samples.
        dim = given.get(owner.name, default) if isinstance(given, Mapping) else default
        own: Any = map_tensors((args, kwargs), torch.Tensor.detach)
        # Appended afterwards: Dynamo breaks its graph at `output_edge`, and cannot
        # carry the `append` of a list over the break.
        call = RecordedCall(
            owner,
            Call(module, own[0], own[1], default if dim is None else dim),
            nodes.output_edge(output),
            output.shape,
            tuple([get_gradient_edge(each) for each in tensors if each.requires_grad]),
            Versions((*tensors, *owner.reads)),
            dim is not None,
        )
        self.calls.append(call)


def _run_as_written(module: nn.Module, restoring: contextlib.ExitStack) -> None:
    """Makes a compiled module run as it was written, until ``restoring`` is closed.

    What was compiled before does not run hooks. Compiled functions that call modules
    are out of reach.
    """
    own = vars(module)
    if "dynamo_ctx" in own:  # torch.compile's wrapper of a module
        restoring.callback(setattr, module, "forward", module.forward)
        module.forward = module._orig_mod.__call__
    elif own.get("_compiled_call_impl") is not None:
        compiled = module._compiled_call_impl
        restoring.callback(setattr, module, "_compiled_call_impl", compiled)
        module._compiled_call_impl = None
