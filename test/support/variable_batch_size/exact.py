"""Runs with exact sums, each with steps whose numbers leave the grid."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import variable_batch_size as vbs
import xla_replica

MINIBATCH = 4
# In minibatches; replicas idle where there are more of them.
TRACE = (1, 3, 8, 5, 2, 7, 4, 6)
NUM_EPOCHS = 2
# By step: what losses are multiplied by. A jump up and one down.
SCALES = types.MappingProxyType({3: 1e3, 4: 1e3, 6: 1e-3, 9: 400.0})
NAN_MINIBATCH = len(TRACE) * NUM_EPOCHS - 1, 2


def digits(norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 16, 10),
    )  # fmt: skip


def perceptron(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *layers, nn.Linear(8, 10))


def small() -> nn.Module:
    return perceptron(nn.BatchNorm1d(8), nn.Dropout(0.1))


class Transformer(nn.Module):
    """A causal language model over the rows of digits, its embedding tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.block(self.embedding(tokens), mask.to(tokens.device), is_causal=True)
        return x @ self.embedding.weight.T


sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
adamw = functools.partial(torch.optim.AdamW, lr=1e-2)


class Run(NamedTuple):
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    rule: str = "linear"
    options: Mapping[str, Any] = types.MappingProxyType({})
    is_language: bool = False
    trace: tuple[int, ...] = TRACE
    num_epochs: int = NUM_EPOCHS
    scales: Mapping[int, float] = SCALES
    zero_step: int | None = 7  # where some gradients are None


RUNS = {
    "small": Run(small),
    "group norm": Run(lambda: digits(nn.GroupNorm(2, 8)), adamw, "root"),
    "batch norm": Run(lambda: digits(nn.BatchNorm2d(8))),
    "adascale": Run(small, rule="adascale"),
    "clipped, noise": Run(
        small, options={"max_grad_norm": 0.5, "noise": True, "overlap": False}
    ),
    "tokens": Run(Transformer, adamw, "root", {"reduction": "sum"}, is_language=True),
}


def wrapped(model, parameters=None, trace=(8,), lr=0.1, size=32, **options: Any):
    """Returns an optimizer with exact sums, and minibatches that it counts."""
    sampler = vbs.CustomSampler(
        dataset_size=size, trace=trace, minibatch_size=MINIBATCH, on_end="cycle"
    )
    inner = torch.optim.SGD(parameters or model.parameters(), lr)
    options = {"exact": model, **options}
    return vbs.LinearRuleOptimizer(inner, sampler, 8, **options), iter(sampler)


def steps(losses: Iterable[torch.Tensor], optimizer, minibatches) -> list[int]:
    """Returns how many updates the backward passes of losses have made, each."""
    made = []
    for _, loss in zip(minibatches, losses):
        loss.backward()
        made.append(optimizer.step())
    return made


