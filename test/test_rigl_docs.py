"""The page about rigl_xla shows code that runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rigl_xla.md"


def test_the_example_runs(capsys):
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    names: dict[str, object] = {}
    exec(example.group(1), names)
    assert "num_rigl_steps=14" in capsys.readouterr().out
    report = names["pruner"].report()
    assert abs(report.sparsity - 0.9) < 1e-3
