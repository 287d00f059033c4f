"""Published libraries beside the environment: for comparisons, not requirements."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def fetch(folder: Path, *requirements: str) -> str | None:
    """Fetches libraries with pip into a folder of their own; what went wrong, or None.

    What they require is not fetched: it would shadow what the environment has.

    Args:
        folder: To be put on ``sys.path`` by who imports them.
        requirements: As for pip: 'name==version'.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--target", str(folder), *requirements]
    run = subprocess.run(command, capture_output=True, text=True)
    return None if run.returncode == 0 else run.stderr.strip()
