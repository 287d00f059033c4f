"""An optimizer that measures noise, and minibatches of given gradients."""

import torch
from torch import nn
from torch.optim import SGD

import variable_batch_size as vbs
from support.variable_batch_size.wrapping import CPU, minibatches, sampler_of

# Minibatch gradients (n, d); tr Sigma, |G|^2 and the gain of n minibatches over one.
CLOSED_FORMS = {
    "orthonormal": (torch.eye(4).tolist(), 1.0, 0.0, 4.0),
    "1 and 3": ([[1.0], [3.0]], 2.0, 3.0, 1.25),
    "1 to 8": ([[float(n)] for n in range(1, 9)], 6.0, 19.5, 1.259259),
}


def make(trace=(4,), parameters=None, inner=SGD, cls=vbs.AdaScaleOptimizer, **options):
    """Returns parameters and an optimizer with minibatches of one sample, ref 1."""
    parameters = parameters or [nn.Parameter(torch.zeros(3))]
    sampler = sampler_of(trace, 64, minibatch_size=1, on_end="cycle")
    options = {"ref_batchsize": 1, "replica": CPU} | options
    optimizer = cls(inner(parameters, 0.01), sampler, **options)
    optimizer.minibatches = minibatches(sampler)
    return parameters, optimizer


def step(optimizer, parameter, rows) -> None:
    for row, _ in zip(rows, optimizer.minibatches):
        row = torch.as_tensor(row, dtype=parameter.dtype)
        (parameter * row).sum().real.backward()
        optimizer.step()
