"""What a capture is asked for: the selected parameters, and its options."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, get_args

from torch import nn

from per_sample_grad.errors import PerSampleError
from per_sample_grad.factors.plan import METHODS, Method
from xla_replica import AccumulationHook, refuse_sharded
from xla_replica.common.arguments import check_choice, check_integer, check_number

Selection = Collection[str] | Callable[[str, nn.Parameter], bool] | None
Fallback = Literal["error", "loop"]
Check = Literal["first", "always", "never"]
# The reductions whose gradient a pass may add to ``.grad``.
Accumulate = Literal["mean", "sum"]

# The most names that a message lists.
MOST_NAMES = 12


@dataclasses.dataclass
class Settings:
    """The checked arguments of a `Capture`; ``params`` are the selected parameters.

    Attributes:
        names: The parameters' names by ``id(parameter)``.
        default_batch_dim: The ``batch_dim`` of modules that it does not name.
        has_fallback: Whether one replaces rules that are missing or wrong.
    """

    model: nn.Module
    params: Mapping[str, nn.Parameter]
    batch_dim: int | Mapping[str, int | None]
    fallback: Fallback
    check: Check
    method: Method
    budget: int | None
    scale: float

    def __post_init__(self) -> None:
        # A sharded parameter, a DTensor, is of another class.
        if not {nn.Parameter}.issuperset(map(type, self.params.values())):
            refuse_sharded(self.params, "capture", ", or leave these out (params=)")
        refuse_hooked(self.params)
        self.names = {id(param): name for name, param in self.params.items()}
        self.has_fallback = self.fallback != "error"
        self.default_batch_dim, unknown = self.batch_dim, set[str]()
        if isinstance(self.batch_dim, Mapping):
            self.default_batch_dim = self.batch_dim.get("") or 0
            unknown = self.batch_dim.keys() - {"", *dict(self.model.named_modules())}
        if unknown:
            raise ValueError(
                f"batch_dim names {', '.join(sorted(unknown))}, not in "
                'model.named_modules(); "" stands for all others'
            )
        others = self.fallback, self.check, self.method, self.budget, self.scale
        _check_options(self.default_batch_dim, *others)


@functools.lru_cache(typed=True)  # a loop asks for the same every time
def _check_options(
    batch_dim: int, fallback: str, check: str, method: str, budget: Any, scale: float
) -> None:
    """Raises TypeError or ValueError for an option that is not allowed."""
    check_integer("batch_dim", batch_dim)
    check_choice("fallback", fallback, get_args(Fallback))
    check_choice("check", check, get_args(Check))
    check_choice("method", method, METHODS)
    check_number("scale", scale, above=0)
    if budget is not None:
        check_integer("budget", budget, least=1)


def selected(model: nn.Module, params: Selection) -> dict[str, nn.Parameter]:
    """Returns the parameters that were asked for, by their first name in the model.

    Raises:
        ValueError: The selection has unknown names or is empty.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if params is None:
        chosen = trained
    elif callable(params):
        chosen = {name: param for name, param in trained.items() if params(name, param)}
    else:
        # A shared parameter may be asked for by any of its names.
        every = dict(model.named_parameters(remove_duplicate=False))
        trainable = {name for name, param in every.items() if param.requires_grad}
        if wrong := sorted(set(params) - trainable):
            raise ValueError(
                f"params: {listed(wrong)} are not trainable parameters of the "
                f"model; allowed are {listed([*trained]) or 'none'}"
            )
        asked = {id(every[name]) for name in params}
        chosen = {name: param for name, param in trained.items() if id(param) in asked}
    if not chosen:
        raise ValueError(
            "no parameter is selected: none requires grad, or params= leaves none"
        )
    if unreal := [name for name, param in chosen.items() if param.is_complex()]:
        raise ValueError(
            f"params: {listed(unreal)} are complex: leave them out (params=), or use "
            "real parameters with torch.view_as_complex"
        )
    return chosen


def listed(names: Sequence[str]) -> str:
    """Returns names in words, of many the first ones."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


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
            f"{', '.join(hooked)} have gradient hooks (register_hook): remove them, "
            "use register_post_accumulate_grad_hook, or leave them out (params=)"
        )
