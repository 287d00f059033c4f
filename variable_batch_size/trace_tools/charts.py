"""Pictures of a trace: in a terminal, and as a file."""

from __future__ import annotations

import os

import numpy as np

from xla_replica.common.arguments import check_integer
from xla_replica.common.later import pd

_BLOCKS = " ▁▂▃▄▅▆▇█"


def terminal_chart(values: np.ndarray, width: int = 72, height: int = 12) -> str:
    """Returns a bar chart of numbers >= 0 as lines of text.

    A column is the mean of the numbers that fall into it; the axis begins at 0.

    >>> print(terminal_chart(np.array([1, 2, 4, 4]), width=4, height=2))
    4 |  ██
    0 |▄███
       0 .. 3
    """
    check_integer("width", width, least=1)
    check_integer("height", height, least=1)
    values = np.asarray(values, float)
    edges = np.unique(np.linspace(0, len(values), min(width, len(values)) + 1).round())
    starts = edges[:-1].astype(int)
    means = np.add.reduceat(values, starts) / np.diff(edges)
    largest = values.max()
    eighths = np.rint(means / (largest or 1.0) * height * 8).astype(int)
    labels = [f"{largest:g}", *[""] * (height - 2), "0"][-height:]
    margin = max(map(len, labels))
    lines = []
    for row in range(height):
        filled = np.clip(eighths - 8 * (height - 1 - row), 0, 8)
        bar = "".join(_BLOCKS[n] for n in filled).rstrip()
        lines.append(f"{labels[row]:>{margin}} |{bar}")
    lines.append(f"{'':>{margin}}  0 .. {len(values) - 1}")
    return "\n".join(lines)


def write_png(
    table: pd.DataFrame, path: str | os.PathLike[str], title: str = ""
) -> None:
    """Writes a PNG with one panel per column, over the steps.

    Args:
        table: One row per step; names of columns become labels.
        path: The file to write.
        title: The heading.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a PNG needs matplotlib: pip install 'elastic-xla[plot]', or leave the "
            "file out for a chart in the terminal"
        ) from error
    figure = Figure(figsize=(9, 0.8 + 2 * len(table.columns)), layout="constrained")
    axes = figure.subplots(len(table.columns), sharex=True, squeeze=False)[:, 0]
    for index, (axis, column) in enumerate(zip(axes, table.columns)):
        # The last step, too, is as wide as a step.
        steps, values = np.arange(len(table) + 1), table[column]
        values = np.append(values, values.iloc[-1:])
        axis.plot(steps, values, f"C{index}", drawstyle="steps-post")
        axis.set_ylabel(column)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step (update of the weights)")
    figure.suptitle(title)
    figure.savefig(path, dpi=120, format="png")
