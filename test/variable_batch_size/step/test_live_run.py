"""Members die, leave, stop and join in the middle of a run: its bits stay the same."""

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.variable_batch_size.member import KINDS, NUM_SAMPLES, TRACE
from support.variable_batch_size.wrapping import make, sampler_of
from support.xla_replica import live_job as jobs
from support.xla_replica.live_job import LiveJob, live_job
from support.xla_replica.replicas import needs_torchtpu, needs_xla, of_torch_alone
from torch import nn

import variable_batch_size as vbs
import xla_replica

pytestmark = jobs.needs_lighthouse
SLOW = pytest.mark.slow
LONGEST = 9  # epochs, of runs of the plain kind
_expected: dict[tuple[str, ...], dict[str, str]] = {}


def undisturbed(arguments: tuple[str, ...], folder: Path, **variables: str) -> dict:
    """Returns by update what one process without any others has made of the weights.

    One run serves all tests of the plain kind, which end after some update of it.
    """
    at = arguments.index("--epochs")  # of `words`
    kind = arguments[:at] + arguments[at + 4 :]
    if kind not in _expected or variables:
        epochs = arguments[at + 1] if kind else LONGEST
        alone = *kind, *words(int(epochs), 0), "--hashes"
        job = LiveJob(folder, alone, variables)
        job.start()
        [result] = job.wait(job.results)
        _expected[kind] = result["hashes"]
        job.stop()
    return _expected[kind]


def meet_fates(job: LiveJob, fates: list[jobs.Fate], num_members: int = 3) -> None:
    """Has members meet their fates, and as many others take their places.

    On a busy machine one may be taken for dead before: another one has its fate then.
    """
    waiting, given = list(fates), {}

    def start() -> None:
        fate = waiting.pop(0) if waiting else None
        given[job.start(fate).pid] = fate

    def has_ended() -> bool:
        for process in job.look():
            fate = given[process.pid]
            if fate and not (job.folder / f"{process.pid}.met").exists():
                waiting.append(fate)
            if process.exitcode and not job.results():
                start()
        if not waiting and job.num_met() == len(fates) and are_together(job):
            end_soon(job)
        return not job.running

    for _ in range(num_members):
        start()

    job.wait(has_ended, 300)


def more_updates(job: LiveJob) -> Callable[[], bool]:
    """Returns a function that says whether four updates were made since now."""
    number = job.num_updates() + 4
    return lambda: job.num_updates() >= number


def are_together(job: LiveJob) -> bool:
    """Returns whether all that run have told last of one generation, of them all."""
    files = [job.folder / f"{each.pid}.txt" for each in job.running]
    texts = [file.read_text() for file in files if file.exists()]
    told = [re.findall(r" generation (\d+): (\d+) ", text)[-1:] for text in texts]
    is_same = told == told[:1] * len(job.running)
    # Of slices, it is the number of their replicas.
    return is_same and all(own and int(own[0][1]) >= len(told) for own in told)


def end_soon(job: LiveJob) -> None:
    """Has members end some updates from now: what would follow shows nothing new."""
    job.tell("end", job.num_updates() + 8)


def check(job: LiveJob, expected: dict[str, str]) -> None:
    results = job.results()
    assert results, job.log()
    number = results[0]["num_updates"]
    right = {"hash": expected[str(number)], "num_updates": number}
    assert results == [right] * len(results), job.log()
    assert job.check_samples() == number


def values(job: LiveJob) -> list[torch.Tensor]:
    """Returns what members end with, of the same bits on all of them."""
    first, *others = job.results()
    assert others == [first] * len(others), job.log()
    assert job.check_samples() == first["num_updates"]
    return torch.load(next(job.folder.glob("*.values")))


def check_floats(job: LiveJob, arguments: tuple[str, ...]) -> None:
    """Asserts that a job has ended as a member that is alone, up to rounding."""
    with live_job(job.folder.with_name("alone"), *arguments) as alone:
        alone.tell("end", job.results()[0]["num_updates"])
        alone.start()
        alone.wait(lambda: not alone.running)
        for own, other in zip(values(job), values(alone)):
            torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-12)


def words(epochs: int, seconds: float = 0.03) -> tuple[str, ...]:
    return "--epochs", str(epochs), "--minibatch-seconds", str(seconds)


