"""Mean balance of projected gradients by hand, for one kind of model.

A forward pass that calls the layers of an `nn.Sequential` itself keeps their inputs,
and hooks keep the gradients of their outputs. After the backward pass come the products
of `per_sample_grad`'s own map and the balance, with the fastest of torch's operations
that are known here for these sizes. (Loops that Numba compiles are faster, and
`per_sample_grad` has them.) Nothing is checked, a use of a parameter outside of these
layers is not noticed, and kernels are 3 x 3 with a padding of one. What a library takes
longer is the price of being right about any model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

import per_sample_grad as psg

LAYERS = (nn.Conv2d, nn.GroupNorm, nn.Linear)


class ProjectedByHand:
    """Signs of mean balance in the first epoch, of gradients projected to ``size``."""

    def __init__(self, model: nn.Sequential, size: int) -> None:
        projection = psg.Projection(dict(model.named_parameters()), size)
        self._projection = projection
        like = next(model.parameters()).detach()
        self._folds = {n: projection.folds_like(n, like) for n in projection.shapes}
        self._layers = list(model.named_children())
        self._sum, self._plain = like.new_zeros(2, projection.size)
        self.signs: list[Tensor] = []

    def step(self, x: Tensor, y: Tensor) -> None:
        """Adds the gradient of the mean loss to ``.grad``, and balances the samples."""
        kept: list[tuple[str, nn.Module, Tensor, Node, list[Any]]] = []
        handles = []
        for name, layer in self._layers:
            inputs, x = x, layer(x)
            if isinstance(layer, LAYERS):
                node, gradients = x.grad_fn, []
                handles.append(node.register_prehook(gradients.append))
                kept.append((name, layer, inputs.detach(), node, gradients))
        saved = {
            name: (node._saved_result1.detach(), node._saved_result2.detach())
            for name, layer, _, node, _ in kept
            if isinstance(layer, nn.GroupNorm)
        }
        F.cross_entropy(x, y, reduction="none").mean().backward()
        for handle in handles:
            handle.remove()
        found: dict[str, Tensor] = {}
        vectors: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, layer, inputs, _, gradients in kept:
                names, delta = (f"{name}.weight", f"{name}.bias"), gradients.pop()[0]
                match layer:
                    case nn.GroupNorm():
                        of_both = _of_norm(inputs, delta, *saved[name])
                        vectors |= zip(names, of_both)
                    case nn.Linear():
                        vectors[names[1]] = delta
                        found[names[0]] = self._of_linear(names[0], inputs, delta)
                    case nn.Conv2d():
                        both = self._of_convolution(names[0], inputs, delta)
                        found[names[0]], vectors[names[1]] = both
            found |= self._projection.of_vectors(vectors)
            rows = torch.cat([found[name] for name in self._folds], 1)
            self._balance(rows.mul_(len(y)))

    def _of_linear(self, name: str, inputs: Tensor, delta: Tensor) -> Tensor:
        folds = self._folds[name]
        rows = delta if folds.rows is None else folds.rows.along(delta, 1)
        columns = inputs if folds.columns is None else folds.columns.along(inputs, 1)
        if folds.columns_come_first:
            rows, columns = columns, rows
        return (rows.unsqueeze(2) * columns.unsqueeze(1)).flatten(1)

    def _of_convolution(
        self, name: str, inputs: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor]:
        folds = self._folds[name]
        (n, p), (height, width) = delta.shape[:2], delta.shape[2:]
        one = (folds.channels.matrix @ inputs.flatten(2)).view(n, 1, height, width)
        one = F.pad(one, (1, 1, 1, 1))
        first, _, down, right = one.stride()
        seen = one.as_strided((n, 3, 3, height, width), (first, down, right, down, 1))
        patches = one.new_empty(n, 10, height * width)
        patches[:, :9].view(n, 3, 3, height, width).copy_(seen)
        patches[:, 9] = 1
        total = patches @ delta.view(n, p, -1).transpose(1, 2)
        of_weight, of_bias = total[:, :9], total[:, 9]
        if folds.rows is not None:
            of_weight = F.linear(of_weight, folds.rows.matrix)
        if not folds.columns_come_first:
            of_weight = of_weight.transpose(1, 2)
        return of_weight.flatten(1), of_bias

    def _balance(self, rows: Tensor) -> None:
        # Centred by zero, as in every first epoch.
        products, gram = (rows @ self._sum).numpy(), (rows @ rows.T).numpy()
        found: list[float] = []
        for i, of_row in enumerate(gram):
            found.append(1.0 if products[i] < 0 else -1.0)
            products += found[i] * of_row
        signs = torch.tensor(found)
        self._sum += signs @ rows
        self._plain += rows.sum(0)
        self.signs.append(signs)


def _of_norm(
    inputs: Tensor, delta: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    (n, channels), groups = delta.shape[:2], mean.numel()
    flat = [each.view(1, n * channels, -1) for each in (delta, inputs)]
    sizes = (1, n * channels, flat[0].shape[2], groups)
    mean, scale = mean.view(1, -1), scale.view(1, -1)
    _, of_weight, of_bias = torch.ops.aten.native_group_norm_backward(
        *flat, mean, scale, scale.new_ones(n * channels), *sizes, [False, True, True]
    )
    return of_weight.view(n, channels), of_bias.view(n, channels)
