"""Exact, expensive gradients of parameters that no rule accounts for.

`loop` is exact for whatever autograd can do. `batched` runs modules once more. A
parameter that no rule accounts for is used within the calls of some module, and the
gradient at the module's output is there for all samples after one backward pass: each
sample's part of it is that sample's own. So the module's vector-Jacobian product with
respect to that parameter, for one sample at a time and vectorised by `torch.vmap`,
gives every sample's gradient at the cost of one more pass through that module.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, NoReturn

import torch
from torch import nn
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
from per_sample_grad.errors import CoverageError, Refusal
from per_sample_grad.factors import forms
from per_sample_grad.factors.forms import Contribution, Dense
from per_sample_grad.layers.registry import Call
from per_sample_grad.operations.vectorising import gradients_by_sample
from xla_replica.common.trees import map_tensors, tensors_in

Fallback = Literal["error", "loop", "batched"]
Params = Mapping[str, nn.Parameter]
Calls = dict[str, list[EnclosingCall]]  # by the module's name


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
                by_repetition,
                {name: name for name in wanted},
                is_operation=True,
            )
            found.append(Substitute(owner, "modules", each, {0: wanted}))
    return found


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
        outside |= graph.walk(losses, regions, names).outside.keys()
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


def loop(
    losses: torch.Tensor, params: Params, calls: Sequence[EnclosingCall]
) -> dict[str, torch.Tensor]:
    """Runs B backward passes of the batch: exact for whatever autograd can do."""
    rows = [
        xla_replica.grad(
            loss,
            list(params.values()),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        for loss in losses.unbind()
    ]
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows))}


def batched(
    losses: torch.Tensor, params: Params, calls: Sequence[EnclosingCall]
) -> dict[str, torch.Tensor]:
    """Runs modules once more, vectorised by torch, at a cost in proportion to B.

    The modules are the smallest ones whose calls hold all uses of a parameter.
    Gradients that cannot be computed in this way, and all where no calls are given,
    take B backward passes of the batch, which torch vectorises.
    """
    found, reasons = by_running_again(losses, params, calls)
    rest = {name: param for name, param in params.items() if name not in found}
    if not rest:
        return found
    if reasons:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
        warnings.warn(
            f'fallback="batched" runs {len(losses)} backward passes of the batch, so '
            "that its cost grows with the square of the batch size, because no module "
            f"could be run once more for these parameters:{lines}\nRegister a rule "
            "(register_rule), or take smaller batches",
            stacklevel=2,
        )
    gradients = xla_replica.grad(
        losses,
        list(rest.values()),
        torch.eye(len(losses), dtype=losses.dtype, device=losses.device),
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=True,
    )
    for (name, param), grad in zip(rest.items(), gradients):
        zeros = param.new_zeros(len(losses), *param.shape)
        found[name] = zeros if grad is None else grad
    return found


class FallbackWay(NamedTuple):
    """A row of `FALLBACKS`.

    Attributes:
        gradients: From losses, parameters and calls that may be run again to the
            gradients ``(B, *shape)`` by name.
        takes_calls: Whether the calls are of use to it.
    """

    gradients: Callable[
        [torch.Tensor, Params, Sequence[EnclosingCall]], dict[str, torch.Tensor]
    ]
    takes_calls: bool


FALLBACKS: dict[str, FallbackWay | None] = {
    "error": None,
    "loop": FallbackWay(loop, takes_calls=False),
    "batched": FallbackWay(batched, takes_calls=True),
}


def raise_uncovered(
    problems: Mapping[str, Collection[str]], losses: torch.Tensor, called: bool
) -> NoReturn:
    """Raises CoverageError that says what problems parameters have, and what to do.

    ``called`` is whether any module with a selected parameter was called.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reasons in problems.items():
        by_reason.setdefault("; ".join(reasons), []).append(name)
    lines = "".join(
        f"\n  {', '.join(names)}: {reason}" for reason, names in by_reason.items()
    )
    remark = "" if called else _why_uncalled(losses)
    fallback = (
        'fallback="batched" (what uses them runs once more, vectorised) '
        'or, where that fails, fallback="loop" (B backward passes of the batch)'
    )
    if xla_replica.traits(losses).is_lazy:
        fallback = 'fallback="batched" (B backward passes of the batch at once)'
    raise CoverageError(
        "these parameters have uses that no layer rule accounts for:"
        f"{lines}\n{remark}Register a rule for the module "
        "(register_rule, the cheapest), leave the parameters out (params=), or "
        f"pass {fallback}"
    )


def _why_uncalled(losses: torch.Tensor) -> str:
    """Returns the likely cause where no module's hook has run."""
    if "CompiledFunctionBackward" in graph.inventory(losses).names:
        return (
            "They are used by what torch.compile has compiled, which calls no hooks: "
            "call the model in the capture, not a compiled function. (A compiled "
            "module runs as it was written if it is the one that is captured: "
            "capture(compiled).) "
        )
    return (
        "No module with any of them was called inside the capture: was the forward "
        "pass run before it? "
    )
