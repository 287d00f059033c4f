"""Processes take the accelerator that torch names: a simulated one, in scripts."""

import contextlib
import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.scripts import python, written
from support.xla_replica.replicas import HAS_XLA, of_torch_alone
from support.xla_replica.torchrun import LAUNCHER

import xla_replica
from xla_replica.starting.torch_tpu import check_is_only_host

# Replica r brings r + 1, so that the sum over two replicas is 3.
SCRIPT = """
import multiprocessing.forkserver, os, time, torch, torch.distributed.nn, xla_replica
from concurrent.futures import ThreadPoolExecutor
from unittest import mock
from support.xla_replica import fake_accelerator

accelerator = fake_accelerator.INSTALL

def train(rank, *names):
    replica = xla_replica.current()
    total = replica.scalar(rank + 1)
    replica.all_reduce_([total])
    group = torch.distributed.get_backend()
    own = [str(replica.device), group, *(os.environ.get(name) for name in names)]
    return total.item(), replica.all_gather_object(own)

def draws_again(rank):
    replica = xla_replica.current()
    generator = torch.get_device_module(replica.device).default_generators[0]
    before = replica.rng_state()
    first = torch.rand(3, generator=generator)
    replica.set_rng_state(before)
    again = torch.rand(3, generator=generator)
    return str(replica.device), before.dtype == torch.uint8, torch.equal(first, again)

def aborts(rank):
    xla_replica.current().barrier()
    time.sleep(0.5)  # nobody is still joining the group that the first one leaves
    os.abort()

def nested(rank):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: str(xla_replica.current().device)).result()
    return other, *xla_replica.launch(train)

def joined(backend, own=None, uses=None):
    accelerator.chosen[:] = [0 if uses is None else uses]
    place = {"init_method": f"file://{os.path.abspath(__file__)}.{backend}"}
    place |= {"rank": int(os.environ["RANK"]), "world_size": 2}
    device = own and torch.device("metal", own())
    torch.distributed.init_process_group(backend, **place, device_id=device)
    here = [f"{__file__}.{backend}.{rank}" for rank in (1 - swapped(), swapped())]
    open(here[0], "w").close()  # nobody leaves a group that the other is still joining
    while not os.path.exists(here[1]):
        time.sleep(0.01)
    found = tried(lambda: str(xla_replica.current().device))
    launched = tried(lambda: devices(*xla_replica.launch(train)))
    torch.distributed.destroy_process_group()
    return found, launched

def devices(found):
    total, places = found
    return total, *(device for device, _ in places)

def started(count=2, **variables):
    # Nothing else says which of its host's processes this is.
    accelerator.chosen[:] = [swapped()]
    counts = mock.patch.object(accelerator, "device_count", lambda: count)
    with counts, mock.patch.dict(os.environ, variables):
        if "LOCAL_RANK" not in variables:
            del os.environ["LOCAL_RANK"]
        return devices(*xla_replica.launch(train))

def swapped():
    return 1 - int(os.environ["RANK"])

def tried(call):
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"

if __name__ == "__main__":
    results = [tried(lambda: eval(call)) for call in CALLS]
    if os.environ.get("RANK", "0") == "0":
        print("RESULTS", repr(results), flush=True)
"""


