"""What processes do that torch_xla starts, as on a TPU's host, here on XLA:CPU."""

import contextlib
import functools
import socket
import sys
from types import SimpleNamespace

import pytest
from support.documents import ROOT
from support.scripts import python, written
from support.xla_replica import tpu_like
from support.xla_replica.replicas import needs_xla, on_chips
from support.xla_replica.stopping import AS_A_TPU, ONE_OF_TWO_HOSTS, all_end
from support.xla_replica.torchrun import LAUNCHER

from xla_replica.starting import xla

pytestmark = [needs_xla, pytest.mark.xla]

HOST = socket.gethostname()
FATE = """
if rank == 1:
    {}
replica.fetch([replica.all_gather(torch.ones(1, device=replica.device))])
time.sleep(3600)
"""
RAISES, HANGS = 'raise KeyError("the mistake of a user")', "time.sleep(3600)"


@on_chips
@pytest.mark.parametrize(("fate", "status", "said"), [
    (RAISES, 1, ["replica 1 raised KeyError", f"On host {HOST}", "mistake of a"]),
    (HANGS, 1, [
        f"replica 1 on host {HOST} did not come to what replica 0 on host {HOST} "
        "has waited for within 3 s",
        f"replicas [0, 1] are on host {HOST}; 0 is here",
    ]),
    ("sys.exit(21)", 21, []),
    ("os._exit(0)", 1, [f"1 on host {HOST} exited before its function returned"]),
])  # fmt: skip
def test_a_failure_is_seen_at_once_and_ends_all(tmp_path, fate, status, said):
    """torch_xla's launcher waits for its first process for ever."""
    timeout = 3 if fate == HANGS else 300
    run = AS_A_TPU.start(tmp_path, fate=FATE.format(fate), timeout=timeout)
    children = run.children()
    found, errors = run.ends()
    assert found == status
    assert all(text in errors for text in said), errors
    assert ("Traceback" in errors) == (status != 21)
    all_end(children)


@on_chips
def test_hosts_of_a_slice_say_where_replica_0_is(tmp_path):
    """It need not be on the first; and each host ends by itself, with its reason."""
    options = {"fate": FATE.format(RAISES), "timeout": 300, "waits": False}
    start = functools.partial(ONE_OF_TWO_HOSTS.start, tmp_path, num_hosts=2, **options)
    first, second = start(host=0), start(host=1)
    first.wait_until_ready()
    children = second.children()
    _, of_first = first.ends()  # which has replica 1
    second.process.kill()
    _, of_second = second.ends()
    assert f"replicas [1] are on host {HOST}; 0 is on another host" in of_first
    assert f"replicas [0] are on host {HOST}; 0 is here" in of_second
    assert "replica 1 raised KeyError" in of_first
    assert "KeyError" not in of_second
    all_end(children)


ONE_CHIP = """
import os, sys
import torch, xla_replica

def train(rank):
    seen = {n: v for n, v in os.environ.items() if n.startswith(("TPU_", "CLOUD_TPU"))}
    return str(xla_replica.current()), torch.get_num_threads(), seen

if __name__ == "__main__":
    print(*xla_replica.launch(train, num_replicas=int(sys.argv[1])))
"""


@on_chips
@pytest.mark.parametrize(("num_replicas", "hosts", "refusal"), [
    (1, 1, ""),
    (2, 1, "num_replicas must be one of None, 3 or 1 on one host, got 2"),
    (1, 2, "num_replicas=1, but this slice has 2 hosts: leave num_replicas out"),
])  # fmt: skip
def test_one_chip_of_a_host_is_a_replica_alone(tmp_path, num_replicas, hosts, refusal):
    """And an error's remedy works: all, or on one host one."""
    variables = tpu_like.environment(3, tmp_path, num_hosts=hosts)
    script, status = written(tmp_path, ONE_CHIP), 1 if refusal else 0
    done = python(script, num_replicas, status=status, **variables)
    assert refusal in done.stderr
    assert ("replica 0 of 1 on xla:0" in done.stdout) == (not refusal), done.stderr
    # What torch_xla and libtpu's documentation set, and no address of other chips.
    bounds = "'TPU_CHIPS_PER_PROCESS_BOUNDS': '1,1,1'", "'TPU_PROCESS_BOUNDS': '1,1,1'"
    for variable in ("'TPU_VISIBLE_CHIPS': '0'", *bounds):
        assert (variable in done.stdout) == (not refusal)
    assert "TPU_PROCESS_ADDRESSES" not in done.stdout


