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


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_member_is_added_from_outside_in_a_few_lines(family, tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", SECTIONS[family], re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= MOST_LINES
    script = tmp_path / "extension.py"
    script.write_text(code)
    run = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PAGE.parents[1])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