class Says(str):
    """Equal to texts that contain it."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str(self) in str(other)


def check(folder: Path, install: str, calls: list[tuple], *command) -> None:
    """Asserts what calls return or raise, of a process with a fake accelerator."""
    expressions = [call for call, _ in calls]
    script = SCRIPT.replace("INSTALL", install).replace("CALLS", repr(expressions))
    # A machine may have a real accelerator, whose backend would be loaded with torch.
    variables = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    command = command or (sys.executable,)
    done = python(written(folder, script), command=command, **variables)
    printed, results = re.sub(r"\[Gloo\].*\n", "", done.stdout).split("RESULTS")
    assert printed == ""
    assert dict(zip(expressions, eval(results))) == dict(calls)


# --- whichever accelerator torch names ----------------------------------------------

PLACES = [["metal:0", "metal_dist"], ["metal:1", "metal_dist"]]


@of_torch_alone
def test_under_torchrun_a_process_takes_the_device_that_its_launcher_means(tmp_path):
    """A group or device that the script has chosen is used, also one for the CPU."""
    first, crossed = (3.0, "metal:0", "metal:1"), (3.0, "metal:1", "metal:0")
    not_served = Says(" but this process computes on metal: call torch.distributed.i")
    calls = [
        ("xla_replica.launch(train), accelerator.chosen[:]", ([(3.0, PLACES)], [0])),
        # By another launch inside, too, and by threads that this one did not start.
        ("xla_replica.launch(nested, device='cpu')",
         [("cpu", (3.0, [["cpu", "gloo"]] * 2))]),
        ("joined('metal_dist', uses=swapped())", ("metal:1", crossed)),
        ("joined('cpu:gloo,metal:metal_dist', own=swapped)", ("metal:1", crossed)),
        ("joined('cpu:gloo')", ("cpu", (3.0, "cpu", "cpu"))),
        ("joined('gloo')", (not_served, not_served)),
        ("started(SLURM_LOCALID=os.environ['RANK'])", first),
        ("started(OMPI_COMM_WORLD_LOCAL_RANK=str(swapped()), SLURM_LOCALID='0')",
         crossed),
        ("started()", crossed),  # the devices that the script uses
        ("started(count=1, LOCAL_RANK=os.environ['RANK'])", (3.0, *2 * ["metal:0"])),
    ]  # fmt: skip
    check(tmp_path, 'install("metal")', calls, *LAUNCHER)


def test_a_group_that_was_joined_without_a_backend_is_found(tmp_path):
    """torch's own choice, and in the environment of the tests that is the CPU's."""
    options = {"init_method": (tmp_path / "store").as_uri()}
    torch.distributed.init_process_group(**options, rank=0, world_size=1)
    try:
        replica = xla_replica.current()
        assert replica.device == xla_replica.LocalReplica().device
        assert replica.reason.startswith("torch.distributed is initialised with cpu:")
    finally:
        torch.distributed.destroy_process_group()


@of_torch_alone
def test_launch_starts_a_process_for_each_device(tmp_path):
    calls = [
        ("xla_replica.launch(train)", [(3.0, PLACES)] * 2),
        ("xla_replica.launch(train, num_replicas=5)",
         "ValueError: num_replicas on 'metal' must be an integer >= 1 and <= 2, got 5"),
        ("xla_replica.launch(aborts, timeout=9)",
         Says("died (signal 6: so nccl ends a process whose peer is later at a "
              "collective than launch(timeout=) allows, ")),
        # With an index: to a loader's thread "metal" would be the first one.
        ("accelerator.set_device(1)", None),
        ("str(xla_replica.current().device)", "metal:1"),
        ("xla_replica.launch(lambda rank: str(xla_replica.current().device), "
         "num_replicas=1)", ["metal:1"]),
    ]  # fmt: skip
    check(tmp_path, 'install("metal")', calls)


# --- TorchTPU -----------------------------------------------------------------------

VARIABLES = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY")
WITHOUT_TORCH_XLA = pytest.mark.skipif(HAS_XLA, reason="no torch_tpu beside torch_xla")


@WITHOUT_TORCH_XLA
def test_torch_tpus_processes_have_its_environment_and_are_not_forked(tmp_path):
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", *VARIABLES
    values = "2", "localhost:8471,localhost:8472", "2,1,1"
    calls = [
        (f"xla_replica.launch(train, {names}, 2, 'accelerator')",
         2 * [(3.0, [["tpu", "tpu_dist", n, n, *values] for n in "01"])]),
        ("multiprocessing.forkserver._forkserver._forkserver_pid", None),
        # A variable that torch_xla reads means nothing where that is not installed.
        ("os.environ.update(PJRT_DEVICE='TPU')", None),
        # With torch 2.13 the module's get_rng_state is torch's alone.
        ("xla_replica.launch(draws_again, num_replicas=1)", [("tpu:0", True, True)]),
        (f"[os.environ.get(name) for name in {VARIABLES}]", [None, None]),
        ("os.environ.update(TPU_WORKER_HOSTNAMES='a,b')", None),
        ("xla_replica.launch(train, num_replicas=1)",
         Says("ValueError: this host is one of 2 of its slice, and launch")),
        ("os.environ.update(TPU_WORKER_HOSTNAMES='a')", None),
        ("xla_replica.launch(train, num_replicas=4)",
         Says("ValueError: num_replicas=4 on 'tpu', but TORCH_TPU_SLICEBUILDER_AD")),
        ("xla_replica.launch(train, num_replicas=3)",
         "RuntimeError: No TPU topology found for count: 3"),
    ]  # fmt: skip
    check(tmp_path, "install_torch_tpu(4)", calls)


@WITHOUT_TORCH_XLA
def test_torch_tpu_under_torchrun_needs_its_environment(tmp_path):
    """Its runtime, and not the local rank, has chosen the device."""
    needs = Says(
        "ReplicaError: this process is one of 2 on 'tpu', but "
        "TORCH_TPU_SLICEBUILDER_ADDRESSES and TORCH_TPU_TOPOLOGY must be set before "
        "the first of them starts; before torchrun, in its shell: eval $(python -m"
    )
    calls = [
        ("xla_replica.launch(train)", needs),
        (f"os.environ.update({dict.fromkeys(VARIABLES, 'set')})", None),
        ("xla_replica.launch(train, ())", [(3.0, [["tpu", "tpu_dist"]] * 2)]),
    ]
    check(tmp_path, "install_torch_tpu()", calls, *LAUNCHER)


@pytest.mark.parametrize("other", [b"", b",b:2:10.0.0.2"])
def test_hosts_of_a_slice_are_known_from_the_metadata(other, monkeypatch):
    """A Compute Engine VM has them nowhere else."""
    asked = []

    def urlopen(request, timeout):
        asked.append((request.full_url.rsplit("/")[-1], request.headers))
        return io.BytesIO(b"a:1:10.0.0.1" + other)

    for name in ("TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    raises = pytest.raises(ValueError, match="torchrun on every host")
    with raises if other else contextlib.nullcontext():
        check_is_only_host(SimpleNamespace(type="tpu"))
    assert asked == [("worker-network-endpoints", {"Metadata-flavor": "Google"})]
