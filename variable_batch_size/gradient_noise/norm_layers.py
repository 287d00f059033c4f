"""Squared gradients of every sample, for the weights of normalisation layers alone.

The gradient of such a weight is a sum over positions of the output's gradient times the
normalised input, which the backward pass of one ordinary training step has at hand. So
the noise of these few weights is known sample by sample, also where a step is a single
minibatch; and it follows that of the whole model, up to a factor (Gray et al. 2024,
arXiv:2411.00999).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from xla_replica import Replica
from xla_replica.common.arguments import check_type
from xla_replica.device.gradients import weak_hook

Tensor = torch.Tensor
# A layer's mean and the inverse of its deviation, as the forward pass has saved them.
Saved = tuple[Tensor, Tensor] | None
_HALF = (torch.bfloat16, torch.float16)
# From a layer, its input and what is saved, to a new tensor: what the weight is for.
Normalise = Callable[[Any, Tensor, Saved], Tensor]


def _layer_norm(layer: Any, x: Tensor, saved: Saved) -> Tensor:
    if saved is not None:
        return (x - saved[0]).mul_(saved[1])
    # On a CPU faster than torch's.
    dims = tuple(range(-layer.weight.dim(), 0))
    return _rms_norm(layer, x - x.mean(dims, keepdim=True), None)


def _rms_norm(layer: Any, x: Tensor, saved: Saved) -> Tensor:
    dims = tuple(range(-layer.weight.dim(), 0))
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True)
    epsilon = _epsilon(layer, x.dtype)
    return x * torch.rsqrt(norm * norm / layer.weight.numel() + epsilon)


def _group_norm(layer: nn.GroupNorm, x: Tensor, saved: Saved) -> Tensor:
    if saved is None:
        return F.group_norm(x, layer.num_groups, eps=layer.eps)
    mean, inverse = (each.unsqueeze(2) for each in saved)
    groups = x.reshape(len(x), layer.num_groups, -1)
    return (groups - mean).mul_(inverse).reshape(x.shape)


def _epsilon(layer: Any, dtype: torch.dtype) -> float:
    """Returns epsilon, by the names that layers give it."""
    names = ("eps", "variance_epsilon", "epsilon")
    found = [getattr(layer, name) for name in names if hasattr(layer, name)]
    # None is torch's RMSNorm's way to say this.
    return torch.finfo(dtype).eps if not found or found[0] is None else found[0]


KINDS: dict[type[nn.Module], Normalise] = {
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.GroupNorm: _group_norm,
}


# Nodes that have saved the input, its mean and the inverse of its deviation.
_NODES = ("NativeLayerNormBackward0", "NativeGroupNormBackward0")


def _saves(output: Tensor) -> bool:
    """Returns whether the node of a layer's output can be asked for what it has saved.

    Hooks that keep saved tensors elsewhere, as a checkpoint's, allow one look at each.
    """
    node = output.grad_fn
    return (
        node is not None
        and node.name() in _NODES
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    )


class NormLayer:
    """One normalisation layer, and its weight's gradients of every sample.

    They are summed over positions, over the layer's calls, and over the backward passes
    whose sum ``.grad`` holds. A pass counts when it adds to ``.grad``: neither
    `torch.autograd.grad` does so, nor a pass whose gradient has been thrown away.

    Attributes:
        weight: The layer's.
        samples: ``(B, n)`` for a weight of n numbers; None as long as there are none.
    """

    def __init__(
        self, layer: Any, normalise: Normalise, minibatch_size: int, replica: Replica
    ) -> None:
        self.weight: nn.Parameter = layer.weight
        self.samples: Tensor | None = None
        self._layer = layer
        self._normalise, self._minibatch_size = normalise, minibatch_size
        self._is_lazy = replica.is_lazy
        # Of the backward pass under way, and its number.
        self._of_pass: Tensor | None = None
        self._pass = -1
        self._was_called = False
        # How often the kept gradient has been written to, with the last pass.
        self._version: int | None = None
        self._handles = [
            layer.register_forward_hook(weak_hook(self.see), with_kwargs=True),
            replica.on_gradient(self.weight, weak_hook(self.arrive)),
        ]

    def see(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Runs after every forward pass of the layer."""
        if not (isinstance(output, Tensor) and output.requires_grad):
            return
        if not self.weight.requires_grad:
            return
        self._was_called = True
        x = args[0] if args else next(iter(kwargs.values()))
        if x.shape[0] != self._minibatch_size:
            raise ValueError(
                f"a {type(layer).__name__} was given an input of shape "
                f"{tuple(x.shape)}, and the minibatch has {self._minibatch_size} "
                "samples: the first dimension must be that of the samples, for "
                "noise.use_norm_layers to tell them apart"
            )
        if not self._is_lazy and _saves(output):
            # It keeps nothing alive that the pass would free.
            output.register_hook(self._add_saved)
        else:
            x = x.detach()
            output.register_hook(lambda gradient: self._add(x, None, gradient))

    def _add_saved(self, gradient: Tensor) -> None:
        """Adds the call whose node the backward pass is about to run."""
        node: Any = torch._C._current_autograd_node()
        saved = node._saved_result1, node._saved_result2
        self._add(node._saved_input, saved, gradient)

    def _add(self, x: Tensor, saved: Saved, gradient: Tensor) -> None:
        """Adds one call's gradients to those of the backward pass under way."""
        if torch.is_grad_enabled():  # in backward(create_graph=True)
            x, gradient = x.detach(), gradient.detach()
        if x.dtype in _HALF:
            x = x.float()
            saved = None if saved is None or saved[1].dtype in _HALF else saved
        products = self._normalise(self._layer, x, saved).mul_(gradient)
        if self._normalise is _group_norm:
            own = products.reshape(*products.shape[:2], -1).sum(2)
        else:
            own = products.reshape(len(x), -1, self.weight.numel()).sum(1)
        number = torch._C._current_graph_task_id()
        if self._of_pass is not None and self._pass == number:
            own = self._of_pass + own
        self._of_pass, self._pass = own, number

    def arrive(self, gradient: Tensor) -> None:
        """Runs before a backward pass adds the weight's gradient to ``.grad``."""
        own, self._of_pass = self._of_pass, None
        is_other = self._pass != torch._C._current_graph_task_id()
        if own is None and self._was_called:
            return  # as of a minibatch of zeros, which no sample is part of
        if own is None or is_other:
            raise ValueError(
                f"the weight of a {type(self._layer).__name__} was given a gradient by "
                "a backward pass that did not come through the layer's output, so that "
                "noise.use_norm_layers cannot tell its samples apart: call the layer "
                "itself where its weight is used, and leave from_samples=True out of "
                "GraB's backward()"
            )
        kept, before = self.weight.grad, self._version
        # Zeroed in place it has been written to once more.
        is_kept = kept is not None and before in (None, kept._version)
        if self.samples is not None and is_kept:
            own = self.samples + own
        self.samples = own
        self._version = None if kept is None else kept._version + 1

    def discard(self) -> None:
        """Forgets the minibatch, with passes that added nothing to ``.grad``."""
        self.samples = self._of_pass = None

    def drop_discarded(self) -> None:
        """Drops the samples' gradients once ``.grad`` does not hold their sum."""
        if self.weight.grad is None:
            self.samples = None


