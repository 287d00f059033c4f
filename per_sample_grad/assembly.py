"""From recorded calls and gradients of activations to contributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from per_sample_grad.contributions import Contribution, regroup, widened
from per_sample_grad.errors import Refusal
from per_sample_grad.recording import Use

# Contributions of all uses, and why some have none, both by parameter.
Parts = dict[str, list[Contribution]]
Problems = dict[str, list[str]]


def gradients(
    losses: torch.Tensor, uses: Sequence[Use], retain_graph: bool
) -> list[torch.Tensor | None]:
    """The gradient of the summed losses at every use's output, of its shape.

    One backward pass that forms no gradient of a parameter.
    """
    if not uses:
        return []
    grads = torch.autograd.grad(
        losses.sum(),
        [use.region.output for use in uses],
        retain_graph=retain_graph,
        allow_unused=True,
    )
    return [
        None if grad is None else grad.detach().reshape(use.shape)
        for use, grad in zip(uses, grads)
    ]


def assemble(
    uses: Sequence[Use],
    grads: Sequence[torch.Tensor | None],
    names: Mapping[int, str],
    num_samples: int,
    may_fold: bool,
) -> tuple[Parts, Problems]:
    """What every rule says of its parameters, and why some say nothing.

    Args:
        uses: Recorded calls.
        grads: Of the outputs, as `gradients` gives them.
        names: The parameter's name for ``id(parameter)``, of selected ones.
        num_samples: B.
        may_fold: Whether k B rows count as k rows of each sample.
    """
    parts: Parts = {}
    problems: Problems = {}
    for use, grad in zip(uses, grads):
        if grad is None:
            continue
        owned = use.call.module.named_parameters(remove_duplicate=False)
        of_inner = {n: names[id(param)] for n, param in owned if id(param) in names}
        try:
            found = _apply(use, grad, num_samples, may_fold)
            missing = sorted(set(of_inner) - set(found))
            if missing:
                raise Refusal(f"its rule says nothing of {', '.join(missing)}")
        except Refusal as refusal:
            for name in of_inner.values():
                problems.setdefault(name, []).append(f"{use}: {refusal}")
            continue
        for inner, name in of_inner.items():
            parts.setdefault(name, []).append(found[inner])
    return parts, problems


def _apply(
    use: Use, grad: torch.Tensor, num_samples: int, may_fold: bool
) -> dict[str, Contribution]:
    """The rule's contributions, with B rows each, in float32 or wider."""
    grad = use.call.batch_first(grad)
    if len(grad) == 0 or len(grad) % num_samples:
        raise Refusal(
            f"dimension {use.call.batch_dim} of its output {tuple(use.shape)} counts "
            f"{len(grad)}, no multiple of the {num_samples} samples; set batch_dim, or "
            "give the module a batch dimension (position ids: expand them to one row "
            "per sample)"
        )
    if len(grad) != num_samples and not may_fold:
        raise Refusal(
            f"it was called with {len(grad)} rows for {num_samples} samples; that each "
            "owns consecutive ones is only believed when checked: do not pass "
            'check="never"'
        )
    with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
        found = use.rule.contributions(use.call, grad)
        return {
            name: regroup(widened(part), num_samples) for name, part in found.items()
        }
