"""One training run, twice: elastic on replicas, and as one obvious large-batch loop."""

import collections
import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import variable_batch_size as vbs
import xla_replica
from xla_replica.backends import overlapped_sum

# A bucket for every gradient, so that sums begin during the backward pass.
overlapped_sum.FIRST_BUCKET_BYTES = overlapped_sum.BUCKET_BYTES = 1

MOMENTUM = partial(torch.optim.SGD, momentum=0.5, weight_decay=2**-6)
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "sgd-heavy-ball": partial(torch.optim.SGD, momentum=0.5),
    "sgd-momentum": MOMENTUM,
    "sgd-nesterov": partial(MOMENTUM, nesterov=True),
    "adamw": partial(torch.optim.AdamW, weight_decay=0.1),
    "adam-amsgrad": partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "nadam": torch.optim.NAdam,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A run. If it is ``exact``, no sum is rounded, in whatever order it is made."""

    trace: tuple[int, ...]
    epochs: int = 1
    optimizer: Any = "sgd-momentum"  # one of OPTIMIZERS, or what makes another one
    rule: str = "linear"
    lr: float = 2**-4
    exact: bool = False
    num_samples: int = 128
    minibatch_size: int = 4
    ref_batchsize: int = 16
    max_grad_norm: float | None = None
    wide: bool = False  # in float64, as one that is exact

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.exact or self.wide else torch.float32


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
    own = {"minibatch_size": case.minibatch_size, "verbose": False, "on_end": "cycle"}
    return vbs.CustomSampler(inputs, case.trace, **own | options)


def loss_of(case: Case, model: nn.Module, x, y) -> torch.Tensor:
    if case.exact:
        return ((model(x)[:, 0] - y) ** 2).sum() / len(x)
    return F.cross_entropy(model(x) * model.scale, y.long())


class Killed(Exception):
    """Ends a run."""


class Training:
    """A run of a case on the replica that it is built in, as a user writes it.

    Args:
        case: The run.
        loss: From model, inputs and targets of a minibatch; default: `loss_of`.
        sampler: Options of the sampler; ``options`` are those of the optimizer.
        made: Model, inputs and targets; default: those of `make`.

    Attributes:
        updates: What functions that are attached have seen.
        samples: ``(step, substep, rank, samples)`` of every minibatch that was run.
    """

    def __init__(self, case: Case, loss=None, sampler=None, made=None, **options):
        self.case, self.replica = case, xla_replica.current()
        self.loss = loss or partial(loss_of, case)
        self.model, self.inputs, self.targets = made or make(case)
        self.model.to(self.replica.device)
        groups = getattr(self.model, "groups", self.model.parameters)()
        self.sampler = sampler_of(case, self.inputs, **sampler or {})
        inner = OPTIMIZERS.get(case.optimizer, case.optimizer)(groups, case.lr)
        own = {"ref_batchsize": case.ref_batchsize, "max_grad_norm": case.max_grad_norm}
        options = own | options
        self.optimizer = vbs.ElasticOptimizer(inner, self.sampler, case.rule, **options)
        self.updates: list[vbs.Update] = []
        self.samples: list[tuple[int, int, int, list[int]]] = []
        self.optimizer.attach(self.updates.append)

    def train(self) -> list[torch.Tensor]:
        for epoch in range(self.sampler.epoch, self.case.epochs):
            self.epoch(epoch)
        return self.weights()

    def train_until(self, kill_at: float) -> None:
        """Trains to the end, or to the update after which all replicas are killed."""

        def kill(update: vbs.Update) -> None:
            if update.step >= kill_at:
                raise Killed

        self.optimizer.attach(kill)
        with contextlib.suppress(Killed):
            self.train()

    def epoch(self, epoch: int) -> int:
        """Trains what is left of an epoch; returns the number of updates."""
        self.sampler.set_epoch(epoch)
        made, fetched = self.optimizer.set_epoch(epoch), collections.deque()

        def loaded() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for rows in self.dealt():
                fetched.append(rows)
                yield self.inputs[rows], self.targets[rows]

        for x, y in self.replica.loader(loaded()):
            place = self.step, self.optimizer.place.substep, self.replica.rank
            self.samples.append((*place, fetched.popleft()))
            made += self.minibatch(x, y)
        return made

    def counted_epoch(self, epoch: int) -> tuple[int, int, int]:
        """Trains an epoch; returns its compilations, transfers and fallbacks."""
        with xla_replica.count(self.replica) as count:
            self.epoch(epoch)
        return count.compilations, count.transfers, len(count.fallbacks)

    def counted_run(self, num_epochs: int) -> tuple[int, int, int]:
        """Trains so many epochs; returns what was counted in the last one."""
        return [self.counted_epoch(epoch) for epoch in range(num_epochs)][-1]

    def dealt(self) -> Iterator[list[int]]:
        return iter(self.sampler)

    def minibatch(self, x: torch.Tensor, y: torch.Tensor) -> int:
        self.loss(self.model, x, y).backward()
        return self.optimizer.step()

    @property
    def step(self) -> int:
        """The step under way, since training began."""
        return self.sampler.plan.first_step + self.optimizer.place.step

    @property
    def steps(self) -> list[int]:
        return [update.step for update in self.updates]

    def weights(self) -> list[torch.Tensor]:
        return self.replica.fetch([p.detach() for p in self.model.parameters()])

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer}
        found = {name: part.state_dict() for name, part in parts.items()}
        return copy.deepcopy(self.replica.to_host(found))

    def load(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)  # torch's optimizers use loaded tensors in place
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def elastic_run(rank: int, case: Case, loss_of=loss_of) -> dict[str, object]:
    training = Training(case, partial(loss_of, case))
    returned = sum(training.epoch(epoch) for epoch in range(case.epochs))
    return {
        "weights": training.weights(),
        "returned": returned,
        "updates": [(u.epoch, u.step, u.batch_size, u.lr) for u in training.updates],
        "num_idle": sum(u.idle for u in training.updates),
    }


def batches(case: Case) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the epoch and the sample indices of every step, in the obvious way."""
    sizes = itertools.cycle(case.trace)
    size = next(sizes)
    capacity = case.num_samples - case.num_samples % case.minibatch_size
    for epoch in range(case.epochs):
        generator = torch.Generator().manual_seed(42 + epoch)
        order = torch.randperm(case.num_samples, generator=generator)[:capacity]
        while len(order) >= size:
            yield epoch, order[:size]
            order, size = order[size:], next(sizes)


