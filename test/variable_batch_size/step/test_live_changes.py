"""Members join, leave, stop and are refused amid a run; what is told of that."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.variable_batch_size.live_training import (
    check,
    check_floats,
    ends,
    live,
    more_updates,
    started,
    undisturbed,
    words,
)
from support.variable_batch_size.member import KINDS
from support.variable_batch_size.wrapping import make, sampler_of
from support.xla_replica import live_job as jobs
from support.xla_replica.live_job import LiveJob, live_job
from support.xla_replica.replicas import needs_torchtpu, needs_xla, of_torch_alone
from torch import nn

import variable_batch_size as vbs
import xla_replica

pytestmark = jobs.needs_lighthouse
SLOW = pytest.mark.slow


def test_members_leave_stop_and_join(tmp_path):
    with live(tmp_path, *words(5, 0.04), min_members=2) as job:
        first, second = started(job, 2)
        os.kill(first.pid, signal.SIGTERM)
        job.wait(lambda: first in job.ended)
        assert first.exitcode == 143
        third, fourth = job.start(), job.start()  # at once
        job.wait(lambda: job.num_ready() == 3)
        os.kill(third.pid, signal.SIGSTOP)
        job.wait(lambda: job.results())
        os.kill(third.pid, signal.SIGCONT)
        ends(job, soon=False)
        assert (second.exitcode, fourth.exitcode) == (0, 0)
        assert third.exitcode == 1  # the others have ended
        assert "Superseded" in job.log()
        joined = rf"from step \d+ on, .*\(process {fourth.pid} on .+\) joined$"
        assert re.search(joined, job.log(), re.MULTILINE), job.log()


@of_torch_alone
def test_an_ordinary_death_is_one_line(tmp_path):
    with live(tmp_path, *words(), seconds=2.0) as job:
        first, second = started(job, 2)
        job.wait(more_updates(job))
        first.kill()
        ends(job)
        text = (job.folder / f"{second.pid}.txt").read_text()
        told = [line for line in text.splitlines() if str(first.pid) in line]
        [line] = [line for line in told if not line.endswith("joined")]
        gone = rf"; member \d \(process {first.pid} on .+\) went \d\.\d+ s ago$"
        assert re.search("1 members train .* with exact sums" + gone, line), text
        assert "gloo" not in text.lower()


@of_torch_alone
def test_a_member_that_waits_to_join_ends_when_it_is_asked_to(tmp_path):
    with live_job(tmp_path / "live", *words(1), min_members=2) as job:
        waits = job.start()
        job.wait(job.is_heard)
        os.kill(waits.pid, signal.SIGTERM)
        job.wait(lambda: waits in job.ended, 30)
        assert waits.exitcode == 143, job.log()


@of_torch_alone
def test_the_log_has_every_line_whoever_wrote_it(tmp_path):
    more = ("--log-steps", "1000")
    with live(tmp_path, *words(), more=more, seconds=2.0) as job:
        [first] = started(job, 1)
        _, _ = job.start(), job.wait(lambda: job.num_ready() == 2)
        first.kill()
        ends(job)
        told = vbs.read_run(job.folder / "run.jsonl").updates["step"].tolist()
        assert told == list(range(job.results()[0]["num_updates"]))


@of_torch_alone
def test_a_run_whose_members_have_all_died_continues_its_checkpoint(tmp_path):
    with live(tmp_path, *words()) as job:
        members = [job.start(), job.start()]
        job.wait(lambda: list(job.folder.glob("checkpoints/*.pt")))
        for each in members:
            each.kill()
        job.wait(lambda: not job.running)
        job.start()
        ends(job)
        assert "resuming" in job.log()


@of_torch_alone
def test_a_trace_of_batches_that_follow_members_replays_the_run(tmp_path):
    with live_job(tmp_path / "live", *words(6), "--follow") as job:
        first, second = started(job, 2)
        job.wait(more_updates(job))
        first.kill()
        job.wait(more_updates(job))
        job.start()
        ends(job)
        decided = job.folder / "decided.csv"
        assert len(decided.read_text().splitlines()) >= 4, job.log()
        assert second.exitcode == 0
        replay = (*words(6), "--trace", str(decided))
        check(job, undisturbed(replay, tmp_path / "alone"))


class Member(xla_replica.LocalReplica):
    is_live, met = True, None

    def change(self, *_):
        raise InterruptedError("the others are met")


def test_wrappers_that_cannot_be_live_are_refused():
    with pytest.raises(TypeError, match="do not work with lockstep=True"):
        make(replica=Member("cpu"), lockstep=True)
    inner = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler_of(), 32, replica=Member("cpu"))
    with pytest.raises(xla_replica.ReplicaError, match=r"Checkpointer.load\(\)"):
        optimizer.set_epoch(0)


@pytest.mark.parametrize("kind", [Member, xla_replica.LocalReplica])
def test_a_member_that_finds_newer_checkpoints_meets_the_others(kind, tmp_path):
    """It was paused before it wrote; in another run, it is another one's folder."""
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler_of(), 32, replica=kind("cpu"))
    checkpointer = vbs.Checkpointer(tmp_path, optimizer, stop_on=(), model=model)
    newer = checkpointer.save()
    newer.rename(tmp_path / newer.name.replace("0-", "5-", 1))
    error = InterruptedError if kind is Member else RuntimeError
    with pytest.raises(error, match=r"others are met|has 5 updates, and this run 0"):
        checkpointer.save()


