"""Weights have the same bits on any number of replicas, wherever they are resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.variable_batch_size import exact
from support.xla_replica.replicas import GPUS, Backend, needs_xla, of_torch_alone, row
from torch import nn
from torch.utils.data import DataLoader

import variable_batch_size as vbs
import xla_replica

ALONE = Backend("cpu", 1)


@pytest.fixture(scope="module")
def alone():
    [found] = ALONE.run(exact.finished, tuple(exact.RUNS))
    return dict(zip(exact.RUNS, found))


@pytest.mark.parametrize(
    "backend",
    [row("cpu", 2), row("cpu", 3), row("cpu", 5, True), row("cpu", 8, True), *GPUS],
)
def test_bits_are_those_of_one_replica(backend, alone):
    found = backend.run(exact.finished, tuple(exact.RUNS))
    if backend.device != "cpu":
        [again] = Backend(backend.device, 1).run(exact.finished, tuple(exact.RUNS))
        alone = dict(zip(exact.RUNS, again))
    for expected, *outcomes in zip(alone.values(), *found):
        exact.assert_same_bits([expected], outcomes)
        assert {0, 3, 9} <= set(expected.repeated)  # no grid yet; and jumps up
        assert len({*expected.repeated}) == len(expected.repeated)  # once each


def test_sums_of_floats_differ(alone):
    """Or the tests above could not fail."""
    one, two = (
        Backend("cpu", n).run(exact.finished, ["small"], False)[0] for n in (1, 2)
    )
    assert len({each.digest for each in (*one, *two, alone["small"])}) == 3


@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        (n, (1, 2))
        if n == "small"
        else pytest.param(n, (1, 2, 8), marks=pytest.mark.slow)
        for n in exact.RUNS
    ],
)
def test_replicas_on_xla_have_one_hash(name, numbers):
    runs = [
        [x for [x] in Backend("xla", n).run(exact.finished, [name])] for n in numbers
    ]
    exact.assert_same_bits(*runs)
    for run in runs:
        for _, *_, counts in run:
            assert not any(count.fallbacks for count in counts)
            # Every replica reads one flag for each time that a step is run.
            at_least = len(exact.TRACE) * len(run)
            assert at_least <= counts[1].transfers <= 2 * at_least


def states(rank: int) -> list[dict[str, Any]]:
    """Returns the state of a run after every update of this replica."""
    training = exact.Training("small")
    return [training.state() for _ in training.train()]


def resumed(rank: int, saved: list[dict[str, Any]]) -> set[str]:
    """Returns the hashes of runs that continue from states."""
    return {
        exact.Training("small", saved=each).finish().outcome().digest for each in saved
    }


@of_torch_alone
def test_a_run_continues_with_the_same_bits_on_other_numbers_of_replicas(alone):
    saved, _ = Backend("cpu", 2).run(states)
    assert len(saved) == exact.NUM_EPOCHS * len(exact.TRACE)
    for number, some in (1, saved), (3, saved[::5]):
        for found in Backend("cpu", number).run(resumed, some):
            assert found == {alone["small"].digest}


def test_weights_are_those_of_float_sums_and_what_is_not_finite_stays_in_its_tensor():
    runs = exact.Training("small"), exact.Training("small", is_exact=False)
    runs[0].is_exact = False  # whose gradients become None in a step
    for run in runs:  # without dropout, which is seeded by minibatch
        run.model.eval()
        run.optimizer.set_lr((1e-4,))
        run.finish()
    mine, theirs = (run.model.state_dict() for run in runs)
    assert all(state.pop("extra").isnan().all() for state in (mine, theirs))
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)  # NaN is not close
    assert runs[0].optimizer.state_dict()["elastic"]["grid"]["extra"] < 8


def test_running_statistics_move_once_a_step():
    """By the mean of what its minibatches would have moved them by."""
    model = exact.small()
    _, linear, norm, *_ = model
    parts = torch.rand(2, exact.MINIBATCH, 64)
    values = [linear(part) for part in parts]
    means = (sum(x.mean(0) for x in values) / 2, sum(x.var(0) for x in values) / 2)
    losses = (model(part).sum() for part in (*parts, *parts))
    assert exact.steps(losses, *exact.wrapped(model, lr=0.0)) == [0, 0, 0, 1]
    torch.testing.assert_close(norm.running_mean, 0.1 * means[0])
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * means[1])
    assert norm.num_batches_tracked == 1


def with_workers(rank: int) -> str:
    """Returns the hash of a run whose loader has workers that read ahead."""
    training = exact.Training("small")
    rows = list(range(len(training.inputs)))
    loader = DataLoader(
        rows, batch_sampler=training.sampler, num_workers=2, collate_fn=list
    )
    return training.finish(training.replica.loader(loader)).outcome().digest


def test_loaders_may_read_ahead(alone):
    assert ALONE.run(with_workers) == [alone["small"].digest]


def test_steps_of_too_many_minibatches_are_refused(monkeypatch):
    monkeypatch.setattr("xla_replica.backends.grid.UP", 12)
    with pytest.raises(ValueError, match="has 2 minibatches, and sums on this device"):
        exact.wrapped(nn.Linear(4, 4))


def test_a_buffer_that_a_pass_changes_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("calls", torch.zeros(()))
    model[0].register_forward_hook(lambda *_: model.calls.add_(1))
    exact.wrapped(model)
    with torch.no_grad():
        model(torch.ones(4))  # not a pass of training
    with pytest.raises(ValueError, match="has changed the buffer 'calls'"):
        model(torch.ones(4))


def test_what_reads_ahead_by_itself_is_refused():
    model = nn.Linear(4, 4)
    optimizer, minibatches = exact.wrapped(model)
    next(minibatches)
    with pytest.raises(ValueError, match=r"replica.loader\(loader\)"):
        exact.steps([model(torch.ones(4, 4)).sum()], optimizer, minibatches)


def test_a_step_that_differs_when_it_is_run_again_is_an_error():
    model = nn.Linear(4, 4)
    losses = (scale * model(torch.ones(4, 4)).sum() for scale in (1.0, 1e3))
    with pytest.raises(
        xla_replica.ReplicaError, match="gave different gradients when rerun"
    ):
        exact.steps(losses, *exact.wrapped(model, trace=(4,)))


def test_another_number_of_threads_is_another_run():
    state = exact.Training("small").state()
    other = exact.Training("small", num_threads=2)
    try:
        with pytest.raises(ValueError, match="num_threads"):
            other.optimizer.load_state_dict(state["optimizer"])
    finally:
        torch.set_num_threads(1)


def test_reentrant_checkpoints_leave_no_move_behind():
    layer = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), layer)
    model.forward = lambda x: torch.utils.checkpoint.checkpoint(
        layer, model[0](x), use_reentrant=True
    )
    losses = (model(x).square().sum() for x in torch.randn(4, 4).expand(2, 4, 4))
    assert exact.steps(losses, *exact.wrapped(model, trace=(4,))) == [0, 1]
    assert layer.num_batches_tracked == 1


def logged(rank: int) -> list[float]:
    """Returns the losses that are logged of steps whose losses are 1, 1, 100 and 1."""
    replica, lines, updates = xla_replica.current(), [], []
    model = nn.Linear(1, 1, bias=False).to(replica.device)
    nn.init.ones_(model.weight)
    optimizer, minibatches = exact.wrapped(model, trace=(8, 4, 16, 4), lr=0.0)
    sinks = [lambda line, step: lines.append(line["loss"])]
    log = vbs.RunLog(None, optimizer, log_steps=3, sinks=sinks)
    for target in (log, updates.append):
        optimizer.attach(target)
    optimizer.set_epoch(0)
    for rows in minibatches:
        scale = 100.0 if len(updates) == 2 else 1.0
        loss = model(replica.send(torch.full((len(rows), 1), scale))).mean()
        xla_replica.backward(loss)
        log.add(loss)
        optimizer.step()
    replica.barrier()
    return lines


@pytest.mark.parametrize("backend", [row("cpu", 1), row("cpu", 3), row("xla", 2)])
def test_losses_of_steps_that_are_run_again_count_once(backend):
    # Run again: the first step, which has no units yet, and the third.
    primary, *others = backend.run(logged)
    assert primary == pytest.approx([1.0, (1 * 1 + 4 * 100 + 1 * 1) / 6])
    assert others == [[]] * len(others)
