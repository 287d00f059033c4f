"""Every rule, as one row: how it is asked for, and what it must do, written by hand.

The model is a weight vector w with loss g_i . w in minibatch i, so the minibatch
gradients g_i are what we say they are, whatever the weights.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import variable_batch_size as vbs
from support.variable_batch_size import elastic

MINIBATCH = 4
REF = 16
LR, MOMENTUM, DECAY = 2.0**-4, 0.5, 2.0**-5
BETAS, EPS = (0.9, 0.99), 1e-3
NUM_SAMPLES = 256
# Ratios from 1/4 to 4; 8 replicas idle below 32 samples, and at first.
TRACE = (4, 16, 64, 8, 40, 16, 24, 32, 4, 48)
CASE = elastic.Case(
    TRACE, lr=LR, num_samples=NUM_SAMPLES, minibatch_size=MINIBATCH, ref_batchsize=REF
)
SHAPES = ((3, 2), (5,), ())  # the first two in one parameter group, the last in another


@dataclasses.dataclass(frozen=True)
class Row:
    rule: str
    inner: str = "sgd"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    noise: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def in_buffer(self) -> bool:
        return self.rule == "linear-momentum" or "momentum_correction" in self.options

    def lr_factor(self, ratio: float, gain: float) -> float:
        """Returns that of a batch ratio and the gain of a parameter group."""
        powers = {"constant": 0, "linear": 1, "linear-momentum": 1, "power:0.75": 0.75}
        return gain if self.rule == "adascale" else ratio ** powers.get(self.rule, 0.5)

    def beta(self, beta: float, ratio: float) -> float:
        return beta**ratio if "half-life" in self.rule else 1 - ratio * (1 - beta)


INSIDE = {"momentum_correction": True}
PER_SAMPLE = {"decay_per_sample": True}
ROWS = {
    **{rule: Row(rule) for rule in ("constant", "linear", "linear-momentum", "root")},
    "root, inside": Row("root", options=INSIDE),
    "root, decay per sample": Row("root", options=PER_SAMPLE),
    "power": Row("power:0.75"),
    "power, inside, decay": Row("power:0.75", options=INSIDE | PER_SAMPLE),
    "adascale": Row("adascale"),
    "adascale, inside": Row("adascale", options=INSIDE),
    "adascale, decay per sample": Row("adascale", options=PER_SAMPLE),
    "adascale, global": Row("adascale", noise={"per_group": False}),
    "adascale, causal": Row("adascale", noise={"causal": True}),
    "root, adamw": Row("root", "adamw"),
    "root, adamw, decay": Row("root", "adamw", PER_SAMPLE),
    "adam-root": Row("adam-root", "adamw"),
    "adam-root, adam": Row("adam-root", "adam"),
    "adam-root, amsgrad": Row("adam-root", "adam, amsgrad"),
    "half-life": Row("adam-half-life", "adamw"),
    "half-life, amsgrad": Row("adam-half-life", "adamw, amsgrad"),
    "half-life, decay": Row("adam-half-life", "adamw", PER_SAMPLE),
}
ADAM = {"betas": BETAS, "eps": EPS, "weight_decay": DECAY}
SGD = partial(torch.optim.SGD, momentum=MOMENTUM, weight_decay=DECAY)
INNER = {
    "sgd": SGD,
    "sgd, nesterov": partial(SGD, nesterov=True),
    "sgd, maximize": partial(SGD, maximize=True),
    "sgd, nesterov, maximize": partial(SGD, nesterov=True, maximize=True),
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


class Weights(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.each = nn.ParameterList(torch.tensor(w, dtype=dtype) for w in start())

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": [*self.each][:2]}, {"params": [*self.each][2:]}]


def loss_of(model: Weights, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns one with the gradients of a minibatch's first sample."""
    parts = x[0].split([w.numel() for w in model.each])
    return sum((g.view_as(w) * w).sum() for g, w in zip(parts, model.each))


def inputs_of(dtype: torch.dtype) -> torch.Tensor:
    rows = [np.hstack([*map(np.ravel, gradients(n))]) for n in range(NUM_SAMPLES)]
    return torch.tensor(np.array(rows), dtype=dtype)


