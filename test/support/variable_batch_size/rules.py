"""Every rule, as one row: how it is asked for, and what it must do, written by hand.

The model is a weight vector w with loss g_i . w in minibatch i, so the minibatch
gradients g_i are what we say they are, whatever the weights.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import torch

import variable_batch_size as vbs
import xla_replica

MINIBATCH = 4
REF = 16
LR, MOMENTUM, DECAY = 2.0**-4, 0.5, 2.0**-5
BETAS, EPS = (0.9, 0.99), 1e-3
NUM_SAMPLES = 256
# Ratios from 1/4 to 4; 8 replicas idle below 32 samples, and at first.
TRACE = (4, 16, 64, 8, 40, 16, 24, 32, 4, 48)
SHAPES = ((3, 2), (5,), ())  # the first two in one parameter group, the last in another


@dataclasses.dataclass(frozen=True)
class Row:
    """A rule under test.

    ``lr_factor`` takes the batch ratio and the gain of a parameter group.
    """

    rule: str
    lr_factor: Any
    inner: str = "sgd"
    beta: Any = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    noise: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def in_buffer(self) -> bool:
        return self.rule == "linear-momentum" or "momentum_correction" in self.options


def _same(ratio: float, gain: float) -> float:
    return 1.0


def _linear(ratio: float, gain: float) -> float:
    return ratio


def _root(ratio: float, gain: float) -> float:
    return ratio**0.5


def _power(ratio: float, gain: float) -> float:
    return ratio**0.75


def _gain(ratio: float, gain: float) -> float:
    return gain


def _sde(beta: float, ratio: float) -> float:
    return 1 - ratio * (1 - beta)


def _half_life(beta: float, ratio: float) -> float:
    return beta**ratio


INSIDE = {"momentum_correction": True}
PER_SAMPLE = {"decay_per_sample": True}
ROWS = {
    "constant": Row("constant", _same),
    "linear": Row("linear", _linear),
    "linear-momentum": Row("linear-momentum", _linear),
    "root": Row("root", _root),
    "root, inside": Row("root", _root, options=INSIDE),
    "root, decay per sample": Row("root", _root, options=PER_SAMPLE),
    "power": Row("power:0.75", _power),
    "power, inside, decay": Row("power:0.75", _power, options=INSIDE | PER_SAMPLE),
    "adascale": Row("adascale", _gain),
    "adascale, inside": Row("adascale", _gain, options=INSIDE),
    "adascale, decay per sample": Row("adascale", _gain, options=PER_SAMPLE),
    "adascale, global": Row("adascale", _gain, noise={"per_group": False}),
    "adascale, causal": Row("adascale", _gain, noise={"causal": True}),
    "adascale, compat": Row("adascale", _gain, noise={"compat": "reference"}),
    "root, adamw": Row("root", _root, "adamw"),
    "root, adamw, decay": Row("root", _root, "adamw", options=PER_SAMPLE),
    "adam-root": Row("adam-root", _root, "adamw", _sde),
    "adam-root, adam": Row("adam-root", _root, "adam", _sde),
    "adam-root, amsgrad": Row("adam-root", _root, "adam, amsgrad", _sde),
    "half-life": Row("adam-half-life", _root, "adamw", _half_life),
    "half-life, amsgrad": Row("adam-half-life", _root, "adamw, amsgrad", _half_life),
    "half-life, decay": Row("adam-half-life", _root, "adamw", _half_life, PER_SAMPLE),
}
ADAM = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
INNER = {
    "sgd": partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, weight_decay=DECAY),
    "adamw": partial(torch.optim.AdamW, **ADAM),
    "adam": partial(torch.optim.Adam, **ADAM),
    "adamw, amsgrad": partial(torch.optim.AdamW, **ADAM, amsgrad=True),
    "adam, amsgrad": partial(torch.optim.Adam, **ADAM, amsgrad=True),
}


def gradients(sample: int) -> list[np.ndarray]:
    """Returns the gradients of the minibatch that begins with ``sample``: noisy."""
    random = np.random.default_rng(sample)
    return [0.3 + 0.5 * random.normal(size=shape) for shape in SHAPES]


def start() -> list[np.ndarray]:
    return [np.linspace(-1, 1, math.prod(s)).reshape(s) for s in SHAPES]


class Training:
    """A run on one replica that can be stopped and resumed."""

    def __init__(
        self,
        row: Row,
        trace: tuple[int, ...] = TRACE,
        dtype: torch.dtype = torch.float64,
        ref: int = REF,
    ) -> None:
        self.replica = xla_replica.current()
        self.dtype = dtype
        self.weights = [
            torch.nn.Parameter(torch.tensor(w, dtype=dtype).to(self.replica.device))
            for w in start()
        ]
        self.sampler = vbs.CustomSampler(
            dataset_size=NUM_SAMPLES, trace=trace, minibatch_size=MINIBATCH,
            on_end="cycle", verbose=False,
        )  # fmt: skip
        groups = [{"params": self.weights[:2]}, {"params": self.weights[2:]}]
        noise = vbs.NoiseOptions(time_constant=50, **row.noise)
        self.optimizer = vbs.ElasticOptimizer(
            INNER[row.inner](groups),
            self.sampler,
            row.rule,
            ref,
            noise=noise if vbs.rule_named(row.rule).measured else False,
            **row.options,
        )
        self.lrs: list[tuple[Any, ...]] = []
        self.optimizer.attach(lambda update: self.lrs.append(update.lr))

    def epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)
        self.optimizer.set_epoch(epoch)
        batches = [
            [torch.tensor(g, dtype=self.dtype) for g in gradients(minibatch[0])]
            for minibatch in self.sampler
        ]
        for batch in self.replica.loader(batches):
            loss = sum((g * w).sum() for g, w in zip(batch, self.weights))
            loss.backward()
            self.optimizer.step()

    def result(self) -> dict[str, Any]:
        fetch = self.replica.fetch
        lrs = [
            tuple(x.item() if isinstance(x, torch.Tensor) else x for x in fetched)
            for fetched in (
                fetch(list(each)) if isinstance(each[0], torch.Tensor) else each
                for each in self.lrs
            )
        ]
        noise = self.optimizer.noise
        return {
            "weights": fetch([w.detach() for w in self.weights]),
            "lrs": lrs,
            "progress": noise.progress if noise else None,
        }


def train(rank: int, name: str, epochs: int, **options: Any) -> dict[str, Any]:
    training = Training(ROWS[name], **options)
    for epoch in range(epochs):
        training.epoch(epoch)
    return training.result()


class Statistics:
    """tr Sigma and |G|^2 of one parameter group, written in the plainest way."""

    def __init__(self) -> None:
        self.sums = np.zeros(3)

    def add(self, found: np.ndarray) -> None:
        """Adds the minibatch gradients, ``(n, d)``, of one step."""
        n, mean = len(found), found.mean(0)
        kept = math.exp(-n / 50)
        if n > 1:
            variance = ((found - mean) ** 2).sum() / (n - 1)
            new = np.array([MINIBATCH * variance, mean @ mean - variance / n, 1])
            self.sums = kept * self.sums + (1 - kept) * new

    def estimate(self) -> np.ndarray:
        return self.sums[:2] / self.sums[2] if self.sums[2] else np.zeros(2)


def gain_of(estimate: np.ndarray, batch_size: float, base: float) -> float:
    """Returns AdaScale's gain: sigma^2 = tr Sigma / base, S = batch_size / base."""
    s = batch_size / base
    sigma2, mu2 = max(estimate[0], 0) / base, max(estimate[1], 0)
    if sigma2 == mu2 == 0:
        return min(1, s)
    return (sigma2 + mu2) / (sigma2 / s + mu2)


