"""Which weights of a model can be sparse."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from xla_replica.common.arguments import check_type
from xla_replica.common.names import unwrapped

# How a user selects layers: by a pattern, a type of module, or a function.
Selector = str | type | Callable[[str, nn.Parameter], bool]

# Layers that are known to multiply by their weights.
MULTIPLIERS = (
    _ConvNd, nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase,
)  # fmt: skip
_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A parameter that can be sparse.

    Attributes:
        name: As `model.named_parameters` has it, without the prefixes of wrappers: of
            a shared parameter the first one.
        parameter: Shape ``(out, in)`` or ``(out, in, *kernel)``, both of a group;
            ``(in, out, *kernel)`` of a transposed convolution.
        module: The module that owns it.
        attribute: Its name there.
        is_conv: Whether it is the kernel of a convolution.
        names: All its names; a shared one has several.
    """

    name: str
    parameter: nn.Parameter
    module: nn.Module
    attribute: str
    is_conv: bool
    names: tuple[str, ...] = ()

    @property
    def transposed(self) -> int | None:
        """Groups of a transposed convolution; None for all others."""
        if isinstance(self.module, _ConvNd) and self.module.transposed:
            return self.module.groups
        return None


def weights_of(
    model: nn.Module,
    include: Selector | Iterable[Selector] = (),
    exclude: Selector | Iterable[Selector] = (),
) -> list[Weight]:
    """Returns weights of convolutions, linear, attention, recurrent, bilinear layers.

    In order of registration, shared ones once, by their first name; never biases,
    norms, embeddings or frozen parameters, unless ``include`` names them. A selector is
    a pattern of a parameter's or module's name (``'blocks.*.mlp'``), a type of module,
    or a function of a parameter's name and the parameter.

    Args:
        model: Any module.
        include: Further parameters of two or more dimensions. A type, or the name of
            modules, includes those that they have.
        exclude: What to leave out, whatever ``include`` says: a module with all inside
            it, a shared parameter by any of its names.

    Raises:
        ValueError: A selector selects nothing, or what cannot be sparse.
        TypeError: A selector is none of the three, or ``model`` is not a module.
    """
    check_model(model)
    places = list(_places(model))
    included = set(_included(selectors(include), places))
    excluded = _selected(selectors(exclude), places, inside=True)
    dense = {place.parameter for place in excluded}
    owners: dict[nn.Parameter, Weight] = {}
    names: dict[nn.Parameter, list[str]] = collections.defaultdict(list)
    for place in places:
        parameter = place.parameter
        names[parameter].append(place.name)
        if parameter in dense or not place.is_allowed:
            continue
        if place in included and _is_normalised(place):
            raise ValueError(
                f"{place.name!r} is normalised by weight_norm: leave it out of include="
            )
        other = owners.get(parameter)
        # A shared one is known by the module that multiplies by it, included or not.
        known = other and _multiplies(other)
        if (_multiplies(place) and not known) or (place in included and not other):
            owners[parameter] = place
    return [
        Weight(names[p][0], p, at.module, at.attribute, at.is_conv, tuple(names[p]))
        for p, at in owners.items()
    ]


def _is_normalised(place: Weight) -> bool:
    """Returns whether a weight is computed as this parameter over its norm."""
    module = place.module
    of_parametrization = isinstance(module, ParametrizationList) and any(
        type(each).__name__ == "_WeightNorm" for each in module
    )
    hooks = module._forward_pre_hooks.values()
    return of_parametrization or (
        place.attribute.endswith("_v")
        and any(type(hook).__name__ == "WeightNorm" for hook in hooks)
    )


def check_model(model: Any) -> None:
    """Raises TypeError unless ``model`` is a torch module."""
    check_type("model", model, nn.Module, "a torch module")


def reasons_for_dense(
    model: nn.Module, weights: list[Weight], exclude: Iterable[Selector] = ()
) -> dict[str, str]:
    """Returns why parameters of two or more dimensions are not among ``weights``."""
    places = list(_places(model))
    fitting = (p for p in places if any(p.fits(s, inside=True) for s in exclude))
    excluded = {place.parameter for place in fitting}
    given = {weight.parameter for weight in weights}
    reasons: dict[nn.Parameter, tuple[str, str]] = {}
    for place in places:
        parameter, kind = place.parameter, type(place.module).__name__
        if parameter.dim() < 2 or parameter in given or parameter in reasons:
            continue
        other = getattr(place.module, place.attribute.rpartition("_")[0], None)
        is_parameter = isinstance(other, nn.Parameter)
        is_computed = isinstance(other, torch.Tensor) and not is_parameter
        if parameter in excluded:
            reason = "exclude= names it"
        elif not parameter.requires_grad:
            reason = "it is frozen"
        elif isinstance(place.module, (nn.Embedding, nn.EmbeddingBag)):
            reason = "an embedding; include= makes it sparse"
        elif is_computed or isinstance(place.module, ParametrizationList):
            reason = "a weight is computed from it, as by weight_norm"
        else:
            reason = f"{kind} is not known to multiply by it; include= makes it sparse"
        reasons[parameter] = (place.name, reason)
    return dict(reasons.values())


