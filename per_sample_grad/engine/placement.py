"""Which modules of a model a capture has hooks on, and for which parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)

from torch import nn

from per_sample_grad.layers import batch_norm
from per_sample_grad.layers.registry import Rule, rule_of
from per_sample_grad.operations import wrong_operations
from xla_replica import refuse_sharded

Selection = Collection[str] | Callable[[str, nn.Parameter], bool] | None

# What DDP and DataParallel, and torch.compile, put before the names of the model that
# they wrap.
WRAPPERS = ("module.", "_orig_mod.")
# How many names a message has.
FEW = 12


@dataclasses.dataclass(frozen=True)
class RecordedModule:
    """A module of the model with selected parameters.

    Its calls are recorded if it has a rule.
    """

    name: str
    kind: str
    rule: Rule | None
    params: Mapping[str, str]  # selected ones, from names in it to those in the model
    # What happens in it, operations or another run, and not one layer with a rule.
    is_operation: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Its parameters' names in the model, each once."""
        return tuple(dict.fromkeys(self.params.values()))

    @functools.cached_property
    def identity(self) -> tuple[Hashable, ...]:
        """What two captures compare."""
        return (self.name, self.rule, tuple(self.params.items()))


@dataclasses.dataclass(frozen=True)
class Placement:
    """What a capture does with the modules and parameters of a model.

    Attributes:
        model: The model.
        params: The selected parameters, by their first name in the model.
        owners: Modules that own some of them.
        holders: Modules, by name, that contain some of them and are not a layer with a
            rule.
        without_rule: The selected parameters that modules without a rule own.
        normalising: Modules that may use statistics, by name.
        may_be_wrong: Modules whose gradient is wrong on some devices.
        is_compiled: Whether torch.compile has compiled any module.
    """

    model: nn.Module
    params: Mapping[str, nn.Parameter]
    owners: Sequence[tuple[nn.Module, RecordedModule]]
    holders: Mapping[str, nn.Module]
    without_rule: Sequence[nn.Parameter]
    normalising: Mapping[str, nn.Module]
    may_be_wrong: Sequence[nn.Module]
    is_compiled: bool


def place(model: nn.Module, selection: Selection) -> Placement:
    """Returns where hooks go in a model, for the selected parameters.

    Raises:
        ValueError: The selection has unknown names or is empty.
        TypeError: A selected parameter is sharded.
    """
    chosen = selected(model, selection)
    refuse_sharded(chosen, "capture", ", or leave these out (params=)")
    names = {id(param): name for name, param in chosen.items()}
    owners, holders, normalising = [], {}, {}
    for name, module in model.named_modules():
        rule = rule_of(module)
        own = module._parameters.items()
        # A module with a rule is one layer, whatever modules are in it.
        if rule is not None and module._modules:
            own = module.named_parameters(remove_duplicate=False)
        inner = {n: names[id(p)] for n, p in own if id(p) in names}
        # What is recorded anyway may run again, too.
        if not (inner and rule is not None) and any(
            id(param) in names for param in module.parameters()
        ):
            holders[name] = module
        if inner:
            recorded = RecordedModule(name, type(module).__name__, rule, inner)
            owners.append((module, recorded))
        if batch_norm.is_normalising(module):
            normalising[name] = module
    modules = list(model.modules())
    return Placement(
        model,
        chosen,
        owners,
        holders,
        _without_rule(model, names),
        normalising,
        [each for each in modules if type(each) in wrong_operations.WRONG],
        any(map(_is_compiled, modules)),
    )


def _without_rule(model: nn.Module, names: Collection[int]) -> list[nn.Parameter]:
    """Returns the parameters, by id in ``names``, that modules without a rule own."""
    found: dict[int, nn.Parameter] = {}
    stack = [model]
    while stack:
        module = stack.pop()
        if rule_of(module) is None:
            own = module.parameters(recurse=False)
            found |= {id(param): param for param in own if id(param) in names}
            stack += module.children()
    return list(found.values())


def _unwrapped(name: str) -> str:
    """Returns a parameter's name in the innermost model."""
    for prefix in WRAPPERS * 2:  # one wrapper may be in the other
        name = name.removeprefix(prefix)
    return name


def _listed(names: Sequence[str]) -> str:
    """Returns names in words, of many the first ones."""
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + more


def selected(model: nn.Module, params: Selection) -> dict[str, nn.Parameter]:
    """Returns the parameters that were asked for, by their first name in the model."""
    every = dict(model.named_parameters(remove_duplicate=False))
    trained: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name, param in every.items():
        if param.requires_grad and id(param) not in seen:
            seen.add(id(param))
            trained[name] = param
    if params is None:
        chosen = trained
    elif callable(params):
        chosen = {name: param for name, param in trained.items() if params(name, param)}
    else:
        # A shared parameter may be asked for by any of its names.
        trainable = {name for name, param in every.items() if param.requires_grad}
        wrong = sorted(set(params) - trainable)
        if wrong:
            wrapped = {_unwrapped(name) for name in trainable}
            named = {_unwrapped(name) for name in wrong}
            remedy = ": of a wrapper, such as DDP or torch.compile(model), and of the "
            remedy += "model in it, take the names and the model from one of the two"
            raise ValueError(
                f"params: {_listed(wrong)} are not trainable parameters of the "
                f"model; allowed are {_listed([*trained]) or 'none'}"
                f"{remedy if named <= wrapped else ''}"
            )
        asked = {id(every[name]) for name in params}
        chosen = {name: param for name, param in trained.items() if id(param) in asked}
    if not chosen:
        raise ValueError(
            "no parameter is selected: the model has none that requires grad, or "
            "params= leaves none"
        )
    return chosen


def _is_compiled(module: nn.Module) -> bool:
    """Returns whether torch.compile has made or changed a module."""
    own = vars(module)
    return own.get("_compiled_call_impl") is not None or "dynamo_ctx" in own


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Makes compiled modules run as they were written, inside the block.

    What was compiled before does not run hooks. These are ``model`` and modules in it
    that ``torch.compile(module)`` or ``module.compile()`` returned or changed; compiled
    functions that call them are out of reach.
    """
    with contextlib.ExitStack() as restoring:
        for module in filter(_is_compiled, model.modules()):
            if "dynamo_ctx" in vars(module):  # torch.compile's wrapper of a module
                restoring.callback(setattr, module, "forward", module.forward)
                module.forward = module._orig_mod.__call__
            else:
                compiled = module._compiled_call_impl
                restoring.callback(setattr, module, "_compiled_call_impl", compiled)
                module._compiled_call_impl = None
        yield
