"""A Chromium without a window and without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom",
)  # fmt: skip
IN_CI = bool(os.environ.get("CI"))


def skip(reason: str) -> None:
    """Skips the test that runs; fails it in CI, where what it needs must be there."""
    (pytest.fail if IN_CI else pytest.skip)(reason)


def shown(address: str, folder: Path, *options: str) -> str:
    """Returns the elements of a page once its scripts have run in Chromium."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        skip("there is no Chromium: make browser")
    done = subprocess.run(
        [found, *OPTIONS, f"--user-data-dir={folder}", *options, address],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
