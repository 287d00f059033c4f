"""Per-sample gradients by a loop, and models to compare with it: one row each."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import nn

import per_sample_grad as psg
from per_sample_grad.layers.registry import RULES
from tools.studies.drawn_models import wide_copy

BATCH = 3
# Errors that are allowed in half precision, relative to the answer.
HALF = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
Gradients = dict[str, torch.Tensor]
# Restores the registry of rules after a block or, as a decorator, after a test.
rules_kept = functools.partial(mock.patch.dict, RULES)


def fold(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """Returns a nonlinear function of all outputs of each sample, ``(B,)``."""
    out = model(*inputs).flatten(1)
    coefficients = torch.cos(torch.arange(out.shape[1], device=out.device))
    return (torch.sin(0.7 * out) * coefficients.to(out.dtype)).sum(1)


def captured(
    model: nn.Module, loss: Callable[..., torch.Tensor], *inputs: object, **options
) -> tuple[psg.Capture, torch.Tensor]:
    """Returns a capture of a forward pass, and its losses."""
    with psg.capture(model, **options) as recorded:
        losses = loss(model, *inputs)
    return recorded, losses


def compared(model: nn.Module, loss: Callable[..., torch.Tensor], *inputs) -> bool:
    """Returns whether a pass, whose norms are asked for, was compared with autograd."""
    recorded, losses = captured(model, loss, *inputs)
    recorded.norms(losses)
    return recorded.compared


def loop(
    losses: Iterable[torch.Tensor], params: Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns each parameter's gradients, ``(B, *shape)``, of losses with a graph."""
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    params = list(params)
    rows = [torch.autograd.grad(loss, params, **options) for loss in losses]
    return [torch.stack(column).detach() for column in zip(*rows)]


def norms_of(
    losses: Iterable[torch.Tensor], params: Iterable[torch.Tensor]
) -> torch.Tensor:
    """Returns the norm of each loss's gradient, ``(B,)``, of losses with a graph."""
    return flat(loop(losses, params)).norm(dim=1)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its inputs, and the options that `capture` needs for it.

    Attributes:
        build: Makes the model; random numbers are seeded.
        shape: Of one sample's input, or a function from a batch size to the inputs.
        loss: From model and inputs to ``(B,)``.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...] | Callable[[int], tuple[torch.Tensor, ...]]
    options: dict[str, object] = dataclasses.field(default_factory=dict)
    loss: Callable[..., torch.Tensor] = fold

    def __str__(self) -> str:
        return self.name

    def make(
        self, dtype: torch.dtype, batch: int = BATCH, seed: int = 0
    ) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        """Returns the model, in evaluation mode with random parameters, and inputs."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build().eval()
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(0.3 * torch.randn(param.shape))
                for name, buffer in model.named_buffers():
                    if "running" in name:
                        buffer.copy_(0.5 + torch.rand(buffer.shape))
            given = self.shape
            inputs = given(batch) if callable(given) else (torch.randn(batch, *given),)
        inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
        return model.to(dtype), inputs

    def oracle(
        self,
        model: nn.Module,
        inputs: tuple[torch.Tensor, ...],
        dtype: torch.dtype = torch.float64,
    ) -> Gradients:
        """Returns ``(B, *shape)`` by name, from a loop over the samples in a dtype."""
        model = wide_copy(model, dtype)
        wide = [x.cpu().to(dtype) if x.is_floating_point() else x.cpu() for x in inputs]
        params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        samples = ([x[i : i + 1] for x in wide] for i in range(len(inputs[0])))
        losses = (self.loss(model, *sample).sum() for sample in samples)
        return dict(zip(params, loop(losses, params.values())))

    def norms(self, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Returns the norm of each sample's gradient by the loop, ``(B,)``."""
        return flat(self.oracle(model, inputs)).norm(dim=1)

    def factors(self, model: nn.Module, inputs: Any, **options: object) -> psg.Factors:
        """Returns factors under these options beside the case's."""
        options = {**self.options, **options}
        return psg.per_sample_factors(model, self.loss, inputs, **options)


def flat(gradients: Gradients | list[torch.Tensor]) -> torch.Tensor:
    """Returns all gradients as one matrix, ``(B, D)``."""
    parts = gradients.values() if isinstance(gradients, dict) else gradients
    return torch.cat([part[:, None].flatten(1) for part in parts], 1)


def error(found: torch.Tensor, truth: torch.Tensor, floor: Any = 0.0) -> float:
    """Returns ``|found - truth| / max(|truth|, 1e-6 floor)``, of Frobenius norms."""
    found, truth = found.detach().cpu().double(), truth.detach()
    assert found.shape == truth.shape
    difference = (found - truth).norm()
    size = max(float(truth.norm()), 1e-6 * float(floor), 1e-300)
    return float(difference) / size