@functools.cache
def large_batch_run(case: Case, loss=None, made=None, decay=1.0, ratios=()) -> Any:
    """Runs the case in plain torch, with one forward and backward pass per step.

    ``loss`` and ``made`` are those of `Training`; learning rates are multiplied by
    ``decay`` after every step; batch ratios other than those of samples are given.
    Returns the weights, and of every update epoch, step, batch size and learning rates.
    """
    loss = loss or partial(loss_of, case)
    model, inputs, targets = made or make(case)
    groups = getattr(model, "groups", model.parameters)()
    optimizer = OPTIMIZERS.get(case.optimizer, case.optimizer)(groups, case.lr)
    lrs = [group["lr"] for group in optimizer.param_groups]
    updates = []
    for step, (epoch, rows) in enumerate(batches(case)):
        ratio = (ratios and ratios[step]) or len(rows) / case.ref_batchsize
        factor = {"constant": 1.0, "linear": ratio, "root": ratio**0.5}[case.rule]
        optimizer.zero_grad()
        loss(model, inputs[rows], targets[rows]).backward()
        if case.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
        now = tuple(lr * factor * decay**step for lr in lrs)
        for group, lr in zip(optimizer.param_groups, now):
            group["lr"] = lr
        optimizer.step()
        updates.append((epoch, step, len(rows), now))
    return [p.detach() for p in model.parameters()], updates


def assert_as_one_large_batch(case: Case, weights: list[torch.Tensor]) -> None:
    tolerance = 0 if case.exact else 1e-6
    expected, _ = large_batch_run(case)
    torch.testing.assert_close(weights, expected, atol=tolerance, rtol=tolerance)
