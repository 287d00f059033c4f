"""Which weights of a model can be sparse."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import itertools
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from xla_replica import is_sharded
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
        around: The modules that it is inside of, from the model to its owner.
    """

    name: str
    parameter: nn.Parameter
    module: nn.Module
    attribute: str
    is_conv: bool
    names: tuple[str, ...] = ()
    around: tuple[nn.Module, ...] = ()

    @property
    def is_allowed(self) -> bool:
        """Whether it may be sparse."""
        return self.parameter.requires_grad and self.parameter.dim() >= 2

    @property
    def transposed(self) -> int | None:
        """Groups of a transposed convolution; None for all others."""
        if isinstance(self.module, _ConvNd) and self.module.transposed:
            return self.module.groups
        return None

    def check_kind(self) -> None:
        """Raises TypeError if it, or its gradient, is of a kind that is not served."""
        module, parameter = self.module, self.parameter
        for is_wrong, why in (
            (is_sharded(parameter),
             "is a DTensor, sharded as by FSDP2; replicas must hold whole weights, as "
             "under DDP"),
            (parameter.is_complex(),
             f"is {parameter.dtype}; only real weights can be sparse"),
            (getattr(module, "sparse", False),
             f"has sparse gradients, because its {type(module).__name__} has "
             "sparse=True, and growth needs dense ones; build that with sparse=False"),
        ):  # fmt: skip
            if is_wrong:
                raise TypeError(f"{self.name!r} {why}, or put it into exclude=")


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
    places = list(_places(check_type("model", model, nn.Module, "a torch module")))
    included = {p for each in selectors(include) for p in _included(each, places)}
    excluded = {
        place.parameter
        for each in selectors(exclude)
        for place in selected(each, places, inside=True)
    }
    owners: dict[nn.Parameter, Weight] = {}
    names: dict[nn.Parameter, list[str]] = collections.defaultdict(list)
    for place in places:
        parameter = place.parameter
        names[parameter].append(place.name)
        if parameter in excluded or not place.is_allowed:
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
        dataclasses.replace(place, name=names[p][0], names=tuple(names[p]))
        for p, place in owners.items()
    ]


def _is_normalised(place: Weight) -> bool:
    """Returns whether a weight is computed as this parameter over its norm."""
    module = place.module
    if isinstance(module, ParametrizationList):
        return any(type(each).__name__ == "_WeightNorm" for each in module)
    hooks = module._forward_pre_hooks.values()
    is_hooked = any(type(hook).__name__ == "WeightNorm" for hook in hooks)
    return is_hooked and place.attribute.endswith("_v")


def reasons_for_dense(
    model: nn.Module, weights: list[Weight], exclude: Iterable[Selector] = ()
) -> dict[str, str]:
    """Returns why parameters of two or more dimensions are not among ``weights``."""
    places = list(_places(model))
    excluded = {p.parameter for p in places if any(_fits(p, s, True) for s in exclude)}
    seen = {weight.parameter for weight in weights}
    found = {}
    for place in places:
        module, parameter = place.module, place.parameter
        if parameter.dim() < 2 or parameter in seen:
            continue
        seen.add(parameter)
        made = getattr(module, place.attribute.rpartition("_")[0], None)
        is_made = isinstance(made, torch.Tensor) and not isinstance(made, nn.Parameter)
        is_lookup = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        is_parametrized = is_made or isinstance(module, ParametrizationList)
        unknown = f"{type(module).__name__} is not known to multiply by it"
        reasons = {
            "exclude= names it": parameter in excluded,
            "it is frozen": not parameter.requires_grad,
            "an embedding; include= makes it sparse": is_lookup,
            "a weight is computed from it, as by weight_norm": is_parametrized,
            f"{unknown}; include= makes it sparse": True,
        }
        found[place.name] = next(why for why, holds in reasons.items() if holds)
    return found


def selectors(given: Selector | Iterable[Selector]) -> list[Selector]:
    """Returns selectors as a list; a single one becomes a list of one."""
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    every: list[Any] = [given] if is_one or callable(given) else list(given)
    for selector in every:
        is_function = callable(selector) and not isinstance(selector, nn.Module)
        if not is_function and not isinstance(selector, str):
            raise TypeError(
                f"{selector!r} selects no layers; give a pattern of names, a type of "
                "module, or a function of a parameter's name and the parameter"
            )
    return every


def _multiplies(weight: Weight) -> bool:
    """Returns whether the weight's module is known to multiply by it."""
    module, attribute = weight.module, weight.attribute
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return attribute.startswith("weight_")
    if isinstance(module, nn.MultiheadAttention):
        return attribute in _ATTENTION
    return attribute == "weight" and isinstance(module, MULTIPLIERS)


def _places(
    module: nn.Module, path: str = "", around: tuple[nn.Module, ...] = ()
) -> Iterator[Weight]:
    """Yields every place of a parameter, in order of registration, sparse or not."""
    around = (*around, module)
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            name, is_conv = unwrapped(path + attribute), isinstance(module, _ConvNd)
            yield Weight(name, parameter, module, attribute, is_conv, (name,), around)
    for name, child in module._modules.items():
        if child is not None:
            yield from _places(child, f"{path}{name}.", around)


def _included(selector: Selector, places: Sequence[Weight]) -> list[Weight]:
    """Returns the places that ``include`` selects; ValueError if they cannot be sparse.

    A module may have biases too, but not alone.
    """
    hits = selected(selector, places)
    usable = [place for place in hits if place.is_allowed]
    for place in hits:
        owner, shape = place.name.rpartition(".")[0], tuple(place.parameter.shape)
        is_module = isinstance(selector, type) or (
            isinstance(selector, str) and fnmatch.fnmatchcase(owner, selector)
        )
        if not place.is_allowed and not (usable and is_module):
            raise ValueError(
                f"include selects {place.name!r}, of shape {shape} and requires_grad="
                f"{place.parameter.requires_grad}; only trained parameters of two or "
                "more dimensions can be sparse"
            )
    return usable


def selected(
    selector: Selector, places: Sequence[Weight], inside: bool = False
) -> list[Weight]:
    """Returns the places that a selector fits; a name or a type must fit some."""
    hits = [place for place in places if _fits(place, selector, inside)]
    if not hits and isinstance(selector, (str, type)):
        raise ValueError(
            f"{selector!r} selects none of the {len(places)} parameters "
            f"{reprlib.repr([place.name for place in places])}"
        )
    return hits


def _fits(place: Weight, selector: Selector, inside: bool) -> bool:
    """Returns whether a selector fits, or with ``inside`` fits a module around."""
    if isinstance(selector, type):
        modules = place.around if inside else (place.module,)
        return any(isinstance(module, selector) for module in modules)
    if isinstance(selector, str):
        return any(_is_named(selector, name, inside) for name in place.names)
    return bool(selector(place.name, place.parameter))


def _is_named(pattern: str, name: str, inside: bool = False) -> bool:
    """Returns whether a pattern fits a parameter's name, or that of its module.

    With ``inside`` that of any module around it, too.
    """
    names = [*itertools.accumulate(name.split("."), "{}.{}".format)]
    return any(fnmatch.fnmatchcase(n, pattern) for n in names[0 if inside else -2 :])
