"""RigL's masks, and the weights, have the same bits on any number of replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.variable_batch_size import exact
from support.xla_replica.replicas import Backend
from torch import nn

import variable_batch_size as vbs
import xla_replica
from rigl_xla import RigLScheduler

OPTIONS: dict[str, dict[str, Any]] = {
    "rigl": {"T_end": 10},
    "window": {"delta": 4, "grad_accumulation_n": 3},
    "snfs": {"method": "snfs"},
    "assigned": {},  # gradients, in place of a backward pass
}
RUN = exact.Run(
    lambda: exact.perceptron(nn.Tanh()), options={"max_grad_norm": 1.0},
    trace=(2, 1, 5, 4, 1, 3), scales={5: 1e4}, zero_step=None,
)  # fmt: skip


class Pruned(exact.Training):
    """A run of a sparse model, whose pruner is built after a state is loaded.

    Attributes:
        seen: After each update: masks, weights, and gradients that wait for more.
    """

    def __init__(
        self, kind: str, is_exact: bool = True, saved: dict[str, Any] | None = None
    ) -> None:
        super().__init__(RUN, is_exact, saved=saved)
        self.is_assigned, self.seen = kind == "assigned", []
        options = {"dense_allocation": 0.3, "delta": 3, "T_end": 20, **OPTIONS[kind]}
        self.pruner = RigLScheduler(
            self.model, self.optimizer, skip_step=False, ignore_linear_layers=False,
            dense_first=False, state_dict=saved and saved["pruner"], **options,
        )  # fmt: skip
        self.optimizer.attach(self.look)

    def look(self, update: vbs.Update) -> None:
        gradients = [layer.gradient for layer in self.pruner._layers]
        found = [*self.pruner.masks.values(), *self.model.parameters(), *gradients]
        self.seen += [x.detach().clone() for x in found if x is not None]
        self.replica.sync()

    def backward(self, losses: torch.Tensor) -> None:
        if not self.is_assigned:
            xla_replica.backward(losses.mean())
            return
        parameters = [*self.model.parameters()]
        grads = xla_replica.grad(losses.mean(), parameters)
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad

    def state(self) -> dict[str, Any]:
        return {**super().state(), "pruner": self.pruner.state_dict()}


def train(rank: int, kind: str, saved: dict[str, Any] | None = None) -> exact.Outcome:
    """Returns the outcome of what updates left."""
    del rank
    run = Pruned(kind, saved=saved).finish()
    assert run.pruner.rigl_steps >= 2
    return run.outcome(run.seen)


@exact.on_all_replicas(OPTIONS)
def test_masks_and_weights_have_the_same_bits(kind, device, numbers):
    exact.assert_same_bits(*(Backend(device, n).run(train, kind) for n in numbers))


@pytest.mark.parametrize("kind", ["rigl", "window", "snfs"])
def test_gradients_mean_what_they_do_without_exact_sums(kind):
    mine, plain = (Pruned(kind, each).finish().seen for each in (True, False))
    torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_has_the_same_bits():
    run, saved = Pruned("rigl"), []
    for _ in run.train():
        saved.append((run.state(), len(run.seen), run.sampler.num_yielded))
    state, num_seen, num_yielded = saved[7]
    results = Backend("cpu", 3).run(train, "rigl", state)
    # No other step is run again: the units of dense gradients are resumed too.
    expected = run.outcome(run.seen[num_seen:])
    assert {each.digest for each in results} == {expected.digest}
    num_after = sum(each.num_yielded for each in results)
    assert num_after == expected.num_yielded - num_yielded
