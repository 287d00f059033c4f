"""Which weights of a model can be sparse."""

from __future__ import annotations

import dataclasses
import fnmatch
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.weak import WeakIdKeyDictionary

# What a user names layers by: a pattern, a type of module, or a question.
Selector = str | type | Callable[[str, nn.Parameter], bool]

# Parameter to whoever keeps it sparse: not an attribute, which torch.save would pickle.
holders: MutableMapping[nn.Parameter, weakref.ref[Any]] = WeakIdKeyDictionary()

_WRAPPERS = ("_orig_mod.", "module.")  # torch.compile; DDP and DataParallel
_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A parameter that can be sparse.

    Attributes:
        name: As `model.named_parameters` has it, without the prefixes of wrappers.
        parameter: Shape ``(out, in)`` or ``(out, in, *kernel)``.
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
    def is_replaced(self) -> bool:
        """Whether the module has another parameter by now, as after ``.to('xla')``."""
        return getattr(self.module, self.attribute, None) is not self.parameter


def weights_of(
    model: nn.Module,
    include: Iterable[Selector] = (),
    exclude: Iterable[Selector] = (),
) -> list[Weight]:
    """Weights of convolutions, linear, attention, recurrent and bilinear layers.

    In order of registration, shared ones once; never biases, norms, embeddings or
    frozen parameters, unless ``include`` names them.

    Args:
        model: Any module.
        include: Further parameters of two or more dimensions.
        exclude: What to leave out; goes before everything else.

    A selector is a pattern of a parameter's or module's name (``'blocks.*.mlp'``), a
    type of module, or a function of a parameter's name and the parameter.

    Raises:
        ValueError, TypeError: A selector selects nothing, or is none.
    """
    include, exclude = list(include), list(exclude)
    used: set[int] = set()
    found: dict[int, Weight] = {}
    for path, module in model.named_modules(remove_duplicate=True):
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = clean(f"{path}.{attribute}" if path else attribute)
            selected = _matches(include, module, name, parameter, used, 0)
            dropped = _matches(exclude, module, name, parameter, used, len(include))
            allowed = parameter.requires_grad and parameter.dim() >= 2
            if selected and not allowed:
                raise ValueError(
                    f"include selects {name!r}, of shape {tuple(parameter.shape)} and "
                    f"requires_grad={parameter.requires_grad}; only trained parameters "
                    "of two or more dimensions can be sparse"
                )
            if dropped or not allowed or not (selected or _is_kind(module, attribute)):
                continue
            is_conv = isinstance(module, _ConvNd)
            weight = Weight(name, parameter, module, attribute, is_conv)
            found.setdefault(id(parameter), weight)
    _check_used([*include, *exclude], used)
    return list(found.values())


def check_bound(weights: Iterable[Weight]) -> None:
    """Raises ValueError if modules have other parameters by now."""
    replaced = [weight.name for weight in weights if weight.is_replaced]
    if replaced:
        raise ValueError(
            f"the model has other parameters now than when this pruner was built: "
            f"{replaced[0]!r} and {len(replaced) - 1} more. Moving a model to XLA "
            "does that; build optimizer and pruner after the move"
        )


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
    """A parameter's name without what torch.compile and DDP put before it."""
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name


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


def _matches(
    selectors: list[Selector],
    module: nn.Module,
    name: str,
    parameter: nn.Parameter,
    used: set[int],
    first: int,
) -> bool:
    """Whether any selector means it; notes which do, numbered from ``first``."""
    hits = []
    for index, selector in enumerate(selectors, start=first):
        if isinstance(selector, str):
            hit = _is_named(selector, name)
        elif isinstance(selector, type):
            hit = isinstance(module, selector)
        elif callable(selector):
            hit = bool(selector(name, parameter))
            used.add(index)  # a function may well have nothing to say
        else:
            raise TypeError(
                f"{selector!r} selects no layers; give a pattern of names, a type of "
                "module, or a function of a parameter's name and the parameter"
            )
        if hit:
            hits.append(index)
    used.update(hits)
    return bool(hits)


def _check_used(selectors: list[Selector], used: set[int]) -> None:
    for index, selector in enumerate(selectors):
        if index not in used and isinstance(selector, str):
            raise ValueError(
                f"include or exclude names {selector!r}, but the model has no such "
                "parameter or module"
            )
