"""Draws a training run: batch sizes, learning rates, measurements and accuracy."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

# Column, label, colour; the last is annotated with its last value.
PANELS = (
    ("batch_size", "global batch size\n(samples)", "C0"),
    ("lr", "effective\nlearning rate", "C1"),
    ("gain", "gain (steps at\nthe reference)", "C4"),
    ("noise_scale", "gradient noise\nscale (samples)", "C5"),
    ("efficiency", "statistical\nefficiency", "C6"),
    ("loss", "training loss", "C2"),
    ("accuracy", "test accuracy\n(%)", "C3"),
)


def plot(history: pd.DataFrame, path: Path, title: str) -> None:
    """Writes a picture of a run as a PNG file.

    Args:
        history: Columns ``step``, ``batch_size``, ``lr``, ``loss``, ``accuracy`` (in
            per cent), NaN where they were not measured; and, if gradient noise was,
            ``gain``, ``noise_scale`` and ``efficiency``.
        path: The file to write.
        title: Its heading.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [panel for panel in PANELS if panel[0] in history]
    figure, axes = plt.subplots(
        len(panels), sharex=True, figsize=(9, 2 * len(panels)), layout="constrained"
    )
    for axis, (column, label, color) in zip(axes, panels):
        measured = history.dropna(subset=[column])
        style = "steps-post" if column in ("batch_size", "lr") else "default"
        marker = "o" if column == "accuracy" else None
        axis.plot(
            measured["step"], measured[column], color, drawstyle=style, marker=marker,
            linewidth=1.2, markersize=4,
        )  # fmt: skip
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if column in ("loss", "noise_scale") and (measured[column] > 0).any():
            axis.set_yscale("log")
    axes[-1].set_xlabel("step (update of the weights)")
    last = history["accuracy"].dropna()
    if len(last):
        axes[-1].annotate(
            f"{last.iloc[-1]:.1f} %",
            (history["step"].iloc[-1], last.iloc[-1]),
            textcoords="offset points",
            xytext=(-8, -16),
            ha="right",
        )
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
