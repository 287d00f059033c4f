"""Writing down what a script has measured: results with versions, and pictures."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("torch", "torch_xla", "numpy", "numba", "scikit-learn")


def versions() -> dict[str, Any]:
    """Returns the machine and versions of libraries, None for one that is missing."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


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
    """Writes the date, the versions and the result as JSON, and prints where.

    Without a path it does nothing.
    """
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
