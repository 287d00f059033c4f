"""The demonstration of members that die and join."""

import re
from pathlib import Path
from unittest import mock

import pytest
from support.documents import ROOT
from support.scripts import run_script

from examples.live import kill_and_join
from variable_batch_size import read_run

FOLDER = ROOT / "examples/live"


def test_updates_are_shown_once_and_drawn_whatever_gloo_writes_between(
    tmp_path, capsys
):
    alone = tmp_path / "alone"
    given = FOLDER / "train_digits.py", alone, "--epochs", 1
    said = run_script(*given, cwd=tmp_path)
    with mock.patch.object(Path, "open"):  # for what processes would say
        run = kill_and_join.LiveRun(tmp_path / "live", "", 0)
    first, second, *rest = re.findall("^(?:update|test accuracy) .*\n", said, re.M)
    lines = [first, f"[Gloo] Rank {first}", f"[Gloo] Rank [Gloo] {second}", *rest]
    (tmp_path / "live/output.txt").write_text("".join(lines))
    updates = read_run(alone / "run.jsonl").updates["step"].tolist()
    assert [*run.follow()] == updates
    shown = [f"update {update:3}   A · · · ·" for update in updates]
    assert capsys.readouterr().out.splitlines() == [*shown, rest[-1].rstrip()]
    run.met[1] = "A", "is killed"
    kill_and_join.draw(run, alone, alone, tmp_path / "live.png")
    assert (tmp_path / "live.png").stat().st_size > 20_000
    assert re.fullmatch("[0-9a-f]{16}", kill_and_join.digest(alone))


@pytest.mark.slow
def test_processes_die_and_join_and_the_weights_are_those_of_one(tmp_path):
    given = FOLDER / "kill_and_join.py", "--folder", "run"
    said = run_script(*given, cwd=tmp_path)
    shown = dict(re.findall(r"^update +(\d+)   (.*)$", said, re.MULTILINE))
    assert list(shown) == [str(update) for update in range(149)]
    assert "A" in "".join(shown.values())
    assert "A" not in shown["60"]  # a busy machine kills some updates later
    assert shown["148"] == "· · · D E"
    assert said.endswith(": equal, to the bit\n")
