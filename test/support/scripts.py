"""Running a script as a user does, from a checkout."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from support.documents import ROOT


def words(arguments: Iterable[object]) -> list[str]:
    return [str(argument) for argument in arguments]


def environment() -> dict[str, str]:
    """Returns an environment in which this project is not on Python's path."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def run_script(
    script: Path,
    *arguments: object,
    cwd: Path,
    command: Iterable[object] = (sys.executable,),
    timeout: float = 300.0,
    status: int = 0,
) -> str:
    """Runs a script in a new process, which must end so; returns its output."""
    done = subprocess.run(
        words([*command, script, *arguments]),
        cwd=cwd, env=environment(), text=True, timeout=timeout,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    return done.stdout


def python(
    *arguments: object,
    command: Iterable[object] = (sys.executable,),
    stdin: str | None = None,
    timeout: float = 120.0,
    status: int = 0,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Runs Python, which finds this checkout's packages and what supports its tests.

    Its environment has these variables besides those of this process. It must end with
    this status.
    """
    path = os.pathsep.join(words([ROOT, ROOT / "test"]))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(
        words([*command, *arguments]),
        env=environment, input=stdin, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done


def written(folder: Path, source: str) -> Path:
    """Returns a script with this source in the folder."""
    script = folder / "script.py"
    script.write_text(source)
    return script


def descendants(pid: int) -> list[int]:
    """Returns all processes below this one; those of torchrun leave its group."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):  # of every thread
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found