def ends(job: LiveJob, soon: bool = True) -> list[int]:
    """Returns the statuses of all, which end soon after they have met, or later."""
    if soon:
        job.wait(lambda: are_together(job))
        end_soon(job)
    job.wait(lambda: not job.running)
    return [each.exitcode for each in job.ended]


@contextlib.contextmanager
def live(folder: Path, *arguments: str, more: tuple[str, ...] = (), **options):
    """Gives a job, whose members must end with the bits of one that is left alone.

    ``more`` arguments and ``options`` are for the job, and change no bit.
    """
    expected = undisturbed(arguments, folder / "alone")
    with live_job(folder / "live", *arguments, *more, **options) as job:
        yield job
        job.wait(lambda: not job.running)
        check(job, expected)


def started(job: LiveJob, number: int, fate: Any = None) -> list[Any]:
    members = [job.start(fate) for _ in range(number)]
    job.wait(lambda: job.num_ready() == number)
    return members


@of_torch_alone
def test_deaths_in_every_phase_leave_the_bits(tmp_path):
    fates = [jobs.Fate(phase, random.randrange(1, 6)) for phase in jobs.PHASES]
    options = {"more": ("--workers", "1"), "seconds": 1.0}
    with live(tmp_path, "--kind", "projected", *words(3, 0.02), **options) as job:
        meet_fates(job, fates)


@SLOW
@pytest.mark.parametrize("number", range(20))
def test_ten_random_deaths_leave_the_bits(number, tmp_path):
    kind = ("plain", "projected", "rigl")[number % 3]
    phases = [
        list(jobs.PHASES)[(10 * number + n) % len(jobs.PHASES)] for n in range(10)
    ]
    # How many times of a phase a member has for certain.
    rare = {"set_epoch": 2, "save": 2, "transfer": 1}
    ways = (*[signal.SIGKILL] * 3, signal.SIGTERM)
    fates = [
        jobs.Fate(phase, random.randrange(rare.get(phase, 12)), random.choice(ways))
        for phase in phases
    ]
    options = {"more": ("--workers", str(number % 2)), "seconds": 1.0}
    with live(tmp_path, "--kind", kind, *words(8, 0.02), **options) as job:
        meet_fates(job, fates, 4)
        assert job.num_met() == len(fates)


@of_torch_alone
@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(k, marks=SLOW) for k in ("tokens", "adascale"))]
)
def test_deaths_in_every_phase_change_float_sums_by_rounding_alone(kind, tmp_path):
    arguments = ("--float", "--kind", kind, *words(4, 0.02))
    phases = [*jobs.PHASES, *jobs.FLOAT_PHASES]
    fates = [jobs.Fate(phase, random.randrange(1, 6)) for phase in phases]
    with live_job(tmp_path / "live", *arguments, seconds=1.0) as job:
        meet_fates(job, fates)
    assert "sums of floats" in job.log()
    check_floats(job, arguments)


@of_torch_alone
@pytest.mark.parametrize("steps", [(14,), (14, 34)])
def test_a_member_whose_weights_differ_receives_those_of_the_others_once(
    steps, tmp_path
):
    arguments = ("--float", *words(3, 0.02))
    with live_job(tmp_path / "live", *arguments, min_members=3) as job:
        members = [job.start(jobs.Flip(steps)), job.start(), job.start()]
        ends(job, soon=False)
        assert "after update 19 the weights of members" in job.log()
        assert ("not for the first time" in job.log()) == (len(steps) == 2)
        assert [each.exitcode for each in members] == [len(steps) - 1] * 3
    assert len(steps) == 2 or values(job)


@of_torch_alone
def test_a_member_that_alone_loses_sums_receives_what_the_others_made_of_them(tmp_path):
    """Of steps in an epoch, of an epoch's last one, and of the run's last one."""
    schedule = vbs.Schedule(vbs.Trace(TRACE), NUM_SAMPLES, 8, "cycle")
    first, second, last = (schedule.steps(epoch).stop - 1 for epoch in range(3))
    with live(tmp_path, *words(3, 0.02)) as job:
        steps = (2, first, second - 1, second, last)
        job.start(jobs.Loss(steps))
        job.start()
        assert ends(job, soon=False) == [0, 0], job.log()
        [joined] = [int(path.stem) for path in job.folder.glob("*.joined")]
        lost = sorted(int(p.stem.split(".")[1]) for p in job.folder.glob("*.lost"))
        assert lost == [step for step in steps if step >= joined] != []


