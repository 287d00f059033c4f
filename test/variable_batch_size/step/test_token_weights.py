"""Minibatches with weights: a step's gradient is the mean over all of its tokens."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.variable_batch_size import elastic
from support.variable_batch_size.elastic import OPTIMIZERS, Case, batches
from support.variable_batch_size.wrapping import one_weight
from support.xla_replica.replicas import TORCHTPU, backends, row
from torch import nn

import xla_replica
from variable_batch_size import gradient_noise

VOCABULARY, LENGTH, PADDING = 11, 7, -100
NUM_SAMPLES = 96
# Batches from one minibatch to eight; several replicas are idle, two of them at first.
TRACE = (4, 24, 12, 32, 8, 16)


def run(reference: dict[str, Any], rule: str = "linear", **changes):
    """Returns a case, and options of the optimizer."""
    options = {"reduction": "sum", "ref_batchsize": None, **reference}
    case = Case(TRACE, 3, rule=rule, num_samples=NUM_SAMPLES, **changes)
    return case, options


RUNS = {
    "by samples": run({"ref_batchsize": 16}),
    "by samples, clipped": run({"ref_batchsize": 16}, "root", max_grad_norm=0.05),
    "by tokens": run({"ref_weight": 64}),
    "by tokens, in the buffer": run({"ref_weight": 64}, "linear-momentum"),
    "by tokens, decay": run({"ref_weight": 64.0, "decay_per_sample": True}, "root"),
    "by tokens, adamw": run({"ref_weight": 64}, "root", optimizer="adamw"),
}
ADASCALE = run({}, "adascale", optimizer="sgd-heavy-ball")


def make_model() -> nn.Module:
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, VOCABULARY)
    return nn.Sequential(nn.Embedding(VOCABULARY, 6), *layers).double()


def make_texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and padded targets, ``(N, T)``, of texts of 0 to T tokens."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_SAMPLES, LENGTH)
    inputs = torch.randint(0, VOCABULARY, shape, generator=generator)
    targets = torch.randint(0, VOCABULARY, shape, generator=generator)
    lengths = torch.randint(0, LENGTH + 1, (NUM_SAMPLES, 1), generator=generator)
    assert {0, LENGTH} <= {*lengths.flatten().tolist()}  # no mean of means is right
    return inputs, targets.where(torch.arange(LENGTH) < lengths, PADDING)


def loss_sum(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        model(x).flatten(0, 1), y.flatten(), reduction="sum", ignore_index=PADDING
    )


class Training(elastic.Training):
    """Trains a language model; weights are numbers or tensors."""

    def __init__(self, name: str, texts=None, **changes) -> None:
        case, options = ADASCALE if name == "adascale" else RUNS[name]
        with xla_replica.current().seeded(0):
            made = (make_model(), *(texts or make_texts()))
        self.has_numbers = name in ("by samples", "by tokens, adamw")
        super().__init__(case, loss_sum, made=made, **options | changes)

    def minibatch(self, x: torch.Tensor, y: torch.Tensor) -> int:
        self.loss(self.model, x, y).backward()
        if self.has_numbers:
            y = self.targets[self.samples[-1][-1]]
            return self.optimizer.step(weight=int((y != PADDING).sum()))
        return self.optimizer.step(weight=(y != PADDING).sum())


def elastic_runs(rank: int) -> dict[str, tuple]:
    found = {}
    for name in RUNS:
        training = Training(name)
        for epoch in range(2):
            training.epoch(epoch)
        count = training.counted_epoch(2)
        updates = training.updates
        told = [float(number) for u in updates for number in (u.weight, u.lr[0])]
        found[name] = training.weights(), told, count
    return found


@functools.cache
def one_process(name: str) -> tuple[list[torch.Tensor], list[float]]:
    """Trains in plain torch, with all tokens of a step in one batch."""
    with xla_replica.seeded(0):
        model = make_model()
    inputs, targets = make_texts()
    case, options = RUNS[name]
    lr, told = case.lr, []
    optimizer = OPTIMIZERS[case.optimizer](model.parameters(), lr)
    for _, rows in batches(case):
        optimizer.zero_grad()
        num_tokens = int((targets[rows] != PADDING).sum())
        (loss_sum(model, inputs[rows], targets[rows]) / num_tokens).backward()
        if case.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
        ratio = len(rows) / (options["ref_batchsize"] or math.inf)
        ratio = ratio or num_tokens / options["ref_weight"]
        factor = math.sqrt(ratio) if case.rule == "root" else ratio
        [group] = optimizer.param_groups
        decay = group["weight_decay"]
        if case.rule == "linear-momentum":
            for parameter in model.parameters():
                parameter.grad.add_(parameter.detach(), alpha=decay).mul_(factor)
            group["weight_decay"] = 0.0
        else:
            group["lr"] = lr * factor
        if "decay_per_sample" in options:
            group["weight_decay"] = decay * ratio / factor
        optimizer.step()
        group["weight_decay"] = decay
        told += [num_tokens, lr * factor]
    return [p.detach() for p in model.parameters()], told


@pytest.fixture(
    scope="module", params=[*backends("cpu", 1, 2), *backends("xla", 2, slow=(1, 8))]
)
def outcomes(request):
    return request.param.run(elastic_runs, timeout=150)


@pytest.mark.parametrize("name", RUNS)
def test_ragged_batches_equal_one_process_with_all_tokens(outcomes, name):
    weights, told = one_process(name)
    for outcome in outcomes:
        found, own, count = outcome[name]
        torch.testing.assert_close(found, weights, rtol=1e-12, atol=1e-12)
        assert own == pytest.approx(told, rel=1e-12)
        # After the first epochs nothing is compiled or read back.
        assert count == (0, 0, 0)


def test_a_minibatch_of_weight_zero_adds_nothing():
    """A step of two minibatches, one of them padding, is a step of the other one."""
    for weights in ((5.0, 0.0), (0.0, 5.0)):
        parameter, sampler, optimizer = one_weight([8], reduction="sum")
        for weight, _ in zip(weights, sampler):
            (parameter.sum() * weight).backward()
            optimizer.step(weight=weight)
        assert torch.equal(parameter.detach(), torch.full((3,), 0.5))


@pytest.mark.parametrize("reference", [{"ref_weight": 4}, {"ref_batchsize": 4}])
def test_a_step_of_weight_zero_has_a_gradient_of_zero(reference):
    has_noise = "ref_weight" in reference
    parameter, sampler, optimizer = one_weight(
        [4, 4], "linear", reduction="sum", noise=has_noise, **reference
    )
    for weight, _ in zip((0, 2), sampler):
        before = parameter.detach().clone()
        (parameter.sum() * weight).backward()
        optimizer.step(weight=weight)
        assert torch.isfinite(parameter).all()
        assert torch.equal(parameter, before) == (weight == 0)


def test_a_loss_without_any_weight_has_no_mean():
    parameter, sampler, optimizer = one_weight([4, 4], reduction="sum")
    before = parameter.detach().clone()
    next(iter(sampler))
    parameter.sum().backward()
    with pytest.raises(ValueError, match="sum to zero, but its gradient is not zero"):
        optimizer.step(weight=0)
    assert torch.equal(parameter, before)


def test_the_estimates_are_unbiased_whatever_the_weights():
    """Every outcome of six tokens, each of gradient m + 1 or m - 1, is averaged."""
    mean, sizes = 0.75, (1, 3, 2)
    total = torch.tensor([float(sum(sizes))], dtype=torch.float64)
    count = torch.tensor([float(len(sizes))], dtype=torch.float64)
    matrix = gradient_noise.weighted_coefficients(count, total)
    estimates = []
    for signs in itertools.product((-1.0, 1.0), repeat=sum(sizes)):
        tokens = iter(mean + sign for sign in signs)
        sums = [sum(next(tokens) for _ in range(size)) for size in sizes]
        squares = total * 0 + sum(s**2 / size for s, size in zip(sums, sizes))
        mean_square = (sum(sums) / total) ** 2
        estimates.append(gradient_noise.estimate(squares, mean_square, matrix))
    variance, square, _ = torch.stack(estimates).mean(0)[:, 0].tolist()
    assert variance == pytest.approx(1.0, rel=1e-12)
    assert square == pytest.approx(mean**2, rel=1e-12)


class Measured(Training):
    """AdaScale where every sample is one token, with and without weights."""

    def __init__(self, weighted: bool) -> None:
        inputs, targets = make_texts()
        texts = inputs[:, :1], targets.clamp(min=0)[:, :1]
        self.weighted = weighted
        options = {"ref_weight": 16} if weighted else {"ref_batchsize": 16}
        options["reduction"] = "sum" if weighted else "mean"
        super().__init__("adascale", texts, **options)

    def minibatch(self, x: torch.Tensor, y: torch.Tensor) -> int:
        if self.weighted:
            return super().minibatch(x, y)
        (self.loss(self.model, x, y) / 4).backward()
        return self.optimizer.step()


def measured(rank: int) -> list[tuple[list[float], list[torch.Tensor]]]:
    """Returns measurements and weights of a run without weights, and one with them."""
    found = []
    for training in (Measured(False), Measured(True)):
        weights, optimizer = training.train(), training.optimizer
        found.append(([*optimizer.noise.measure(), optimizer.current_lr()], weights))
    return found


@pytest.mark.parametrize(
    "backend", [row("cpu", 1), row("cpu", 3), row("xla", 2), *TORCHTPU]
)
def test_adascale_with_equal_weights_is_adascale(backend):
    outcomes = backend.run(measured)
    [numbers, weights] = outcomes[0][0]
    for _, found in outcomes:
        assert found[0] == pytest.approx(numbers, rel=1e-10)
        torch.testing.assert_close(found[1], weights, rtol=1e-11, atol=1e-12)


def test_the_log_tells_tokens(caplog):
    training = Training("by tokens", log_steps=1)
    with caplog.at_level(logging.INFO, logger="variable_batch_size"):
        training.epoch(0)
    _, told = one_process("by tokens")
    first = caplog.records[0].getMessage()
    assert f"batch size 4, weight {told[0]:g}, learning rate {told[1]:.6g}" in first
    assert training.optimizer.current_lr() == pytest.approx(told[2 * 5 + 1])


def test_loading_a_state_forgets_the_weight_of_the_step_under_way():
    training, ends = Training("by tokens"), []
    state, sampler = training.state(), training.sampler
    for interrupted in (False, True):
        training.load(state)
        if interrupted:
            sampler.set_epoch(0)
            training.optimizer.set_epoch(0)
            for rows in itertools.islice(sampler, 3):  # of 1 and then 6
                x, y = training.inputs[rows], training.targets[rows]
                loss_sum(training.model, x, y).backward()
                training.optimizer.step(weight=1000)
            training.load(state)
        training.epoch(0)
        ends.append([weight.clone() for weight in training.weights()])
    torch.testing.assert_close(*ends, rtol=0, atol=0)
