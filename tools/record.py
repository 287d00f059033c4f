"""What the scripts of this folder write down: results, with what they were made by."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "torch_xla", "numpy", "scikit-learn")


def versions() -> dict[str, Any]:
    """Of Python and of the libraries, None for one that is not installed."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def save(path: Path, result: dict[str, Any]) -> None:
    """Writes JSON: the date, versions, and the result; says so."""
    record = {"date": time.strftime("%Y-%m-%d"), "versions": versions(), **result}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"saved to {path}")
