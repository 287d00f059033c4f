"""Replicas run functions of scripts that their processes cannot import."""

from __future__ import annotations

import pytest
from support.scripts import python, written
from support.xla_replica.replicas import HAS_XLA, of_torch_alone

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


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("-c", marks=[pytest.mark.xla] if HAS_XLA else []),
        pytest.param("standard input", marks=of_torch_alone),
        pytest.param("without a guard", marks=of_torch_alone),
    ],
)
def test_functions_and_classes_are_sent_themselves(way, tmp_path):
    script = SCRIPT.replace("DEVICE", "'xla'" if HAS_XLA and way == "-c" else "'cpu'")
    if way == "-c":
        done = python("-c", script)
    elif way == "standard input":
        done = python("-", stdin=script)
    else:
        done = python(written(tmp_path, script))
    assert done.stdout.count("FOUND [22.0, 22.0]") == 1, done.stderr


@of_torch_alone
def test_without_cloudpickle_an_error_says_at_once_what_to_do(tmp_path):
    hidden = "import sys; sys.modules['cloudpickle'] = None\n"
    done = python(written(tmp_path, hidden + SCRIPT.replace("DEVICE", "'cpu'")))
    assert done.returncode == 1
    assert "put the function into a file, and call launch there under" in done.stderr
    assert "FOUND" not in done.stdout


@of_torch_alone
def test_a_script_with_a_guard_is_imported_as_always(tmp_path):
    lines = SCRIPT.replace("DEVICE", "'cpu'").splitlines()
    guarded = [
        *lines[:-3],
        "print('IMPORTED ' + __name__)",
        'if __name__ == "__main__":',
    ]
    guarded += [f"    {line}" for line in lines[-3:]]
    done = python(written(tmp_path, "\n".join(guarded)))
    assert done.stdout.count("FOUND [22.0, 22.0]") == 1, done.stderr
    assert done.stdout.count("IMPORTED __mp_main__") == 2
