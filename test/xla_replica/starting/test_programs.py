"""A run that is started again on TorchTPU compiles nothing."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from support.scripts import python
from support.xla_replica import torchtpu
from support.xla_replica.replicas import needs_torchtpu

import xla_replica

# What loads TorchTPU comes first; the run is an ordinary one.
SCRIPT = """
import sys
from support.xla_replica import torchtpu
torchtpu.load()

import torch
import torch.nn.functional as F
import variable_batch_size as vbs
import xla_replica

def train(rank, folder):
    xla_replica.keep_programs(folder + "/programs")
    replica = xla_replica.current()
    with replica.seeded(0):
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8))
        x, y = torch.randn(96, 6), torch.randint(0, 8, (96,))
    model.to(replica.device)
    sampler = vbs.CustomSampler(
        x, [8, 16, 24, 48], minibatch_size=8, on_end="cycle", verbose=False
    )
    optimizer = vbs.AdaScaleOptimizer(
        torch.optim.SGD(model.parameters(), 0.1, 0.9), sampler, ref_batchsize=8
    )
    checkpointer = vbs.Checkpointer(folder, optimizer, model=model)
    checkpointer.load()
    optimizer.attach(checkpointer)
    for epoch in range(sampler.epoch, sampler.epoch + 2):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for batch in sampler:
            inputs, labels = replica.send((x[batch], y[batch]))
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    checkpointer.save()
    print("compiled", torch.tpu._get_cache_stats().num_compilations)

xla_replica.launch(train, (sys.argv[1],), 1, "accelerator")
"""


def programs_of_a_start(folder: Path, host: str) -> int:
    """Returns how many programs a start compiles on a host that has seen none."""
    # What is read more slowly than it is compiled would be compiled.
    always = {"TORCH_TPU_INTERNAL_TIER3_COMPILATION_CACHE_LOCAL_BACKUP_TASK": "0"}
    done = python(
        "-c", SCRIPT, folder, TORCH_TPU_TIER2_COMPILATION_CACHE=host, **always
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "are not kept" not in done.stderr
    return int(done.stdout.split("compiled")[1])


@needs_torchtpu
@pytest.mark.torchtpu
def test_a_second_start_compiles_nothing_with_a_copy(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT", raising=False)
    host = f"test-{os.getpid()}-{time.monotonic_ns()}"
    assert programs_of_a_start(tmp_path / "first", f"{host}-1") > 20
    shutil.copytree(tmp_path / "first", tmp_path / "copied")
    assert programs_of_a_start(tmp_path / "copied", f"{host}-2") == 0
    for each in (1, 2):
        shutil.rmtree(f"/dev/shm/torch_tpu_cache/{host}-{each}", ignore_errors=True)


@needs_torchtpu
@pytest.mark.torchtpu
def test_a_folder_that_comes_too_late_is_told(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT", raising=False)
    (torch.ones(2, device="tpu") + 1).cpu()
    assert not xla_replica.keep_programs(tmp_path)
    assert "something has been computed on the TPU already" in caplog.text
    monkeypatch.setenv("TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT", "/chosen")
    assert xla_replica.keep_programs(tmp_path)
    assert os.environ["TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"] == "/chosen"


@pytest.mark.skipif(torchtpu.is_installed(), reason="needs a device that keeps none")
def test_elsewhere_nothing_is_kept(tmp_path):
    assert not xla_replica.keep_programs(tmp_path)
    assert "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT" not in os.environ
