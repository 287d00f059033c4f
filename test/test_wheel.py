"""The wheel, with what it declares and nothing else, is enough for what it promises.

Every other environment of this project has packages that hide a missing dependency.
`make wheel` runs these: one environment has, for each extra, what uv finds it to need,
and nothing else.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.documents import ROOT, block, blocks, read

pytestmark = pytest.mark.wheel

PACKAGES = [
    "grab_xla", "per_sample_grad", "rigl_xla", "variable_batch_size", "xla_replica",
]  # fmt: skip
IMPORT_ALL = (
    f"import {', '.join(PACKAGES)}\nassert 'site-packages' in grab_xla.__file__"
)
DRAW = """
import pathlib
from variable_batch_size.command_line import main
pathlib.Path("t.csv").write_text("step,batchsize\\n0,8\\n1,16\\n")
assert not main(["plot", "t.csv", "--out", "t.png"])
assert pathlib.Path("t.png").stat().st_size
"""
READ_PARQUET = """
import pyarrow, pyarrow.parquet, variable_batch_size as vbs
pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2, 3]}), "n.parquet")
data = vbs.BlockDataset.from_parquet(["n.parquet"], columns=["n"])
assert [data[i]["n"] for i in range(3)] == [1, 2, 3]
"""
REPLICAS = """
import os
os.environ["PJRT_DEVICE"] = "CPU"
import torch, xla_replica

def train(rank):
    replica = xla_replica.current()
    total = torch.ones(2, device=replica.device)
    replica.all_reduce_([total])
    assert total.tolist() == [2, 2]

if __name__ == "__main__":
    xla_replica.launch(train, num_replicas=2)
"""
MEMBER = """
from xla_replica.members.membership import Membership
with xla_replica.lighthouse() as address:
    member = Membership(address)
    assert member.agree(()).members == (member.id,)
    member.leave()
"""
# What each extra is for, as a script.
USES = {
    "torchtpu": "from importlib.metadata import version\nversion('torch_tpu')",
    "plot": DRAW,
    "parquet": READ_PARQUET,
    "transformers": "from variable_batch_size.integrations.hugging_face import *",
    "lightning": "from variable_batch_size.integrations.lightning import *",
    "ray": "from ray.train import ScalingConfig\nScalingConfig(num_workers=(1, 8))",
    "live": MEMBER,
    "test": f"""
import pytest, sys
sys.exit(pytest.main(["--collect-only", "-qq", "--rootdir={ROOT}", {str(ROOT)!r}]))
""",
    "outside": f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tools.outside.models import import_torchvision
import_torchvision()
import accelerate, lightning, opacus, timm, torchdata, transformers
""",
    # Last, since these have another torch.
    "examples": "import matplotlib, sklearn, torchvision",
    "xla-cpu": REPLICAS,
    "xla-tpu": f"import libtpu\n{REPLICAS}",
}


# torchvision's operators need the build of torch that it was made for.
OTHER_TORCH = ("examples", "xla-cpu", "xla-tpu")


def test_every_extra_has_a_use():
    listed = read("setup.py").split("extras_require={")[1].split("    },\n")[0]
    assert set(re.findall(r'^ +"([\w-]+)": \[', listed, re.MULTILINE)) == USES.keys()


def run(*command: str | Path, cwd: Path) -> None:
    """Runs a command where no other package is in reach."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "VIRT"))}
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def new(folder: Path) -> Path:
    """Makes an environment in a folder; returns its interpreter."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    return folder / "bin" / "python"


def _packages(python: Path) -> Path:
    [found] = (python.parents[1] / "lib").glob("*/site-packages")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel that is built from the source distribution, beside which it lies."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    run("git", "clone", "-q", ROOT, source, cwd=folder)
    # What is not committed yet counts, too.
    changed = subprocess.run(
        ["git", "diff", "HEAD", "--binary"], cwd=ROOT, capture_output=True
    )
    subprocess.run(["git", "apply", "--allow-empty"], cwd=source, input=changed.stdout)
    build = "from setuptools import build_meta; build_meta.build_sdist('..')"
    python = new(folder / "venv")
    run(python, "-m", "pip", "install", "-q", "setuptools>=77", cwd=folder)
    run(python, "-c", build, cwd=source)
    [sdist] = folder.glob("*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, sdist,
        cwd=folder)  # fmt: skip
    [found] = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Iterator[Callable[[str], Path]]:
    """Gives an interpreter that has the wheel and what an extra, or "", declares."""
    python = new(tmp_path_factory.mktemp("wheel") / "venv")
    install = [sys.executable, ROOT / "tools" / "install.py", "--python", python]

    def with_extra(name: str) -> Path:
        # Else each might bring another torch of several GB.
        torch = os.environ.get("WHEEL_TORCH", "torch")
        more = "--upgrade" if name in OTHER_TORCH else torch
        what = f"{wheel}[{name}]" if name else wheel
        run(*install, "--exact", what, more, cwd=ROOT)
        return python

    yield with_extra
    shutil.rmtree(python.parents[1])


def test_distributions_hold_the_packages_and_nothing_else(wheel):
    git = ["git", "ls-files", *PACKAGES]
    files = set(subprocess.check_output(git, cwd=ROOT, text=True).split())
    [sdist] = wheel.parent.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        assert {n for n in archive.namelist() if ".dist-info/" not in n} == files
    with tarfile.open(sdist) as archive:
        names = {m.name.partition("/")[2] for m in archive if m.isfile()}
    assert {n for n in names if "/" in n and ".egg-info/" not in n} == files
    assert {"LICENSE", "README.md", "setup.py", "pyproject.toml"} <= names


# They import all five packages, by a member of one's own in every family.
@pytest.mark.parametrize("number", range(len(blocks("docs/extending.md", "python"))))
def test_required_dependencies_are_enough(number, installed, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(blocks("docs/extending.md", "python")[number])
    run(installed(""), script, cwd=tmp_path)


def test_the_readmes_lines_install_it_and_its_script_runs(installed, tmp_path):
    """As they are written: a clone, pip alone, and a folder with two files."""
    python = new(tmp_path / "venv")  # over one with torch, as most have
    (_packages(python) / "below.pth").write_text(f"{_packages(installed(''))}\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "train.py").write_text(*blocks("README.md", "python"))
    lines = block("README.md", "sh", "pip install .").replace("ADDRESS", str(ROOT))
    start = block("README.md", "sh", "python train.py")
    script = f"export PATH={python.parent}:$PATH\n{lines}cd ../empty\n{start}"
    run("bash", "-ec", script, cwd=tmp_path)
    assert (tmp_path / "empty" / "run").is_dir()


@pytest.mark.parametrize("extra", USES)
def test_an_extra_is_enough_for_its_use(extra, installed, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{IMPORT_ALL}\n{USES[extra]}")
    run(installed(extra), script, cwd=tmp_path)
