"""Writing down what a script has measured: results with versions, and pictures."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("torch", "torch_xla", "numpy", "scikit-learn")
ROOT = Path(__file__).resolve().parents[1]
GOALS = {"at_most": "at most", "at_least": "at least"}  # and how they are read


def versions() -> dict[str, Any]:
    """Returns the machine and versions of libraries, None for one that is missing."""
    found: dict[str, Any] = {
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _commit() -> str | None:
    """Returns the checkout's commit, ``-dirty`` if it is changed; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return run.stdout.strip() or None


def _processor() -> str:
    """Returns what Linux calls the processor; elsewhere what Python knows of it."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = re.findall("model name.*: (.*)", Path("/proc/cpuinfo").read_text())
    return names[0] if names else platform.processor()


def row(
    work: str,
    values: Iterable[float] | float,
    unit: str = "",
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> dict[str, Any]:
    """Returns what a line of the report says: median, quartiles and goal of a number.

    Args:
        work: What is measured, in words that are read without the script.
        values: One number for each round, or one for all.
        unit: That of the numbers; none for ratios and counts.
        at_most, at_least: The goal, if there is one.
    """
    found = [values] if isinstance(values, int | float) else sorted(values)
    low, _, high = statistics.quantiles(found, n=4) if len(found) > 1 else (None,) * 3
    line = {"work": work, "median": statistics.median(found), "quartiles": [low, high]}
    return {**line, "unit": unit, "at_most": at_most, "at_least": at_least}


def parser_with_output(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser of a script's arguments, with the ``--output`` of `save`.

    Args:
        description: The script's docstring, which its help shows.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON with results and versions")
    return parser


def save(path: Path | None, result: dict[str, Any]) -> None:
    """Prints the result's rows, and writes it as JSON with the date and the versions.

    Without a path it writes nothing.
    """
    for each in result.get("rows", ()):
        low, high = each["quartiles"]
        spread = "" if low is None else f" ({low:.4g} to {high:.4g})"
        goals = [
            f"{words} {each[name]:g}"
            for name, words in GOALS.items()
            if each[name] is not None
        ]
        number = f"{each['median']:.4g} {each['unit']}".strip()
        print(": ".join((each["work"], number)) + spread, *goals, sep=", ")
    if path is None:
        return
    record = {"date": time.strftime("%Y-%m-%d"), "versions": versions(), **result}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"saved to {path}")


@contextlib.contextmanager
def picture(path: Path, num_panels: int, **options: Any) -> Iterator[list[Any]]:
    """Yields the axes of a row of panels, and writes them as a PNG at the end.

    Args:
        path: The file to write; its folder is made.
        num_panels: The number of panels.
        **options: Passed on to ``matplotlib.pyplot.subplots``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, num_panels, layout="constrained", squeeze=False, **options
    )
    yield list(axes[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"drawn to {path}")
