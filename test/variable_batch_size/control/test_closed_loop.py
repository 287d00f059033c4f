"""Batch sizes that a run decides for itself, and the replay of what it decided."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.variable_batch_size import elastic
from support.variable_batch_size.resuming import CASE as RESUMED
from support.variable_batch_size.resuming import loss_of
from support.variable_batch_size.wrapping import one_weight
from support.xla_replica.replicas import HAS_XLA, Backend, needs_xla, row

import variable_batch_size as vbs
from variable_batch_size.control import policies
from variable_batch_size.trace_tools.step_time import StepTime
from xla_replica import ReplicaError

# Sums are never rounded, so that any number of replicas gives the same bits.
START, LEAST, MOST, EVERY, EPOCHS = 16, 4, 64, 3, 3
CASE = dataclasses.replace(RESUMED, optimizer="sgd-heavy-ball")
AHEAD = 3  # minibatches that the loader fetches before they are run


def zigzag(seen: vbs.Observation) -> float:
    """Wants another size at every decision, whatever was measured."""
    return (48, 8, 64, 4, 20, 36)[(seen.step + 1) // EVERY % 6]


POLICIES = {"zigzag": zigzag, "noise-scale": "noise-scale", "goodput": "goodput"}


def ahead(items: Iterator, number: int) -> Iterator:
    """Yields items after so many more were fetched, as a loader with workers does."""
    fetched: collections.deque = collections.deque()
    for item in items:
        fetched.append(item)
        if len(fetched) > number:
            yield fetched.popleft()
    yield from fetched


class Training(elastic.Training):
    """A run on the trace, with a controller if there is a policy.

    Its loader is ``ahead`` by so many minibatches.
    """

    def __init__(self, folder: Path, trace, policy=None, **options) -> None:
        case = dataclasses.replace(CASE, trace=trace, epochs=EPOCHS)
        super().__init__(case, loss_of, noise=policy is not None)
        self.ahead = AHEAD
        self.log = vbs.RunLog(folder / "run.jsonl", self.optimizer)
        if policy is not None:
            limits = {"least": LEAST, "most": MOST, "every": EVERY} | options
            controller = vbs.BatchSizeController(
                self.optimizer,
                **limits,
                policy=policy,
                trace_file=folder / "decided.csv",
                log=self.log,
            )
            self.optimizer.attach(controller)

    def dealt(self) -> Iterator[list[int]]:
        return ahead(super().dealt(), self.ahead)

    def told(self) -> list[tuple]:
        return [(u.step, u.batch_size, u.epoch, u.ends_epoch) for u in self.updates]


def train(rank: int, folder: Path, policy: str, kill_at: float = math.inf):
    """Trains from the newest checkpoint; returns weights and (step, size, epoch)."""
    training = Training(folder, START, POLICIES[policy])
    checkpointer = vbs.Checkpointer(
        folder, training.optimizer, every_updates=4, model=training.model, stop_on=()
    )
    checkpointer.load()
    training.optimizer.attach(checkpointer)
    training.train_until(kill_at)
    return training.weights(), training.told()


def replay(rank: int, folder: Path):
    """Trains the same epochs on what was decided, without a controller."""
    training = Training(folder, folder / "decided.csv")
    training.ahead = 0
    return training.train(), training.told()


def job(*backends: tuple[str, int], policy: str = "zigzag", marks=()):
    """Returns where a run begins, is resumed and is replayed, and its policy."""
    name = ", ".join(f"{device} {number}" for device, number in backends)
    jobs = [Backend(*backend) for backend in backends]
    return pytest.param(*jobs, policy, id=f"{name}, {policy}", marks=marks)


@pytest.mark.parametrize(
    ("first", "second", "last", "policy"),
    [
        *(job(*[("cpu", 1)] * 3, policy=policy) for policy in POLICIES),
        job(
            ("cpu", 2), ("cpu", 1), ("cpu", 1),
            marks=[pytest.mark.slow] if HAS_XLA else [],
        ),
        job(("cpu", 3), ("cpu", 2), ("cpu", 1), marks=[pytest.mark.slow]),
        job(
            ("xla", 3), ("xla", 2), ("cpu", 1), marks=[needs_xla, pytest.mark.xla]
        ),
    ],
)  # fmt: skip
def test_a_run_that_is_killed_and_resized_equals_the_replay_of_its_decisions(
    tmp_path, first, second, last, policy
):
    first.run(train, tmp_path, policy, 10)
    outcomes = second.run(train, tmp_path, policy)
    whole = last.run(replay, tmp_path)
    weights, replayed = whole[0]
    for received, told in outcomes:
        assert told == replayed[8:]  # from the checkpoint of eight updates on
        assert all(torch.equal(*pair) for pair in zip(received, weights))
    sizes = {size for _, size, _, _ in replayed}
    assert len(sizes) >= (4 if policy == "zigzag" else 1)
    assert replayed[-1][3]


def counted(rank: int, folder: Path) -> tuple[int, int, int]:
    training = Training(folder, START, zigzag)
    for epoch in range(2):
        training.epoch(epoch)
    num_decisions = len(training.sampler.state_dict()["changes"])
    compilations, _, fallbacks = training.counted_epoch(2)
    num_more = len(training.sampler.state_dict()["changes"]) - num_decisions
    return compilations, fallbacks, num_more


@pytest.mark.parametrize("backend", [row("xla", 2)])
def test_a_decision_compiles_nothing(backend, tmp_path):
    for compilations, fallbacks, num_decisions in backend.run(counted, tmp_path):
        assert (compilations, fallbacks) == (0, 0)
        assert num_decisions >= 1


def test_decisions_are_told_in_the_run_s_log(tmp_path):
    train(0, tmp_path, "zigzag")
    events = vbs.read_run(tmp_path / "run.jsonl").events
    decisions = [event for event in events if event["event"] == "decision"]
    assert len(decisions) > 3
    trace = vbs.Trace(tmp_path / "decided.csv")
    for told in decisions:
        assert trace.batch_sizes[told["first_step"]] == told["batch_size"]
        assert trace.batch_sizes[told["first_step"] - 1] == told["before"]
        assert told["first_step"] > told["step"]


def test_what_is_available_limits_at_once(tmp_path):
    """Also where the factor would keep the size, and below the least."""
    left = iter([64, 16, 12, 4, *[64] * 50])
    training = Training(
        tmp_path, 16, lambda seen: 64, available=lambda: next(left), least=8
    )
    for epoch in range(6):
        training.epoch(epoch)
    changes = [size for _, size in training.sampler.state_dict()["changes"]]
    assert changes[:4] == [64, 16, 12, 4]


# --- changing the batch size by hand ------------------------------------------------


def ask_for_different_sizes(rank: int, folder: Path) -> None:
    training = Training(folder, 8)
    training.optimizer.attach(
        lambda update: training.optimizer.change_batch_size(8 + 4 * rank)
    )
    with pytest.raises(ReplicaError, match=r"different batch sizes, \[8, 12\]"):
        training.epoch(0)


def test_replicas_that_ask_for_different_sizes_are_told(tmp_path):
    Backend("cpu", 2).run(ask_for_different_sizes, tmp_path)


@settings(deadline=None)  # a busy machine may be slow
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=4),
)
def test_a_changed_schedule_is_that_of_the_trace_as_it_was_decided(sizes, changes):
    schedule = vbs.Schedule(vbs.Trace([4 * n for n in sizes]), 40, 4, "hold")
    slow = [4 * sizes[min(i, len(sizes) - 1)] for i in range(60)]
    for step, size in changes:
        schedule = schedule.changed(step, 4 * size)
        slow[step:] = [4 * size] * (60 - step)
    again = vbs.Schedule(vbs.Trace(schedule.thresholds()), 40, 4)
    told = []
    for epoch in range(5):
        plan, replayed = schedule.plan(epoch, 2), again.plan(epoch, 2)
        assert plan.num_minibatches.tolist() == replayed.num_minibatches.tolist()
        told += [plan.batch_size(step) for step in range(plan.num_steps)]
    assert told[:60] == slow[: len(told)]


# --- policies ------------------------------------------------------------------------

SEEN = vbs.Observation(
    step=9, batch_size=64, noise_scale=300.0, step_time=StepTime(0.6, 0.1),
    minibatch_size=8, num_replicas=4,
)  # fmt: skip


def test_goodput_is_best_at_the_size_that_is_returned():
    def progress_per_second(size: float) -> float:
        seconds = 0.6 + 0.1 * size / (8 * 4)
        return size / seconds / (size + 300)

    best = policies.goodput(SEEN)
    assert progress_per_second(best) == pytest.approx(
        max(progress_per_second(size) for size in range(1, 5000)), rel=1e-6
    )
    unknown = SEEN._replace(step_time=StepTime(0.0, 0.1))
    assert policies.goodput(unknown) == 300


@pytest.mark.parametrize(
    ("wanted", "least", "most", "expected"),
    [
        (300, 8, 4096, 304),  # whole minibatches
        (90, 8, 4096, 64),  # within the factor
        (96, 8, 4096, 96),
        (44, 8, 4096, 64),
        (42, 8, 4096, 40),
        (1e9, 8, 512, 512),
        (math.inf, 8, 512, 512),
        (0, 16, 512, 16),
        (math.nan, 8, 512, 64),
        (math.nan, 8, 50, 48),  # what is available has fallen
        (math.nan, 70, 512, 72),
    ],
)
def test_a_decision_has_hysteresis_and_limits(wanted, least, most, expected):
    assert policies.decide(SEEN, wanted, least, most, 1.5) == expected


@pytest.mark.parametrize(
    ("trace", "options", "error", "message"),
    [
        (16, {"most": 2}, ValueError, "most must be an integer >= 4, got 2"),
        (16, {"factor": 1}, ValueError, "factor must be a finite number > 1, got 1"),
        (16, {"policy": "x"}, ValueError, "policy must be one of 'noise-scale', 'g"),
        (16, {"available": 64}, TypeError, "available must be a function, got 64"),
        ([16, 8], {}, ValueError, "constant trace, or on_end='hold'"),
        (16, {"least": 5, "most": 7}, ValueError, "multiples of the minibatch size, 4"),
        (16, {"most": 10**6}, ValueError, "most: steps of 1000000 .*exceeds epoch"),
    ],
)
def test_wrong_arguments_say_so(tmp_path, trace, options, error, message):
    with pytest.raises(error, match=message):
        Training(tmp_path, trace, **{"policy": "noise-scale"} | options)


def test_what_cannot_be_controlled_is_refused(tmp_path):
    training = Training(tmp_path, 16)
    with pytest.raises(TypeError, match="build the optimizer with noise=True"):
        vbs.BatchSizeController(training.optimizer, least=4, most=64)
    training.optimizer.attach(lambda _: training.optimizer.change_batch_size(6))
    with pytest.raises(vbs.TraceError, match="not a multiple of minibatch_size=4"):
        training.epoch(0)


def test_a_rule_that_does_not_allow_the_size_says_so():
    """Adam's betas cannot follow a batch ten times as large."""
    parameter, sampler, optimizer = one_weight(
        4, "adam-root", torch.optim.AdamW, size=900, ref_batchsize=4, noise=True
    )
    with pytest.raises(ValueError, match=r"most: steps of 400 samples.*adam-half"):
        vbs.BatchSizeController(optimizer, least=4, most=400)
    optimizer.attach(lambda update: optimizer.change_batch_size(400))
    next(iter(sampler))
    parameter.sum().backward()
    with pytest.raises(ValueError, match="adam-half-life"):
        optimizer.step()
    assert not sampler.state_dict()["changes"]