class Training:
    """A run on the replica that it is built in, or what is left after a saved state.

    Attributes:
        repeated: Steps that were run again.
        num_minibatches: How many it has run, some of them again.
        counts: Of every epoch: see `xla_replica.count`.
    """

    def __init__(self, run: Any, is_exact=True, num_threads=1, saved=None) -> None:
        torch.set_num_threads(num_threads)
        self.run = run = RUNS[run] if isinstance(run, str) else run
        self.is_exact, self.replica = is_exact, xla_replica.current()
        generator = torch.Generator().manual_seed(0)
        size = MINIBATCH * sum(run.trace)
        self.inputs = torch.rand(size, 1, 8, 8, generator=generator)
        self.targets = torch.randint(10, (size, 9), generator=generator)
        with self.replica.seeded(0):
            self.model = run.model()
            # Part of no forward pass, so that it may become NaN.
            self.model.extra = nn.Parameter(torch.randn(3))
        self.model.to(self.replica.device)
        self.sampler = vbs.CustomSampler(
            self.inputs, [MINIBATCH * n for n in run.trace], minibatch_size=MINIBATCH,
            on_end="cycle", order=self.order(), verbose=False,
        )  # fmt: skip
        inner, exact = run.optimizer(self.model.parameters()), is_exact and self.model
        self.optimizer = vbs.ElasticOptimizer(
            inner, self.sampler, run.rule, 16, exact=exact or None, **run.options
        )
        if saved:
            saved = copy.deepcopy(saved)  # replicas were sent the same memory
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        self.repeated, self.counts, self.num_minibatches = [], [], 0

    def order(self) -> Any:
        """Returns what orders samples."""

    def losses(self, rows: list[int]) -> tuple[torch.Tensor, Any]:
        """Returns the losses of a minibatch, or their sum and its weight."""
        x, y = self.replica.send((self.inputs[rows], self.targets[rows]))
        if not self.run.is_language:
            return F.cross_entropy(self.model(x), y[:, 0], reduction="none"), None
        counts = (y[:, 1:] > 2).float()  # so that minibatches weigh differently
        losses = F.cross_entropy(self.model(y[:, :-1]).mT, y[:, 1:], reduction="none")
        return (losses * counts).sum(), counts.sum()

    def backward(self, losses: torch.Tensor) -> None:
        losses.mean().backward()

    def minibatch(self, rows: list[int]) -> int:
        _, step, substep = self.optimizer.place
        step += self.sampler.plan.first_step
        number = substep * self.replica.num_replicas + self.replica.rank
        losses, weight = self.losses(rows)
        scale = self.replica.scalar(self.run.scales.get(step, 1.0))
        own = math.nan if (step, number) == NAN_MINIBATCH else 0.1 * step
        extra = self.model.extra - self.model.extra.detach()  # a gradient, no value
        losses = losses * scale + (extra * self.replica.scalar(own)).sum()
        if step == self.run.zero_step and self.is_exact:
            matrices = [each for each in self.model.parameters() if each.dim() > 1]
            losses.mean().backward(inputs=matrices)
        else:
            self.backward(losses)
        made = self.optimizer.step(weight=weight)
        self.num_minibatches += 1
        is_dropped = not made and self.optimizer.place.substep == 0
        self.repeated += [step] if is_dropped else []
        return made

    def train(self) -> Iterator[None]:
        """Trains from where it is; yields after every call that made updates."""
        for epoch in range(self.sampler.epoch, self.run.num_epochs):
            with xla_replica.count(self.replica) as count:
                self.sampler.set_epoch(epoch)
                self.optimizer.set_epoch(epoch)
                for rows in self.sampler:
                    if self.minibatch(rows):
                        yield
                self.replica.sync()
            self.counts.append(count)

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer}
        return self.replica.to_host({n: p.state_dict() for n, p in parts.items()})

    def finish(self) -> Training:
        for _ in self.train():
            pass
        return self

    def outcome(self, tensors: Iterable[torch.Tensor] | None = None) -> Outcome:
        """Returns a hash of all bits of tensors, else of the model, and the counts."""
        tensors = self.model.state_dict().values() if tensors is None else tensors
        found = self.replica.fetch([each.detach() for each in tensors])
        text = b"".join(each.contiguous().numpy().tobytes() for each in found)
        self.replica.barrier()
        digest, number = hashlib.sha256(text).hexdigest(), self.num_minibatches
        return Outcome(digest, self.repeated, number, self.counts)


class Outcome(NamedTuple):
    digest: str
    repeated: list[int]
    num_minibatches: int
    counts: list[xla_replica.Counts]


def assert_same_bits(*runs: list[Outcome]) -> None:
    """Asserts that the replicas of all runs, the first of which has one, agree."""
    [alone] = runs[0]
    assert {0} < set(alone.repeated)  # another step than the first is run again, too
    for run in runs:
        assert {each.digest for each in run} == {alone.digest}
        assert sum(each.num_minibatches for each in run) == alone.num_minibatches
        for each in run:
            assert set(each.repeated) <= set(alone.repeated)
            assert not any(x.compilations for x in each.counts[len(each.counts) // 2 :])


def finished(rank: int, names: Iterable[str]) -> list[Outcome]:
    torch.use_deterministic_algorithms(xla_replica.current().has_streams)
    return [Training(name).finish().outcome() for name in names]