@of_torch_alone
@pytest.mark.parametrize("num_members", [2, 3])
def test_the_others_go_on_without_one_that_hangs(num_members, tmp_path):
    times = {"patience": 5.0, "LIVE_TIMEOUT_SECONDS": "4"}
    with live(tmp_path, *words(3, 0.02), **times) as job:
        hangs = job.start(jobs.Hang(30))
        others = [job.start() for _ in range(num_members - 1)]
        job.wait(lambda: job.num_ready() == num_members)
        job.wait(job.num_met)
        job.wait(more_updates(job))
        end_soon(job)
        job.wait(lambda: all(each in job.ended for each in others))
        hangs.kill()
        assert [each.exitcode for each in others] == [0] * len(others), job.log()


@of_torch_alone
def test_members_that_are_paused_and_go_on_one_after_another_all_end_well(tmp_path):
    with live(tmp_path, *words(6, 0.03), seconds=1.0) as job:
        members = started(job, 3)
        job.wait(more_updates(job))
        for each in members:
            os.kill(each.pid, signal.SIGSTOP)
        time.sleep(3)  # heartbeats
        for each in members:
            os.kill(each.pid, signal.SIGCONT)
            job.wait(more_updates(job))  # of this one alone at first
        assert ends(job) == [0, 0, 0], job.log()
        assert len(job.results()) == 3
        assert "joins anew" in job.log()


@of_torch_alone
def test_paused_members_join_one_that_has_begun_with_a_checkpoint(tmp_path):
    with live(tmp_path, *words(9, 0.03), seconds=1.0) as job:
        members = started(job, 2)
        job.wait(job.saved)
        for each in members:
            os.kill(each.pid, signal.SIGSTOP)
        members.append(job.start())
        job.wait(more_updates(job))
        for each in members[:2]:
            os.kill(each.pid, signal.SIGCONT)
            time.sleep(1)
        job.wait(lambda: "joins anew" in job.log())
        assert ends(job) == [0, 0, 0], job.log()


@of_torch_alone
def test_a_paused_member_joins_who_begins_with_the_checkpoint_of_the_dead(
    tmp_path,
):
    """It is ahead of nobody, and its own state is older than what they have saved."""
    with live(tmp_path, *words(9, 0.03), seconds=1.0, min_members=2) as job:
        paused, *others = started(job, 3)
        os.kill(paused.pid, signal.SIGSTOP)
        number = job.num_updates()
        job.wait(lambda: job.saved() and job.saved()[0].num_updates > number + 10)
        for each in others:
            each.kill()
        job.wait(lambda: not job.is_heard())
        new = job.start()
        job.wait(job.is_heard)
        time.sleep(1)  # it asks for others
        os.kill(paused.pid, signal.SIGCONT)
        job.wait(lambda: "joins anew" in job.log())
        ends(job)
        assert (paused.exitcode, new.exitcode) == (0, 0), job.log()


@of_torch_alone
def test_a_paused_member_passes_over_the_epochs_that_another_one_has_trained(tmp_path):
    with live(tmp_path, *words(9, 0.02), seconds=1.0) as job:
        paused, _ = started(job, 2)
        os.kill(paused.pid, signal.SIGSTOP)
        job.wait(lambda: job.num_updates() > 45)  # in the fourth epoch
        os.kill(paused.pid, signal.SIGCONT)
        job.wait(lambda: "joins anew" in job.log())
        assert ends(job) == [0, 0], job.log()


@of_torch_alone
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
@pytest.mark.parametrize("has_space", [True, False])
@pytest.mark.parametrize("how", [(), ("--save-last",)])
def test_the_last_checkpoint_is_there_whoever_dies_writing_it(how, has_space, tmp_path):
    """By another member, for which all wait; also if the first one's disk is full."""
    last = vbs.Schedule(vbs.Trace(TRACE), NUM_SAMPLES, 8, "cycle").steps(1).stop
    every = ("--save-every", str(2 * last if how == ("--save-last",) else last))
    with live(tmp_path, *words(2, 0.02), more=(*how, *every), seconds=1.0) as job:
        for _ in range(3):
            job.start(jobs.DiesWriting(has_space))
        status = -signal.SIGKILL if has_space else 1
        assert sorted(ends(job, soon=False)) == sorted([0, 0, status]), job.log()
        assert job.saved()[0].num_updates == last
        assert "No space left" in job.log() or has_space


