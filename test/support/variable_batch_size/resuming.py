"""Runs that are saved after every update, and resumed on other replicas."""

import functools
from typing import Any

import torch
from torch import nn

from support.variable_batch_size.elastic import Case, Training

# Two epochs of 32 minibatches, in steps of 1 to 9: some steps have idle replicas, the
# first and last of an epoch among them, and some have several substeps.
CASE = Case((4, 36, 8, 4, 12, 32, 20, 4), epochs=2, exact=True)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns a loss whose gradients are multiples of 1/64: sums are never rounded.

    Inputs are integers, and residuals are rounded to sixteenths. After any number of
    steps, other samples or weights would change the bits of the result.
    """
    outputs = model(x)[:, 0]
    residuals = torch.round((outputs.detach() - y) * 16) / 16
    return (residuals * outputs).sum() / len(x)


EXACT = functools.partial(Training, loss=loss_of)


def run(rank: int, case: Case, state=None, saves=True, build=EXACT) -> dict[str, Any]:
    """Trains from ``state`` to the end; returns weights, samples, steps and states."""
    training = build(case)
    states: list[dict[str, Any]] = []
    if state is not None:
        training.load(state)
    if saves:
        states.append(training.state())
        training.optimizer.attach(lambda update: states.append(training.state()))
    return {
        "weights": training.train(),
        "samples": training.samples,
        "updates": training.steps,
        "states": states if training.replica.is_primary else [],
    }


def resume_from_each(rank: int, case: Case, states: list[Any], build=EXACT):
    return [run(rank, case, state, saves=False, build=build) for state in states]


def global_samples(outcomes: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    """Returns (step, samples) of every minibatch of all replicas, in their order."""
    everything = sorted(one for outcome in outcomes for one in outcome["samples"])
    return [(step, samples) for step, _, _, samples in everything]


def assert_equal(received: Any, expected: Any) -> None:
    """Asserts that two states are equal bit for bit, in tensors and other values."""
    assert type(received) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(received, expected)
    elif isinstance(expected, dict):
        assert received.keys() == expected.keys()
        assert_equal([received[key] for key in expected], [*expected.values()])
    elif isinstance(expected, (list, tuple)):
        assert len(received) == len(expected)
        for one, other in zip(received, expected):
            assert_equal(one, other)
    else:
        assert received == expected
