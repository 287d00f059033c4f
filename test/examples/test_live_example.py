"""The demonstration of members that die and join."""

from __future__ import annotations

import re

import pytest
from support.documents import ROOT
from support.scripts import run_script

from examples.live import kill_and_join
from variable_batch_size import read_run

FOLDER = ROOT / "examples/live"
SAID = """\
update 0 is by A B C
[Gloo] Rank [Gloo] Rank 0 is connected to 2 peer ranks
[Gloo] Rank update 1 is by B C
update 1 is by B C
test accuracy 97.8 %
"""


class Follower(kill_and_join.LiveRun):
    """Follows what others have said."""

    def __init__(self) -> None:
        self.members, self.killed = {}, {1: "A"}


def test_the_script_trains_alone_and_its_run_is_drawn(tmp_path, capsys):
    alone = tmp_path / "alone"
    given = FOLDER / "train_digits.py", alone, "--epochs", 1
    status, said = run_script(*given, cwd=tmp_path)
    assert status == 0, said
    run = Follower()
    updates = [u for line in said.splitlines(True) for u in run._read(line)]
    assert updates == read_run(alone / "run.jsonl").updates["step"].tolist()
    assert set(run.members.values()) == {"A"}
    kill_and_join.draw(run, alone, alone, tmp_path / "live.png")
    assert (tmp_path / "live.png").stat().st_size > 20_000
    assert re.fullmatch("[0-9a-f]{16}", kill_and_join.digest(alone))


def test_updates_are_shown_once_whatever_gloo_writes_between(capsys):
    run = Follower()
    assert [u for line in SAID.splitlines(True) for u in run._read(line)] == [0, 1]
    assert capsys.readouterr().out == (
        "update   0   A B C · ·\nupdate   1   · B C · ·\ntest accuracy 97.8 %\n"
    )


@pytest.mark.slow
def test_processes_die_and_join_and_the_weights_are_those_of_one(tmp_path):
    given = FOLDER / "kill_and_join.py", "--folder", "run"
    status, said = run_script(*given, cwd=tmp_path)
    assert status == 0, said
    shown = dict(re.findall(r"^update +(\d+)   (.*)$", said, re.MULTILINE))
    assert list(shown) == [str(update) for update in range(149)]
    assert "A" in "".join(shown.values())
    assert "A" not in shown["60"]  # a busy machine kills some updates later
    assert shown["148"] == "· · C D E"
    assert said.endswith(": equal, to the bit\n")
