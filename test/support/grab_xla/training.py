"""A small classifier, its data, and training in the orders of GraB."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import per_sample_grad as psg
import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler

F64 = torch.float64
Data = tuple[torch.Tensor, torch.Tensor]
# Two epochs of 24 samples, and again, in minibatches of 4.
TRACE, MINIBATCH, REFERENCE = [8, 16, 4, 12, 8], 4, 8


def samples(num_samples: int = 24, dtype: torch.dtype = F64) -> Data:
    """Returns six numbers, and one of three classes, of every sample."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 6, generator=generator, dtype=dtype)
    return x, torch.randint(0, 3, (num_samples,), generator=generator)


def mlp(dtype: torch.dtype = F64) -> nn.Module:
    """Returns a model on the replica's device that is the same on all of them."""
    replica = xla_replica.current()
    with replica.seeded(0):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    return model.to(replica.device)


def cross_entropies(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def sampler_of(model, num_samples=24, balance="mean", **options: Any) -> GraBSampler:
    """Returns a sampler of a model's parameters, which balances in float64."""
    parameters, options = dict(model.named_parameters()), {"dtype": F64, **options}
    return GraBSampler(range(num_samples), parameters, balance, **options)


def balance(
    grab: GraBSampler,
    model: nn.Module,
    losses_of: Callable[..., torch.Tensor],
    *given: Any,
    **options: Any,
) -> None:
    """Has the gradients of ``losses_of(*given)``, which depend on a model, balanced."""
    with grab.record(model):
        losses = losses_of(*given)
    grab.backward(losses, **options)


def ordered(
    model: nn.Module,
    data: Data,
    how: str,
    kind: str = "mean",
    losses_of: Callable[..., torch.Tensor] = cross_entropies,
    update: Callable[[], object] | None = None,
    epochs: int = 3,
    size: int = 4,
    passes: int = 1,
    backwards: bool = False,
    captured: Any = None,
    **options: Any,
) -> list[list[int]]:
    """Trains a model, in passes of a size for each update; returns every epoch's order.

    Gradients are "recorded", make ``.grad`` "from samples", or are "formed". The
    sampler may know parameters ``backwards``; ``captured`` are options of its `record`.
    """
    named, captured = list(model.named_parameters()), captured or {}
    options = {"dtype": F64, **options}
    params = dict(named[::-1] if backwards else named)
    grab = GraBSampler(range(len(data[0])), params, kind, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    orders = []
    for _ in range(epochs):
        for number, batch in enumerate(torch.tensor(list(grab)).split(size), 1):
            given = tuple(each[batch] for each in data)
            if how in ("recorded", "from samples"):
                with grab.record(model, **captured):
                    losses = losses_of(model, *given)
                passed = {"indices": batch, "from_samples": how == "from samples"}
                grab.backward(losses, **passed)
            else:
                grads = psg.per_sample_grads(model, losses_of, given, **captured)
                grab.step(grads, indices=batch)
                losses_of(model, *given).mean().backward()
            if number % passes == 0:
                for parameter in model.parameters() if passes > 1 else ():
                    parameter.grad /= passes
                (update or optimizer.step)()
                model.zero_grad()
        orders.append(grab.order.tolist())
    return orders


class Training:
    """A model, an elastic optimizer, and the GraB sampler that orders its samples."""

    def __init__(
        self, model: nn.Module, inner: torch.optim.Optimizer, grab: GraBSampler,
        attaches: bool = True, **given: Any,
    ) -> None:  # fmt: skip
        own = {"trace": TRACE, "minibatch_size": MINIBATCH, "on_end": "cycle"}
        own |= {"order": grab, "verbose": False, **given}
        self.replica, self.model, self.grab = xla_replica.current(), model, grab
        self.sampler = vbs.CustomSampler(range(grab.num_samples), **own)
        options = {"ref_batchsize": REFERENCE}
        self.optimizer = vbs.ElasticOptimizer(inner, self.sampler, "linear", **options)
        if attaches:
            self.optimizer.attach(grab.after_update)

    def epoch(self, epoch: int, minibatch: Callable[[list[int]], Any]) -> list[int]:
        """Trains for an epoch, in which ``minibatch`` balances; returns its order."""
        self.sampler.set_epoch(epoch)
        self.optimizer.set_epoch(epoch)  # where replicas that begin idle join
        for indices in self.sampler:
            minibatch(indices)
            self.optimizer.step()
        return self.grab.order.tolist()
