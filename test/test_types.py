"""Public modules are typed strictly, and mypy finds the mistakes in users' scripts."""

import ast
import re
import subprocess
import sys

import pytest
from support.documents import ROOT, read
from support.xla_replica.replicas import HAS_XLA

from tools.size.count_lines import PACKAGES

pytestmark = pytest.mark.skipif(HAS_XLA, reason="is of the newest torch's types")
# A line's comment is the error that it deserves; the other lines are right.
SCRIPT = """
import grab_xla, per_sample_grad as psg, rigl_xla, torch
import variable_batch_size as vbs, xla_replica
model = torch.nn.Linear(4, 1)
inner = torch.optim.SGD(model.parameters())
sampler = vbs.CustomSampler(range(8), [4], minibatch_size=2, on_end="hold")
vbs.CustomSampler(range(8), [4], minibatch_size=2, on_end="halt")  # arg-type
vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=4, max_grad_norm=1.0)
vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=4, max_grad_nrm=1.0)  # call-arg
grab_xla.GraBSampler(range(8), dict(model.named_parameters()), fidelity="exact")
grab_xla.GraBSampler(range(8), dict(model.named_parameters()), fidelity="x")  # arg-type
rigl_xla.RigLScheduler(model, inner, dense_allocation=0.1, T_end=75)
rigl_xla.RigLScheduler(model, inner, dense_alocation=0.1, T_end=75)  # call-arg
psg.token_cross_entropy(torch.ones(2, 3), [0, 1])  # arg-type
xla_replica.current().all_gather([torch.ones(1)])  # arg-type
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[tuple[str, str, str]]:
    """Returns mypy's, by its settings in pyproject.toml: file, line and code."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("types")
    (folder / "script.py").write_text(SCRIPT)
    options = ["--cache-dir", folder / "cache", *PACKAGES, folder / "script.py"]
    mypy = [sys.executable, "-m", "mypy", *options]
    said = subprocess.run(mypy, cwd=ROOT, capture_output=True, text=True)
    assert "source files)" in said.stdout, said.stdout + said.stderr
    return re.findall(r"^(.+?):(\d+): error: .*\[([\w-]+)\]$", said.stdout, re.M)


def test_public_modules_are_typed_strictly(errors):
    """Whatever these import is public, and so are the trainers."""
    vbs = "variable_batch_size"
    folders = (*PACKAGES, f"{vbs}/gradient_noise", f"{vbs}/trace_tools")
    public = {f"{folder}/__init__.py" for folder in folders}
    for node in [n for init in [*public] for n in ast.parse(read(init)).body]:
        if isinstance(node, ast.ImportFrom):
            path = node.module.replace(".", "/")
            public |= {f"{path}.py", f"{path}/__init__.py"}
    assert not [e for e in errors if e[0] in public or f"{vbs}/integrations/" in e[0]]


def test_mistakes_in_a_script_are_found_and_nothing_else(errors):
    found = {(int(line), code) for file, line, code in errors if "script.py" in file}
    lines = enumerate(SCRIPT.splitlines(), 1)
    assert found == {(n, line.split("# ")[1]) for n, line in lines if "#" in line}
