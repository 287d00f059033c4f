"""One picture of one or several runs; a trace is drawn as the run that it plans."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping

import numpy as np

from variable_batch_size.runs.run_file import BEGINNINGS, Run
from xla_replica.common.arguments import check_choice
from xla_replica.common.later import pd

AXES = ("updates", "samples", "hours")
# Columns that are drawn, a panel for each, and their labels.
PANELS = {
    "batch_size": "batch size\n(samples)",
    "lr": "learning rate",
    "loss": "loss",
    "replicas": "replicas",
}
# What holds throughout an update is drawn as steps; other numbers come at its end.
STEPPED = ("batch_size", "lr", "replicas")
# Columns with a logarithmic axis if their largest number is 10 to so many times the
# smallest one. A learning rate that decays to almost nothing has none.
LOGARITHMIC = {"batch_size": 1e9, "lr": 1e3, "loss": 1e9, "noise_scale": 1e9}
# Colours that everybody can tell apart, and line styles for where there are none.
LOOKS = (
    ("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#000000", ":"),
    ("#CC79A7", (0, (6, 1, 1, 1, 1, 1))), ("#8C6D00", (0, (1, 3))),
)  # fmt: skip


def draw_runs(
    runs: Mapping[str, Run],
    path: str | os.PathLike[str],
    x: str = "updates",
    panels: Mapping[str, str] = PANELS,
) -> None:
    """Draws runs over one axis, a panel for each number, and writes the picture.

    A dotted line shows where a run was resumed. Panels of numbers that no run has are
    left out.

    Args:
        runs: What `read_run` has returned, by the names that the legend shows.
        path: A file whose name ends as a format of matplotlib, such as .png or .pdf.
        x: 'updates', 'samples', or 'hours', without those between a stop and the
            resumption.
        panels: Columns of the updates, and ``replicas``, with the labels of their axes.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: A run has no updates, or does not say where on the axis they are; or
            matplotlib writes no such file.
    """
    check_choice("x", x, AXES)
    try:
        from matplotlib import figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a picture needs matplotlib: pip install 'elastic-xla[plot]'"
        ) from error
    tables = {name: _table(name, run, panels, x) for name, run in runs.items()}
    drawn = pd.concat(tables.values())
    names = [name for name in panels if drawn[name].notna().any()]
    picture = figure.Figure(figsize=(8, 0.8 + 1.6 * len(names)), layout="constrained")
    axes = picture.subplots(len(names), sharex=True, squeeze=False)[:, 0]
    for axis, name in zip(axes, names):
        how = {"drawstyle": "steps-pre"} if name in STEPPED else {}
        for (run, table), (color, style) in zip(tables.items(), itertools.cycle(LOOKS)):
            points = table[table[name].notna() | table["begins"]]  # with gaps
            axis.plot(points[x], points[name], c=color, ls=style, label=run, **how)
            for place in table[x][table["begins"] & (table["part"] > 0)]:
                axis.axvline(place, c=color, ls=":", lw=1)
        least, most = drawn[name].min(), drawn[name].max()
        if 0 < 10 * least <= most <= LOGARITHMIC.get(name, 0) * least:
            axis.set_yscale("log", base=2 if name == "batch_size" else 10)
            if name == "batch_size":
                axis.yaxis.set_major_formatter("{x:g}")
        elif name in STEPPED:
            axis.set_ylim(bottom=0)
        axis.set_ylabel(panels[name])
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel(x)
    columns = max(1, 90 // (8 + max(map(len, runs))))
    legend = axes[0].get_legend_handles_labels()
    picture.legend(*legend, loc="outside upper left", ncols=columns, frameon=False)
    picture.savefig(path, dpi=150)  # 1200 pixels wide


def _table(name: str, run: Run, panels: Iterable[str], x: str) -> pd.DataFrame:
    """Returns the updates with columns of panels, and of `AXES`, where each ends.

    Parts, from 0, are what was run between two resumptions. Each begins with a row
    without numbers, where its first update began. Raises ValueError if there is no
    update, or not its place on the axis ``x``.
    """
    if run.updates.empty:
        raise ValueError(f"{name} tells of no update; is it the log of a run?")
    known = ("samples", "time", "seconds", "batch_size", "replicas", *panels)
    table = run.updates.reindex(columns=[*dict.fromkeys((*run.updates, *known))])
    table["updates"], table["part"] = table["step"] + 1, 0
    for number, event in enumerate(run.events):
        after = table["step"] >= event["step"]
        if event["event"] in BEGINNINGS:
            table.loc[after, "part"] = number * (not after.all())
        if event["event"] in (*BEGINNINGS, "members") and "num_replicas" in event:
            table.loc[after, "replicas"] = event["num_replicas"]
    rows = []
    for _, part in table.groupby("part"):
        begun = part.iloc[:1].assign(updates=part["step"], begins=True)
        begun["samples"] -= begun["batch_size"]
        begun["time"] -= begun["seconds"].fillna(0)
        begun[[*panels]] = np.nan
        rows += [begun, part.assign(begins=False)]
    table = pd.concat(rows)
    seconds = table["time"].diff().mask(table["begins"], 0.0)
    table["hours"] = seconds.cumsum() / 3600
    if table[x].isna().any():
        raise ValueError(f"x={x!r}: {name} does not say the {x} of its updates")
    return table
