"""A small classifier, its data, and elastic training in the orders of GraB."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import per_sample_grad as psg
import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler
from support.xla_replica.replicas import TORCHTPU, row

F64 = torch.float64
Data = tuple[torch.Tensor, torch.Tensor]
# Two epochs of 24 samples, and again, in minibatches of 4.
TRACE, MINIBATCH, REFERENCE = [8, 16, 4, 12, 8], 4, 8
BACKENDS = [
    row("cpu", 3), row("xla", 1), row("xla", 2, slow=True), row("xla", 8, slow=True),
    *TORCHTPU,
]  # fmt: skip


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
    backwards: bool = False,
    captured: Any = None,
    **options: Any,
) -> list[list[int]]:
    """Trains a model in batches of a size; returns every epoch's order.

    Args:
        how: Gradients are "recorded", make ``.grad`` "from samples", or are "formed".
        update: What follows a backward pass. Default: a step of SGD.
        backwards: Whether the sampler knows parameters in another sequence.
        captured: Options of `GraBSampler.record`.
    """
    named, captured = list(model.named_parameters()), captured or {}
    options = {"dtype": F64, **options}
    params = dict(named[::-1] if backwards else named)
    grab = GraBSampler(range(len(data[0])), params, kind, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    orders = []
    for _ in range(epochs):
        orders.append(list(grab))
        for batch in torch.tensor(orders[-1]).split(size):
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
            (update or optimizer.step)()
            model.zero_grad()
    return orders


class Training:
    """A model, an elastic optimizer, and the GraB sampler that orders its samples.

    Args:
        grab: The sampler; every update tells it, if it ``attaches``.
        given: What differs from `TRACE` and the like for `vbs.CustomSampler`;
            ``options`` are those of the optimizer.
    """

    def __init__(
        self, model: nn.Module, inner: torch.optim.Optimizer, grab: GraBSampler,
        rule: str = "linear", attaches: bool = True, given: Any = (), **options: Any,
    ) -> None:  # fmt: skip
        own = {"trace": TRACE, "minibatch_size": MINIBATCH, "on_end": "cycle"}
        own |= {"order": grab, "verbose": False, **dict(given)}
        self.replica, self.model, self.grab = xla_replica.current(), model, grab
        self.sampler = vbs.CustomSampler(range(grab.num_samples), **own)
        self.optimizer = vbs.ElasticOptimizer(inner, self.sampler, rule, **options)
        if attaches:
            self.optimizer.attach(grab.after_update)

    def epoch(self, epoch: int, minibatch: Callable[[list[int]], Any]) -> list[int]:
        """Trains for an epoch; returns its order.

        ``minibatch`` has the gradients of these samples balanced and accumulated, and
        may return the weight of their step.
        """
        self.sampler.set_epoch(epoch)
        self.optimizer.set_epoch(epoch)  # where replicas that begin idle join
        for indices in self.sampler:
            self.optimizer.step(weight=minibatch(indices))
        return self.grab.order.tolist()


def elastic(
    model: nn.Module, data: Data, epochs: int, rule: str = "linear", lr: float = 0.1,
    from_samples: bool = False, **options: Any,
) -> tuple[list[list[int]], list[torch.Tensor], list[tuple[int, int]]]:  # fmt: skip
    """Trains a model under `TRACE`, with a sampler of these options.

    Returns:
        Every epoch's order, the parameters, and the compilations and transfers of every
        epoch.
    """
    grab = sampler_of(model, len(data[0]), **options)
    inner, orders, counts = torch.optim.SGD(model.parameters(), lr), [], []
    run = Training(model, inner, grab, rule, ref_batchsize=REFERENCE)

    def minibatch(indices: list[int]) -> None:
        given = run.replica.send(tuple(each[indices] for each in data))
        passed = {"indices": indices, "from_samples": from_samples}
        balance(grab, model, cross_entropies, model, *given, **passed)

    for epoch in range(epochs):
        with xla_replica.count(run.replica) as count:
            orders.append(run.epoch(epoch, minibatch))
            run.replica.sync()
        counts.append((count.compilations, count.transfers))
    return orders, run.replica.fetch([p.detach() for p in model.parameters()]), counts


def assert_same_runs(
    run: Callable[..., Any],
    *args: Any,
    backend: Any,
    oracle: Callable[..., Any] | None = None,
) -> list[list[list[int]]]:
    """Asserts that all replicas of a backend train as one on the CPU, or the oracle.

    ``run`` returns a list of what `elastic` does. Returns the orders of each run.
    """
    expected = (oracle or run)(0, *args)
    for found in backend.run(run, *args, timeout=240.0):
        for (theirs, values, counts), (orders, weights, _) in zip(
            found, expected, strict=True
        ):
            assert theirs == orders
            torch.testing.assert_close(values, weights, rtol=1e-9, atol=1e-12)
            if backend.device == "xla":
                # The epoch's signs are one transfer of each replica.
                assert counts[1:] == [(0, backend.num_replicas)] * (len(orders) - 1)
    return [orders for orders, _, _ in expected]
