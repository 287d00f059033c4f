"""Processes take the accelerator that torch names, and its process group.

The accelerator is simulated (see support/xla_replica/fake_accelerator.py), so every
script has a process, or two under torchrun, of its own, and does several things.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripts import python, written
from support.xla_replica.replicas import HAS_XLA, of_torch_alone
from support.xla_replica.torchrun import LAUNCHER

import xla_replica
from xla_replica import LocalReplica

# Replica r brings r + 1, so that the sum over two replicas is 3.
SCRIPT = """
import multiprocessing.forkserver, os, time, torch, torch.distributed.nn, xla_replica
from concurrent.futures import ThreadPoolExecutor
from support.xla_replica import fake_accelerator

accelerator = fake_accelerator.{install}

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
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{{os.path.abspath(__file__)}}.{{backend}}",
        rank=int(os.environ["RANK"]),
        world_size=2,
        device_id=own and torch.device("metal", own()),
    )
    found = tried(lambda: str(xla_replica.current().device))
    launched = tried(lambda: xla_replica.launch(train))
    torch.distributed.destroy_process_group()
    return found, launched

def started(count=2, **variables):
    # Nothing else says which of its host's processes this is.
    before = dict(os.environ)
    del os.environ["LOCAL_RANK"]
    os.environ.update(variables)
    accelerator.chosen[:] = [swapped()]
    accelerator.device_count, usual = (lambda: count), accelerator.device_count
    [(_, places)] = xla_replica.launch(train)
    accelerator.device_count = usual
    os.environ.clear()
    os.environ.update(before)
    return [device for device, _ in places]

def swapped():
    return 1 - int(os.environ["RANK"])

def tried(call):
    try:
        return call()
    except (xla_replica.ReplicaError, ValueError) as error:
        return f"{{type(error).__name__}}: {{error}}"

if __name__ == "__main__":
    results = {{}}
    for name, call in {{{calls}}}.items():
        results[name] = tried(call)
    if os.environ.get("RANK", "0") == "0":
        print("RESULTS", repr(results), flush=True)
