"""Minibatches with weights: a step's gradient is the mean over all of its tokens."""

import itertools
import logging
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.variable_batch_size import elastic
from support.variable_batch_size.elastic import Case, batches, large_batch_run
from support.variable_batch_size.wrapping import one_weight
from support.xla_replica.replicas import XLA_BACKENDS, backends
from torch import nn

import xla_replica

VOCABULARY, LENGTH, PADDING = 11, 7, -100
NUM_SAMPLES = 96
# Batches from one minibatch to eight; several replicas are idle, two of them at first.
TRACE = (4, 24, 12, 32, 8, 16)
CASE = Case(TRACE, 3, num_samples=NUM_SAMPLES)
BY_SAMPLES, BY_TOKENS = {"ref_batchsize": 16}, {"ref_weight": 64.0}
RUNS = {
    "by samples": (CASE, BY_SAMPLES),
    "by samples, clipped": (replace(CASE, rule="root", max_grad_norm=0.05), BY_SAMPLES),
    "by tokens": (CASE, BY_TOKENS),
    "by tokens, adamw": (replace(CASE, rule="root", optimizer="adamw"), BY_TOKENS),
}


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
    scores = model(x).flatten(0, 1)
    return F.cross_entropy(scores, y.flatten(), reduction="sum", ignore_index=PADDING)


class Training(elastic.Training):
    def __init__(self, name: str, **changes) -> None:
        case, options = RUNS[name]
        with xla_replica.current().seeded(0):
            made = make_model(), *make_texts()
        self.has_numbers = name in ("by samples", "by tokens, adamw")
        options = {"reduction": "sum", "ref_batchsize": None, **options, **changes}
        super().__init__(case, loss_sum, made=made, **options)

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
        count, updates = training.counted_run(3), training.updates
        told = [float(number) for u in updates for number in (u.weight, u.lr[0])]
        found[name] = training.weights(), told, count
    return found


def mean_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return loss_sum(model, x, y) / (y != PADDING).sum()


def one_process(name: str) -> tuple[list[torch.Tensor], list[float]]:
    """Trains in plain torch, with all tokens of a step in one batch."""
    (case, options), (inputs, targets) = RUNS[name], make_texts()
    with xla_replica.seeded(0):
        made = make_model(), inputs, targets
    counts = [int((targets[rows] != PADDING).sum()) for _, rows in batches(case)]
    ratios = [count / options.get("ref_weight", math.inf) for count in counts]
    weights, updates = large_batch_run(case, mean_loss, made, ratios=(*ratios,))
    told = zip(counts, (lr for *_, [lr] in updates))
    return weights, [*itertools.chain(*told)]


@pytest.mark.parametrize("backend", [*backends("cpu", 1, 2), *XLA_BACKENDS])
def test_ragged_batches_equal_one_process_with_all_tokens(backend):
    for outcome in backend.run(elastic_runs, timeout=150):
        for name, (found, own, count) in outcome.items():
            weights, told = one_process(name)
            torch.testing.assert_close(found, weights, rtol=1e-12, atol=1e-12)
            assert own == pytest.approx(told, rel=1e-12), name
            # After the first epochs nothing is compiled or read back.
            assert count == (0, 0, 0)


@pytest.mark.parametrize(("trace", "weights", "options", "expected"), [
    # A step of two minibatches, one of them padding, is a step of the other one.
    ([8], (5, 0), {}, (1.0, 0.5)),
    ([8], (0, 5), {}, (1.0, 0.5)),
    # A step of nothing changes nothing.
    ([4, 4], (0, 2), {"ref_batchsize": 4}, (1.0, 0.5)),
    ([4, 4], (0, 2), {"ref_weight": 4, "noise": True}, (1.0, 0.75)),
])  # fmt: skip
def test_a_minibatch_of_weight_zero_adds_nothing(trace, weights, options, expected):
    parameter, sampler, optimizer = one_weight(
        trace, "linear" if options else "constant", reduction="sum", **options
    )
    for weight, value, _ in zip(weights, expected, sampler):
        (parameter.sum() * weight).backward()
        optimizer.step(weight=weight)
        assert torch.equal(parameter.detach(), torch.full((3,), value))


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
