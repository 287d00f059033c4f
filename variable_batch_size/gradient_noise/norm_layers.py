"""Squared gradients of every sample, for the weights of normalisation layers alone.

The gradient of such a weight is a sum over positions of the output's gradient times the
normalised input, which the backward pass of one ordinary training step has at hand. So
the noise of these few weights is known sample by sample, also where a step is a single
minibatch; and it follows that of the whole model, up to a factor (Gray et al. 2024,
arXiv:2411.00999).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from variable_batch_size.gradient_noise import estimators
from variable_batch_size.gradient_noise.squares import square
from xla_replica import Replica
from xla_replica.device.gradients import weak_hook

Tensor = torch.Tensor
# A layer's mean and the inverse of its deviation, as the forward pass has saved them.
Saved = tuple[Tensor, Tensor] | None
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


_NODES = ("NativeLayerNormBackward0", "NativeGroupNormBackward0")


def _saved_by(output: Tensor, dtype: torch.dtype) -> Saved:
    """Returns what the forward pass has saved, in this dtype; None where it is not.

    Hooks that keep saved tensors elsewhere, as a checkpoint's, allow one look at each.
    """
    node = output.grad_fn
    if node is None or node.name() not in _NODES:
        return None
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    found = node._saved_result1, node._saved_result2  # type: ignore[attr-defined]
    return found if found[1].dtype == dtype else None


class _Layer:
    """One normalisation layer, and its weight's gradients of every sample.

    They are summed over positions, over the layer's calls, and over the backward passes
    whose sum ``.grad`` holds. A pass counts when it adds to ``.grad``: neither
    `torch.autograd.grad` does so, nor a pass whose gradient has been thrown away.

    Attributes:
        layer: The module.
        samples: ``(B, n)`` for a weight of n numbers; None as long as there are none.
    """

    def __init__(
        self, layer: Any, normalise: Normalise, minibatch_size: int, replica: Replica
    ) -> None:
        self.layer = layer
        self.samples: Tensor | None = None
        self._normalise, self._minibatch_size = normalise, minibatch_size
        self._is_lazy = replica.is_lazy
        # Of the backward pass under way, and its number.
        self._of_pass: Tensor | None = None
        self._pass = -1
        # How often the kept gradient has been written to, with the last pass.
        self._version: int | None = None
        self._handles = [
            layer.register_forward_hook(weak_hook(self.see)),
            replica.on_gradient(layer.weight, weak_hook(self.arrive)),
        ]

    def see(self, layer: Any, args: tuple[Any, ...], output: Any) -> None:
        """Runs after every forward pass of the layer."""
        if not (isinstance(output, Tensor) and output.requires_grad):
            return
        if not layer.weight.requires_grad or not args:
            return
        x = args[0].detach()
        if len(x) != self._minibatch_size:
            raise ValueError(
                f"a {type(layer).__name__} was given an input of shape "
                f"{tuple(x.shape)}, and the minibatch has {self._minibatch_size} "
                "samples: the first dimension must be that of the samples, for "
                "noise.use_norm_layers to tell them apart"
            )
        wide = torch.promote_types(x.dtype, torch.float32)
        saved = None if self._is_lazy else _saved_by(output, wide)
        output.register_hook(lambda gradient: self._add(x, wide, saved, gradient))

    def _add(
        self, x: Tensor, wide: torch.dtype, saved: Saved, gradient: Tensor
    ) -> None:
        """Adds one call's gradients to those of the backward pass under way."""
        with torch.no_grad():
            products = self._normalise(self.layer, x.to(wide), saved)
            products.mul_(gradient.detach())
            if self._normalise is _group_norm:
                own = products.reshape(*products.shape[:2], -1).sum(2)
            else:
                own = products.reshape(len(x), -1, self.layer.weight.numel()).sum(1)
            number = torch._C._current_graph_task_id()
            if self._of_pass is not None and self._pass == number:
                own = self._of_pass + own
            self._of_pass, self._pass = own, number

    def arrive(self, gradient: Tensor) -> None:
        """Runs before a backward pass adds the weight's gradient to ``.grad``."""
        own, self._of_pass = self._of_pass, None
        if own is None or self._pass != torch._C._current_graph_task_id():
            return
        kept, before = self.layer.weight.grad, self._version
        # Zeroed in place it has been written to once more.
        is_kept = kept is not None and before in (None, kept._version)
        if self.samples is not None and is_kept:
            own = self.samples + own
        self.samples = own
        self._version = None if kept is None else kept._version + 1

    def drop_discarded(self) -> None:
        """Drops the samples' gradients once ``.grad`` does not hold their sum."""
        if self.layer.weight.grad is None:
            self.samples = None


