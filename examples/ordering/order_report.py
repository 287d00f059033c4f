"""Compares orders: a table, the numbers in files, and a picture."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pandas as pd

# One epoch of one run: order, seed, epoch, training time so far in seconds, loss and
# accuracy of both halves, and the sampler's metrics.
Row = dict[str, Any]

# Column, label, whether on a logarithmic axis.
PANELS = (
    ("train_loss", "training loss", True),
    ("excess", "training loss above\nthe lowest one reached", True),
    ("test_accuracy", "test accuracy (%)", False),
)
AXES = (
    ("epoch", "epoch"),
    ("seconds", "seconds of training, with epochs of median length"),
)


def report(history: list[Row], title: str, args: argparse.Namespace) -> None:
    """Prints the table; writes history.csv, results.json and the picture."""
    folder = Path(args.logdir)
    folder.mkdir(parents=True, exist_ok=True)
    rows = pd.DataFrame(history)
    rows.to_csv(folder / "history.csv", index=False)
    results = {"title": title, "settings": vars(args), "history": history}
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{title}: means over {args.seeds} seeds [smallest, largest]")
    print(table(rows).to_string())
    try:
        plot(rows, folder / "orders.png", title)
        print(f"picture: {folder / 'orders.png'}")
    except ImportError:
        print("no picture: matplotlib is not installed")
    print(f"numbers: {folder / 'history.csv'}, {folder / 'results.json'}")
    print(f"TensorBoard: tensorboard --logdir {os.path.relpath(folder)}")


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns one line for every order, about its last epoch."""
    lines = {}
    for order, runs in rows.groupby("order", sort=False):
        by_seed = runs.groupby("seed")
        last = by_seed.last()
        columns = {
            "train loss": _spread(last["train_loss"], ".5f"),
            "test loss": _spread(last["test_loss"], ".5f"),
            "test %": _spread(last["test_accuracy"], ".2f"),
            "s/epoch": f"{seconds_per_epoch(runs):.2f}",
        }
        if "herding" in runs and runs["herding"].notna().any():
            columns["herding"] = _spread(last["herding"], ".3g")
        lines[order] = columns
    return pd.DataFrame.from_dict(lines, orient="index").fillna("")


def seconds_per_epoch(runs: pd.DataFrame) -> float:
    """Returns the median time of an epoch, since first epochs compile programs."""
    return runs.groupby("seed")["seconds"].diff().median()


def _spread(values: pd.Series, form: str) -> str:
    if len(values) == 1:
        return f"{values.iloc[0]:{form}}"
    return f"{values.mean():{form}} [{values.min():{form}}, {values.max():{form}}]"


def plot(rows: pd.DataFrame, path: Path, title: str) -> None:
    """Writes a PNG: loss and accuracy against epochs and against time, every order.

    The picture starts at the first epoch. Lines are means over seeds; bands reach from
    the smallest to the largest.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    excess = rows["train_loss"] - rows["train_loss"].min()
    rows = rows.assign(excess=excess.where(excess > 0))  # Zero has no logarithm.
    rows = rows[rows["epoch"] > 0]  # Untrained weights would dwarf the rest.
    figure, axes = plt.subplots(
        len(PANELS), len(AXES), sharex="col", sharey="row", figsize=(11, 10),
        layout="constrained",
    )  # fmt: skip
    for line, (column, label, logarithmic) in zip(axes, PANELS):
        for axis, (against, _) in zip(line, AXES):
            for order, runs in rows.groupby("order", sort=False):
                y = runs.groupby("epoch")[column]
                x = y.mean().index.to_numpy()
                if against == "seconds":
                    x = x * seconds_per_epoch(runs)
                axis.plot(x, y.mean(), linewidth=1.2, label=order)
                axis.fill_between(x, y.min(), y.max(), alpha=0.2, linewidth=0)
            axis.grid(alpha=0.3)
        line[0].set_ylabel(label)
        if logarithmic and (rows[column] > 0).any():
            line[0].set_yscale("log")
    for axis, (_, name) in zip(axes[-1], AXES):
        axis.set_xlabel(name)
    axes[0][0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
