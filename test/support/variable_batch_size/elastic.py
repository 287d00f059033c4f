"""One training run, twice: elastic on replicas, and as one obvious large-batch loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import variable_batch_size as vbs
import xla_replica
from xla_replica.backends import overlapped_sum

# A bucket for every gradient, so that sums begin during the backward pass.
overlapped_sum.FIRST_BUCKET_BYTES = overlapped_sum.BUCKET_BYTES = 1

OPTIMIZERS = {
    "sgd": lambda ps, lr: torch.optim.SGD(ps, lr),
    "sgd-heavy-ball": lambda ps, lr: torch.optim.SGD(ps, lr, momentum=0.5),
    "sgd-momentum": lambda ps, lr: torch.optim.SGD(
        ps, lr, momentum=0.5, weight_decay=2**-6
    ),
    "sgd-nesterov": lambda ps, lr: torch.optim.SGD(
        ps, lr, momentum=0.5, weight_decay=2**-6, nesterov=True
    ),
    "adamw": lambda ps, lr: torch.optim.AdamW(ps, lr, weight_decay=0.1),
    "adam-amsgrad": lambda ps, lr: torch.optim.Adam(
        ps, lr, amsgrad=True, weight_decay=0.1
    ),
    "adagrad": lambda ps, lr: torch.optim.Adagrad(ps, lr),
    "rmsprop": lambda ps, lr: torch.optim.RMSprop(ps, lr, momentum=0.5, centered=True),
    "nadam": lambda ps, lr: torch.optim.NAdam(ps, lr),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A run. If it is ``exact``, no sum is rounded, in whatever order it is made."""

    trace: tuple[int, ...]
    epochs: int = 1
    optimizer: str = "sgd-momentum"
    rule: str = "linear"
    lr: float = 2**-4
    exact: bool = False
    num_samples: int = 128
    minibatch_size: int = 4
    ref_batchsize: int = 16
    max_grad_norm: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.exact else torch.float32


def make(case: Case) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Returns model, inputs ``(N, 6)`` and targets ``(N,)``, always the same."""
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(case.dtype)

    if case.exact:
        model: nn.Module = nn.Linear(6, 1)
    else:
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        model.scale = nn.Parameter(torch.ones(()))  # parameters may lack dimensions
    model = model.to(case.dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(integers(-8, 9, *parameter.shape) / 16)
    inputs = integers(-2, 3, case.num_samples, 6)
    targets = integers(0, 3, case.num_samples)
    if not case.exact:
        inputs = inputs + torch.rand(case.num_samples, 6, generator=generator)
    return model, inputs, targets


def sampler_of(case: Case, inputs: torch.Tensor, **options: Any) -> vbs.CustomSampler:
    """Returns the sampler of a case, on the replica that it is called in."""
    return vbs.CustomSampler(
        inputs,
        case.trace,
        minibatch_size=case.minibatch_size,
        on_end="cycle",
        verbose=False,
        **options,
    )


def optimizer_of(
    case: Case, parameters: Iterable[Any], sampler: vbs.CustomSampler, **options: Any
) -> vbs.ElasticOptimizer:
    """Returns the elastic optimizer of a case; ``options`` go before the case's."""
    own = {"ref_batchsize": case.ref_batchsize, "max_grad_norm": case.max_grad_norm}
    inner = OPTIMIZERS[case.optimizer](parameters, case.lr)
    return vbs.ElasticOptimizer(inner, sampler, case.rule, **own | options)


def loss_of(
    case: Case, model: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Returns the minibatch's mean loss; quadratic in the weights if sums are exact."""
    if case.exact:
        return ((model(x)[:, 0] - y) ** 2).sum() / len(x)
    return F.cross_entropy(model(x) * model.scale, y.long())


def elastic_run(
    rank: int, case: Case, loss_of: Callable[..., torch.Tensor] = loss_of
) -> dict[str, object]:
    """Runs the case on replicas, as a user writes it."""
    replica = xla_replica.current()
    model, inputs, targets = make(case)
    model.to(replica.device)
    sampler = sampler_of(case, inputs)
    optimizer = optimizer_of(case, model.parameters(), sampler)
    updates: list[vbs.Update] = []
    optimizer.attach(updates.append)
    returned = 0
    samples: list[int] = []
    for epoch in range(case.epochs):
        sampler.set_epoch(epoch)
        returned += optimizer.set_epoch(epoch)
        minibatches = list(sampler)
        samples += [sample for minibatch in minibatches for sample in minibatch]
        for x, y in replica.loader([(inputs[m], targets[m]) for m in minibatches]):
            loss_of(case, model, x, y).backward()
            returned += optimizer.step()
    weights = replica.fetch([p.detach() for p in model.parameters()])
    return {
        "weights": weights,
        "returned": returned,
        "updates": [(u.epoch, u.step, u.batch_size, u.lr) for u in updates],
        "num_idle": sum(u.idle for u in updates),
        "samples": samples,
    }


def batches(case: Case) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the epoch and the sample indices of every step, in the obvious way."""
    step = 0
    for epoch in range(case.epochs):
        generator = torch.Generator().manual_seed(42 + epoch)
        order = torch.randperm(case.num_samples, generator=generator)
        used = 0
        capacity = case.num_samples // case.minibatch_size * case.minibatch_size
        while used + case.trace[step % len(case.trace)] <= capacity:
            size = case.trace[step % len(case.trace)]
            yield epoch, order[used : used + size]
            used, step = used + size, step + 1


def large_batch_run(case: Case) -> tuple[list[torch.Tensor], list[tuple]]:
    """Runs the case in plain torch, with one forward and backward pass per step."""
    model, inputs, targets = make(case)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters(), case.lr)
    updates = []
    for step, (epoch, rows) in enumerate(batches(case)):
        ratio = len(rows) / case.ref_batchsize
        factor = {"constant": 1.0, "linear": ratio, "root": ratio**0.5}[case.rule]
        optimizer.zero_grad()
        loss_of(case, model, inputs[rows], targets[rows]).backward()
        if case.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = case.lr * factor
        optimizer.step()
        updates.append((epoch, step, len(rows), (case.lr * factor,)))
    return [p.detach() for p in model.parameters()], updates
