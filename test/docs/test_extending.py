"""docs/extending.md adds a member to each family from outside; its code runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
SECTIONS = dict(SECTION.findall(PAGE.read_text(encoding="utf-8")))
FAMILIES = {
    "A learning-rate rule",
    "A balance type",
    "A layer rule",
    "A sparsity method",
    "A replica backend",
    "A score of a pool",
    "A family of traces",
}
MOST_LINES = 30  # of code; blank lines are free


def test_every_family_has_a_section():
    assert SECTIONS.keys() >= FAMILIES


def code_of(family: str) -> str:
    [code] = re.findall(r"```python\n(.*?)```", SECTIONS[family], re.DOTALL)
    return code


# Each script has a process of its own, which need not import torch again.
RUN_ALL = """
import multiprocessing, runpy, sys
import torch._dynamo  # which optimizers import

def run(script):
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")

for script in sys.argv[1:]:
    process = multiprocessing.get_context("fork").Process(target=run, args=(script,))
    process.start()
    process.join()
    print(process.exitcode, "is how", script, "ends", file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """The exit status of each section's code, and all that the scripts have said."""
    folder = tmp_path_factory.mktemp("extensions")
    scripts = {}
    for number, family in enumerate(sorted(FAMILIES)):
        scripts[family] = folder / f"extension_{number}.py"
        scripts[family].write_text(code_of(family))
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *scripts.values()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PAGE.parents[1])},
        capture_output=True,
        text=True,
    )
    told = re.findall(r"^(-?\d+) is how (.+) ends$", done.stderr, re.MULTILINE)
    found = {script: int(status) for status, script in told}
    return {
        family: (found[str(script)], done.stderr) for family, script in scripts.items()
    }


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_member_is_added_from_outside_in_a_few_lines(family, ends):
    lines = code_of(family).splitlines()
    assert sum(bool(line.strip()) for line in lines) <= MOST_LINES
    status, said = ends[family]
    assert status == 0, said
