"""RigL's masks, and the weights, have the same bits on any number of replicas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.grab_xla.training import cross_entropies, mlp, samples
from support.xla_replica.replicas import Backend, needs_xla, of_torch_alone

import variable_batch_size as vbs
import xla_replica
from rigl_xla import RigLScheduler

# In minibatches of 4; where there are several replicas some idle.
TRACE, EPOCHS = [8, 4, 20, 16, 4, 12], 2
OPTIONS: dict[str, dict[str, Any]] = {
    "rigl": {"T_end": 10},
    "window": {"delta": 4, "grad_accumulation_n": 3},
    "snfs": {"method": "snfs"},
    "assigned": {},  # gradients, in place of a backward pass
}


class Training:
    """A sparse model whose losses are 10,000 times as large in the sixth step.

    Attributes:
        seen: After each update: masks, weights, and gradients that wait for more.
    """

    def __init__(self, kind: str, is_exact: bool = True, prunes: bool = True) -> None:
        torch.set_num_threads(1)
        self.kind, self.replica = kind, xla_replica.current()
        self.model = model = mlp(torch.float32)
        self.x, self.y = samples(sum(TRACE), torch.float32)
        self.sampler = vbs.CustomSampler(
            self.x, TRACE, minibatch_size=4, on_end="cycle", verbose=False
        )
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        self.optimizer = vbs.LinearRuleOptimizer(
            inner, self.sampler, 8, max_grad_norm=1.0, exact=model if is_exact else None
        )
        self.pruner = self.pruned() if prunes else None
        self.optimizer.attach(self.look)
        self.num_updates, self.seen = 0, []

    def pruned(self, **options: Any) -> RigLScheduler:
        options |= {"dense_allocation": 0.3, "delta": 3, "T_end": 20}
        options |= {"ignore_linear_layers": False, "dense_first": False}
        options |= OPTIONS[self.kind]
        return RigLScheduler(self.model, self.optimizer, skip_step=False, **options)

    def look(self, update: vbs.Update) -> None:
        found = [*self.pruner.masks.values(), *self.model.parameters()]
        gradients = [layer.gradient for layer in self.pruner._layers]
        found += [each for each in gradients if each is not None]
        self.seen += [each.detach().clone() for each in found]
        self.num_updates += 1
        self.replica.sync()

    def run(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)
        self.optimizer.set_epoch(epoch)
        for rows in self.sampler:
            x, y = self.replica.send((self.x[rows], self.y[rows]))
            scale = self.replica.scalar(1e4 if self.num_updates == 5 else 1.0)
            self.backward((cross_entropies(self.model, x, y) * scale).mean())
            self.optimizer.step()

    def backward(self, loss: torch.Tensor) -> None:
        if self.kind != "assigned":
            xla_replica.backward(loss)
            return
        parameters = [*self.model.parameters()]
        for parameter, grad in zip(parameters, xla_replica.grad(loss, parameters)):
            parameter.grad = grad


def train(rank: int, kind: str, is_exact: bool = True):
    """Returns what updates left, minibatches yielded, and the last compilations."""
    del rank
    run = Training(kind, is_exact)
    run.run(0)
    with xla_replica.count(run.replica) as count:
        run.run(1)
        run.replica.sync()
    assert run.pruner.rigl_steps >= 2
    seen = run.replica.fetch(run.seen)
    run.replica.barrier()
    return seen, run.sampler.num_yielded, count.compilations


def check(kind: str, *backends: Backend) -> None:
    """Asserts that all replicas of all backends see the same."""
    runs = [backend.run(train, kind) for backend in backends]
    expected, num_yielded, _ = runs[0][0]
    # Another step than the first is repeated.
    assert num_yielded > EPOCHS * sum(TRACE) // 4 + 2
    for results in runs:
        assert sum(number for _, number, _ in results) == num_yielded
        for seen, _, num_compiled in results:
            assert num_compiled == 0
            assert [*map(torch.equal, seen, expected)] == [True] * len(expected)


@of_torch_alone
@pytest.mark.parametrize("kind", OPTIONS)
def test_masks_and_weights_have_the_same_bits(kind):
    check(kind, *(Backend("cpu", number) for number in (1, 2, 3)))


@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize(
    "kind", ["rigl", *(pytest.param(k, marks=pytest.mark.slow) for k in [*OPTIONS][1:])]
)
def test_masks_and_weights_have_the_same_bits_on_xla(kind):
    check(kind, Backend("xla", 1), Backend("xla", 2))


@pytest.mark.parametrize("kind", ["rigl", "window", "snfs"])
def test_gradients_mean_what_they_do_without_exact_sums(kind):
    (exact, *_), (plain, *_) = (train(0, kind, is_exact) for is_exact in (True, False))
    torch.testing.assert_close(exact, plain, rtol=1e-4, atol=1e-6)


def resumed(rank: int, states: list[Any]):
    """Resumes, then builds the pruner; returns what is left, minibatches yielded."""
    del rank
    run = Training("rigl", prunes=False)
    run.num_updates, run.seen = 8, states[0]
    run.model.load_state_dict(states[1])
    run.optimizer.load_state_dict(states[2])
    run.pruner = run.pruned(state_dict=states[3])
    run.run(1)
    return run.seen, run.sampler.num_yielded


def test_a_resumed_run_has_the_same_bits():
    run, states = Training("rigl"), []
    parts = run.model, run.optimizer, run.pruner

    def save(update: vbs.Update) -> None:
        if update.step == 7:
            found = [run.seen, *(part.state_dict() for part in parts)]
            states.extend(copy.deepcopy([*found, run.sampler.num_yielded]))

    run.optimizer.attach(save)
    for epoch in range(EPOCHS):
        run.run(epoch)
    *_, num_before = states
    results = Backend("cpu", 3).run(resumed, states)
    # No other step is run again: the units of dense gradients are resumed too.
    num_after = sum(number for _, number in results)
    assert num_after == run.sampler.num_yielded - num_before
    for seen, _ in results:
        assert [*map(torch.equal, seen, run.seen)] == [True] * len(run.seen)
