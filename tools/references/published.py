"""Installing published libraries outside of the environment, to compare with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def fetch(folder: Path, *requirements: str) -> str | None:
    """Installs libraries into a folder with pip; returns an error's text, or None.

    Their requirements are not installed: they would shadow those of the environment.

    Args:
        folder: The folder, which the caller puts on ``sys.path``.
        *requirements: As for pip: 'name==version'.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--target", str(folder), *requirements]
    run = subprocess.run(command, capture_output=True, text=True)
    return None if run.returncode == 0 else run.stderr.strip()
