"""Per-sample gradients of an ordinary `torch.nn.Module`, in two forms and an oracle.

`functional` is the form that torch.func documents, ``vmap(grad_and_value(loss))``. It
is right on eager devices and taken there. On lazy XLA tensors it is not dependable.
With torch_xla 2.9.0 on XLA:CPU:

- its numbers were right for all models of these examples (error below 2e-6), but
  ``torch.func.grad`` returns zeros without a word through kl_div, std, selu and some
  more, and raises at max_pool2d;
- autograd's thread keeps gradients alive for a random while (see `xla_replica.grad`),
  and a sync computes every tensor that is alive: in 8 equal steps logistic
  regression, the ResNet and the transformer each compiled a second program, at
  different steps in different runs. Two replicas whose programs differ cannot sum:
  such a run hangs or ends.

`expanded` gives every sample its own (expanded, not copied) parameters, lets vmap run
the forward pass, and asks ordinary autograd for the gradients of the sum of losses. No
torch.func derivative is involved. Same numbers, one program for 8 steps, a third less
time per step; it is what compiled devices get. `check` compares the form in use with
`loop` on the CPU.

All three give ``(losses, grads)``: ``(B,)`` losses and ``(B, *shape)`` gradients by the
parameters' names. Layers that mix samples (BatchNorm) or draw random numbers (Dropout)
have no per-sample gradient of this kind.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

import xla_replica
from xla_replica import Replica

Tensors = Mapping[str, torch.Tensor]
Form = Callable[
    [Tensors, torch.Tensor, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]
]

# Largest error of a gradient, relative to its largest element: far above what float32
# comes to behind many layers, far below the zeros of a layer without a derivative.
TOLERANCE = 1e-2


def mean_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of ``(..., classes)`` logits, averaged over all targets."""
    return F.cross_entropy(
        outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1).long()
    )


def sample_loss(
    model: nn.Module, params: Tensors, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The loss of one sample, as a function of the parameters."""
    outputs = functional_call(model, dict(params), (inputs.unsqueeze(0),))
    return mean_loss(outputs, targets)


def functional(model: nn.Module) -> Form:
    """The form of torch.func."""
    of_batch = vmap(
        grad_and_value(functools.partial(sample_loss, model)), in_dims=(None, 0, 0)
    )

    def form(
        params: Tensors, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        constants = {name: param.detach() for name, param in params.items()}
        grads, losses = of_batch(constants, inputs, targets)
        return losses, grads

    return form


def expanded(model: nn.Module) -> Form:
    """Ordinary autograd through vmap, with parameters for every sample."""
    of_batch = vmap(functools.partial(sample_loss, model))

    def form(
        params: Tensors, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        of_samples = {
            name: param.detach().expand(len(inputs), *param.shape).requires_grad_()
            for name, param in params.items()
        }
        losses = of_batch(of_samples, inputs, targets)
        grads = xla_replica.grad(losses.sum(), list(of_samples.values()))
        return losses.detach(), dict(zip(of_samples, grads))

    return form


def loop(model: nn.Module) -> Form:
    """One sample after the other: slow and obviously right."""

    def form(
        params: Tensors, inputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        losses, grads = [], []
        for one_input, target in zip(inputs, targets):
            loss = sample_loss(model, params, one_input, target)
            grads.append(xla_replica.grad(loss, list(params.values())))
            losses.append(loss.detach())
        return torch.stack(losses), dict(zip(params, map(torch.stack, zip(*grads))))

    return form


def form_for(model: nn.Module, replica: Replica) -> Form:
    """The form that can be relied on where this replica computes."""
    return expanded(model) if replica.is_lazy else functional(model)


def relative_errors(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Of every parameter's gradients, relative to the largest element of them.

    Gradients that are nearly zero are measured by those of the other parameters: a
    true zero, such as a bias before a normalisation, is computed as noise.
    """
    sizes = {name: float(grad.abs().max()) for name, grad in expected.items()}
    least = 1e-3 * max(sizes.values())
    return {
        name: float((found[name] - grad).abs().max()) / max(sizes[name], least)
        for name, grad in expected.items()
    }


def check(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, replica: Replica
) -> float:
    """Compares `form_for` on the replica's device with `loop` on the CPU.

    Args:
        model: On the CPU; it stays as it is.
        inputs: ``(B, ...)``, on the CPU.
        targets: ``(B, ...)``, on the CPU.
        replica: Where the model is to be trained.

    Returns:
        The largest error, relative to the largest gradient of its parameter.

    Raises:
        RuntimeError: It is too large: a layer of this model is not to be trusted there.
    """
    # The device first: torch_xla 2.9 cannot run backward if a CPU did before it.
    there = copy.deepcopy(model).to(replica.device)
    params = dict(there.named_parameters())
    _, grads = form_for(there, replica)(params, *replica.send((inputs, targets)))
    found = dict(zip(grads, replica.fetch(list(grads.values()))))
    _, expected = loop(model)(dict(model.named_parameters()), inputs, targets)
    errors = relative_errors(found, expected)
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] < TOLERANCE:
        raise RuntimeError(
            f"per-sample gradients on {replica.device} are wrong: those of {worst!r} "
            f"are off by {errors[worst]:.1e} of their largest element. Write the layer "
            "with other operations, see examples/ordering/per_sample.py"
        )
    return errors[worst]