class ByHand:
    """The whole run in float64 NumPy, as one obvious loop."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.statistics = [Statistics(), Statistics()]
        self.progress = 0.0
        self.groups = [np.concatenate([w.ravel() for w in start()[:2]]), start()[2]]
        self.groups = [np.atleast_1d(group) for group in self.groups]
        self.velocity: list[Any] = [None, None]
        self.moments = [np.zeros((2, len(group))) for group in self.groups]
        self.largest = [np.zeros(len(group)) for group in self.groups]  # of amsgrad
        self.moment_weights = np.zeros((2, 2))
        self.lrs: list[tuple[float, ...]] = []

    def gains(self, batch_size: int, found: list[np.ndarray]) -> list[float]:
        noise = self.row.noise
        base = MINIBATCH if noise.get("compat") else REF
        before = [s.estimate() for s in self.statistics]
        for statistics, each in zip(self.statistics, found):
            statistics.add(each)
        after = [s.estimate() for s in self.statistics]
        estimates = before if noise.get("causal") else after
        overall = gain_of(sum(estimates), batch_size, base)
        self.progress += overall
        per_group = [gain_of(e, batch_size, base) for e in estimates]
        if noise.get("per_group") is False:
            per_group = [overall, overall]
        return [gain * base / REF for gain in per_group]

    def step(self, rows: np.ndarray) -> None:
        parts = [gradients(minibatch[0]) for minibatch in rows.reshape(-1, MINIBATCH)]
        found = [
            np.array([np.concatenate([p[0].ravel(), p[1]]) for p in parts]),
            np.array([np.atleast_1d(p[2]) for p in parts]),
        ]
        ratio = len(rows) / REF
        gains = self.gains(len(rows), found)
        self.lrs.append(())
        for index, gain in enumerate(gains):
            factor = self.row.lr_factor(ratio, gain)
            self.lrs[-1] += (LR * factor,)
            decay = DECAY
            if "decay_per_sample" in self.row.options:
                decay *= ratio / factor
            self.update(index, found[index].mean(0), ratio, factor, decay)

    def update(self, index: int, gradient: np.ndarray, ratio, factor, decay) -> None:
        weight, lr = self.groups[index], LR * factor
        if self.row.inner == "sgd":
            gradient = gradient + decay * weight
            if self.row.in_buffer:
                gradient, lr = factor * gradient, LR
            old = self.velocity[index]
            new = gradient if old is None else MOMENTUM * old + gradient
            self.velocity[index] = new
            self.groups[index] = weight - lr * new
            return
        betas, eps = np.array(BETAS), EPS
        if self.row.beta:
            betas = np.array([self.row.beta(b, ratio) for b in BETAS])
            eps = EPS / math.sqrt(ratio)
        if self.row.inner.startswith("adamw"):
            weight = weight * (1 - lr * decay)
        else:
            gradient = gradient + decay * weight
        moments = self.moments[index]
        moments[0] = betas[0] * moments[0] + (1 - betas[0]) * gradient
        moments[1] = betas[1] * moments[1] + (1 - betas[1]) * gradient**2
        weights = self.moment_weights[index]
        weights[:] = betas * weights + 1 - betas
        square = moments[1]
        if "amsgrad" in self.row.inner:
            square = self.largest[index] = np.maximum(self.largest[index], square)
        mean, square = moments[0] / weights[0], square / weights[1]
        self.groups[index] = weight - lr * mean / (np.sqrt(square) + eps)

    def weights(self) -> list[np.ndarray]:
        flat, rest = self.groups[0], self.groups[1]
        return [flat[:6].reshape(3, 2), flat[6:], rest.reshape(())]


def by_hand(name: str, epochs: int) -> ByHand:
    run, step = ByHand(ROWS[name]), 0
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(42 + epoch)
        order = torch.randperm(NUM_SAMPLES, generator=generator).numpy()
        used = 0
        while used + TRACE[step % len(TRACE)] <= NUM_SAMPLES:
            size = TRACE[step % len(TRACE)]
            run.step(order[used : used + size])
            used, step = used + size, step + 1
    return run
