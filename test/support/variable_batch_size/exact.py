"""Runs with exact sums, each with steps whose numbers leave the grid."""

from __future__ import annotations

import hashlib
import math
import types
from collections.abc import Callable, Iterator, Mapping
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
SCALES = {3: 1e3, 4: 1e3, 6: 1e-3, 9: 40.0}
ZERO_STEP, NAN_MINIBATCH = 7, (len(TRACE) * NUM_EPOCHS - 1, 2)


class Digits(nn.Module):
    """A convolutional network with dropout, and a normalisation."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), norm(8)
        self.last = nn.Linear(8 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.last(F.dropout(x.flatten(1), 0.1, self.training))


class Perceptron(nn.Module):
    """A small network that compiles fast, with dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 8), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x.flatten(1)))
        return self.last(F.dropout(x, 0.1, self.training))


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


class Run(NamedTuple):
    """A model, an optimizer, and options of the wrapper."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: (
        torch.optim.SGD(parameters, 0.05, momentum=0.9)
    )
    rule: str = "linear"
    options: Mapping[str, Any] = types.MappingProxyType({})
    is_language: bool = False


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


RUNS = {
    "group norm": Run(lambda: Digits(lambda n: nn.GroupNorm(2, n)), adamw, "root"),
    "batch norm": Run(lambda: Digits(nn.BatchNorm2d)),
    "small": Run(Perceptron),
    "adascale": Run(Perceptron, rule="adascale"),
    "clipped, noise": Run(
        Perceptron, options={"max_grad_norm": 0.5, "noise": True, "overlap": False}
    ),
    "tokens": Run(Transformer, adamw, "root", {"reduction": "sum"}, is_language=True),
}


class Training:
    """A run on the replica that it is built in, as a user writes it.

    Attributes:
        repeated: Steps that were run again.
    """

    def __init__(self, name: str, is_exact: bool = True, num_threads: int = 1) -> None:
        torch.set_num_threads(num_threads)
        self.is_exact = is_exact
        self.run, self.replica = RUNS[name], xla_replica.current()
        generator = torch.Generator().manual_seed(0)
        size = MINIBATCH * sum(TRACE)
        self.inputs = torch.rand(size, 1, 8, 8, generator=generator)
        self.targets = torch.randint(10, (size, 9), generator=generator)
        with self.replica.seeded(0):
            self.model = self.run.model()
            # Part of no forward pass, so that it may become NaN.
            self.model.extra = nn.Parameter(torch.randn(3))
        self.model.to(self.replica.device)
        self.sampler = vbs.CustomSampler(
            self.inputs,
            [MINIBATCH * n for n in TRACE],
            minibatch_size=MINIBATCH,
            on_end="cycle",
            verbose=False,
        )
        self.optimizer = vbs.ElasticOptimizer(
            self.run.optimizer(self.model.parameters()),
            self.sampler,
            self.run.rule,
            16,
            exact=self.model if is_exact else None,
            **self.run.options,
        )
        self.repeated: list[int] = []

    def losses(self, rows: list[int]) -> tuple[torch.Tensor, Any]:
        """Returns the loss of a minibatch and its weight."""
        x, y = self.replica.send((self.inputs[rows], self.targets[rows]))
        if not self.run.is_language:
            return F.cross_entropy(self.model(x), y[:, 0]), None
        counts = (y[:, 1:] > 2).float()  # so that minibatches weigh differently
        losses = F.cross_entropy(self.model(y[:, :-1]).mT, y[:, 1:], reduction="none")
        return (losses * counts).sum(), counts.sum()

    def minibatch(self, rows: list[int]) -> int:
        position = self.optimizer._loop.position
        step = position.plan.first_step + position.step
        number = position.substep * self.replica.num_replicas + self.replica.rank
        loss, weight = self.losses(rows)
        scale = SCALES.get(step, 1.0)
        is_nan = (step, number) == NAN_MINIBATCH
        own = self.replica.scalar(math.nan if is_nan else 0.1 * step)
        extra = self.model.extra - self.model.extra.detach()  # a gradient, no value
        loss = loss * self.replica.scalar(scale) + (extra * own).sum()
        loss.sum().backward()
        if step == ZERO_STEP and self.is_exact:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.grad = None if parameter.dim() == 1 else parameter.grad
        is_last = position.substep == position.num_substeps - 1
        made = self.optimizer.step(weight=weight)
        if is_last and not made:
            self.repeated.append(step)
        return made

    def train(self) -> Iterator[None]:
        """Trains from where it is; yields after every call that made updates."""
        for epoch in range(self.sampler.epoch, NUM_EPOCHS):
            self.sampler.set_epoch(epoch)
            self.optimizer.set_epoch(epoch)
            for rows in self.sampler:
                if self.minibatch(rows):
                    yield

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer}
        return self.replica.to_host({n: p.state_dict() for n, p in parts.items()})

    def digest(self) -> str:
        """Returns a hash of all bits of parameters and buffers."""
        tensors = self.replica.fetch([*self.model.state_dict().values()])
        parts = [each.contiguous().numpy().tobytes() for each in tensors]
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def digests(
    rank: int, names: tuple[str, ...], is_exact: bool = True
) -> dict[str, tuple[str, list[int]]]:
    """Returns the hash of every run after its end, and the steps run again here."""
    found = {}
    for name in names:
        training = Training(name, is_exact)
        for _ in training.train():
            pass
        found[name] = training.digest(), training.repeated
    return found
