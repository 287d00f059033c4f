"""Replicas as torch_xla itself starts and joins them, here on one XLA:CPU device."""

from __future__ import annotations

import sys

import pytest
from support.scripts import python, written
from support.xla_replica.replicas import needs_xla

from xla_replica.starting import xla

pytestmark = [needs_xla, pytest.mark.xla]

JOINED = """
import torch, torch.distributed, torch_xla.distributed.xla_backend, xla_replica

def train(rank):
    return str(xla_replica.current())

if __name__ == "__main__":
    torch.distributed.init_process_group("xla", init_method="xla://")
    print(xla_replica.current())
    print(*xla_replica.launch(train))
    try:
        xla_replica.launch(train, num_replicas=2)
    except ValueError as error:
        print(error)
"""


def test_a_machine_without_any_device_of_google_has_no_tpu(tmp_path, monkeypatch):
    """There torch_xla is not imported; elsewhere it knows which device is a TPU."""
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setitem(sys.modules, "torch_xla._internal", None)  # cannot be imported
    monkeypatch.setattr(xla, "PCI_DEVICES", tmp_path)
    for number, vendor in enumerate(("0x1af4", "0x8086")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(f"{vendor}\n")
    assert not xla.has_tpu()
    (tmp_path / "1" / "vendor").write_text("0x1ae0\n")
    with pytest.raises(ImportError):
        xla.has_tpu()


def test_launch_uses_torch_xlas_process_group_that_the_script_has_joined(tmp_path):
    done = python(written(tmp_path, JOINED), PJRT_DEVICE="CPU")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "replica 0 of 1 on xla:0 (torch.distributed is initialised with xla)",
        "replica 0 of 1 on xla:0 (a process of this job)",
        "num_replicas=2, but the process group that this process has joined has 1: "
        "leave num_replicas out",
    ]