class Training(elastic.Training):
    def __init__(self, row: Row, trace=TRACE, dtype=torch.float64) -> None:
        inner = INNER[row.inner]
        case = dataclasses.replace(CASE, trace=trace, optimizer=inner, rule=row.rule)
        noise = vbs.NoiseOptions(time_constant=50, **row.noise)
        options = {"noise": vbs.rule_named(row.rule).measured and noise, **row.options}
        made = Weights(dtype), inputs_of(dtype), torch.zeros(NUM_SAMPLES)
        super().__init__(case, loss_of, made=made, **options)

    def result(self) -> dict[str, Any]:
        noise = self.optimizer.noise
        return {
            "weights": self.weights(),
            "lrs": [tuple(map(float, update.lr)) for update in self.updates],
            "progress": noise.progress if noise else None,
        }


def train(rank: int, name: str, epochs: int, **options: Any) -> dict[str, Any]:
    """Returns what came of epochs, and what was counted in the last one."""
    training = Training(ROWS[name], **options)
    return {"count": training.counted_run(epochs), **training.result()}


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
        # Of both groups: averages of tr Sigma and |G|^2, and the weight of all of them.
        self.averages = np.zeros((2, 3))
        self.progress = 0.0
        matrix, vector, number = start()
        self.groups = [np.hstack([matrix.ravel(), vector]), np.atleast_1d(number)]
        self.velocity: list[Any] = [None, None]
        self.moments = [np.zeros((2, len(group))) for group in self.groups]
        self.largest = [np.zeros(len(group)) for group in self.groups]  # of amsgrad
        self.moment_weights = np.zeros((2, 2))
        self.lrs: list[tuple[float, ...]] = []

    def estimates(self) -> np.ndarray:
        return self.averages[:, :2] / np.maximum(self.averages[:, 2:], 1e-300)

    def gains(self, batch_size: int, found: list[np.ndarray]) -> list[float]:
        """Returns those of the minibatch gradients ``(n, d)`` of each group."""
        estimates = self.estimates()
        n = len(found[0])
        for average, each in zip(self.averages, found):
            if n > 1:
                mean, kept = each.mean(0), math.exp(-n / 50)
                variance = ((each - mean) ** 2).sum() / (n - 1)
                new = np.array([MINIBATCH * variance, mean @ mean - variance / n, 1])
                average[:] = kept * average + (1 - kept) * new
        if not self.row.noise.get("causal"):
            estimates = self.estimates()
        overall = gain_of(sum(estimates), batch_size, REF)
        self.progress += overall
        gains = [gain_of(each, batch_size, REF) for each in estimates]
        if self.row.noise.get("per_group") is False:
            gains = [overall, overall]
        return gains

    def step(self, rows: np.ndarray) -> None:
        parts = [gradients(minibatch[0]) for minibatch in rows.reshape(-1, MINIBATCH)]
        found = [np.array([np.hstack([p[0].ravel(), p[1]]) for p in parts])]
        found.append(np.array([np.atleast_1d(p[2]) for p in parts]))
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
        if self.row.inner.startswith("sgd"):
            sign = -1 if "maximize" in self.row.inner else 1
            gradient = sign * gradient + decay * weight
            if self.row.in_buffer:
                gradient, lr = factor * gradient, LR
            old = self.velocity[index]
            new = gradient if old is None else MOMENTUM * old + gradient
            self.velocity[index] = new
            if "nesterov" in self.row.inner:
                new = gradient + MOMENTUM * new
            self.groups[index] = weight - lr * new
            return
        betas, eps = np.array(BETAS), EPS
        if self.row.rule.startswith("adam-"):
            betas = np.array([self.row.beta(b, ratio) for b in BETAS])
            eps = EPS / math.sqrt(ratio)
        if self.row.inner.startswith("adamw"):
            weight = weight * (1 - lr * decay)
        else:
            gradient = gradient + decay * weight
        moments = self.moments[index]
        for moment, beta, new in zip(moments, betas, (gradient, gradient**2)):
            moment[:] = beta * moment + (1 - beta) * new
        weights = self.moment_weights[index]
        weights[:] = betas * weights + 1 - betas
        square = moments[1]
        if "amsgrad" in self.row.inner:
            square = self.largest[index] = np.maximum(self.largest[index], square)
        mean, square = moments[0] / weights[0], square / weights[1]
        self.groups[index] = weight - lr * mean / (np.sqrt(square) + eps)

    def weights(self) -> list[np.ndarray]:
        flat, rest = self.groups
        return [flat[:6].reshape(3, 2), flat[6:], rest.reshape(())]


def by_hand(row: Row, epochs: int) -> ByHand:
    run = ByHand(row)
    for _, rows in elastic.batches(dataclasses.replace(CASE, epochs=epochs)):
        run.step(rows.numpy())
    return run
