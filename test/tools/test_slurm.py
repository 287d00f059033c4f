"""An array job of live members on a Slurm of one machine, as docs/machines.md says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents import ROOT

pytest.importorskip("sklearn")
pytest.importorskip("torchft")


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("slurmctld") or os.geteuid() != 0,
    reason="needs Debian's slurm-wlm and munge, and the rights to start them",
)
def test_a_member_that_slurm_preempts_is_queued_again_and_joins(tmp_path):
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [ROOT / "tools/slurm/one_machine.sh", tmp_path],
        env={**os.environ, "PATH": binaries},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test accuracy" in done.stdout
    members = re.findall(r'"num_replicas": (\d)', done.stdout)
    assert "212" in "".join(members), done.stdout