def selectors(given: Selector | Iterable[Selector]) -> list[Selector]:
    """Returns selectors as a list; a single one becomes a list of one."""
    is_one = isinstance(given, (str, type, nn.Module)) or callable(given)
    every: list[Any] = [given]
    if not is_one and isinstance(given, Iterable):
        every = list(given)
    for selector in every:
        is_name = isinstance(selector, (str, type))
        if not is_name and (not callable(selector) or isinstance(selector, nn.Module)):
            raise TypeError(
                f"{selector!r} selects no layers; give a pattern of names, a type of "
                "module, or a function of a parameter's name and the parameter"
            )
    return every


def named(weights: list[Weight], pattern: str) -> list[str]:
    """Returns names of the weights that a pattern matches, which must be some."""
    names = [
        weight.name
        for weight in weights
        if any(_is_named(pattern, name) for name in weight.names)
    ]
    if not names:
        raise ValueError(
            f"{pattern!r} does not match the name of any weight that can be sparse; "
            f"there are {[w.name for w in weights]}"
        )
    return names


def _multiplies(weight: Weight) -> bool:
    """Returns whether the weight's module is known to multiply by it."""
    module, attribute = weight.module, weight.attribute
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return attribute.startswith("weight_")
    if isinstance(module, nn.MultiheadAttention):
        return attribute in _ATTENTION
    return attribute == "weight" and isinstance(module, MULTIPLIERS)


@dataclasses.dataclass(frozen=True, eq=False)
class _Place(Weight):
    """A place where a parameter is, sparse or not; a shared one has several."""

    around: tuple[nn.Module, ...] = ()  # from the model to the owner

    @property
    def is_allowed(self) -> bool:
        """Whether it may be sparse."""
        return self.parameter.requires_grad and self.parameter.dim() >= 2

    def fits(self, selector: Selector, inside: bool) -> bool:
        """Returns whether a selector fits, or with ``inside`` fits a module around."""
        if isinstance(selector, type):
            modules = self.around if inside else (self.module,)
            return any(isinstance(module, selector) for module in modules)
        if not isinstance(selector, str):
            return bool(selector(self.name, self.parameter))
        parts = self.name.split(".")
        paths = [".".join(parts[:depth]) for depth in range(1, len(parts))]
        return _is_named(selector, self.name) or (
            inside and any(fnmatch.fnmatchcase(path, selector) for path in paths)
        )


def _is_named(pattern: str, name: str) -> bool:
    """Returns whether a pattern fits a parameter's name, or that of its module."""
    owner = name.rpartition(".")[0]
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(owner, pattern)


def _places(
    module: nn.Module, path: str = "", around: tuple[nn.Module, ...] = ()
) -> Iterator[_Place]:
    """Yields in order of registration, as `named_parameters` without deduplication."""
    around = (*around, module)
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            name, is_conv = unwrapped(path + attribute), isinstance(module, _ConvNd)
            yield _Place(name, parameter, module, attribute, is_conv, (), around)
    for name, child in module._modules.items():
        if child is not None:
            yield from _places(child, f"{path}{name}.", around)


def _included(given: list[Selector], places: list[_Place]) -> list[_Place]:
    """Returns the places that ``include`` selects; ValueError if they cannot be sparse.

    A module may have biases too, but not alone.
    """
    usable_places = []
    for selector in given:
        hits = _selected([selector], places)
        usable = [place for place in hits if place.is_allowed]
        for place in hits:
            owner = place.name.rpartition(".")[0]
            is_module = isinstance(selector, type) or (
                isinstance(selector, str) and fnmatch.fnmatchcase(owner, selector)
            )
            if place.is_allowed or (usable and is_module):
                continue
            parameter = place.parameter
            raise ValueError(
                f"include selects {place.name!r}, of shape {tuple(parameter.shape)} "
                f"and requires_grad={parameter.requires_grad}; only trained parameters "
                "of two or more dimensions can be sparse"
            )
        usable_places += usable
    return usable_places


def _selected(
    given: list[Selector], places: list[_Place], inside: bool = False
) -> list[_Place]:
    """Returns the places that any selector fits; raises ValueError if one fits none."""
    selected = []
    for selector in given:
        hits = [place for place in places if place.fits(selector, inside)]
        # A function may well select nothing.
        if not hits and isinstance(selector, (str, type)):
            raise ValueError(
                f"include or exclude names {selector!r}, but the model has no such part"
            )
        selected += hits
    return selected