def test_who_was_paused_after_a_save_may_find_that_others_have_deleted_it(
    tmp_path, monkeypatch
):
    @contextlib.contextmanager
    def writing(replica: xla_replica.LocalReplica, what: str) -> Iterator[None]:
        yield
        [path] = tmp_path.glob("update-*.pt")
        path.unlink()

    monkeypatch.setattr(xla_replica.LocalReplica, "writing", writing)
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler_of(), 32)
    checkpointer = vbs.Checkpointer(tmp_path, optimizer, stop_on=(), model=model)
    assert not checkpointer.save().exists()


def lose_a_slice(folder: Path, kind: Any, sizes: tuple[int, int, int], **variables):
    """Runs two slices, of which one dies in mid-step, and another joins.

    Returns:
        How many programs the one that lives compiled in each epoch.
    """
    kinds = kind.split() if "--" in kind else ["--kind", kind]
    arguments = (*kinds, *words(3, 0.02))
    told = [{**variables, "MEMBER_REPLICAS": str(size)} for size in sizes]
    with live_job(folder / "live", *arguments, min_members=2, seconds=2.0) as job:
        lost = job.start(jobs.Fate("sum", 20 * sizes[0]), **told[0])
        stays = job.start(**told[1])
        job.wait(lambda: lost in job.ended)
        assert lost.exitcode == 1
        job.start(**told[2])
        assert ends(job) == [1, 0, 0], job.log()
        variables.pop("MEMBER_DEVICE")
        if "--float" in kind:
            check_floats(job, arguments)
        else:
            check(job, undisturbed(arguments, folder / "alone", **variables))
        return json.loads((job.folder / f"{stays.pid}.compilations").read_text())


@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize(
    "kind",
    ["plain", *(pytest.param(kind, marks=SLOW) for kind in (*KINDS[1:], "--float"))],
)
def test_a_slice_on_xla_dies_another_joins_and_nothing_compiles(kind, tmp_path):
    xla = {"PJRT_DEVICE": "CPU", "MEMBER_DEVICE": "xla"}
    counts = lose_a_slice(tmp_path, kind, (2, 2, 1), **xla)
    assert counts[0] > 0
    # What GraB's rows become on the device depends on the number of replicas.
    most = 2 if kind in ("projected", "group") else 0
    assert sum(counts[1:]) <= most, counts


@needs_torchtpu
@pytest.mark.torchtpu
def test_a_member_on_torchtpu_dies_and_another_joins(tmp_path):
    with live(tmp_path, *words()) as job:
        members = started(job, 3)
        job.wait(more_updates(job))
        members[0].kill()
        job.start()
        assert ends(job) == [-signal.SIGKILL, 0, 0, 0]
        told = (job.folder / f"{members[1].pid}.compilations").read_text()
        first, *later = json.loads(told)
        assert first > 0
        assert sum(later) == 0, told


@of_torch_alone
@pytest.mark.parametrize("kind", [
    "projected",
    "--float",
    "--float --shards",
    "--shards",
    pytest.param("rigl", marks=SLOW),
])  # fmt: skip
def test_a_slice_of_processes_dies_and_another_joins(kind, tmp_path):
    sizes = (2, 2, 2) if "--shards" in kind else (2, 1, 2)
    lose_a_slice(tmp_path, kind, sizes, MEMBER_DEVICE="cpu")


def test_members_that_are_not_of_the_run_are_refused(tmp_path):
    with live(tmp_path, *words()) as job:
        going_on = job.start()
        job.wait(job.num_ready)
        others = [job.start(LIVE_TOKEN="a guess"), job.start(MEMBER_SEED="1")]
        job.wait(lambda: all(each in job.ended for each in others))
        assert [each.exitcode for each in others] == [1, 1]
        assert "LIVE_TOKEN" in job.log()
        assert "seed is '1', not '0'" in job.log()
        for each in (going_on, others[1]):  # on both sides
            text = (job.folder / f"{each.pid}.txt").read_text()
            assert f"process {others[1].pid} on " in text
        assert ends(job)[-1] == going_on.exitcode == 0
        assert len(job.results()) == 1


@of_torch_alone
@pytest.mark.parametrize(("differs", "variable", "says"), [
    ("data", {}, "first samples is "),
    ("epochs", {}, "num_epochs is '8', not '7'"),
    ("dropout", {}, "1 x Dropout(p=0.2, inplace=False)"),
    ("", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "ONEDNN_MAX_CPU_ISA is \"'AVX2'\", not "),
    ("scheduler", {}, "updates ahead is ("),
    ("attached", {}, "attached is ["),
])  # fmt: skip
def test_a_joiner_that_differs_is_refused_alone_by_name_on_both_sides(
    differs, variable, says, tmp_path
):
    with live(tmp_path, *words(7)) as job:
        members = started(job, 2)
        other = job.start(MEMBER_DIFFERS=differs, **variable)
        job.wait(lambda: other in job.ended)
        assert (ends(job), other.exitcode) == ([1, 0, 0], 1), job.log()
        for each in (other, *members):
            told = (job.folder / f"{each.pid}.txt").read_text()
            assert says in told, told
            assert each is other or f"process {other.pid} on " in told


@of_torch_alone
def test_the_lighthouse_may_go_away_and_come_back(tmp_path):
    expected = undisturbed(words(), tmp_path / "alone")
    lighthouse = jobs.Lighthouse(heartbeat_seconds=3.0)
    job = LiveJob(tmp_path / "live", words(), lighthouse.variables)
    with lighthouse:
        members = started(job, 2)
    job.wait(more_updates(job))  # nobody needs it
    with lighthouse:
        job.wait(more_updates(job))
        members[0].kill()
        ends(job)
    assert members[1].exitcode == 0
    check(job, expected)
