"""The page about rigl_xla shows code that runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rigl_xla.md"


def examples() -> list[str]:
    """Those that stand alone."""
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    return [example for example in found if "import torch\n" in example]


def test_the_example_of_snip_runs():
    [example] = [example for example in examples() if "snip_scores" in example]
    names: dict[str, object] = {}
    exec(example, names)
    assert abs(names["pruner"].report().sparsity - 0.9) < 1e-3


def test_the_example_runs(capsys):
    names: dict[str, object] = {}
    exec(examples()[0], names)
    assert "num_rigl_steps=14" in capsys.readouterr().out
    report = names["pruner"].report()
    assert abs(report.sparsity - 0.9) < 1e-3
