"""Members die, hang, pause and differ amid a run: its bits stay the same."""

import os
import random
import re
import signal
import time

import pytest
from support.variable_batch_size.live_training import (
    are_together,
    check_floats,
    end_soon,
    ends,
    live,
    more_updates,
    started,
    values,
    words,
)
from support.variable_batch_size.member import NUM_SAMPLES, TRACE
from support.xla_replica import live_job as jobs
from support.xla_replica.live_job import LiveJob, live_job
from support.xla_replica.replicas import of_torch_alone

import variable_batch_size as vbs

pytestmark = [jobs.needs_lighthouse, of_torch_alone]
SLOW = pytest.mark.slow


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


def test_deaths_in_every_phase_leave_the_bits(tmp_path):
    fates = [jobs.Fate(phase, random.randrange(1, 6)) for phase in jobs.PHASES]
    options = {"more": ("--workers", "1"), "seconds": 2.0}
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


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(k, marks=SLOW) for k in ("tokens", "adascale"))]
)
def test_deaths_in_every_phase_change_float_sums_by_rounding_alone(kind, tmp_path):
    arguments = ("--float", "--kind", kind, *words(4, 0.02))
    phases = [*jobs.PHASES, *jobs.FLOAT_PHASES]
    fates = [jobs.Fate(phase, random.randrange(1, 6)) for phase in phases]
    with live_job(tmp_path / "live", *arguments, seconds=2.0) as job:
        meet_fates(job, fates)
    assert "sums of floats" in job.log()
    check_floats(job, arguments)


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


def test_a_member_that_alone_loses_sums_receives_what_the_others_made_of_them(tmp_path):
    """Of steps in an epoch, of an epoch's last one, and of the run's last one."""
    schedule = vbs.Schedule(vbs.Trace(TRACE), NUM_SAMPLES, 8, "cycle")
    first, second, last = (schedule.steps(epoch).stop - 1 for epoch in range(3))
    with live(tmp_path, *words(3, 0.02), min_members=2) as job:
        steps = (2, first, second - 1, second, last)
        job.start(jobs.Loss(steps))
        job.start()
        assert ends(job, soon=False) == [0, 0], job.log()
        [joined] = [int(path.stem) for path in job.folder.glob("*.joined")]
        lost = sorted(int(p.stem.split(".")[1]) for p in job.folder.glob("*.lost"))
        assert lost == [step for step in steps if step >= joined] != []


@pytest.mark.parametrize("num_members", [2, 3])
def test_the_others_go_on_without_one_that_hangs(num_members, tmp_path):
    times = {"patience": 5.0, "LIVE_TIMEOUT_SECONDS": "4"}
    with live(tmp_path, *words(seconds=0.02), **times) as job:
        hangs = job.start(jobs.Hang(0, since="armed"))
        others = [job.start() for _ in range(num_members - 1)]
        job.wait(lambda: job.num_ready() == num_members)
        (job.folder / "armed").touch()
        job.wait(job.num_met)
        job.wait(more_updates(job))
        end_soon(job)
        job.wait(lambda: all(each in job.ended for each in others))
        hangs.kill()
        assert [each.exitcode for each in others] == [0] * len(others), job.log()


def test_who_believes_that_it_was_silent_meets_the_others_who_do_not_at_once(tmp_path):
    """They waited in a collective for it, and it for them, until patience ended."""
    with live(tmp_path, *words(seconds=0.02), seconds=1.0, patience=15.0) as job:
        members = [job.start(jobs.Silence()), job.start(), job.start()]
        job.wait(lambda: job.num_ready() == 3 and "generation 8: 3" in job.log())
        assert ends(job) == [0] * len(members), job.log()
        assert "waits for all" not in job.log()


def test_members_that_are_paused_and_go_on_one_after_another_all_end_well(tmp_path):
    with live(tmp_path, *words(), seconds=1.0) as job:
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


def test_paused_members_join_one_that_has_begun_with_a_checkpoint(tmp_path):
    with live(tmp_path, *words(), seconds=1.0) as job:
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


def test_a_paused_member_joins_who_begins_with_the_checkpoint_of_the_dead(
    tmp_path,
):
    """It is ahead of nobody, and its own state is older than what they have saved."""
    with live(tmp_path, *words(), seconds=1.0, min_members=2) as job:
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


def test_a_paused_member_passes_over_the_epochs_that_another_one_has_trained(tmp_path):
    """Also if that one is not heard of when it goes on."""
    with live(tmp_path, *words(seconds=0.02), seconds=1.0) as job:
        paused, other = started(job, 2)
        os.kill(paused.pid, signal.SIGSTOP)
        job.wait(lambda: job.num_updates() > 45)  # in the fourth epoch
        os.kill(other.pid, signal.SIGSTOP)
        job.wait(lambda: not job.is_heard())
        os.kill(paused.pid, signal.SIGCONT)
        time.sleep(1.5)
        os.kill(other.pid, signal.SIGCONT)
        job.wait(lambda: "joins anew" in job.log())
        assert ends(job) == [0, 0], job.log()


@pytest.mark.parametrize("has_space", [True, False])
@pytest.mark.parametrize("how", [(), ("--save-last",)])
def test_the_last_checkpoint_is_there_whoever_dies_writing_it(how, has_space, tmp_path):
    """By another member, for which all wait; also if the first one's disk is full."""
    last = vbs.Schedule(vbs.Trace(TRACE), NUM_SAMPLES, 8, "cycle").steps(1).stop
    every = ("--save-every", str(2 * last if how == ("--save-last",) else last))
    with live(tmp_path, *words(2, 0.02), more=(*how, *every), seconds=2.0) as job:
        for _ in range(3):
            job.start(jobs.DiesWriting(has_space))
        status = -signal.SIGKILL if has_space else 1
        assert sorted(ends(job, soon=False)) == sorted([0, 0, status]), job.log()
        assert job.saved()[0].num_updates == last
        assert "No space left" in job.log() or has_space


@pytest.mark.parametrize("sends", [True, False])
def test_who_dies_amid_the_pieces_of_a_state_costs_its_own_alone(sends, tmp_path):
    fate = jobs.DiesAmidPieces(sends)
    with live(tmp_path, *words(), seconds=2.0) as job:
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


def test_a_second_death_where_survivors_meet_costs_no_more_than_the_first(tmp_path):
    with live(tmp_path, *words(), seconds=2.0) as job:
        members = started(job, 3, jobs.DiesMeeting())
        job.wait(more_updates(job))
        (job.folder / "armed").touch()
        members[0].kill()
        assert sorted(ends(job)) == [-signal.SIGKILL, -signal.SIGKILL, 0], job.log()
        seconds = [float(s) for s in re.findall(r"went (\d+\.\d+) s ago", job.log())]
        assert max(seconds) < 40, job.log()
