"""Which weights of a model can be sparse."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

# What a user names layers by: a pattern, a type of module, or a question.
Selector = str | type | Callable[[str, nn.Parameter], bool]

# What torch.compile, FSDP and checkpointing put into a path, wherever they wrap.
_INNER = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_OUTER = "module."  # DDP and DataParallel, around the whole model
_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A parameter that can be sparse.

    Attributes:
        name: As `model.named_parameters` has it, without the prefixes of wrappers.
        parameter: Shape ``(out, in)`` or ``(out, in, *kernel)``, both of a group;
            ``(in, out, *kernel)`` of a transposed convolution.
        module: Its owner.
        attribute: Its name there.
        is_conv: Whether it is the kernel of a convolution.
    """

    name: str
    parameter: nn.Parameter
    module: nn.Module
    attribute: str
    is_conv: bool

    @property
    def transposed(self) -> int | None:
        """Groups of a transposed convolution; None for all others."""
        module = self.module
        is_transposed = isinstance(module, _ConvNd) and module.transposed
        return module.groups if is_transposed else None

    @property
    def is_replaced(self) -> bool:
        """Whether the module has another parameter by now, as after ``.to('xla')``."""
        return getattr(self.module, self.attribute, None) is not self.parameter


def weights_of(
    model: nn.Module,
    include: Selector | Iterable[Selector] = (),
    exclude: Selector | Iterable[Selector] = (),
) -> list[Weight]:
    """Weights of convolutions, linear, attention, recurrent and bilinear layers.

    In order of registration, shared ones once, by the name at the first such layer;
    never biases, norms, embeddings or frozen parameters, unless ``include`` names them.

    Args:
        model: Any module.
        include: Further parameters of two or more dimensions.
        exclude: What to leave out; goes before everything else.

    A selector is a pattern of a parameter's or module's name (``'blocks.*.mlp'``), a
    type of module, or a function of a parameter's name and the parameter. To exclude a
    module is to exclude all inside it; to exclude a shared parameter, any of its names
    will do.

    Raises:
        ValueError, TypeError: A selector selects nothing, or is none.
    """
    include, exclude = selectors(include), selectors(exclude)
    used: set[int] = set()
    owners = list(_owners(model))
    dropped = {
        id(owner.parameter)
        for owner in owners
        if _matches(exclude, owner, used, len(include), inside=True)
    }
    found: dict[int, Weight] = {}
    for owner in owners:
        parameter, module = owner.parameter, owner.module
        selected = _matches(include, owner, used, 0)
        allowed = parameter.requires_grad and parameter.dim() >= 2
        if selected and not allowed:
            raise ValueError(
                f"include selects {owner.name!r}, of shape {tuple(parameter.shape)} "
                f"and requires_grad={parameter.requires_grad}; only trained parameters "
                "of two or more dimensions can be sparse"
            )
        if id(parameter) in dropped or not allowed:
            continue
        by_kind = _is_kind(module, owner.attribute)
        other = found.get(id(parameter))
        # A shared one is known by the module that multiplies by it, included or not.
        known = other and _is_kind(other.module, other.attribute)
        if (by_kind and not known) or (selected and not other):
            is_conv = isinstance(module, _ConvNd)
            weight = Weight(owner.name, parameter, module, owner.attribute, is_conv)
            found[id(parameter)] = weight
    _check_used([*include, *exclude], used)
    return list(found.values())


def selectors(given: Selector | Iterable[Selector]) -> list[Selector]:
    """Selectors as a list; a single one, which has no letters or members to it, too.

    Raises:
        TypeError: One is no selector.
    """
    single = isinstance(given, (str, type, nn.Module)) or callable(given)
    single = single or not isinstance(given, Iterable)
    found = [given] if single else list(given)
    for selector in found:
        is_name = isinstance(selector, (str, type))
        if not is_name and (not callable(selector) or isinstance(selector, nn.Module)):
            raise TypeError(
                f"{selector!r} selects no layers; give a pattern of names, a type of "
                "module, or a function of a parameter's name and the parameter"
            )
    return found


def named(weights: list[Weight], pattern: str) -> list[str]:
    """Names of the weights that a pattern means.

    Raises:
        ValueError: It means none.
    """
    names = [w.name for w in weights if _is_named(pattern, w.name)]
    if not names:
        raise ValueError(
            f"{pattern!r} is the name of no weight that can be sparse; there are "
            f"{[w.name for w in weights]}"
        )
    return names


def clean(name: str) -> str:
    """A parameter's name without what wrappers put into it.

    >>> clean("module._orig_mod.blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    name = ".".join(part for part in name.split(".") if part not in _INNER)
    while name.startswith(_OUTER):
        name = name.removeprefix(_OUTER)
    return name


def multipliers_of(model: nn.Module, weight: Weight) -> list[tuple[nn.Module, str]]:
    """Modules that multiply by a weight, with its name there; shared ones have several.

    Its first owner, which may have been included by name, and all others of the kinds
    that multiply: an embedding looks up.
    """
    found = [(weight.module, weight.attribute)]
    for owner in _owners(model):
        place = (owner.module, owner.attribute)
        multiplies = owner.parameter is weight.parameter and _is_kind(*place)
        if multiplies and place not in found:
            found.append(place)
    return found


def _is_kind(module: nn.Module, attribute: str) -> bool:
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return attribute.startswith("weight_")
    if isinstance(module, nn.MultiheadAttention):
        return attribute in _ATTENTION
    return attribute == "weight" and isinstance(
        module, (_ConvNd, nn.Linear, nn.Bilinear)
    )


def _is_named(pattern: str, name: str) -> bool:
    owner = name.rpartition(".")[0]
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(owner, pattern)


class _Owner(NamedTuple):
    """A place where a parameter is; a shared one has several."""

    name: str
    parameter: nn.Parameter
    module: nn.Module
    attribute: str
    around: tuple[nn.Module, ...]  # from the model to the module

    def is_inside(self, pattern: str) -> bool:
        """Whether the pattern means a module around it."""
        parts = self.name.split(".")
        return any(
            fnmatch.fnmatchcase(".".join(parts[:depth]), pattern)
            for depth in range(1, len(parts))
        )


def _owners(
    module: nn.Module, path: str = "", around: tuple[nn.Module, ...] = ()
) -> Iterator[_Owner]:
    """In order of registration, as `named_parameters` without its deduplication."""
    around = (*around, module)
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            name = clean(path + attribute)
            yield _Owner(name, parameter, module, attribute, around)
    for name, child in module._modules.items():
        if child is not None:
            yield from _owners(child, f"{path}{name}.", around)


def _matches(
    selectors: list[Selector],
    owner: _Owner,
    used: set[int],
    first: int,
    inside: bool = False,
) -> bool:
    """Whether any selector means it, or with ``inside`` a module around it.

    Notes which do, numbered from ``first``.
    """
    hits = []
    for index, selector in enumerate(selectors, start=first):
        if isinstance(selector, str):
            hit = _is_named(selector, owner.name)
            hit = hit or (inside and owner.is_inside(selector))
        elif isinstance(selector, type):
            modules = owner.around if inside else (owner.module,)
            hit = any(isinstance(module, selector) for module in modules)
        else:
            hit = bool(selector(owner.name, owner.parameter))
            used.add(index)  # a function may well have nothing to say
        if hit:
            hits.append(index)
    used.update(hits)
    return bool(hits)


def _check_used(selectors: list[Selector], used: set[int]) -> None:
    for index, selector in enumerate(selectors):
        if index not in used:
            raise ValueError(
                f"include or exclude names {selector!r}, but the model has no such "
                "parameter, nor such a module with parameters"
            )
