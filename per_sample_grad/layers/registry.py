"""What layer rules see, the sums that several take, and which module has which rule."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from per_sample_grad.errors import PerSampleError, Refusal
from per_sample_grad.factors import forms
from xla_replica import traits

_signature = functools.cache(inspect.signature)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a module in the recorded forward pass, as a layer rule sees it.

    Attributes:
        module: The module, of a type that the rule is for.
        args: Positional arguments; tensors are detached.
        kwargs: Keyword arguments; tensors are detached.
        batch_dim: The dimension of the tensors that counts samples.
    """

    module: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch_dim: int

    @property
    def input(self) -> torch.Tensor:
        """The first argument, with the batch as its first dimension."""
        value = self.args[0] if self.args else next(iter(self.kwargs.values()), None)
        if not isinstance(value, torch.Tensor):
            raise Refusal(
                f"its first argument is a {type(value).__name__}, not a tensor"
            )
        return self.batch_first(value)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by the names that ``forward`` has for them, and the module."""
        bound = _signature(type(self.module).forward).bind_partial
        return bound(self.module, *self.args, **self.kwargs).arguments

    def batch_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor`` with the batch as its first dimension."""
        if not -tensor.dim() <= self.batch_dim < tensor.dim():
            raise Refusal(
                f"a tensor of shape {tuple(tensor.shape)} has no dimension "
                f"{self.batch_dim} to count samples"
            )
        return tensor.movedim(self.batch_dim, 0) if self.batch_dim else tensor


# From a call and the gradient of the summed losses with respect to its output (batch
# first) to the contribution of each parameter, by its name within the module.
Rule = Callable[
    [Call, torch.Tensor],
    Mapping[str, forms.Contribution | Sequence[forms.Contribution]],
]

# The rules by exact type: a subclass may compute something else.
RULES: dict[type[nn.Module], Rule] = {}

# Those that read arguments alone, and no tensor of the module.
ONLY_ARGUMENTS: set[Rule] = set()


def register_rule(
    *module_types: type[nn.Module],
    like: type[nn.Module] | None = None,
    reads_module: bool = True,
) -> Callable[[Rule], Rule]:
    """Returns a decorator: the function becomes the rule of exactly these types.

    The function gets a `Call` and the gradient of the summed losses with respect to
    the module's (first) output, batch first, ``(N, ...)``. It returns, by the names of
    the parameters within the module (``"weight"``, or ``"inner.weight"`` for a module
    that is treated as one layer), an `Outer`, `Lookup` or `Dense` each with N rows, or
    several that are added. It raises `Refusal` where its formula does not hold. The
    first backward pass of every model compares the result with autograd, so a wrong
    rule raises an error.

    A subclass of a module that has a rule has none until it is registered: it may
    compute something else. If it does not, ``register_rule(Subclass, like=nn.Linear)``
    is enough, and decorates nothing. Registering a type again replaces its rule.

    A rule runs in the backward pass, so parameters of the module that it may read must
    not have changed since the call, which is an error. ``reads_module=False`` says that
    it reads none, and what they are then does not matter.

    Args:
        *module_types: The modules' classes.
        like: A class whose rule they take over; None where a function is decorated.
        reads_module: Whether the rule reads tensors of the module.

    Raises:
        TypeError: One of the arguments is not a subclass of `torch.nn.Module`.
        KeyError: ``like`` has no rule.

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
    >>> RULES[Scale] is scale
    True
    >>> del RULES[Scale]
    """
    for module_type in module_types:
        if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
            raise TypeError(
                f"register_rule takes types of torch.nn.Module, got {module_type!r}"
            )

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(module_types, rule))
        if not reads_module:
            ONLY_ARGUMENTS.add(rule)
        return rule

    if like is not None:
        register(RULES[like])
    return register


def why_no_rule(module: nn.Module) -> str | None:
    """Returns why this very module has no rule; None if it has one."""
    attributes, kind = vars(module), type(module)
    if "forward" in attributes:
        return f"the forward method of this {kind.__name__} was replaced"
    made = [name for name, v in attributes.items() if isinstance(v, torch.Tensor)]
    if made:
        return (
            f"the {', '.join(made)} of this {kind.__name__} is not a parameter, but a "
            "tensor that is computed from parameters (weight norm, pruning)"
        )
    if kind in RULES:
        return None
    why = f"no rule is registered for {kind.__name__}"
    if known := [base.__name__ for base in kind.__mro__[1:] if base in RULES]:
        why += f", and as a {known[0]} it may compute something else; if not, "
        why += f"register_rule({kind.__name__}, like={known[0]})"
    return why


def is_of_torch(module: nn.Module, rule: Rule | None) -> bool:
    """Returns whether a module of torch has this package's rule.

    Then it is known to keep samples apart whatever the data. A module or a rule by
    others was only seen to do so with the data of a comparison.
    """
    of_rule = getattr(rule, "__module__", None) or ""
    is_own = of_rule.startswith(f"{__package__}.")
    return is_own and type(module).__module__.startswith("torch.nn.")


