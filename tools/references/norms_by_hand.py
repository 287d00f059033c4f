"""Norms of each sample's gradient by hand, for one kind of model, out of torch's parts.

Ordinary hooks keep the inputs of layers, and hooks of their outputs compute norms with
torch's fastest operation that is known here for these sizes. Nothing is checked, a use
of a parameter outside of these layers is not noticed, and every layer must be called
once. What a library takes longer is the price of being right about any model; loops
that are compiled for a layer can be faster than the operations here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Samples at a time whose normalised inputs stay in a cache.
_CACHED = 2**16


class UnknownParametersError(ValueError):
    """A model has parameters that nothing here is written for."""


def norms_by_hand(
    model: nn.Module, losses_of: Callable[..., torch.Tensor], *batch: torch.Tensor
) -> torch.Tensor:
    """Returns the norms ``(B,)``; ``losses_of(model, *batch)`` returns the losses.

    Raises:
        UnknownParametersError: Some do not belong to one of the `LAYERS`.
    """
    layers = [each for each in model.modules() if isinstance(each, LAYERS)]
    known = {id(p) for each in layers for p in each.parameters(recurse=False)}
    if free := [name for name, p in model.named_parameters() if id(p) not in known]:
        raise UnknownParametersError(f"no layer written by hand has {', '.join(free)}")
    squares: list[torch.Tensor] = []
    small: list[torch.Tensor] = []  # the gradients of norms and biases
    lowest: list[Any] = []

    def kept(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        inputs = args[0].detach()

        def look(grad: torch.Tensor) -> None:
            with torch.no_grad():
                _take(module, inputs, grad, squares, small)

        output.register_hook(look)
        if not lowest:
            lowest.append(torch.autograd.graph.get_gradient_edge(output))

    handles = [each.register_forward_hook(kept) for each in layers]
    losses = losses_of(model, *batch)
    for handle in handles:
        handle.remove()
    torch.autograd.grad(losses.sum(), lowest)
    if small:
        squares.append(_squares(torch.cat(small, 1)))
    return torch.stack(squares).sum(0).sqrt()


LAYERS = (
    nn.Linear, nn.Conv2d, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d, nn.Embedding,
)  # fmt: skip


def _take(
    module: nn.Module,
    inputs: torch.Tensor,
    grad: torch.Tensor,
    squares: list[torch.Tensor],
    small: list[torch.Tensor],
) -> None:
    match module:
        case nn.Linear() if grad.dim() == 2:
            squares.append(_squares(grad) * (_squares(inputs) + 1))
        case nn.Linear():
            squares.append(_by_products(grad, inputs))
            small.append(grad.sum(1))
        case nn.Conv2d():
            squares.append(_of_convolution(module, inputs, grad))
            if module.bias is not None:
                small.append(grad.sum((2, 3)))
        case nn.Embedding():
            squares.append(_of_table(inputs, grad, module.num_embeddings))
        case _:
            dims = [1] if isinstance(module, nn.LayerNorm) else [2, 3]
            rows = max(1, _CACHED // grad[0].numel())
            parts = zip(inputs.split(rows), grad.split(rows))
            sums = [
                (_normalised(module, some).mul_(deltas).sum(dims), deltas.sum(dims))
                for some, deltas in parts
            ]
            small.extend(torch.cat(column) for column in zip(*sums))


def _squares(rows: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(rows.flatten(1), dim=1).square()


def _by_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns the norms of ``Σ_t left_t right_tᵀ`` from products of positions."""
    of_left = torch.bmm(left, left.transpose(1, 2)).flatten(1)
    of_right = torch.bmm(right, right.transpose(1, 2)).flatten(1)
    return torch.linalg.vecdot(of_left, of_right)


def _of_convolution(
    module: nn.Conv2d, inputs: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    n, channels, groups = len(inputs), inputs.shape[1], module.groups
    kernel, stride, padding = module.kernel_size, module.stride, module.padding
    if kernel == stride == (1, 1):
        left, right = grad.flatten(2), inputs.flatten(2)
        p, t, q = left.shape[1], left.shape[2], right.shape[1]
        if t == 1:
            return _squares(left) * _squares(right)
        if t * (p + q) < p * q:
            return _by_products(left.transpose(1, 2), right.transpose(1, 2))
        return _squares(torch.bmm(left, right.transpose(1, 2)))
    if groups == channels == grad.shape[1]:
        if any(width >= size for width, size in zip(padding, grad.shape[2:])):
            inputs = F.pad(inputs, (padding[1], padding[1], padding[0], padding[0]))
            padding = (0, 0)
        found = torch.convolution(
            inputs.flatten(0, 1).unsqueeze(0), grad.flatten(0, 1).unsqueeze(1), None,
            module.dilation, padding, stride, False, [0, 0], n * channels,
        )  # fmt: skip
        return _squares(found[0, :, : kernel[0], : kernel[1]].unflatten(0, (n, -1)))
    if channels < 8:
        seen = F.pad(inputs, (padding[1], padding[1], padding[0], padding[0]))
        seen = seen.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
        seen = seen.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)
        return _squares(torch.bmm(grad.flatten(2), seen.transpose(1, 2)))
    sizes = (n * grad.shape[1], channels // groups, *kernel)
    weight = module.weight.new_empty(()).expand(sizes)
    _, found, _ = torch.ops.aten.convolution_backward(
        grad.flatten(0, 1).unsqueeze(0), inputs.flatten(0, 1).unsqueeze(0), weight,
        None, stride, padding, module.dilation, False, [0, 0], n * groups,
        [False, True, False],
    )  # fmt: skip
    return _squares(found.unflatten(0, (n, -1)))


def _of_table(index: torch.Tensor, grad: torch.Tensor, entries: int) -> torch.Tensor:
    """Returns the norms of tables, from a row for each of a sample's tokens."""
    n, t = index.shape
    tokens = torch.arange(t).expand(n, t)
    row = index.new_empty(n, entries).scatter_(1, index, tokens).gather(1, index)
    row = row + torch.arange(n).unsqueeze(1) * t
    table = grad.new_zeros(n * t, grad.shape[2])
    table.index_add_(0, row.flatten(), grad.flatten(0, 1))
    return _squares(table.unflatten(0, (n, t)))


def _normalised(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    match module:
        case nn.LayerNorm():
            return F.layer_norm(inputs, module.normalized_shape, eps=module.eps)
        case nn.GroupNorm():
            return F.group_norm(inputs, module.num_groups, eps=module.eps)
        case nn.BatchNorm2d(running_mean=mean, running_var=var):
            scale = torch.rsqrt(var + module.eps)
            return (inputs - mean[:, None, None]).mul_(scale[:, None, None])
    raise TypeError(f"{type(module).__name__} is not a normalisation known here")
