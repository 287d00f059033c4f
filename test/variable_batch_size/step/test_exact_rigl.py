"""RigL's masks, and the weights, have the same bits on any number of replicas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.xla_replica.replicas import Backend, needs_xla
from torch import nn

import variable_batch_size as vbs
import xla_replica
from rigl_xla import RigLScheduler

# In minibatches of 4; where there are several replicas some idle.
TRACE, MINIBATCH, EPOCHS = [8, 4, 20, 16, 4, 12], 4, 2
NUM_MINIBATCHES = EPOCHS * sum(TRACE) // MINIBATCH
OPTIONS: dict[str, dict[str, Any]] = {
    "rigl": {"T_end": 10},
    "window": {"delta": 4, "grad_accumulation_n": 3},
    "snfs": {"method": "snfs"},
    "assigned": {},
    "assigned and masked": {},
}


class Training:
    """A sparse model whose losses are 10,000 times as large in the sixth step.

    Attributes:
        seen: After each update: masks, weights, and gradients that wait for more.
    """

    def __init__(self, kind: str, is_exact: bool = True) -> None:
        torch.set_num_threads(1)
        self.kind, self.replica = kind, xla_replica.current()
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(sum(TRACE), 12, generator=generator)
        self.y = torch.randint(0, 5, (len(self.x),), generator=generator)
        with self.replica.seeded(0):
            model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 5))
        self.model = model.to(self.replica.device)
        self.sampler = vbs.CustomSampler(
            self.x, TRACE, minibatch_size=MINIBATCH, on_end="cycle", verbose=False
        )
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        self.optimizer = vbs.LinearRuleOptimizer(
            inner, self.sampler, 8, max_grad_norm=1.0, exact=model if is_exact else None
        )
        self.pruner = self.pruned()
        self.optimizer.attach(self.look)
        self.seen: list[list[torch.Tensor]] = []

    def pruned(self, **options: Any) -> RigLScheduler:
        options |= {"dense_allocation": 0.3, "delta": 3, "T_end": 20} | OPTIONS[
            self.kind
        ]
        return RigLScheduler(
            self.model, self.optimizer, ignore_linear_layers=False, dense_first=False,
            skip_step=False, **options,
        )  # fmt: skip

    def look(self, update: vbs.Update) -> None:
        """Copies what an update has left."""
        found = [*self.pruner.masks.values(), *self.model.parameters()]
        gradients = [layer.gradient for layer in self.pruner._layers]
        found += [each for each in gradients if each is not None]
        self.seen.append([each.detach().clone() for each in found])
        self.replica.sync()

    def run(self, epoch: int) -> None:
        """Trains the model for an epoch."""
        self.sampler.set_epoch(epoch)
        self.optimizer.set_epoch(epoch)
        for rows in self.sampler:
            x, y = self.replica.send((self.x[rows], self.y[rows]))
            scale = self.replica.scalar(1e4 if len(self.seen) == 5 else 1.0)
            loss = (F.cross_entropy(self.model(x), y) * scale).sum()
            self.backward(loss)
            self.optimizer.step()

    def backward(self, loss: torch.Tensor) -> None:
        """Computes the gradients of a minibatch."""
        if not self.kind.startswith("assigned"):
            xla_replica.backward(loss)
            return
        parameters = [*self.model.parameters()]
        for parameter, grad in zip(parameters, xla_replica.grad(loss, parameters)):
            parameter.grad = grad
        if self.kind == "assigned and masked":
            self.pruner()


def train(rank: int, kind: str, is_exact: bool = True):
    """Returns what updates left, minibatches yielded, and the last compilations."""
    del rank
    run = Training(kind, is_exact)
    run.run(0)
    with xla_replica.count(run.replica) as count:
        run.run(1)
        run.replica.sync()
    assert run.pruner.rigl_steps >= 2
    seen = [run.replica.fetch(tensors) for tensors in run.seen]
    run.replica.barrier()
    return seen, run.sampler.num_yielded, count.compilations


def check(kind: str, *backends: Backend) -> None:
    """Asserts that all replicas of all backends see the same."""
    expected = None
    for backend in backends:
        results = backend.run(train, kind)
        num_yielded = sum(number for _, number, _ in results)
        for seen, _, num_compiled in results:
            assert num_compiled == 0
            expected = expected or (seen, num_yielded)
            # More steps were run again than the first, and the same ones everywhere.
            assert num_yielded == expected[1] > NUM_MINIBATCHES + TRACE[0] // MINIBATCH
            for found, others in zip(seen, expected[0], strict=True):
                assert all(map(torch.equal, found, others))


@pytest.fixture(autouse=True)
def threads():
    """One replica alone trains in this process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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
    [(exact, *_)], [(plain, *_)] = (
        Backend("cpu", 1).run(train, kind, is_exact) for is_exact in (True, False)
    )
    for found, others in zip(exact, plain, strict=True):
        torch.testing.assert_close(found, others, rtol=1e-4, atol=1e-6)


def resumed(rank: int, states: list[Any], is_late: bool):
    """Returns what the updates leave after a state, which a late pruner gets first."""
    del rank
    run = Training("rigl")
    run.seen = states[0]
    run.model.load_state_dict(states[1])
    if is_late:
        run.pruner.close()
    else:
        run.pruner.load_state_dict(states[3])
    run.optimizer.load_state_dict(states[2])
    if is_late:
        run.pruner = run.pruned(state_dict=states[3])
    run.run(1)
    return run.seen


@pytest.mark.parametrize("is_late", [False, True])
def test_a_resumed_run_has_the_same_bits(is_late):
    run, states = Training("rigl"), []
    parts = run.model, run.optimizer, run.pruner

    def save(update: vbs.Update) -> None:
        if update.step == 7:
            found = [run.seen, *(part.state_dict() for part in parts)]
            states.extend(copy.deepcopy(found))

    run.optimizer.attach(save)
    for epoch in range(EPOCHS):
        run.run(epoch)
    for seen in Backend("cpu", 3).run(resumed, states, is_late):
        for found, others in zip(seen, run.seen, strict=True):
            assert all(map(torch.equal, found, others))
