"""Exact, expensive gradients of parameters that no rule accounts for.

`loop` is exact for whatever autograd can do. `vectorised` runs modules once more. A
parameter that no rule accounts for is used within the calls of some module, and the
gradient at the module's output is there for all samples after one backward pass: each
sample's part of it is that sample's own. So the module runs once more, vectorised over
the samples by `torch.func`, with a copy of the parameter for each, and autograd gives
every sample's gradient at the cost of one more pass through that module. It runs with
the attributes that it has then, so that the result has to be compared.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import xla_replica
from per_sample_grad.engine import graph
from per_sample_grad.engine.recording import RecordedCall
from per_sample_grad.errors import CoverageError
from per_sample_grad.factors import forms
from xla_replica.common.trees import map_tensors, tensors_in

Params = Mapping[str, nn.Parameter]
Outputs = dict[str, dict[int, list[tuple[RecordedCall, torch.Tensor]]]]


def loop(losses: torch.Tensor, params: Params) -> dict[str, torch.Tensor]:
    """Returns ``(B, *shape)`` by name, from B backward passes; keeps the graph."""
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    inputs = list(params.values())
    rows = [xla_replica.grad(loss, inputs, **options) for loss in losses.unbind()]
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows))}


def vectorised(
    losses: torch.Tensor, params: Params, calls: Sequence[RecordedCall]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns gradients ``(B, *shape)`` by name, and why others could not be had.

    For each parameter the smallest module is tried first, then what encloses it.
    """
    by_module: dict[str, list[RecordedCall]] = defaultdict(list)
    for call in calls:
        by_module[call.owner.name].append(call)
    untried = _enclosing_modules(params, by_module)
    tried = set().union(*untried.values())
    outputs = _outputs(losses, [call for call in calls if call.owner.name in tried])
    found: dict[str, torch.Tensor] = {}
    reasons: dict[str, str] = {}
    while any(untried.values()):
        chosen: dict[str, list[str]] = defaultdict(list)
        for name, modules in untried.items():
            if modules:
                chosen[modules.pop(0)].append(name)
        outside = _used_outside(losses, params, by_module, chosen)
        reasons |= dict.fromkeys(outside, "it is used outside of its modules' calls")
        for module, names in chosen.items():
            wanted = {name: params[name] for name in names if name not in outside}
            try:
                made = outputs[module].values()
                terms = [_of_call(each, wanted, len(losses)) for each in made]
            except Exception as error:  # whatever the module's own code raises
                text = f"{module or 'the model'} cannot be vectorised, {error!r}"
                reasons |= dict.fromkeys(wanted, text)
                continue
            # There is a term for each: the losses depend on these parameters.
            found |= {n: forms.summed([term[n] for term in terms]) for n in wanted}
        untried = {n: modules for n, modules in untried.items() if n not in found}
    return found, {name: why for name, why in reasons.items() if name not in found}


def _outputs(losses: torch.Tensor, calls: Sequence[RecordedCall]) -> Outputs:
    """Returns each call's outputs with their gradients, by module and by call."""
    edges = [call.region.output for call in calls]
    found = xla_replica.grad(losses.sum(), edges, retain_graph=True, allow_unused=True)
    outputs: Outputs = defaultdict(lambda: defaultdict(list))
    for call, gradient in zip(calls, found):
        if gradient is not None:
            outputs[call.owner.name][id(call.call)].append((call, gradient))
    return outputs


def _enclosing_modules(
    params: Params, by_module: Mapping[str, Sequence[RecordedCall]]
) -> dict[str, list[str]]:
    """Returns the called modules that hold each parameter, the smallest first."""
    held = {
        module: {id(param) for param in calls[0].call.module.parameters()}
        for module, calls in by_module.items()
    }
    # Of modules with the same parameters the innermost comes first.
    ordered = sorted(held, key=lambda module: (len(held[module]), -_depth(module)))
    return {
        name: [module for module in ordered if id(param) in held[module]]
        for name, param in params.items()
    }


def _depth(module: str) -> int:
    """Returns how many modules a module is within; the model itself is within none."""
    return module.count(".") + 1 if module else 0


