"""Replicas run functions of scripts that their processes cannot import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.documents import ROOT
from support.xla_replica.replicas import SEVERAL_REPLICAS

SCRIPT = """
import sys, torch
import xla_replica

OFFSET = 10

class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + OFFSET

def train(rank, model):
    replica = xla_replica.current()
    total = model.to(replica.device)(torch.ones(1, 1, device=replica.device)).detach()
    replica.all_reduce_([total])
    return replica.fetch([total])[0].item()

model = Model(1, 1)
torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
print("FOUND", xla_replica.launch(train, (model,), 2, DEVICE), flush=True)
"""


@pytest.fixture(params=SEVERAL_REPLICAS)
def script(request):
    return SCRIPT.replace("DEVICE", repr(request.param.device))


def run(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, **options
    )


@pytest.mark.parametrize("way", ["-c", "standard input", "without a guard"])
def test_functions_and_classes_are_sent_themselves(script, way, tmp_path):
    if "'xla'" in script and way != "-c":
        pytest.skip("what is sent does not depend on the device")
    if way == "-c":
        done = run("-c", script)
    elif way == "standard input":
        done = run("-", input=script)
    else:
        (tmp_path / "script.py").write_text(script)
        done = run(tmp_path / "script.py")
    assert done.stdout.count("FOUND [22.0, 22.0]") == 1, done.stderr


def test_without_cloudpickle_an_error_says_at_once_what_to_do(tmp_path):
    hidden = "import sys; sys.modules['cloudpickle'] = None\n"
    (tmp_path / "script.py").write_text(hidden + SCRIPT.replace("DEVICE", "'cpu'"))
    done = run(tmp_path / "script.py")
    assert done.returncode == 1
    assert "put the function into a file, and call launch there under" in done.stderr
    assert "FOUND" not in done.stdout


def test_a_script_with_a_guard_is_imported_as_always(tmp_path):
    lines = SCRIPT.replace("DEVICE", "'cpu'").splitlines()
    guarded = [*lines[:-3], "print('IMPORTED', __name__)", 'if __name__ == "__main__":']
    guarded += [f"    {line}" for line in lines[-3:]]
    (tmp_path / "script.py").write_text("\n".join(guarded))
    done = run(tmp_path / "script.py")
    assert done.stdout.count("FOUND [22.0, 22.0]") == 1, done.stderr
    assert done.stdout.count("IMPORTED __mp_main__") == 2
