"""Which rule knows which module; users add their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import nn

from per_sample_grad.factors.forms import Contribution
from per_sample_grad.layers.call import Call

# From a call and the gradient of the summed losses with respect to its output (batch
# first) to the contribution of each parameter, by its name within the module.
RuleFunction = Callable[[Call, torch.Tensor], Mapping[str, Contribution]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is known of a kind of module.

    Attributes:
        contributions: The rule itself.
    """

    contributions: RuleFunction


# By exact type: a subclass may compute something else.
RULES: dict[type[nn.Module], Rule] = {}


def register_rule(
    *module_types: type[nn.Module],
) -> Callable[[RuleFunction], RuleFunction]:
    """A decorator that makes a function the rule of these module types, exactly.

    The function gets a `Call` and the gradient of the summed losses with respect to
    the module's (first) output, batch first, ``(N, ...)``. It returns, by the names of
    the parameters within the module (``"weight"``, or ``"inner.weight"`` for a module
    that is treated as one layer), an `Outer`, `Lookup` or `Dense` each with N rows. It
    raises `Refusal` where its formula does not hold. The first backward pass of every
    model checks the outcome against autograd, so a wrong rule is an error.

    A subclass of a module that has a rule has none until it is registered: it may
    compute something else. Registering again replaces.

    >>> from torch import nn
    >>> from per_sample_grad import Dense
    >>> class Scale(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.factor = nn.Parameter(torch.ones(()))
    ...     def forward(self, x):
    ...         return self.factor * x
    >>> @register_rule(Scale)
    ... def scale(call, grad):
    ...     return {"factor": Dense((grad * call.input).flatten(1).sum(1))}
    >>> RULES[Scale].contributions is scale
    True
    >>> del RULES[Scale]
    """
    for module_type in module_types:
        if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
            raise TypeError(
                f"register_rule takes types of torch.nn.Module, not {module_type!r}"
            )

    def register(function: RuleFunction) -> RuleFunction:
        for module_type in module_types:
            RULES[module_type] = Rule(function)
        return function

    return register


def rule_of(module: nn.Module) -> Rule | None:
    """The rule for this very module, or None; see `why_no_rule`."""
    return None if why_no_rule(module) else RULES[type(module)]


def why_no_rule(module: nn.Module) -> str | None:
    """Why what this very module computes is unknown; None if there is a rule for it."""
    attributes = vars(module)
    kind = type(module).__name__
    if "forward" in attributes:
        return f"the forward method of this {kind} was replaced"
    made = [name for name, v in attributes.items() if isinstance(v, torch.Tensor)]
    if made:
        return (
            f"the {', '.join(made)} of this {kind} is no parameter, but a tensor that "
            "is made of some (weight norm, pruning)"
        )
    if type(module) not in RULES:
        known = [base.__name__ for base in type(module).__mro__[1:] if base in RULES]
        inherits = (
            f", and as a {known[0]} it may compute something else" if known else ""
        )
        return f"no rule is registered for {kind}{inherits}"
    return None
