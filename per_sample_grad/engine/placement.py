"""Which modules of a model a capture has hooks on, and for which parameters.

That is found once. A later capture looks at every module only to see that nothing has
changed on which it depends: classes and their rules, names, what attributes are, which
parameters are trained, and which are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import NamedTuple

from torch import nn

from per_sample_grad.layers import batch_norm
from per_sample_grad.layers.registry import RULES, Rule, rule_of
from per_sample_grad.operations import wrong_operations
from xla_replica import refuse_sharded

Selection = Collection[str] | Callable[[str, nn.Parameter], bool] | None

# What DDP and DataParallel, and torch.compile, put before the names of the model that
# they wrap.
WRAPPERS = ("module.", "_orig_mod.")
# How many names a message has.
FEW = 12
# How many selections of a model's parameters are kept: those that were used last.
MOST = 16


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
    """What a capture does with a model: positions of its modules and parameters.

    Attributes:
        params: The selected parameters, by their first name in the model.
        owners: Modules that own some of them.
        holders: Modules that contain some of them and are not a layer with a rule.
        without_rule: The selected parameters that modules without a rule own.
        normalising: Modules that may use statistics, by name.
        may_be_wrong: Modules whose gradient is wrong on some devices.
        is_compiled: Whether torch.compile has compiled any module.
    """

    params: Mapping[str, int]
    owners: tuple[tuple[int, RecordedModule], ...]
    holders: tuple[tuple[int, str], ...]
    without_rule: tuple[int, ...]
    normalising: tuple[tuple[int, str], ...]
    may_be_wrong: tuple[int, ...]
    is_compiled: bool

    @functools.cached_property
    def with_selected(self) -> Mapping[str, int]:
        """The modules that own or contain selected parameters, by name."""
        owners = {owner.name: number for number, owner in self.owners}
        return owners | {name: number for number, name in self.holders}


class Placed(NamedTuple):
    """A placement in a model, with the modules and parameters that it counts."""

    model: nn.Module
    placement: Placement
    modules: list[nn.Module]
    params: list[nn.Parameter]


class _Kept(NamedTuple):
    """A placement, and all that it depends on: the rules, and what was looked at."""

    rules: Mapping[type[nn.Module], Rule]
    seen: list[object]
    placement: Placement


_KNOWN: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, _Kept]]
_KNOWN = weakref.WeakKeyDictionary()


def place(model: nn.Module, selection: Selection) -> Placed:
    """Returns where hooks go in a model, for the selected parameters.

    Raises:
        ValueError: The selection has unknown names or is empty.
        TypeError: A selected parameter is sharded.
    """
    modules, params, seen = _look_at(model)
    key: Hashable = None
    if not callable(selection):
        key = None if selection is None else frozenset(selection)
        kept = _KNOWN.get(model, {}).get(key)
        if kept is not None and kept.seen == seen and kept.rules == RULES:
            return Placed(model, kept.placement, modules, params)
    placement = _find(model, modules, params, selection)
    chosen = {name: params[number] for name, number in placement.params.items()}
    refuse_sharded(chosen, "capture", ", or leave these out (params=)")
    if not callable(selection):
        known = _KNOWN.setdefault(model, {})
        known.pop(key, None)
        known[key] = _Kept(dict(RULES), seen, placement)
        while len(known) > MOST:
            known.pop(next(iter(known)), None)
    return Placed(model, placement, modules, params)


def _look_at(
    model: nn.Module,
) -> tuple[list[nn.Module], list[nn.Parameter], list[object]]:
    """Returns all modules and parameters, and all else that a placement depends on.

    That is looked at in every capture, so it is little: of a module's attributes only
    what decides whether it has a rule and is compiled.
    """
    modules, params = [model], []
    seen: list[object] = []
    numbers = {id(model): 0}
    for module in modules:
        attributes = vars(module)
        own, children = module._parameters, module._modules
        seen += type(module), _is_compiled(module)
        if own or children:
            # A plain tensor among the attributes was computed from parameters.
            seen += "forward" in attributes, set(map(type, attributes.values()))
        for name, param in own.items():
            if param is None:
                seen.append(name)
                continue
            number = numbers.setdefault(id(param), len(params))
            if number == len(params):
                params.append(param)
            seen += name, number, param.requires_grad, type(param)
        for name, child in children.items():
            if child is None:
                seen.append(name)
                continue
            number = numbers.setdefault(id(child), len(modules))
            if number == len(modules):
                modules.append(child)
            seen += name, number
    return modules, params, seen


def _find(
    model: nn.Module,
    modules: list[nn.Module],
    params: list[nn.Parameter],
    selection: Selection,
) -> Placement:
    number_of = {id(each): number for number, each in enumerate(modules)}
    number_of |= {id(each): number for number, each in enumerate(params)}
    chosen = selected(model, selection)
    names = {id(param): name for name, param in chosen.items()}
    owners, holders, normalising, may_be_wrong = [], [], [], []
    for name, module in model.named_modules():
        number, rule = number_of[id(module)], rule_of(module)
        own = module._parameters.items()
        # A module with a rule is one layer, whatever modules are in it.
        if rule is not None and module._modules:
            own = module.named_parameters(remove_duplicate=False)
        inner = {n: names[id(p)] for n, p in own if id(p) in names}
        # What is recorded anyway may run again, too.
        if not (inner and rule is not None) and any(
            id(param) in names for param in module.parameters()
        ):
            holders.append((number, name))
        if inner:
            owner = RecordedModule(name, type(module).__name__, rule, inner)
            owners.append((number, owner))
        if batch_norm.is_normalising(module):
            normalising.append((number, name))
        if type(module) in wrong_operations.WRONG:
            may_be_wrong.append(number)
    return Placement(
        {name: number_of[id(param)] for name, param in chosen.items()},
        tuple(owners),
        tuple(holders),
        tuple(number_of[id(each)] for each in _without_rule(model, names)),
        tuple(normalising),
        tuple(may_be_wrong),
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