"""


def run(folder: Path, install: str, calls: dict[str, str], torchrun: bool) -> Any:
    """Returns what each call returned, or its error, as replica 0 has it."""
    lines = ", ".join(f"{name!r}: lambda: {call}" for name, call in calls.items())
    # A machine may have a real accelerator, whose backend would be loaded with torch.
    done = python(
        written(folder, SCRIPT.format(install=install, calls=lines)),
        command=LAUNCHER if torchrun else [sys.executable],
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    *printed, results = re.sub(r"\[Gloo\].*\n", "", done.stdout).split("RESULTS")
    return {"stdout": "".join(printed), **eval(results)}


# --- whichever accelerator torch names ----------------------------------------------

PLACES = [["metal:0", "metal_dist"], ["metal:1", "metal_dist"]]


@of_torch_alone
def test_under_torchrun_a_process_takes_the_device_that_its_launcher_means(tmp_path):
    calls = {
        "launch": "(*xla_replica.launch(train), accelerator.chosen.copy())",
        "cpu": "xla_replica.launch(nested, device='cpu')",
        "its own": "joined('metal_dist', uses=swapped())",
        "both": "joined('cpu:gloo,metal:metal_dist', own=swapped)",
        "only cpu": "joined('cpu:gloo')",
        "gloo": "joined('gloo')",
        "slurm": "started(SLURM_LOCALID=os.environ['RANK'])",
        "mpirun": "started(OMPI_COMM_WORLD_LOCAL_RANK=str(swapped()), "
        "SLURM_LOCALID='0')",
        "nobody": "started()",  # the devices that the script uses
        "its own alone": "started(count=1, LOCAL_RANK=os.environ['RANK'])",
        "too few": "(setattr(accelerator, 'device_count', lambda: 0), "
        "xla_replica.launch(train))",
    }
    results = run(tmp_path, 'install("metal")', calls, torchrun=True)
    del results["stdout"]  # where gloo writes, too
    # A group that serves the accelerator is used as it is, and so is the device that
    # the script has chosen, in joining or before; one for the CPU leaves it unused.
    for name in ("its own", "both", "only cpu"):
        device, [(total, places)] = results.pop(name)
        results[name] = device, total, *(each for each, _ in places)
    for error in results.pop("gloo"):
        assert error.startswith("ReplicaError: the process group gloo sums tensors on ")
        assert (
            " but this process computes on metal: call torch.distributed.init" in error
        )
        assert error.endswith("To leave an accelerator unused, join 'cpu:gloo'")
    assert results.pop("too few").startswith(
        "ReplicaError: this process is number 0 on its host, which has 0 devices of "
        "kind 'metal': start at most as many"
    )
    assert results == {
        "launch": ((3.0, PLACES), [0]),
        # By another launch inside, too, and by threads that this one did not start.
        "cpu": [("cpu", (3.0, [["cpu", "gloo"]] * 2))],
        "its own": ("metal:1", 3.0, "metal:1", "metal:0"),
        "both": ("metal:1", 3.0, "metal:1", "metal:0"),
        "only cpu": ("cpu", 3.0, "cpu", "cpu"),
        "slurm": ["metal:0", "metal:1"],
        "mpirun": ["metal:1", "metal:0"],
        "nobody": ["metal:1", "metal:0"],
        "its own alone": ["metal:0", "metal:0"],
    }


def test_a_group_that_was_joined_without_a_backend_is_found(tmp_path):
    """torch's own choice, and in the environment of the tests that is the CPU's."""
    torch.distributed.init_process_group(
        init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1
    )
    try:
        replica = xla_replica.current()
        assert replica.device == LocalReplica().device
        assert replica.reason.startswith("torch.distributed is initialised with cpu:")
    finally:
        torch.distributed.destroy_process_group()


@of_torch_alone
def test_launch_starts_a_process_for_each_device(tmp_path):
    calls = {
        "launch": "xla_replica.launch(train)",
        "too many": "xla_replica.launch(train, num_replicas=5)",
        "aborts": "xla_replica.launch(aborts, timeout=9)",
        "use the other": "accelerator.set_device(1)",
        "current": "str(xla_replica.current().device)",
        "alone": "xla_replica.launch(lambda rank: str(xla_replica.current().device), "
        "num_replicas=1)",
    }
    results = run(tmp_path, 'install("metal")', calls, torchrun=False)
    assert re.fullmatch(
        r"ReplicaError: replica \d died \(signal 6: so nccl ends a process whose peer "
        r"is later at a collective than launch\(timeout=\) allows, .* collective\)",
        results.pop("aborts"),
    )
    assert results == {
        "stdout": "",
        "launch": [(3.0, PLACES)] * 2,
        "too many": "ValueError: num_replicas=5, but there are 2 devices of kind "
        "'metal'",
        # With an index: to a loader's thread "metal" would be the first one.
        "use the other": None,
        "current": "metal:1",
        "alone": ["metal:1"],
    }


# --- TorchTPU -----------------------------------------------------------------------

VARIABLES = ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY")
WITHOUT_TORCH_XLA = pytest.mark.skipif(
    HAS_XLA, reason="no environment has both torch_tpu and torch_xla"
)


@WITHOUT_TORCH_XLA
def test_torch_tpus_processes_have_its_environment_and_are_not_forked(tmp_path):
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", *VARIABLES
    calls = {
        "launch": f"xla_replica.launch(train, {names}, 2, 'accelerator')",
        "forked": "multiprocessing.forkserver._forkserver._forkserver_pid is not None",
        "printed": "xla_replica.launch(print, num_replicas=2)",
        "torch_xla's": "os.environ.update(PJRT_DEVICE='TPU')",
        "alone": "xla_replica.launch(draws_again, num_replicas=1)",
        "left": f"[os.environ.get(name) for name in {VARIABLES}]",
        "another": "xla_replica.launch(train, num_replicas=4)",
        "wrong": "xla_replica.launch(train, num_replicas=3)",
    }
    results = run(tmp_path, "install_torch_tpu(4)", calls, torchrun=False)
    addresses = "localhost:8471,localhost:8472"
    assert results["launch"] == 2 * [
        (3.0, [["tpu", "tpu_dist", n, n, "2", addresses, "2,1,1"] for n in "01"])
    ]
    assert not results["forked"]
    # With torch 2.13 the module's get_rng_state is torch's alone. And a variable that
    # torch_xla reads means nothing where that is not installed.
    assert results["alone"] == [("tpu:0", True, True)]
    assert sorted("".join(results["stdout"].split())) == ["0", "1"]  # what they print
    assert results["left"] == [None, None]
    assert results["wrong"] == (
        "ValueError: num_replicas=3 on 'tpu': No TPU topology found for count: 3"
    )
    assert results["another"].startswith(
        "ValueError: num_replicas=4 on 'tpu': this environment is for 2 processes"
    )


@WITHOUT_TORCH_XLA
def test_torch_tpu_under_torchrun_needs_its_environment(tmp_path):
    """Its runtime, and not the local rank, has chosen the device."""
    exported = dict.fromkeys(VARIABLES, "set")
    calls = {
        "without": "xla_replica.launch(train)",
        "export": f"os.environ.update({exported})",
        "with": "xla_replica.launch(train)",
    }
    results = run(tmp_path, "install_torch_tpu()", calls, torchrun=True)
    assert results["without"].startswith(
        "ReplicaError: this process is one of 2 on 'tpu', but "
        "TORCH_TPU_SLICEBUILDER_ADDRESSES and TORCH_TPU_TOPOLOGY must be set before "
        "the first of them starts; before torchrun, in its shell: eval $(python -m"
    )
    assert results["with"] == [(3.0, [["tpu", "tpu_dist"]] * 2)]