@pytest.mark.parametrize(("waiting", "returned", "said"), [
    ([], [], None),
    ([0, 2], [], "replica 1 on host {} did not come to what replica 0"),
    ([0], [1, 2], "replica 1 on host {0} and replica 2 on host {0} did not come "),
    ([0, 1, 2], [], "another host's replica did not come to what replica 0 on "),
    ([], [2], "replica 0 on host {0} and replica 1 on host {0} did not return"),
    ([], [0, 1, 2], None),  # exit handlers take their time
])  # fmt: skip
def test_who_is_late_is_named(waiting, returned, said, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 1000.0)
    monkeypatch.setattr("xla_replica.starting.xla.time", clock)
    runtime = xla.TpuRuntime(3, None, timeout=5.0)
    runtime._ranks[:] = range(3)
    for number in returned:
        runtime._returned[number] = clock.monotonic()
    with contextlib.ExitStack() as waits:
        for number in waiting:
            waits.enter_context(runtime.waiting(number))
        assert runtime.late() is None  # they have only begun
        clock.monotonic = lambda: 1005.5
        error = runtime.late()
    assert (error is None) == (said is None)
    assert (said or "").format(HOST) in str(error)
    if not returned:
        assert runtime.late() is None  # nobody waits any more


@pytest.mark.slow
def test_processes_of_torchrun_that_know_nothing_of_each_other_are_refused(tmp_path):
    """Each was replica 0 of 1, and trained a model of its own."""
    script = written(tmp_path, "import torch_xla, xla_replica; xla_replica.current()")
    done = python(script, command=LAUNCHER, PJRT_DEVICE="CPU", status=1)
    assert "torchrun has started 2 processes, but torch_xla knows 1" in done.stderr


def test_a_machine_has_a_tpu_where_torch_xla_would_find_one(tmp_path, monkeypatch):
    """It is not imported for that, which would take seconds."""
    from torch_xla._internal import tpu

    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setattr(xla, "PCI_DEVICES", tmp_path)
    monkeypatch.setitem(sys.modules, "torch_xla._internal", None)  # not to be imported
    (tmp_path / "0").mkdir()
    for chip in (*tpu._TPU_PCI_DEVICE_IDS, "0x0042"):  # a network card of Google's
        for vendor in ("0x1af4", "0x8086", tpu._GOOGLE_PCI_VENDOR_ID):
            (tmp_path / "0" / "vendor").write_text(f"{vendor}\n")
            (tmp_path / "0" / "device").write_text(f"{chip}\n")
            assert xla.has_tpu() == (vendor == "0x1ae0" and chip != "0x0042")


JOINS = """
import os
os.environ["PJRT_DEVICE"] = "CPU"
import torch, torch.distributed, torch_xla.distributed.xla_backend, xla_replica

def train(rank):
    return str(xla_replica.current())

torch.distributed.init_process_group("xla", init_method="xla://")
print(xla_replica.current())
print(*xla_replica.launch(train))
try:
    xla_replica.launch(train, num_replicas=2)
except ValueError as error:
    print(error)
torch.distributed.destroy_process_group()

import torch_xla.runtime
torch_xla.runtime.use_spmd()
xla_replica.current()
"""


def test_torch_xlas_process_group_is_kept_and_spmd_is_refused():
    """One process does both, since importing torch_xla takes seconds."""
    done = python("-c", JOINS, status=1)
    assert "this process uses SPMD" in done.stderr, done.stderr
    assert done.stdout.splitlines() == [
        "replica 0 of 1 on xla:0 (torch.distributed is initialised with xla)",
        "replica 0 of 1 on xla:0 (a process of this job)",
        "num_replicas must be one of 1, None, got 2",
    ]


SKIPPED = """
import pytest

@pytest.mark.tpu_like
def test_family():
    pytest.skip("a reason")
"""


def test_a_family_that_is_skipped_here_fails(tmp_path):
    options = "-p", "conftest", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"
    done = python("-m", "pytest", *options, written(tmp_path, SKIPPED), status=1)
    assert "1 failed" in done.stdout, done.stdout + done.stderr