def apply(
    rule: Rule,
    owner: object,
    call: Call,
    grad: torch.Tensor,
    shapes: Mapping[str, tuple[int, ...]],
    num_samples: int,
) -> dict[str, list[forms.Contribution]]:
    """Returns what a rule contributes to each parameter of a call.

    Args:
        rule: The rule.
        owner: What messages call the module.
        call: The call.
        grad: The gradient of its output, batch first, ``(N, ...)``.
        shapes: Those of the wanted parameters, by their names within the module.
        num_samples: B.

    Raises:
        Refusal: The rule does not hold for this call, or leaves out a parameter.
        PerSampleError: The rule returned something else than contributions with N or B
            rows.
    """
    found, faults, parts = rule(call, grad), [], {}
    if isinstance(found, Mapping):
        if missing := sorted(shapes.keys() - found.keys()):
            raise Refusal(f"its rule returned nothing for {', '.join(missing)}")
        for name, shape in shapes.items():
            value = found[name]
            parts[name] = list(value) if isinstance(value, Sequence) else [value]
            for part in parts[name]:
                fault = _fault(part, (len(grad), num_samples), shape)
                faults += [f"for {name!r} of shape {shape} {fault}"] if fault else []
    else:
        faults = [f"a {type(found).__name__}"]
    if faults:
        name = f"{rule.__module__}.{getattr(rule, '__qualname__', rule)}"
        raise PerSampleError(
            f"the rule of {owner}, {name}, returned {faults[0]}. It must return a dict "
            "by the parameters' names of Dense (N, *shape), Outer (N, G, T, p) and (N, "
            "G, T, q) or Lookup (N, T) and (N, T, q), or lists of them: see "
            "register_rule"
        )
    return parts


def _fault(part: object, rows: Collection[int], shape: tuple[int, ...]) -> str | None:
    """Returns what a rule must not return for a parameter of this shape; None: it may.

    ``rows`` are allowed numbers of rows.
    """
    height, width = shape[0] if shape else 1, math.prod(shape[1:])
    match part:
        case forms.Dense(values):
            got, fits = [values], tuple(values.shape[1:]) == shape
        case forms.Lookup(index, values):
            got = [index, values]
            fits = (*index.shape, width) == tuple(values.shape) and index.dim() == 2
        case forms.Outer(left, right):
            got = [left, right]
            fits = left.dim() == 4 and (*left.shape[:3], width) == tuple(right.shape)
            fits = fits and left.shape[1] * left.shape[3] == height
        case forms.Windows(left):
            got, fits = [left], left.dim() == 4
        case _:
            return f"a {type(part).__name__}"
    if fits and got[0].dim() and len(got[0]) in rows:
        return None
    sizes = " and ".join(str(tuple(each.shape)) for each in got)
    return f"the {type(part).__name__} of {sizes}"


def over_positions(values: torch.Tensor, kept: Sequence[int]) -> torch.Tensor:
    """Returns ``values`` summed over all dimensions but the first and ``kept``."""
    dims = [d for d in range(1, values.dim()) if d not in kept]
    dtype = forms.accumulation_dtype(values.dtype)
    return values.sum(dims, dtype=dtype) if dims else values.to(dtype)


def affine(
    call: Call,
    grad: torch.Tensor,
    kept: Sequence[int],
    normalize: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, forms.Contribution]:
    """Returns those of ``weight * x̂ + bias``: ``Σ x̂ ⊙ δ`` and ``Σ δ``.

    Args:
        call: Its input is normalised, in float32 or wider so that nothing is rounded.
        grad: δ, of the input's shape.
        kept: The dimensions of weight and bias.
        normalize: Maps the input of any number of samples to a new tensor x̂.
    """
    dtype = forms.accumulation_dtype(call.input.dtype, grad.dtype)
    found = {"weight": normalize(call.input.to(dtype)).mul_(grad), "bias": grad}
    return {n: forms.Dense(over_positions(x, kept)) for n, x in found.items()}


def memory(tensor: torch.Tensor) -> int | None:
    """Returns where a tensor is stored; None: that cannot be told."""
    return None if traits(tensor).is_lazy else tensor.untyped_storage().data_ptr()


class Owned:
    """The tensors of a model, and copies of its vectors, as spectral norm makes them.

    On a CPU copies are told by their values: reading those from another device would
    take a transfer. Where it cannot be told how tensors are stored, only the tensors
    themselves are the model's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = list(model.buffers())
        self._memories = {*map(memory, (*model.parameters(), *self._buffers))} - {None}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        is_one = any(tensor is each for each in self._buffers)
        if is_one or memory(tensor) in self._memories:
            return True
        if tensor.dim() != 1 or tensor.requires_grad or not traits(tensor).is_host:
            return False
        alike = [each for each in self._buffers if each.dtype == tensor.dtype]
        return any(torch.equal(each, tensor) for each in alike)


def require_batched(inputs: torch.Tensor, num_dims: int) -> None:
    """Raises `Refusal` unless the input has this number of dimensions."""
    if inputs.dim() != num_dims:
        raise Refusal(
            f"its input of shape {tuple(inputs.shape)} has {inputs.dim()} dimensions; "
            f"with a batch dimension it has {num_dims}"
        )