def _used_outside(
    losses: torch.Tensor,
    params: Params,
    by_module: Mapping[str, Sequence[RecordedCall]],
    chosen: Mapping[str, Sequence[str]],
) -> set[str]:
    """Returns the parameters that the losses reach other than through chosen calls."""
    outside: set[str] = set()
    # A walk steps over calls, so those of one walk must not enclose each other.
    for depth in {_depth(module) for module in chosen}:
        level = [module for module in chosen if _depth(module) == depth]
        regions = [call.region for module in level for call in by_module[module]]
        names = {id(params[name]): name for m in level for name in chosen[m]}
        outside |= graph.walk(losses, regions, names).outside.keys()
    return outside


def _of_call(
    outputs: Sequence[tuple[RecordedCall, torch.Tensor]],
    wanted: Params,
    num_samples: int,
) -> dict[str, torch.Tensor]:
    """Returns what one call adds to the gradients of parameters, ``(B, *shape)``.

    Args:
        outputs: What it returned, each with its gradient.
        wanted: The parameters, by name in the model.
        num_samples: B.
    """
    call, autocast = outputs[0][0].call, outputs[0][0].autocast
    assert autocast is not None
    module, dim = call.module, call.batch_dim
    inner = {id(param): name for name, param in module.named_parameters()}
    # The gradient is that of the output before a last view.
    gradients = [call.batch_first(g.reshape(each.shape)) for each, g in outputs]
    rows = len(gradients[0])
    if not rows or rows % num_samples or any(len(each) != rows for each in gradients):
        raise ValueError(
            f"dimension {dim} of what it returned counts {rows}, not a multiple of the "
            f"{num_samples} samples"
        )
    # Tensors that count samples are cut at them, and vectorised over the first part.
    tensors: list[torch.Tensor] = []
    places: list[int | None] = []
    for each in tensors_in((call.args, call.kwargs)):
        counts = -each.dim() <= dim < each.dim() and each.shape[dim] == rows
        place = dim % each.dim() if counts else None
        tensors.append(each.unflatten(place, (num_samples, -1)) if counts else each)
        places.append(place)

    # Each sample has a copy of its own, which takes no memory.
    copies = {
        inner[id(p)]: p.detach().expand(num_samples, *p.shape).requires_grad_()
        for p in wanted.values()
    }

    # What the module changes in place are copies.
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def run(own: Params, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        replaced = iter(tensors)
        args, kwargs = map_tensors((call.args, call.kwargs), lambda _: next(replaced))
        with autocast:
            found = torch.func.functional_call(module, {**buffers, **own}, args, kwargs)
        returned = tensors_in(found)
        return [returned[each.position].movedim(dim, 0) for each, _ in outputs]

    # The other kernels of attention are not vectorised on a CPU, but looped over.
    with _attributes_kept(module), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        returned = torch.func.vmap(run, in_dims=(0, places))(copies, tensors)
    pairs = [
        (output, gradient.reshape(output.shape))
        for output, gradient in zip(returned, gradients)
        if output.requires_grad
    ]
    # Nothing is lazy here, and no hook is on what was just made.
    found = torch.autograd.grad(
        [output for output, _ in pairs],
        list(copies.values()),
        [gradient for _, gradient in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(wanted, found))


@contextlib.contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Gives a module and those in it back the attributes and buffers they have now."""
    held = [own for each in module.modules() for own in (vars(each), each._buffers)]
    kept = [(own, dict(own)) for own in held]
    try:
        yield
    finally:
        for now, before in kept:
            now.clear()
            now.update(before)


def warn_of_loop(num_samples: int, reasons: Mapping[str, str]) -> None:
    """Warns that parameters, by name, could not be vectorised, and why."""
    lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
    warnings.warn(
        f'fallback="batched" runs {num_samples} backward passes of the batch, so '
        "that its cost grows with the square of the batch size, because no module "
        f"could be run once more for these parameters:{lines}\nRegister a rule "
        "(register_rule), or take smaller batches",
        stacklevel=2,
    )


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
    fallback = 'fallback="loop" (B backward passes of the batch)'
    if not xla_replica.traits(losses).is_lazy:
        fallback = (
            'fallback="batched" (what uses them runs once more, vectorised) or, where '
            f"that fails, {fallback}"
        )
    raise CoverageError(
        "these parameters have uses that no layer rule accounts for:"
        f"{lines}\n{remark}Register a rule for the module "
        "(register_rule, the cheapest), leave the parameters out (params=), or "
        f"pass {fallback}"
    )


def _why_uncalled(losses: torch.Tensor) -> str:
    """Returns the likely cause where no module's hook has run."""
    names = {node.name() for node in graph.backward_nodes(losses.grad_fn)}
    if "CompiledFunctionBackward" in names:
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
