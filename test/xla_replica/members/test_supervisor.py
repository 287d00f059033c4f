"""`run` keeps members running: who dies at once ends nobody else."""

import logging
import re
import signal
import subprocess
import sys

import pytest
from support.xla_replica.replicas import of_torch_alone

from xla_replica.members.supervisor import keep_running

pytestmark = of_torch_alone
SCRIPT = """
import pathlib, sys, time
try:
    pathlib.Path(sys.argv[1], "first").mkdir()
except FileExistsError:
    sys.exit(3)
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""


@pytest.fixture(autouse=True)
def signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("seconds", "status"), [(2.5, 0), (0, 3)])
def test_a_member_that_always_dies_ends_no_other_one(seconds, status, tmp_path, caplog):
    script = ["-c", SCRIPT, str(tmp_path), str(seconds), str(status)]
    assert keep_running(script, 2, {}) == status
    assert "another one in 1 s" in caplog.text
    assert ("those before it have failed" in caplog.text) == (status == 3)


@pytest.mark.parametrize(("num_members", "most"), [(1, 3), (2, 4), (3, 6)])
def test_if_all_die_alike_before_an_update_the_run_ends_soon(num_members, most, caplog):
    """Each of them once, and one of them again: they die of the script's own error."""
    assert keep_running(["-c", "raise SystemExit(7)"], num_members, {}) == 7
    texts = "has died (7)", "those before it have failed"
    ends = sum(caplog.text.count(text) for text in texts)
    assert num_members < ends <= most


UPDATES = """
import os, pathlib, sys
with open(sys.argv[1], "a") as log:
    log.write("x")
    number = log.tell()
if number == 3:
    pathlib.Path(os.environ["LIVE_UPDATE_FILE"]).touch()
sys.exit(0 if number == 5 else 1)
"""


def test_who_has_made_no_update_starts_after_twice_as_long(tmp_path, caplog):
    assert keep_running(["-c", UPDATES, str(tmp_path / "log")], 1, {}) == 0
    assert re.findall(r"another one(?: in (\d) s)?", caplog.text) == ["1", "2", "", "1"]


@pytest.mark.parametrize("number", [15, 2])
def test_a_run_that_was_asked_to_leave_before_its_end_says_so(number):
    script = f"import os; os.kill(os.getpid(), {number})"
    assert keep_running(["-c", script], 2, {}) == 128 + number


TOKEN = """
import os, pathlib, stat, subprocess, sys
folder = pathlib.Path(os.environ.pop("LIVE_UPDATE_FILE")).parent
modes = [stat.S_IMODE(each.stat().st_mode) for each in (folder, folder / "variables")]
given = os.environ.pop("LIVE_TOKEN")
text = f". {folder}/variables; printf '%s' \\"$LIVE_TOKEN\\""
assert subprocess.check_output(["sh", "-c", text], text=True) == given == "a b'c"
assert modes == [0o700, 0o600]
"""


def test_how_to_start_another_member_is_told_without_the_token(caplog):
    caplog.set_level(logging.INFO)
    assert keep_running(["-c", TOKEN], 1, {"LIVE_TOKEN": "a b'c"}) == 0
    assert "another member: . /" in caplog.text
    assert "a b'c" not in caplog.text


GROUP = """
import os, pathlib, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, os.environ["LOCAL_RANK"])
assert ranks == ["0", "1"]
folder, rank = pathlib.Path(sys.argv[1]), dist.get_rank()
number = len([*folder.glob(f"{rank}-*")])
(folder / f"{rank}-{number}").touch()
if number == 0:  # one of the first member dies, and the other one waits for ever
    while not (folder / "0-0").exists(): time.sleep(0.01)
    os._exit(9) if rank else time.sleep(600)
dist.destroy_process_group()
"""


def test_the_processes_of_a_member_form_a_group_and_die_together(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert keep_running(["-c", GROUP, str(tmp_path)], 1, {}, num_processes=2) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]
    assert "has died (9)" in caplog.text
    assert "torchrun --standalone --nproc-per-node=2 -c" in caplog.text


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("begun", flush=True)
time.sleep(60)
"""


def test_a_second_interrupt_ends_without_a_traceback():
    code = (
        "import sys; from xla_replica.members.supervisor import keep_running as run; "
        f"sys.exit(run(['-c', {STUBBORN!r}], 1, {{}}))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        for said in ("begun", "asked"):
            assert process.stdout.readline().strip() == said
            process.send_signal(signal.SIGINT)
        assert process.wait(40) == 130
        assert process.stderr.read() == ""
