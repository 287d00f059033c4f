"""The studies in tools/ find what they are to find, on a small scale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parent.parent
PNG = b"\x89PNG"


def run(tool: str, folder: Path, *options: str) -> dict[str, Any]:
    """What the tool saved; what it drew must be an image."""
    image, output = folder / "made" / "image.png", folder / "made" / "output.json"
    command = [sys.executable, str(ROOT / "tools" / tool), *options]
    finished = subprocess.run(
        [*command, "--image", str(image), "--output", str(output)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert finished.returncode == 0, finished.stderr
    assert image.read_bytes().startswith(PNG)
    saved = json.loads(output.read_text(encoding="utf-8"))
    assert saved["versions"]["torch"]
    assert saved["date"]
    return saved


def test_herding_hardly_grows_but_for_random_orders(tmp_path):
    saved = run("herding_study.py", tmp_path, "--quick", "--seeds", "0", "1")
    slopes = saved["slope"]
    assert 0.4 < slopes["rr"] < 0.6
    assert slopes["mean"] < 0.15
    assert slopes["pair"] < 0.15
    for balance_type in ("mean", "pair"):  # halved by every epoch, to begin with
        first, second, *_, last = saved["herding_by_epoch_of_largest"][balance_type]
        assert second < 0.75 * first
        assert last < first / 4


@pytest.mark.parametrize("tool", ["herding_study.py"])
def test_the_help_teaches(tool):
    command = [sys.executable, str(ROOT / "tools" / tool), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert "--quick" in shown
    assert "default: " in shown
