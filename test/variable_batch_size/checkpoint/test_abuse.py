"""A run that is tormented ends as one that is left in peace, and does not grow."""

import json
import random

import pytest
from support.xla_replica.live_job import needs_lighthouse
from support.xla_replica.replicas import needs_xla, of_torch_alone

from tools.studies import live_runs
from tools.studies.abuse import abuse, growth, problems

HOUR = pytest.param(3600.0, marks=[pytest.mark.slow, pytest.mark.timeout(3 * 3600)])


def check(folder, kind: str, seconds: float) -> None:
    # The hour looks for what nobody has seen; a default run must not.
    seed = random.randrange(10**6) if seconds > 60 else 3
    outcome = abuse(folder, kind, seconds, seed)
    assert problems(outcome) == [], outcome
    assert outcome["processes"]["started"] > 1, outcome


@of_torch_alone
@needs_lighthouse
@pytest.mark.parametrize("seconds", [14.0, HOUR])
def test_live_members_bear_all_that_happens_to_them(seconds, tmp_path):
    check(tmp_path, "live", seconds)


@of_torch_alone
@needs_lighthouse
@pytest.mark.slow
def test_disturbed_runs_end_as_others(tmp_path):
    log, wanted = tmp_path / "log.jsonl", {"kills": 1, "hangs": 1}
    lines = live_runs.torment(tmp_path, log, wanted, 3600.0, random.randrange(10**6))
    assert not any(line["problems"] for line in lines), lines


def test_a_log_of_disturbed_runs_is_continued(tmp_path):
    log = tmp_path / "log.jsonl"
    line = {
        "seed": 7, "settings": "--float", "done": {"kills": 2}, "processes": 5,
        "problems": ["one"], "error": 1e-15, "seconds": 9,
    }  # fmt: skip
    log.write_text(json.dumps(line) + "\n")
    lines = live_runs.torment(tmp_path, log, {"kills": 2}, 60.0, 1)
    assert lines == [line]
    wanted = {"kills": 3, "joins": 1}
    assert live_runs.missing(lines, wanted) == {"kills": 1, "joins": 1}
    assert "| runs, float | 1 |" in live_runs.table(lines)
    assert "seed 7: one" in live_runs.table(lines)


@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize("seconds", [pytest.param(8.0, marks=pytest.mark.slow), HOUR])
def test_emulated_replicas_bear_all_that_happens_to_them(seconds, tmp_path):
    check(tmp_path, "emulated", seconds)


def test_what_grows_is_found():
    life = growth([(n, 100 + n, 7, 3, 5 + n) for n in range(40)])
    assert (life["seconds"], life["memory, kB"]) == (39, [114.5, 134.5])
    outcome = {
        "ends": {"with the run": 1}, "hash": ["a"], "hash undisturbed": "a",
        "samples lost or doubled": 0, "lines of the log missing": 0,
        "growth": [life],
    }  # fmt: skip
    found = [text.split(":")[0] for text in problems(outcome)]
    assert found == ["memory, kB", "sockets"]