@of_torch_alone
@pytest.mark.parametrize("sends", [True, False])
def test_who_dies_amid_the_pieces_of_a_state_costs_its_own_alone(sends, tmp_path):
    fate = jobs.DiesAmidPieces(sends)
    with live(tmp_path, *words(5, 0.03), seconds=1.0) as job:
        started(job, 2, fate)
        (job.folder / "armed").touch()
        joiner = job.start(fate)
        job.wait(lambda: (job.folder / "died").exists())
        if not sends:
            job.start(fate)
        statuses = sorted(ends(job))
        assert statuses == [-signal.SIGKILL, *[0] * (len(statuses) - 1)], job.log()
        assert len(job.results()) == 2 + (not sends), job.log()
        kept = (job.folder / f"{joiner.pid}.kept").exists()
        assert kept == sends, job.log()


@of_torch_alone
def test_an_ordinary_death_is_one_line(tmp_path):
    with live(tmp_path, *words(4, 0.03), seconds=1.0) as job:
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
def test_a_second_death_where_survivors_meet_costs_no_more_than_the_first(tmp_path):
    with live(tmp_path, *words(4, 0.03), seconds=1.0) as job:
        members = started(job, 3, jobs.DiesMeeting())
        job.wait(more_updates(job))
        (job.folder / "armed").touch()
        members[0].kill()
        assert sorted(ends(job)) == [-signal.SIGKILL, -signal.SIGKILL, 0], job.log()
        seconds = [float(s) for s in re.findall(r"went (\d+\.\d+) s ago", job.log())]
        assert max(seconds) < 40, job.log()


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
    with live(tmp_path, *words(3, 0.03), more=more, seconds=1.0) as job:
        [first] = started(job, 1)
        _, _ = job.start(), job.wait(lambda: job.num_ready() == 2)
        first.kill()
        ends(job)
        told = vbs.read_run(job.folder / "run.jsonl").updates["step"].tolist()
        assert told == list(range(job.results()[0]["num_updates"]))


@of_torch_alone
def test_a_run_whose_members_have_all_died_continues_its_checkpoint(tmp_path):
    with live(tmp_path, *words(3)) as job:
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
    with live_job(tmp_path / "live", *words(2), "--follow") as job:
        first, second = started(job, 2)
        job.wait(more_updates(job))
        first.kill()
        job.wait(more_updates(job))
        job.start()
        ends(job)
        decided = job.folder / "decided.csv"
        assert len(decided.read_text().splitlines()) >= 4, job.log()
        assert second.exitcode == 0
        replay = (*words(2), "--trace", str(decided))
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
    with live(tmp_path, *words(4)) as job:
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
@pytest.mark.parametrize(
    "kind",
    [
        "projected",
        "--float",
        "--float --shards",
        "--shards",
        pytest.param("rigl", marks=SLOW),
    ],
)
def test_a_slice_of_processes_dies_and_another_joins(kind, tmp_path):
    sizes = (2, 2, 2) if "--shards" in kind else (2, 1, 2)
    lose_a_slice(tmp_path, kind, sizes, MEMBER_DEVICE="cpu")


@of_torch_alone
def test_members_that_are_not_of_the_run_are_refused(tmp_path):
    with live(tmp_path, *words(3)) as job:
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
@pytest.mark.parametrize(
    ("differs", "variable", "says"),
    [
        ("data", {}, "first samples is "),
        ("epochs", {}, "num_epochs is '8', not '7'"),
        ("dropout", {}, "1 x Dropout(p=0.2, inplace=False)"),
        ("", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "ONEDNN_MAX_CPU_ISA is \"'AVX2'\", not "),
        ("scheduler", {}, "updates ahead is ("),
        ("attached", {}, "attached is ["),
    ],
)
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
    expected = undisturbed(words(LONGEST), tmp_path / "alone")
    lighthouse = jobs.Lighthouse(heartbeat_seconds=3.0)
    job = LiveJob(tmp_path / "live", words(LONGEST), lighthouse.variables)
    with lighthouse:
        members = started(job, 2)
    job.wait(more_updates(job))  # nobody needs it
    with lighthouse:
        job.wait(more_updates(job))
        members[0].kill()
        ends(job)
    assert members[1].exitcode == 0
    check(job, expected)
