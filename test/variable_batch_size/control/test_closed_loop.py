"""Batch sizes that a run decides for itself, and the replay of what it decided."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.variable_batch_size import elastic
from support.variable_batch_size.resuming import CASE as RESUMED
from support.variable_batch_size.resuming import loss_of
from support.variable_batch_size.wrapping import one_weight
from support.xla_replica.replicas import Backend, needs_xla, of_torch_alone, on_xla

import variable_batch_size as vbs
from variable_batch_size.control import policies
from variable_batch_size.trace_tools.step_time import StepTime
from xla_replica import ReplicaError

# Sums are never rounded, so that any number of replicas gives the same bits.
START, EVERY = 16, 3
CASE = dataclasses.replace(RESUMED, optimizer="sgd-heavy-ball", epochs=3)


def zigzag(seen: vbs.Observation) -> float:
    return (48, 8, 64, 4, 20, 36)[(seen.step + 1) // EVERY % 6]


POLICIES = {"zigzag": zigzag, "noise-scale": "noise-scale", "goodput": "goodput"}


class Training(elastic.Training):
    def __init__(self, folder: Path, trace, policy=None, **options) -> None:
        case = dataclasses.replace(CASE, trace=trace)
        super().__init__(case, loss_of, noise=policy is not None)
        self.ahead = 3  # minibatches that the loader fetches before they are run
        if policy is not None:
            log = vbs.RunLog(folder / "run.jsonl", self.optimizer)
            options = {"least": 4, "most": 64, "every": EVERY, "log": log} | options
            options |= {"trace_file": folder / "decided.csv", "policy": policy}
            self.optimizer.attach(vbs.BatchSizeController(self.optimizer, **options))

    def dealt(self) -> Iterator[list[int]]:
        """Yields those that were fetched ahead, as a loader with workers does."""
        minibatches = super().dealt()
        fetched = collections.deque(itertools.islice(minibatches, self.ahead))
        for minibatch in minibatches:
            fetched.append(minibatch)
            yield fetched.popleft()
        yield from fetched

    def changes(self) -> list[tuple[int, int]]:
        return self.sampler.state_dict()["changes"]

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


@pytest.mark.parametrize(("device", "first", "second", "policy"), [
    *(("cpu", 1, 1, policy) for policy in POLICIES),
    pytest.param("cpu", 3, 2, "zigzag", marks=of_torch_alone),
    pytest.param("xla", 2, 1, "zigzag", marks=[needs_xla, pytest.mark.xla]),
])  # fmt: skip
def test_a_run_that_is_killed_and_resized_equals_the_replay_of_its_decisions(
    tmp_path, device, first, second, policy
):
    Backend(device, first).run(train, tmp_path, policy, 10)
    outcomes = Backend(device, second).run(train, tmp_path, policy)
    again = Training(tmp_path, tmp_path / "decided.csv")
    again.ahead = 0
    weights, replayed = again.train(), again.told()
    for received, told in outcomes:
        assert told == replayed[8:]  # from the checkpoint of eight updates on
        assert all(map(torch.equal, received, weights))
    sizes = {size for _, size, _, _ in replayed}
    assert len(sizes) >= (4 if policy == "zigzag" else 1)
    assert replayed[-1][3]


def counted(rank: int, folder: Path) -> tuple[int, int, int]:
    training = Training(folder, START, zigzag)
    for epoch in range(2):
        training.epoch(epoch)
    num_decisions = len(training.changes())
    compilations, _, fallbacks = training.counted_epoch(2)
    return compilations, fallbacks, len(training.changes()) - num_decisions


@on_xla
def test_a_decision_compiles_nothing(tmp_path):
    for *compiled, num_decisions in Backend("xla", 2).run(counted, tmp_path):
        assert compiled == [0, 0]
        assert num_decisions >= 1


def test_decisions_are_told_in_the_run_s_log(tmp_path):
    train(0, tmp_path, "zigzag")
    events = vbs.read_run(tmp_path / "run.jsonl").events
    decisions = [event for event in events if event["event"] == "decision"]
    assert len(decisions) > 3
    sizes = vbs.Trace(tmp_path / "decided.csv").batch_sizes
    for told in decisions:
        first = told["first_step"]
        assert [*sizes[first - 1 : first + 1]] == [told["before"], told["batch_size"]]
        assert first > told["step"]


def test_what_is_available_limits_at_once(tmp_path):
    """Also where the factor would keep the size, and below the least."""
    left = iter([64, 16, 12, 4, *[64] * 50])
    options = {"available": lambda: next(left), "least": 8}
    training = Training(tmp_path, 16, lambda seen: 64, **options)
    training.train()
    assert [size for _, size in training.changes()][:4] == [64, 16, 12, 4]


def ask_for_different_sizes(rank: int, folder: Path) -> None:
    training = Training(folder, 8)
    change = training.optimizer.change_batch_size
    training.optimizer.attach(lambda update: change(8 + 4 * rank))
    training.epoch(0)


def test_replicas_that_ask_for_different_sizes_are_told(tmp_path):
    with pytest.raises(ReplicaError, match=r"0 has .*: 8}, replica 1 has .*: 12}"):
        Backend("cpu", 2).run(ask_for_different_sizes, tmp_path)


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


SEEN = vbs.Observation(
    step=9, batch_size=64, noise_scale=300.0, step_time=StepTime(0.6, 0.1),
    minibatch_size=8, num_replicas=4,
)  # fmt: skip


def test_goodput_is_best_at_the_size_that_is_returned():
    def progress_per_second(size: float) -> float:
        seconds = 0.6 + 0.1 * size / (8 * 4)
        return size / seconds / (size + 300)

    most = max(map(progress_per_second, range(1, 5000)))
    found = progress_per_second(policies.goodput(SEEN))
    assert found == pytest.approx(most, rel=1e-6)
    assert policies.goodput(SEEN._replace(step_time=StepTime(0.0, 0.1))) == 300


@pytest.mark.parametrize(("wanted", "least", "most", "expected"), [
    (300, 8, 4096, 304),  # whole minibatches
    (90, 8, 4096, 64), (96, 8, 4096, 96), (44, 8, 4096, 64), (42, 8, 4096, 40),
    (1e9, 8, 512, 512), (math.inf, 8, 512, 512), (0, 16, 512, 16),
    (math.nan, 8, 512, 64), (math.nan, 70, 512, 72),
    (math.nan, 8, 50, 48),  # what is available has fallen
])  # fmt: skip
def test_a_decision_has_hysteresis_and_limits(wanted, least, most, expected):
    assert policies.decide(SEEN, wanted, least, most, 1.5) == expected


def test_a_rule_that_does_not_allow_the_size_says_so():
    """Adam's betas cannot follow a batch ten times as large."""
    parameter, sampler, optimizer = one_weight(
        4, "adam-root", torch.optim.AdamW, size=900, ref_batchsize=4, noise=True
    )
    with pytest.raises(ValueError, match=r"batch ratio 100.*adam-half"):
        vbs.BatchSizeController(optimizer, least=4, most=400)
    optimizer.attach(lambda update: optimizer.change_batch_size(400))
    next(iter(sampler))
    parameter.sum().backward()
    with pytest.raises(ValueError, match="adam-half-life"):
        optimizer.step()
    assert not sampler.state_dict()["changes"]
