"""What a TPU's host does, with the processes of its chips on XLA:CPU.

The parent is told of two chips; each process is a replica that knows of no other, so
that what is seen is how processes start, fail and end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.documents import ROOT
from support.xla_replica.replicas import needs_xla
from support.xla_replica.torchrun import LAUNCHER

pytestmark = [needs_xla, pytest.mark.xla]

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import xla_replica
from xla_replica.starting import xla

def train(rank, folder, what):
    index = int(os.environ["PJRT_LOCAL_PROCESS_RANK"])
    xla_replica.catch_signals()
    Path(folder, f"pid-{index}").write_text(str(os.getpid()))
    while len(list(Path(folder).glob("pid-*"))) < 2:
        time.sleep(0.05)
    if index == 1 and what == "raises":
        raise KeyError("the user's mistake")
    if index == 1 and what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)  # as where memory is short
    while True:  # a collective whose peer never comes
        time.sleep(3600)

if __name__ == "__main__":
    from torch_xla._internal import pjrt
    pjrt.runtime.device_type = lambda: "TPU"
    pjrt.tpu.num_local_processes = lambda: 2
    xla.run_on_tpu(train, tuple(sys.argv[1:]), None)
"""


def start(folder: Path, what: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU"}
    return subprocess.Popen(
        [sys.executable, folder / "script.py", folder, what],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def replicas_of(folder: Path) -> list[int]:
    """Returns the processes of the replicas, as soon as both train."""
    end = time.monotonic() + 120
    while (
        len(found := [p.read_text() for p in folder.glob("pid-*")]) < 2 or "" in found
    ):
        assert time.monotonic() < end
        time.sleep(0.05)
    return list(map(int, found))


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raises", ["replica 0 raised KeyError", "the user's mistake"]),
        ("dies", ["the process of chip 1 died (signal 9)"]),
    ],
)
def test_a_failure_is_seen_at_once_and_ends_all(tmp_path, what, said):
    """torch_xla's launcher waits for its first process for ever."""
    with start(tmp_path, what) as process:
        replicas = replicas_of(tmp_path)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    for text in said:
        assert text in errors
    assert not any(map(is_running, replicas))


def test_no_replica_outlives_a_script_that_is_killed(tmp_path):
    """It would hold the chips."""
    with start(tmp_path, "waits") as process:
        replicas = replicas_of(tmp_path)
        process.kill()
    end = time.monotonic() + 60
    while any(map(is_running, replicas)):
        assert time.monotonic() < end
        time.sleep(0.1)


SPMD = """
import torch_xla.runtime as xr
xr.use_spmd()
import xla_replica
xla_replica.current()
"""


def test_spmd_is_refused():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU"}
    done = subprocess.run(
        [sys.executable, "-c", SPMD], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "this process uses SPMD" in done.stderr


UNDER_TORCHRUN = """
import os, sys
os.environ["PJRT_DEVICE"] = "CPU"
import torch_xla, xla_replica
xla_replica.current()
"""


@pytest.mark.slow
def test_processes_of_torchrun_that_know_nothing_of_each_other_are_refused(tmp_path):
    """Each was replica 0 of 1, and trained a model of its own."""
    (tmp_path / "script.py").write_text(UNDER_TORCHRUN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*LAUNCHER, tmp_path / "script.py"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "torchrun has started 2 processes, but torch_xla knows 1" in done.stderr


FINDS = """
import os
os.environ.pop("PJRT_DEVICE", None)
import sys, types
from xla_replica.starting import xla
xla._has_device_of_google = lambda: True

class Finder:  # what importing torch_xla sets on a host with a TPU
    def find_spec(self, name, path=None, target=None):
        if name == "torch_xla" and "PJRT_SELECT_DEFAULT_DEVICE" in os.environ:
            os.environ["LIBTPU_INIT_ARGS"] = "--of_torch_xla"

sys.meta_path.insert(0, Finder())
before = dict(os.environ)
xla.has_tpu()
changed = {n: v for n, v in os.environ.items() if before.get(n) != v}
assert changed["LIBTPU_INIT_ARGS"] == "--of_torch_xla", changed
assert "PJRT_SELECT_DEFAULT_DEVICE" not in os.environ
"""


def test_looking_for_a_tpu_leaves_what_importing_torch_xla_has_set():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FINDS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


SKIPPED = """
import pytest

@pytest.mark.tpu_like
@pytest.mark.parametrize("reason", ["a row", "a fixture"])
def test_family(reason):
    pytest.skip(reason)
"""


def test_a_family_that_is_skipped_here_fails(tmp_path):
    script = tmp_path / "test_skipped.py"
    script.write_text(SKIPPED)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider",
         "-c", ROOT / "pyproject.toml", script],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'test'}"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "2 failed" in done.stdout, done.stdout + done.stderr
