"""Gradients from running modules once more, vectorised over the samples.

A parameter that no rule accounts for is used within the calls of some module. The
gradient at the module's output is there for all samples after one backward pass, and
each sample's part of it is that sample's own. So the module's vector-Jacobian product
with respect to that parameter, for one sample at a time and vectorised by `torch.vmap`,
gives every sample's gradient at the cost of one more pass through that module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import xla_replica
from per_sample_grad.engine import graph
from per_sample_grad.engine.operation_calls import Substitute
from per_sample_grad.engine.recording import (
    EnclosingCall,
    RecordedCall,
    RecordedModule,
)
from per_sample_grad.errors import Refusal
from per_sample_grad.factors import forms
from per_sample_grad.factors.forms import Contribution, Dense
from per_sample_grad.layers.registry import Call
from per_sample_grad.operations.vectorising import as_autocast_was, gradients_by_sample
from xla_replica.common.trees import map_tensors, tensors_in

Calls = dict[str, list[EnclosingCall]]  # by the module's name
# Units in the last place by which two runs of a module may differ.
_ROUNDINGS = 64


@dataclasses.dataclass(frozen=True)
class RepeatedCall(Call):
    """A call that runs once more, as a `Call`, which `by_repetition` is the rule of.

    Attributes:
        enclosing: The call.
        wanted: The parameters that it accounts for, by name.
        num_samples: B.
    """

    enclosing: EnclosingCall
    wanted: Mapping[str, nn.Parameter]
    num_samples: int


def by_repetition(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Returns the contributions of a `RepeatedCall`, by the parameter's name."""
    assert isinstance(call, RepeatedCall)
    [position] = call.enclosing.positions
    gradients = {position: grad.movedim(0, call.batch_dim)}
    try:
        found = _of_call(call.enclosing, call.wanted, gradients, call.num_samples)
    except Exception as error:  # whatever the module's own code raises
        raise Refusal(f"it cannot be vectorised, {error!r}") from error
    return {name: Dense(grad) for name, grad in found.items()}


def by_rows(call: Call, grad: torch.Tensor) -> dict[str, Contribution]:
    """Returns what `by_repetition` does, from a run of the module as it is.

    Each sample's row of a parameter is its own. What functions with a derivative in
    Python do cannot be known, and vectorising them takes many times as long as they do
    themselves, where torch can. So they are run, and what comes out is only believed
    if it shows that rows of samples do not meet.
    """
    assert isinstance(call, RepeatedCall)
    if call.module not in _MIXING:
        try:
            found = _of_rows(call, grad)
        except Exception:  # whatever the module's own code raises
            found = None
        if found is not None:
            return {name: Dense(gradients) for name, gradients in found.items()}
        _MIXING.add(call.module)
    return by_repetition(call, grad)


