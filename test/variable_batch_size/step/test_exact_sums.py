"""Weights have the same bits on any number of replicas, wherever they are resumed."""

from __future__ import annotations

import copy

import pytest
import torch
from support.variable_batch_size.exact import (
    MINIBATCH,
    NUM_EPOCHS,
    RUNS,
    TRACE,
    Training,
    digests,
)
from support.xla_replica.replicas import (
    GPUS,
    Backend,
    needs_xla,
    row,
)
from torch import nn
from torch.utils.data import DataLoader

import variable_batch_size as vbs
import xla_replica

ALONE = Backend("cpu", 1)
NUM_STEPS = NUM_EPOCHS * len(TRACE)


@pytest.fixture(scope="module")
def alone():
    [found] = ALONE.run(digests, tuple(RUNS))
    return found


@pytest.mark.parametrize(
    "backend",
    [row("cpu", 2), row("cpu", 3), row("cpu", 5, True), row("cpu", 8, True), *GPUS],
)
def test_bits_are_those_of_one_replica(backend, alone):
    for found in backend.run(digests, tuple(RUNS)):
        for name, (digest, repeated) in found.items():
            assert digest == alone[name][0], name
            assert set(repeated) <= set(alone[name][1])


def test_steps_that_leave_the_grid_are_run_again(alone):
    for name, (_, repeated) in alone.items():
        assert {0, 3, 9} <= set(repeated), name  # no grid yet; and jumps up
        assert repeated == sorted(set(repeated)), name  # once each


def test_sums_of_floats_differ(alone):
    """Or the tests above could not fail."""
    [one] = ALONE.run(digests, ("small",), False)
    two = Backend("cpu", 2).run(digests, ("small",), False)[0]
    assert len({one["small"][0], two["small"][0], alone["small"][0]}) == 3


def xla_digests(rank: int, name: str) -> tuple[str, list[int], list[int]]:
    """Returns the hash, and compilations and transfers of each epoch."""
    training = Training(name)
    compilations, transfers = [], []
    for epoch in range(NUM_EPOCHS):
        with xla_replica.count(training.replica) as count:
            training.sampler.set_epoch(epoch)
            training.optimizer.set_epoch(epoch)
            for rows in training.sampler:
                training.minibatch(rows)
        compilations.append(count.compilations)
        transfers.append(count.transfers)
        assert not count.fallbacks
    return training.digest(), compilations, transfers


@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize(
    "name",
    [n if n == "small" else pytest.param(n, marks=pytest.mark.slow) for n in RUNS],
)
def test_replicas_on_xla_have_one_hash(name):
    runs = [Backend("xla", n).run(xla_digests, name) for n in (1, 2)]
    if name != "small":
        runs.append(Backend("xla", 8).run(xla_digests, name))
    assert len({digest for run in runs for digest, *_ in run}) == 1
    for run in runs:
        for _, compilations, transfers in run:
            assert compilations[1:] == [0] * (NUM_EPOCHS - 1)
            # Every replica reads one flag for each time that a step is run.
            at_least = len(TRACE) * len(run)
            assert at_least <= transfers[1] <= 2 * at_least


def states(rank: int, name: str) -> tuple[str, list]:
    """Returns the hash of a run, and its state after every update of replica 0."""
    training = Training(name)
    saved = [training.state() for _ in training.train()]
    return training.digest(), saved


def resumed(rank: int, name: str, saved: list) -> list[str]:
    """Returns the hashes of runs that continue from states."""
    found = []
    for state in saved:
        training = Training(name)
        state = copy.deepcopy(state)  # replicas were sent the same memory
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        for _ in training.train():
            pass
        found.append(training.digest())
    return found


