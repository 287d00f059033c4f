"""Forked processes have what spawned ones would have: surroundings and the script."""

import os
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from support.scripts import python, written
from support.xla_replica import replicas
from support.xla_replica.replicas import SEVERAL_REPLICAS, Backend, of_torch_alone, row

import xla_replica
from xla_replica import ReplicaError

needs_forks = pytest.mark.skipif(sys.platform != "linux", reason="they are spawned")


def environment(rank: int) -> tuple[str | None, Path, bool, int]:
    has_torch_xla = "torch_xla" in sys.modules
    return os.environ.get("A_TEST_HAS_SET"), Path.cwd(), has_torch_xla, os.getpid()


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_a_run_has_its_parents_present_surroundings(backend, monkeypatch, tmp_path):
    """Only where it is needed is torch_xla, which replaces modules such as nn.GRU."""
    processes = set()
    for value in ("1", "2", ""):
        monkeypatch.setenv("A_TEST_HAS_SET", value)
        if not value:
            monkeypatch.delenv("A_TEST_HAS_SET")
        folder = tmp_path / f"folder{value}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        for *found, process in backend.run(environment):
            assert found == [value or None, folder, backend.device == "xla"]
            processes.add(process)
    # XLA's replicas are threads of one process.
    assert len(processes) == 3 * (1 if backend.device == "xla" else 3)
    assert os.getpid() not in processes


@needs_forks
def test_what_processes_are_forked_from_has_no_thread_and_no_driver():
    """Neither a lock that a thread holds nor an open GPU survives a fork."""
    Backend("cpu", 2).run(environment)
    server = Path(f"/proc/{forkserver._forkserver._forkserver_pid}")
    assert len(list((server / "task").iterdir())) == 1
    mapped = (server / "maps").read_text()
    assert "libtorch_cpu" in mapped
    assert "libcuda.so" not in mapped


def imported_with_torch_xla(rank: int) -> int:
    """Returns how many parts of torch torch_xla imports in a forked process."""
    os.environ["PJRT_DEVICE"] = "CPU"
    assert "torch_xla" not in sys.modules
    before = set(sys.modules)
    import torch_xla  # noqa: F401

    return sum(name.startswith("torch.") for name in set(sys.modules) - before)


@replicas.on_xla
@needs_forks
def test_most_of_what_torch_xla_imports_is_there_before_a_process_is_forked():
    [parts] = set(Backend("cpu", 2).run(imported_with_torch_xla))
    assert parts < 20  # without it more than a hundred, in a second


class Unreadable(Exception):
    def __str__(self) -> str:
        raise KeyError("meanwhile")


def ends_early(rank: int, how: str) -> None:
    is_late = how.endswith("after its peer")
    if rank == 0 and is_late:
        raise ReplicaError("replica 0 of 2 failed in all_reduce_", 0)
    if rank == 1:
        time.sleep(0.3 * is_late)
        if how.startswith("exits"):
            os._exit(0)
        if how.startswith("is killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "is interrupted":
            raise Unreadable
    replica = xla_replica.current()
    if how == "sums alone":
        for _ in range(2 - rank):
            replica.all_reduce_([torch.ones(3 + 9 * rank)])
    time.sleep(30)


@pytest.mark.parametrize(("how", "said"), [
    ("exits", "^replica 1 exited before its function returned"),
    ("exits after its peer", "^replica 1 exited before its function returned"),
    ("is killed after its peer", r"^replica 1 died \(signal 9\)"),
    ("is interrupted", "^replica 1 raised KeyError: 'meanwhile'"),
    ("sums alone", r"^replica \d died \(signal 6: .*: call each on every replica"),
])  # fmt: skip
def test_a_process_that_ends_without_a_word_is_named_at_once(how, said):
    """Also if a peer's collective fails first, or a loader's worker interrupts it."""
    with pytest.raises(ReplicaError, match=said):
        Backend("cpu", 2).run(ends_early, how)


FAILS = """
import multiprocessing, sys, time, xla_replica

def train(rank):
    lock = multiprocessing.RLock()  # as a progress bar and a loader's workers have
    if rank == 1:
        raise KeyError("the mistake of a user")
    time.sleep(60)

if __name__ == "__main__":
    xla_replica.launch(train, num_replicas=2, device=sys.argv[1])
"""


@pytest.mark.parametrize("backend", [row("cpu", 3), row("xla", 3, slow=True)])
def test_processes_that_are_ended_leave_no_semaphore_behind(backend, tmp_path):
    done = python(written(tmp_path, FAILS), backend.device, status=1)
    assert "the mistake of a user" in done.stderr
    assert "leaked" not in done.stderr


DEFINES = """
import torch, xla_replica

OFFSET = 10
print("IMPORTED", __name__, flush=True)

class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + OFFSET

def train(rank, model):
    replica = xla_replica.current()
    total = model.to(replica.device)(torch.ones(1, 1, device=replica.device)).detach()
    replica.all_reduce_([total])
    return replica.fetch([total])[0].item()

def main():
    model = Model(1, 1)
    torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
    print("FOUND", xla_replica.launch(train, (model,), 2, "cpu"), flush=True)
"""
CALL = f"{DEFINES}\nmain()"
GUARDED = f"{DEFINES}\nif __name__ == '__main__':\n    main()\n"


@of_torch_alone
@pytest.mark.parametrize("way", ["-c", "-", "a file"])
def test_processes_import_a_script_or_are_sent_its_functions(way, tmp_path):
    what = {"-c": ["-c", CALL], "-": ["-"]}.get(way, [written(tmp_path, GUARDED)])
    done = python(*what, stdin=CALL)
    assert done.stdout.count("FOUND [22.0, 22.0]") == 1, done.stderr
    assert done.stdout.count("IMPORTED __main__") == 1
    assert done.stdout.count("IMPORTED __mp_main__") == (2 if way == "a file" else 0)


@of_torch_alone
def test_a_script_without_a_guard_is_one_clear_error(tmp_path):
    done = python(written(tmp_path, CALL), status=1)
    assert "FOUND" not in done.stdout
    assert 'call it under `if __name__ == "__main__":`' in done.stderr
    assert "ReplicaError: a process of the replicas raised RuntimeError" in done.stderr
