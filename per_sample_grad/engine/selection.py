"""Which parameters are asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

Selection = Collection[str] | Callable[[str, nn.Parameter], bool] | None


def selected(model: nn.Module, params: Selection) -> dict[str, nn.Parameter]:
    """The parameters that were asked for, by their first name in the model."""
    named = dict(model.named_parameters())
    trained = {name: param for name, param in named.items() if param.requires_grad}
    if params is None:
        chosen = trained
    elif callable(params):
        chosen = {name: param for name, param in trained.items() if params(name, param)}
    else:
        every = dict(model.named_parameters(remove_duplicate=False))
        first = {id(param): name for name, param in named.items()}
        wrong = sorted(name for name in params if name not in every)
        frozen = sorted(n for n in params if n in every and not every[n].requires_grad)
        if wrong or frozen:
            raise ValueError(
                f"params: {', '.join(wrong + frozen)} are no parameters of the model "
                f"that require grad; allowed are {', '.join(trained) or 'none'}"
            )
        asked = {first[id(every[name])] for name in params}
        chosen = {name: param for name, param in trained.items() if name in asked}
    if not chosen:
        raise ValueError(
            "no parameter is selected: the model has none that requires grad, or "
            "params= leaves none"
        )
    return chosen