# Modules whose rows have met in some run.
_MIXING: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _of_rows(call: RepeatedCall, grad: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Returns the gradients ``(B, *shape)`` by name; None where rows may have met.

    With a row of the parameters for each sample the module must return what it returns
    without, and gradients times powers of two must give rows of gradients times these.
    """
    module, enclosing, count = call.module, call.enclosing, call.num_samples
    [shape], [position] = enclosing.shapes, enclosing.positions
    dim, dtype = range(len(shape))[call.batch_dim], grad.dtype
    if grad.shape[0] != count or dtype not in (torch.float32, torch.float64):
        return None
    rows: dict[str, torch.Tensor] = {}
    for name, param in call.wanted.items():
        own = [1] * (len(shape) - param.dim()) + list(param.shape)
        if len(own) > len(shape) or own[dim] != 1 or param.dtype != dtype:
            return None
        own[dim] = count
        rows[name] = param.detach().expand(own).requires_grad_()
    replaced = {id(param): rows[name] for name, param in call.wanted.items()}
    args, kwargs = call.args, call.kwargs
    before, version = enclosing.output or (None, 0)
    with torch.random.fork_rng(devices=[]), as_autocast_was(enclosing.autocast):
        if before is None or before._version != version:
            with torch.no_grad():
                before = tensors_in(module(*args, **kwargs))[position]
        with torch.enable_grad(), _replaced(module, replaced):
            output = tensors_in(module(*args, **kwargs))[position]
    if output.shape != shape or not _is_equal(output.detach(), before):
        return None

    weights = _powers_of_two(count, dtype)
    found, weighted = (
        [
            found.movedim(dim, 0) if dim else found
            for found in _gradients_of(list(rows.values()), output, _moved(each, dim))
        ]
        for each in (grad, _times(grad, weights))
    )
    if not all(torch.equal(_times(a, weights), b) for a, b in zip(found, weighted)):
        return None
    return {
        name: each.reshape(count, *param.shape)
        for each, (name, param) in zip(found, call.wanted.items())
    }


def _gradients_of(
    leaves: Sequence[torch.Tensor], output: torch.Tensor, gradient: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Returns the gradients of all leaves that an output was computed from."""
    node = output.grad_fn
    if isinstance(node, BackwardCFunction) and len(node._input_metadata) == 1:
        below = [each for each, _ in node.next_functions if each is not None]
        taken = [id(getattr(each, "variable", None)) for each in below]
        if sorted(taken) == sorted(map(id, leaves)):
            # One function has made it. A pass of the engine takes as long as that.
            with torch.no_grad():
                found = node.apply(gradient)
            found = found if isinstance(found, tuple) else (found,)
            wanted = [g for g, needs in zip(found, node.needs_input_grad) if needs]
            by_leaf = dict(zip(taken, wanted))
            own = [by_leaf.get(id(leaf)) for leaf in leaves]
            if all(
                each is not None
                and each.shape == leaf.shape
                and each.dtype == leaf.dtype
                for each, leaf in zip(own, leaves)
            ):
                return own
    return torch.autograd.grad(
        output,
        leaves,
        gradient,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )


def _times(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return rows * weights.view(-1, *[1] * (rows.dim() - 1))


@functools.lru_cache(maxsize=16)
def _powers_of_two(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.exp2(torch.arange(count, dtype=dtype) * 7 % 31 - 15)


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns whether two tensors are equal up to rounding."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if torch.equal(first, second):
        return True
    eps = torch.finfo(first.dtype).eps
    difference = (first - second).abs().max()
    return bool(difference <= _ROUNDINGS * eps * second.abs().max())


@contextlib.contextmanager
def _replaced(module: nn.Module, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Puts tensors in the places of a module's parameters, by id, inside the block."""
    places = [
        (each._parameters, name, param)
        for each in module.modules()
        for name, param in each._parameters.items()
        if id(param) in tensors
    ]
    try:
        for parameters, name, param in places:
            parameters[name] = tensors[id(param)]  # type: ignore[assignment]
        yield
    finally:
        for parameters, name, param in places:
            parameters[name] = param


def modules_again(
    losses: torch.Tensor,
    params: Mapping[str, nn.Parameter],
    calls: Sequence[EnclosingCall],
) -> list[Substitute]:
    """Returns calls that account for parameters when their modules run once more.

    They are those of the smallest module that holds a parameter, where these calls hold
    all its uses and return one tensor each.
    """
    by_module, untried = _candidates(params, calls)
    chosen: dict[str, list[str]] = defaultdict(list)
    for name, modules in untried.items():
        if modules and all(len(each.regions) == 1 for each in by_module[modules[0]]):
            chosen[modules[0]].append(name)
    outside = _used_outside(losses, params, by_module, chosen)
    found = []
    for module, names in chosen.items():
        wanted = tuple(name for name in names if name not in outside)
        for each in by_module[module] if wanted else ():
            owner = RecordedModule(
                module,
                type(each.call.module).__name__,
                by_rows if _has_python_inside(each) else by_repetition,
                {name: name for name in wanted},
                is_operation=True,
            )
            found.append(Substitute(owner, "modules", each, {0: wanted}))
    return found


def _has_python_inside(each: EnclosingCall) -> bool:
    """Returns whether a derivative is computed in Python, and on the host."""
    [region] = each.regions
    on_host = all(
        xla_replica.traits(param).is_host for param in each.call.module.parameters()
    )
    return on_host and any(
        isinstance(node, BackwardCFunction) for node in graph.inside(region)
    )


def repeated_call(
    each: Substitute,
    module: nn.Module,
    params: Mapping[str, nn.Parameter],
    batch_dim: int,
    num_samples: int,
) -> RecordedCall:
    """Returns a call that runs once more as one that has a rule."""
    enclosing: EnclosingCall = each.source
    wanted = {name: params[name] for name in each.owner.names}
    own = enclosing.call
    call = RepeatedCall(
        own.module, own.args, own.kwargs, own.batch_dim, enclosing, wanted, num_samples
    )
    [region], [shape] = enclosing.regions, enclosing.shapes
    return RecordedCall(each.owner, call, region, shape, ())


def by_running_again(
    losses: torch.Tensor,
    params: Mapping[str, nn.Parameter],
    calls: Sequence[EnclosingCall],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns gradients ``(B, *shape)`` by name, and why others could not be had.

    For each parameter the smallest module is tried first, then what encloses it.
    """
    by_module, untried = _candidates(params, calls)
    found: dict[str, torch.Tensor] = {}
    reasons: dict[str, str] = {}
    while untried := {name: modules for name, modules in untried.items() if modules}:
        chosen: dict[str, list[str]] = defaultdict(list)
        for name, modules in untried.items():
            chosen[modules.pop(0)].append(name)
        outside = _used_outside(losses, params, by_module, chosen)
        reasons |= dict.fromkeys(outside, "it is used outside of its modules' calls")
        chosen = {
            m: [n for n in names if n not in outside] for m, names in chosen.items()
        }
        gradients = _gradients(losses, [c for m in chosen for c in by_module[m]])
        for module, names in chosen.items():
            wanted = {name: params[name] for name in names}
            try:
                # At least one has gradients: the losses depend on these parameters.
                terms = [
                    _of_call(call, wanted, gradients[id(call)], len(losses))
                    for call in by_module[module]
                    if gradients[id(call)]
                ]
            except Exception as error:  # whatever the module's own code raises
                text = f"{module or 'the model'} cannot be vectorised, {error!r}"
                reasons |= dict.fromkeys(names, text)
                continue
            for name in names:
                untried[name] = []
                found[name] = forms.summed(term[name] for term in terms)
    return found, {name: why for name, why in reasons.items() if name not in found}


def _candidates(
    params: Mapping[str, nn.Parameter], calls: Sequence[EnclosingCall]
) -> tuple[Calls, dict[str, list[str]]]:
    """Returns calls by module, and each parameter's modules, the smallest first."""
    by_module: Calls = defaultdict(list)
    for call in calls:
        by_module[call.name].append(call)
    held = {
        module: {id(param) for param in of_module[0].call.module.parameters()}
        for module, of_module in by_module.items()
    }
    # Of modules with the same parameters the innermost comes first.
    ordered = sorted(held, key=lambda module: (len(held[module]), -_depth(module)))
    untried = {
        name: [module for module in ordered if id(param) in held[module]]
        for name, param in params.items()
    }
    return by_module, untried


def _depth(module: str) -> int:
    return module.count(".") + 1 if module else 0


def _used_outside(
    losses: torch.Tensor,
    params: Mapping[str, nn.Parameter],
    by_module: Calls,
    chosen: Mapping[str, Sequence[str]],
) -> set[str]:
    """Returns the parameters that the losses reach other than through chosen calls."""
    outside: set[str] = set()
    # A walk steps over calls, so those of one walk must not enclose each other.
    for depth in {_depth(module) for module in chosen}:
        level = [module for module in chosen if _depth(module) == depth]
        regions = [r for m in level for call in by_module[m] for r in call.regions]
        names = {id(params[name]): name for m in level for name in chosen[m]}
        outside |= graph.walk(losses, regions, names, {0}).outside.keys()
    return outside


def _gradients(
    losses: torch.Tensor, calls: Sequence[EnclosingCall]
) -> dict[int, dict[int, torch.Tensor]]:
    """Returns gradients of what calls returned, by the call's id and by position."""
    edges = [region.output for call in calls for region in call.regions]
    given = iter(
        xla_replica.grad(losses.sum(), edges, retain_graph=True, allow_unused=True)
    )
    found = {}
    for call in calls:
        by_position = zip(call.positions, given)
        found[id(call)] = {i: g for i, g in by_position if g is not None}
    return found


def _of_call(
    enclosing: EnclosingCall,
    wanted: Mapping[str, nn.Parameter],
    gradients: Mapping[int, torch.Tensor],
    num_samples: int,
) -> dict[str, torch.Tensor]:
    """Returns what one call adds to the gradients of parameters, ``(B, *shape)``."""
    call = enclosing.call
    module, dim = call.module, call.batch_dim
    state = {
        name: tensor.detach()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    inner = {id(param): name for name, param in module.named_parameters()}
    given = {name: state.pop(inner[id(param)]) for name, param in wanted.items()}
    counts = {call.batch_first(g).shape[0] for g in gradients.values()}
    rows = counts.pop()
    if counts or not rows or rows % num_samples:
        raise Refusal(
            f"dimension {dim} of what it returned counts {rows}, not a multiple of the "
            f"{num_samples} samples"
        )

    inputs = tensors_in((call.args, call.kwargs))
    samples, with_samples = by_sample(inputs, dim, rows, num_samples)

    names = [inner[id(param)] for param in wanted.values()]

    def run(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        replaced = iter(with_samples(tensors[len(names) :]))
        args, kwargs = map_tensors((call.args, call.kwargs), lambda _: next(replaced))
        named = dict(zip(names, tensors))
        output = tensors_in(functional_call(module, {**state, **named}, args, kwargs))
        return [output[i].movedim(dim, 0) for i in gradients]

    # The other kernels of attention are not vectorised on a CPU, but looped over.
    with sdpa_kernel(SDPBackend.MATH):
        found = gradients_by_sample(
            run,
            [given[name] for name in wanted],
            samples,
            [
                cut_at_samples(call.batch_first(gradient), num_samples)
                for gradient in gradients.values()
            ],
            enclosing.autocast,
        )
    return dict(zip(wanted, found))


def cut_at_samples(tensor: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Returns ``(k B, *)`` as ``(B, k, *)``."""
    if tensor.shape[0] == num_samples:
        return tensor.unsqueeze(1)
    return tensor.unflatten(0, (num_samples, -1))


def _moved(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.movedim(0, dim) if dim else tensor


def by_sample(
    tensors: Sequence[torch.Tensor], dim: int, rows: int, num_samples: int
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]]:
    """Returns those tensors of a call that count samples, cut at the samples.

    Args:
        tensors: What the call took.
        dim: The dimension that counts samples.
        rows: The number that it counts, a multiple of B.
        num_samples: B.

    Returns:
        These tensors, ``(B, rows / B, *)``; and a function that takes one sample's of
        them and returns all tensors of the call, for that sample.
    """
    batched = [
        -each.dim() <= dim < each.dim() and each.shape[dim] == rows for each in tensors
    ]

    def with_samples(samples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        own = iter(samples)
        return [
            _moved(next(own), dim) if is_batched else tensor
            for is_batched, tensor in zip(batched, tensors)
        ]

    cut = [
        cut_at_samples(each.movedim(dim, 0) if dim else each, num_samples)
        for each, is_batched in zip(tensors, batched)
        if is_batched
    ]
    return cut, with_samples
