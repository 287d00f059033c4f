"""The page about rigl_xla shows code that runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rigl_xla.md"


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


def test_the_example_of_snip_runs():
    [example] = [example for example in examples() if "snip_scores" in example]
    names: dict[str, object] = {}
    exec(example, names)
    assert abs(names["pruner"].report().sparsity - 0.9) < 1e-3


def test_the_examples_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(examples()[0], names)
    assert "num_rigl_steps=14" in capsys.readouterr().out
    of_reports = [text for text in examples() if "costs" in text]
    assert len(of_reports) == 2
    for text in of_reports:
        exec(text, names)
    assert "training: dense 1.0000" in capsys.readouterr().out
    assert abs(names["report"].sparsity - 0.9) < 1e-3
    (events,) = tmp_path.glob("runs/events.out.tfevents.*")
    names["log"]._writer.close()
    assert b"rigl/inference_flops_ratio" in events.read_bytes()
