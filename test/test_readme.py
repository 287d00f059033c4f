"""What the README shows works: its diff is applied, and both sides are run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents import ROOT, block, blocks, patched, read, sides
from support.readers import check_trained, on_replicas, run_script_of_reader
from support.xla_replica.replicas import HAS_XLA, of_torch_alone
from support.xla_replica.torchrun import LAUNCHER

from tools.size.count_lines import PACKAGES

README = read("README.md")


def scripts() -> tuple[str, str, str]:
    """Returns the user's script, the elastic one, and that with AdaScale."""
    [to_elastic] = blocks("README.md", "diff")
    [to_adascale] = blocks("docs/rules.md", "diff")
    ordinary, elastic = sides(to_elastic)
    return ordinary, elastic, patched(elastic, to_adascale)


@of_torch_alone
def test_the_quick_start_runs_as_it_is_printed(tmp_path):
    """In an empty folder, with the packages installed."""
    pytest.importorskip("sklearn")
    [script] = blocks("README.md", "python")
    (tmp_path / "train.py").write_text(script)
    section = README[README.index("## Quick start") : README.index("## Make your")]
    commands = block("README.md", "sh", "vbs make ramp").strip()
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = os.environ | {"PATH": binaries, "PYTHONPATH": str(ROOT)}
    assert len(commands.splitlines()) == 2
    options = {"cwd": tmp_path, "env": kept, "capture_output": True, "text": True}
    for command in commands.splitlines():
        done = subprocess.run(shlex.split(command), **options)
        assert done.returncode == 0, done.stderr
    [said] = re.findall(r"to a test accuracy of (\d+) %", " ".join(section.split()))
    [reached] = re.findall(r"^test accuracy ([\d.]+) %$", done.stdout, re.MULTILINE)
    assert float(reached) > float(said) - 1.5
    assert (tmp_path / "run").is_dir()


@of_torch_alone
def test_the_script_before_the_diff_trains(tmp_path):
    check_trained(run_script_of_reader(scripts()[0], tmp_path), 1)


def test_the_script_after_the_diff_trains_on_every_replica_alike(tmp_path):
    script = on_replicas(3, scripts()[1])
    check_trained(run_script_of_reader(script, tmp_path), 3)


@of_torch_alone
def test_the_script_after_the_diff_trains_under_torchrun(tmp_path):
    check_trained(run_script_of_reader(scripts()[1], tmp_path, *LAUNCHER[1:]), 2)


def test_the_script_with_adascale_trains_on_every_replica_alike(tmp_path):
    num_replicas = 1 if HAS_XLA else 3
    script = on_replicas(num_replicas, scripts()[2])
    check_trained(run_script_of_reader(script, tmp_path), num_replicas)


def test_the_diff_is_as_short_as_it_says():
    [diff] = blocks("README.md", "diff")
    assert len(re.findall(r"^\+", diff, re.MULTILINE)) <= 17


@pytest.mark.parametrize(
    ("page", "most"),
    [("README.md", 1500), *((f"docs/{name}.md", 2000) for name in PACKAGES)],
)
def test_a_first_page_is_short(page, most):
    shown = re.sub("<!--.*?-->", "", read(page))
    assert len(shown.split()) <= most


def test_the_readme_names_make_targets_and_python_versions_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?<!vbs )make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert ">=3.10" in (ROOT / "setup.py").read_text()
