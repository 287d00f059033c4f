"""Draws a training run: batch size, effective learning rate, loss and accuracy."""

from __future__ import annotations

from pathlib import Path

import pandas as pd


def plot(history: pd.DataFrame, path: Path, title: str) -> None:
    """Writes a PNG.

    Args:
        history: Columns ``step``, ``batch_size``, ``lr``, ``loss``, ``accuracy`` (in
            per cent); the last two may be NaN where they were not measured.
        path: The file to write.
        title: Its heading.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = (
        ("batch_size", "global batch size\n(samples)", "C0"),
        ("lr", "effective\nlearning rate", "C1"),
        ("loss", "training loss", "C2"),
        ("accuracy", "test accuracy\n(%)", "C3"),
    )
    figure, axes = plt.subplots(
        len(panels), sharex=True, figsize=(9, 8), layout="constrained"
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
    axes[2].set_yscale("log")
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