class NormLayerSquares:
    """Sees the outputs of normalisation layers, and their gradients.

    Layers are those of torch, and any other that has a vector ``weight``, perhaps a
    ``bias``, and no other parameter, and whose first output is that of a LayerNorm or
    an RMSNorm. The first dimension of their inputs must be that of the samples.

    Args:
        model: Its layers are looked at. Only those whose weight is among `parameters`
            and requires a gradient count.
        parameters: What the optimizer trains.
        minibatch_size: Samples in a minibatch, over which the loss is a mean.
        dtype: What squares are added up in.
        replica: The replica whose gradients these are.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: It has no layer that could count.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        minibatch_size: int,
        dtype: torch.dtype,
        replica: Replica,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {model!r}")
        self._minibatch_size = minibatch_size
        self._dtype = dtype
        self._nothing = torch.zeros(1, dtype=dtype, device=replica.device)
        trained = set(parameters)
        self._layers: list[_Layer] = []
        for module in model.modules():
            if getattr(module, "weight", None) in trained:
                kind = _kind_of(module)
                if kind is not None:
                    self._layers.append(_Layer(module, kind, minibatch_size, replica))
        if not self._layers:
            raise ValueError(
                f"{type(model).__name__} has no LayerNorm, RMSNorm or GroupNorm whose "
                "weight the optimizer trains, so normalisation layers tell nothing of "
                "its noise: leave use_norm_layers out"
            )

    def take(self) -> Tensor:
        """Returns the sum of the samples' squared gradients, once: ``(1,)``."""
        found = [each.samples for each in self._layers if each.samples is not None]
        self.discard()
        # Each is a part of the minibatch's mean.
        return self._total(found) * self._minibatch_size**2

    def discard(self) -> None:
        """Forgets the minibatch."""
        for each in self._layers:
            each.samples = None

    def drop_discarded(self) -> None:
        """Drops what `model.zero_grad` has removed from ``.grad``, in every layer."""
        for each in self._layers:
            each.drop_discarded()

    def of_gradients(self) -> Tensor:
        """Returns ||gradient||^2 of what ``.grad`` of the weights holds: ``(1,)``."""
        weights = [each.layer.weight.grad for each in self._layers]
        return self._total([weight for weight in weights if weight is not None])

    def _total(self, tensors: list[Tensor]) -> Tensor:
        """Returns the sum of all squares: ``(1,)``."""
        if not tensors:
            return self._nothing
        together = torch.cat([tensor.flatten() for tensor in tensors])
        return square(together, self._dtype).reshape(1)


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


class NormLayerNoise:
    """The statistics of normalisation layers' weights, as estimates of the model's.

    Attributes:
        averages: ``(3, 2)``: those of the layers' weights, and those of the steps alone
            in which the whole gradient's noise was measured too.
    """

    def __init__(self, dtype: torch.dtype, replica: Replica) -> None:
        self._layers: NormLayerSquares | None = None
        self._dtype, self._replica = dtype, replica
        self.averages = estimators.no_statistics(2, dtype, replica.device)
        self._squares = torch.zeros(1, dtype=dtype, device=replica.device)

    @property
    def in_use(self) -> bool:
        """Whether layers are looked at."""
        return self._layers is not None

    def use(
        self, model: nn.Module, parameters: Iterable[nn.Parameter], minibatch_size: int
    ) -> None:
        """Begins to look at a model's layers; see `NormLayerSquares`."""
        self._layers = NormLayerSquares(
            model, parameters, minibatch_size, self._dtype, self._replica
        )

    def numbers(
        self, num_samples: int, num_minibatches: int, time_constant: float
    ) -> dict[str, Any]:
        """Returns what a step's `update` needs on the device, by name."""
        if not self.in_use:
            return {}
        weight = -math.expm1(-num_minibatches / time_constant)
        return {
            "coefficients of samples": estimators.coefficients(num_samples, 1),
            "weight of samples": weight if num_samples > 1 else 0.0,
        }

    def drop_discarded(self) -> None:
        """Forgets gradients that `model.zero_grad` has thrown away meanwhile."""
        if self._layers is not None:
            self._layers.drop_discarded()

    def end_minibatch(self) -> None:
        """Adds the minibatch's squares to the step's, in the minibatch's graph."""
        if self._layers is not None:
            self._squares = self._squares + self._layers.take()

    def to_sum(self) -> list[Tensor]:
        """Returns what is to be summed over replicas, in place."""
        return [self._squares] if self.in_use else []

    def update(self, numbers: dict[str, Tensor], weight_of_whole: Tensor) -> None:
        """Takes in a step, whose averaged gradients are in ``.grad``.

        Args:
            numbers: Those of `numbers`, on the device.
            weight_of_whole: ``(1,)``: the step's weight in the averages of the whole
                gradient; 0 where it was not measured.
        """
        if self._layers is None:
            return
        new = estimators.estimate(
            self._squares,
            self._layers.of_gradients(),
            numbers["coefficients of samples"],
        )
        weights = torch.cat([numbers["weight of samples"], weight_of_whole])
        self.averages = estimators.average(self.averages, new, weights)

    def end_step(self) -> None:
        """Forgets the minibatches of the step."""
        if self._layers is not None:
            self._layers.discard()
        with torch.no_grad():
            self._squares.zero_()

    def state(self) -> Tensor:
        """Returns both statistics, one after the other: ``(6, 1)``."""
        return self.averages.T.reshape(6, 1)

    def load_state(self, state: Tensor) -> None:
        """Takes what `state` returned."""
        state = state.to(self._dtype).to(self._replica.device)
        self.averages = state.reshape(2, 3).T.contiguous()


def noise_factor(norm_layers: Tensor, whole: Tensor) -> Tensor:
    """Returns the noise scale of all parameters over that of the layers: ``(1,)``.

    NaN where either is unknown, or not above zero.

    Args:
        norm_layers: ``(6, 1)``: `NormLayerNoise.state`.
        whole: ``(3, 1)``: the statistics of all parameters.
    """
    part = norm_layers[3:]
    is_known = (torch.cat([whole, part]) > 0).all()
    factor = (whole[0] / part[0]) * (part[1] / whole[1])
    return torch.where(is_known, factor, torch.full_like(factor, math.nan))


def of_model(norm_layers: Tensor, whole: Tensor) -> Tensor:
    """Returns the layers' statistics with the model's noise scale: ``(3, 1)``.

    The arguments are those of `noise_factor`, which is one as long as it is unknown.
    """
    factor = noise_factor(norm_layers, whole)
    factor = torch.where(factor == factor, factor, torch.ones_like(factor))
    return torch.cat([norm_layers[:1] * factor, norm_layers[1:3]])