def norm_layers_of(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    minibatch_size: int,
    replica: Replica,
) -> list[NormLayer]:
    """Returns the normalisation layers of a model, each with hooks that see it.

    Layers are those of torch, and any other that has a vector ``weight``, perhaps a
    ``bias``, and no other parameter, and whose first output is that of a LayerNorm or
    an RMSNorm. The first dimension of their inputs must be that of the samples.

    Args:
        model: Only layers whose weight is among `parameters` count.
        parameters: What the optimizer trains.
        minibatch_size: Samples in a minibatch, over which the loss is a mean.
        replica: The replica whose gradients these are.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: It has no layer that could count.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    trained, layers = set(parameters), []
    for module in model.modules():
        if getattr(module, "weight", None) in trained:
            kind = _kind_of(module)
            if kind is not None:
                layers.append(NormLayer(module, kind, minibatch_size, replica))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no LayerNorm, RMSNorm or GroupNorm whose "
            "weight the optimizer trains, so normalisation layers tell nothing of "
            "its noise: leave use_norm_layers out"
        )
    return layers


def _kind_of(layer: Any) -> Normalise | None:
    """Returns how a layer normalises, by its class or by trial; None if it does not.

    The trial is a forward pass of two samples of three positions.
    """
    if type(layer) in KINDS:
        return KINDS[type(layer)]
    own = dict(layer.named_parameters())
    if set(own) - {"bias", "weight"} or layer.weight.dim() != 1:
        return None
    weight = layer.weight.detach()
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, len(weight), generator=draws) + 0.5
    x = x.to(weight.device, weight.dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    tolerance = 1e-4 if x.dtype == wide else 3e-2
    with torch.no_grad():
        try:
            output = layer.forward(x)  # without anybody's hooks
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None  # its inputs are others
        if not isinstance(output, Tensor) or output.shape != x.shape:
            return None
        bias = own.get("bias", torch.zeros_like(weight)).to(wide)
        for normalise in (_rms_norm, _layer_norm):
            found = normalise(layer, x.to(wide), None)
            # Gemma's weights are differences from one.
            for factor in (weight.to(wide), 1 + weight.to(wide)):
                error = found * factor + bias - output.to(wide)
                if error.abs().max() <= tolerance:
                    return normalise
    return None