def test_a_run_continues_with_the_same_bits_on_other_numbers_of_replicas(alone):
    digest, saved = Backend("cpu", 2).run(states, "small")[0]
    assert digest == alone["small"][0]
    assert len(saved) == NUM_STEPS
    assert set(ALONE.run(resumed, "small", saved)[0]) == {digest}
    few = saved[:: NUM_STEPS // 3]
    assert set(Backend("cpu", 3).run(resumed, "small", few)[0]) == {digest}


def test_what_is_not_finite_stays_in_its_tensor():
    training = Training("small")
    for _ in training.train():
        pass
    for name, parameter in training.model.named_parameters():
        assert (
            parameter.isnan().all() if name == "extra" else parameter.isfinite().all()
        )
    assert training.optimizer.state_dict()["elastic"]["grid"]["extra"] < 8


def test_weights_are_those_of_float_sums():
    exact, plain = Training("small"), Training("small", is_exact=False)
    exact.is_exact = False  # whose gradients become None in a step
    for training in (exact, plain):  # without dropout, which is seeded by minibatch
        training.model.eval()
        training.optimizer.set_lr((1e-4,))
        for _ in training.train():
            pass
    pairs = zip(exact.model.named_parameters(), plain.model.parameters())
    for (name, mine), theirs in pairs:
        if name != "extra":
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


def test_running_statistics_move_once_a_step():
    """By the mean of what its minibatches would have moved them by."""
    training = Training("small")
    norm = training.model.norm
    x = training.inputs[: 2 * MINIBATCH]
    expected = norm.running_mean.clone(), norm.running_var.clone()
    moves = []
    for part in x.split(MINIBATCH):
        values = training.model.first(part.flatten(1))
        moves.append((values.mean(0), values.var(0)))
    sampler = vbs.CustomSampler(
        dataset_size=64, trace=[2 * MINIBATCH], minibatch_size=MINIBATCH, on_end="hold"
    )
    optimizer = vbs.LinearRuleOptimizer(
        torch.optim.SGD(training.model.parameters(), 0.0), sampler, 8,
        exact=training.model,
    )  # fmt: skip
    optimizer.set_epoch(0)
    made, minibatches = 0, iter(sampler)
    while not made:
        for part in x.split(MINIBATCH):
            next(minibatches)
            training.model(part).sum().backward()
            made += optimizer.step()
    for at, (start, buffer) in enumerate(
        zip(expected, (norm.running_mean, norm.running_var))
    ):
        mean = torch.stack([move[at] for move in moves]).mean(0)
        torch.testing.assert_close(buffer, start + 0.1 * (mean - start))
    assert norm.num_batches_tracked == 1


def with_workers(rank: int) -> str:
    """Returns the hash of a run whose loader has workers that read ahead."""
    training = Training("small")
    rows = list(range(len(training.inputs)))
    loader = DataLoader(
        rows, batch_sampler=training.sampler, num_workers=2, collate_fn=list
    )
    for epoch in range(NUM_EPOCHS):
        training.sampler.set_epoch(epoch)
        training.optimizer.set_epoch(epoch)
        for batch in training.replica.loader(loader):
            training.minibatch(batch)
    return training.digest()


def test_loaders_may_read_ahead(alone):
    assert ALONE.run(with_workers) == [alone["small"][0]]


class Counting(nn.Module):
    """Moves a buffer of its own in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.weight


def wrapped(model: nn.Module, parameters=None, trace=(8,), **options):
    sampler = vbs.CustomSampler(
        dataset_size=1024, trace=trace, minibatch_size=MINIBATCH, on_end="cycle"
    )
    inner = torch.optim.SGD(parameters or model.parameters(), 0.1)
    options = {"exact": model, **options}
    return sampler, vbs.LinearRuleOptimizer(inner, sampler, 8, **options)


def test_what_cannot_be_exact_is_refused_by_name():
    linear = nn.Linear(4, 4)
    for options, message in [
        ({"model": linear.double()}, "'weight' is torch.float64"),
        ({"model": nn.Sequential(nn.SyncBatchNorm(4))}, "'0' is a SyncBatchNorm"),
        ({"model": nn.Linear(4, 4), "exact": True}, "exact= is the model"),
        ({"model": nn.Linear(4, 4), "lockstep": True}, "lockstep"),
    ]:
        with pytest.raises(TypeError, match=message):
            wrapped(**options)
    with pytest.raises(ValueError, match="not one of the model's"):
        wrapped(nn.Linear(4, 4), nn.Linear(4, 4).parameters())


def test_steps_of_too_many_minibatches_are_refused(monkeypatch):
    monkeypatch.setattr("xla_replica.backends.grid.UP", 12)
    with pytest.raises(ValueError, match="has 2 minibatches, and sums on this device"):
        wrapped(nn.Linear(4, 4))


def test_a_buffer_that_a_pass_changes_is_refused():
    model = Counting()
    wrapped(model)
    with torch.no_grad():
        model(torch.ones(4))  # not a pass of training
    with pytest.raises(ValueError, match="has changed the buffer 'calls'"):
        model(torch.ones(4))


def test_a_loader_that_reads_ahead_by_itself_is_refused():
    model = nn.Linear(4, 4)
    sampler, optimizer = wrapped(model)
    minibatches = iter(sampler)
    next(minibatches), next(minibatches)
    model(torch.ones(4, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"replica.loader\(loader\)"):
        optimizer.step()


def test_a_step_that_differs_when_it_is_run_again_is_an_error():
    model = nn.Linear(4, 4)
    sampler, optimizer = wrapped(model, trace=(4,))
    minibatches = iter(sampler)
    for scale in (1.0, 1e3):  # the same step
        next(minibatches)
        (scale * model(torch.ones(4, 4)).sum()).backward()
        if scale == 1.0:
            assert optimizer.step() == 0
    with pytest.raises(xla_replica.ReplicaError, match="has been run twice"):
        optimizer.step()


def test_another_number_of_threads_is_another_run():
    state = Training("small").state()
    other = Training("small", num_threads=2)
    try:
        with pytest.raises(ValueError, match="num_threads"):
            other.optimizer.load_state_dict(state["optimizer"])
    finally:
        torch.set_num_threads(1)


def test_minibatches_that_were_listed_are_refused():
    model = nn.Linear(4, 4)
    sampler, optimizer = wrapped(model)
    for _ in list(sampler)[:1]:
        model(torch.ones(4, 4)).sum().backward()
        with pytest.raises(ValueError, match="nothing may read ahead"):
            optimizer.step()


def test_a_look_ahead_of_the_loader_is_refused():
    model = nn.Linear(4, 4)
    sampler, optimizer = wrapped(model)
    batches = iter(optimizer.replica.loader(sampler))
    next(batches), next(batches)
    model(torch.ones(4, 4)).sum().backward()
    with pytest.raises(ValueError, match="nothing may read ahead"):
        optimizer.step()


def test_reentrant_checkpoints_leave_no_move_behind():
    layer = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), layer)
    model.forward = lambda x: torch.utils.checkpoint.checkpoint(
        layer, model[0](x), use_reentrant=True
    )
    sampler, optimizer = wrapped(model, trace=(4,))
    minibatches = iter(sampler)
    for made in (0, 1):
        next(minibatches)
        model(torch.randn(4, 4)).square().sum().backward()
        assert optimizer.step() == made
        assert layer.num_batches_tracked == made
