"""Gradients of every sample from one vectorised run of whatever can run once more."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import _functorch
from torch._functorch.vmap import lazy_load_decompositions

# From one sample's tensors, first those that gradients are wanted of, to what a run
# returns of them.
Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def gradients_by_sample(
    run: Run,
    own: Sequence[torch.Tensor],
    samples: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    autocast: Mapping[str, Any],
) -> list[torch.Tensor]:
    """Returns the gradients ``(B, *shape)`` of tensors that do not depend on samples.

    Args:
        run: It runs once, for all samples, with a row of everything that it takes.
        own: The tensors.
        samples: What else it takes, ``(B, *)`` each.
        gradients: Those of what it returns, ``(B, *)`` each, in any shape.
        autocast: The state of autocast, arguments of it.

    Raises:
        RuntimeError: torch cannot vectorise the run.
    """
    count = gradients[0].shape[0]
    # Each sample has a copy of its own, which takes no memory.
    rows = [t.detach().expand(count, *t.shape).requires_grad_() for t in own]
    # Plain autograd through one vectorised run: functional transforms take longer.
    with torch.enable_grad(), as_autocast_was(autocast):
        outputs = vectorised(run, [*rows, *samples], count)
    pairs = [
        (output, grad.reshape(output.shape))
        for output, grad in zip(outputs, gradients, strict=True)
        if output.requires_grad
    ]
    if not pairs:
        return [torch.zeros_like(each) for each in rows]
    # Nothing is lazy here, and no hook is on what was just made.
    return list(
        torch.autograd.grad(
            [output for output, _ in pairs],
            rows,
            [grad for _, grad in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
    )


def vectorised(
    run: Run, tensors: Sequence[torch.Tensor], count: int
) -> list[torch.Tensor]:
    """Returns what `torch.vmap` of a run returns, in less time.

    What `torch.vmap` does about nested containers takes longer than a small run.
    """
    _load_decompositions()
    with torch.autograd.graph.disable_saved_tensors_hooks(_NO_HOOKS):
        return _vectorised(run, tensors, count)


_load_decompositions = functools.cache(lazy_load_decompositions)
_NO_HOOKS = "what is vectorised cannot be given to hooks of saved tensors"


def _vectorised(
    run: Run, tensors: Sequence[torch.Tensor], count: int
) -> list[torch.Tensor]:
    level = _functorch._vmap_increment_nesting(count, "error")
    try:
        given = [_functorch._add_batch_dim(each, 0, level) for each in tensors]
        found = run(given)
        return [_functorch._remove_batch_dim(each, level, count, 0) for each in found]
    finally:
        _functorch._vmap_decrement_nesting()


def as_autocast_was(
    state: Mapping[str, Any],
) -> contextlib.AbstractContextManager[Any]:
    """Returns a context with autocast in this state; it takes time to enter one."""
    is_off = not state["enabled"]
    if is_off and not torch.is_autocast_enabled(state["device_type"]):
        return contextlib.nullcontext()
    return torch.autocast(**state)
