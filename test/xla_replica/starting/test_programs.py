"""A run that is started again on TorchTPU compiles nothing."""

import os
import shutil
import time
from pathlib import Path

import pytest
from support.scripts import python
from support.xla_replica.replicas import needs_torchtpu

# What loads TorchTPU comes first; the run is an ordinary one, asked to stop or not.
SCRIPT = """
import sys
from pathlib import Path
from support.xla_replica import torchtpu
torchtpu.load()

import torch
import xla_replica
from support.variable_batch_size import checkpointed

def train(rank, folder, ask_at):
    try:
        checkpointed.train(rank, folder, ask_at, asked=(0,))
    except xla_replica.Stopped:
        print("stopped")
    print("compiled", torch.tpu._get_cache_stats().num_compilations)

arguments = Path(sys.argv[1]), int(sys.argv[2])
xla_replica.launch(train, arguments, 1, "accelerator")
"""


def programs_of_a_start(folder: Path, host: str, ask_at: int) -> tuple[bool, int]:
    """Returns whether a run has stopped, and how many programs it has compiled."""
    # What is read more slowly than it is compiled would be compiled.
    always = {"TORCH_TPU_INTERNAL_TIER3_COMPILATION_CACHE_LOCAL_BACKUP_TASK": "0"}
    here = {"TORCH_TPU_TIER2_COMPILATION_CACHE": host}  # it has seen no program
    keeps = {"TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT": str(folder / "programs")}
    done = python("-c", SCRIPT, folder, ask_at, **keeps, **here, **always)
    before, number = done.stdout.split("compiled")
    return "stopped" in before, int(number)


@needs_torchtpu
@pytest.mark.torchtpu
def test_a_second_start_compiles_nothing_with_a_copy(tmp_path):
    host = f"test-{os.getpid()}-{time.monotonic_ns()}"
    has_stopped, number = programs_of_a_start(tmp_path / "first", f"{host}-1", 12)
    assert (has_stopped, number > 20) == (True, True)
    shutil.copytree(tmp_path / "first", tmp_path / "copied")
    assert programs_of_a_start(tmp_path / "copied", f"{host}-2", -1) == (False, 0)
    for each in (1, 2):
        shutil.rmtree(f"/dev/shm/torch_tpu_cache/{host}-{each}", ignore_errors=True)
