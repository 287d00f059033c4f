"""One page about one or several runs, from their logs."""

from __future__ import annotations

import html
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from variable_batch_size.runs.run_file import BEGINNINGS, Run, read_run
from xla_replica.common.later import pd

# Column of the updates, label, whether steps are drawn, whether the axis may be a log.
PANELS = (
    ("batch_size", "batch size<br>(samples)", True, False),
    ("replicas", "replicas", True, False),
    ("lr", "effective<br>learning rate", True, False),
    ("loss", "loss", False, True),
    ("accuracy", "accuracy (%)", False, False),
    ("gain", "gain", False, False),
    ("noise_scale", "noise scale<br>(samples)", False, True),
    ("idle", "idle time<br>(of all replicas)", False, False),
)
# Columns that the common axis can count; the first one's label is its unit.
AXES = {"elapsed": "time", "samples": "samples", "step": "updates"}
UNITS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
# Of events: plotly's name, and a character that looks like it.
SYMBOLS = {
    "start": ("triangle-right", "▶"),
    "resume": ("triangle-right-open", "▷"),
    "checkpoint": ("line-ns-open", "|"),
    "stop": ("x", "✕"),
    "decision": ("diamond", "◆"),
    "more members": ("triangle-up", "▲"),
    "fewer members": ("triangle-down", "▼"),
}
OTHER = ("circle", "●")
MOST_POINTS = 4000  # of a line; a page of a million updates would not open

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 1.5em; }}
table {{ border-collapse: collapse; font-size: 90%; }}
th, td {{ padding: 0.25em 0.8em; text-align: right; border-bottom: 1px solid #8886; }}
th:first-child, td:first-child {{ text-align: left; }}
p {{ overflow-x: auto; }}
@media (max-width: 600px) {{
  body {{ margin: 0.5em; font-size: 85%; }}
  h1 {{ font-size: 130%; overflow-wrap: anywhere; }}
}}
</style>
</head>
<body>
<h1>{title}</h1>
{tables}
<p>Events: {events}</p>
{figure}
</body>
</html>
"""


def write_report(
    logs: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]
) -> Path:
    """Writes one HTML page about runs, which opens without a network.

    Batch size, replicas, learning rate, loss, accuracy, gain, noise scale, idle time
    and events (starts, resumptions, checkpoints, stops, decisions, members that come
    and go) share one axis: time since the run began, samples, or updates. Tables
    compare the runs and their settings.

    Args:
        logs: Files that `RunLog` has written, or folders with a ``run.jsonl``.
        path: The page.

    Raises:
        ModuleNotFoundError: plotly is not installed.
        FileNotFoundError, ValueError: A log is missing, or is another file.
    """
    if not logs:
        raise ValueError("a report needs the log of a run")
    files = [
        Path(log, "run.jsonl") if Path(log).is_dir() else Path(log) for log in logs
    ]
    runs = dict(zip(_names(files), map(read_run, files)))
    for file, run in zip(files, runs.values()):
        if run.updates.empty:
            raise ValueError(f"{file} tells of no update; is it the log of a run?")
    figure = _figure(runs).to_html(
        full_html=False,
        include_plotlyjs=True,
        config={"displaylogo": False, "responsive": True},
    )
    tables = "\n".join(
        _html_table(table) for table in (summary(runs), _differences(runs))
    )
    page = _PAGE.format(
        title=html.escape("Runs: " + ", ".join(runs)),
        tables=tables,
        figure=figure,
        events=_legend(runs),
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _legend(runs: dict[str, Run]) -> str:
    """Returns what the symbols of the events mean that there are."""
    found = dict.fromkeys(e["event"] for run in runs.values() for e in _named(run))
    known = [f"{SYMBOLS[name][1]} {name}" for name in SYMBOLS if name in found]
    others = [html.escape(name) for name in found if name not in SYMBOLS]
    return ", ".join([*known, *([f"{OTHER[1]} {' or '.join(others)}"] * bool(others))])


def _named(run: Run) -> Iterator[dict[str, Any]]:
    """Yields the events; those of members are called by what they change."""
    num_replicas = 0
    for event in run.events:
        before, num_replicas = num_replicas, event.get("num_replicas", num_replicas)
        if event["event"] == "members":
            name = "fewer members" if num_replicas < before else "more members"
            event = {**event, "event": name}
        yield event


def summary(runs: dict[str, Run]) -> pd.DataFrame:
    """Returns one row for every run: how much it has trained, and with what result."""
    return pd.DataFrame({name: _totals(run) for name, run in runs.items()}).T


def _totals(run: Run) -> dict[str, Any]:
    updates, header = run.updates, run.header
    begun = [event for event in run.events if event["event"] in BEGINNINGS]
    seconds = updates.get("seconds", pd.Series(dtype=float)).sum()
    return {
        "rule": header.get("rule", ""),
        "replicas": " → ".join(dict.fromkeys(f"{n:g}" for n in _num_replicas(run))),
        "updates": len(updates),
        "samples": _last(updates, "samples"),
        "minutes of updates": seconds / 60,
        "idle (%)": 100 * _idle_share(run),
        "last loss": _last(updates, "loss"),
        "best accuracy (%)": _measured(updates, "accuracy").max(),
        "resumed": sum(event["event"] == "resume" for event in begun),
        "updates made again": sum(event["num_lost"] for event in begun),
        "generations": sum(event["event"] == "members" for event in run.events),
        "checkpoints": sum(event["event"] == "checkpoint" for event in run.events),
    }


def _measured(updates: pd.DataFrame, column: str) -> pd.Series:
    return updates.get(column, pd.Series(dtype=float)).dropna()


def _last(updates: pd.DataFrame, column: str) -> float:
    found = _measured(updates, column)
    return found.iloc[-1] if len(found) else np.nan


def _idle_share(run: Run) -> float:
    """Returns what part of the time of all replicas was idle."""
    updates = run.updates
    if "idle_seconds" not in updates:
        return np.nan
    total = (updates["seconds"] * _num_replicas(run)).sum()
    return updates["idle_seconds"].sum() / total if total else np.nan


def _num_replicas(run: Run) -> np.ndarray:
    """Returns how many replicas have made each update, NaN where nothing tells."""
    found = np.full(len(run.updates), np.nan)
    for event in run.events:
        if event["event"] in (*BEGINNINGS, "members"):
            number = event.get("num_replicas", np.nan)
            found[run.updates["step"] >= event["step"]] = number
    return found


def _differences(runs: dict[str, Run]) -> pd.DataFrame:
    """Returns the settings in which runs differ, a row for each run."""
    table = pd.DataFrame(
        {
            name: {
                **{k: str(v) for k, v in run.header.get("settings", {}).items()},
                **run.header.get("versions", {}),
            }
            for name, run in runs.items()
        }
    ).T
    return table.loc[:, [table[c].nunique(dropna=False) > 1 for c in table]]


def _html_table(table: pd.DataFrame) -> str:
    if table.shape[1] == 0:
        return ""
    text = table.to_html(
        border=0, na_rep="", float_format=lambda x: f"{x:.4g}", justify="right"
    )
    return f"<p>{text}</p>"


def _names(files: list[Path]) -> list[str]:
    """Returns what the runs are called: their folders, or the whole paths."""
    names = [
        file.parent.name if file.name == "run.jsonl" else file.stem for file in files
    ]
    if len(set(names)) < len(names):
        names = [str(file) for file in files]
    if len(set(names)) < len(names):
        raise ValueError(f"a run is given twice: {', '.join(names)}")
    return names


def _figure(runs: dict[str, Run]) -> Any:
    try:
        from plotly.colors import qualitative
        from plotly.graph_objects import Figure, Scatter
        from plotly.subplots import make_subplots
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a report needs plotly: pip install 'elastic-xla[report]'"
        ) from error
    tables = {name: _table(run) for name, run in runs.items()}
    events = {name: _events(run, tables[name]) for name, run in runs.items()}
    elapsed = pd.concat(
        [table["elapsed"] for table in (*tables.values(), *events.values())]
    )
    unit = next((u for u, x in UNITS.items() if elapsed.max() < 200 * x), "hours")
    panels = [p for p in PANELS if any(p[0] in table for table in tables.values())]
    rows = 1 + len(panels)
    heights = [40 + 30 * len(runs), *[170] * len(panels)]
    figure: Figure = make_subplots(
        rows, 1, shared_xaxes=True, row_heights=heights, vertical_spacing=0.012
    )
    positions: list[pd.DataFrame] = []  # of every line, by axis

    def add(row: int, points: pd.DataFrame, **options: Any) -> None:
        positions.append(
            points[[*AXES]].assign(elapsed=points["elapsed"] / UNITS[unit])
        )
        figure.add_trace(Scatter(x=positions[-1]["elapsed"], **options), row, 1)

    for name, color in zip(runs, itertools.cycle(qualitative.D3)):
        told = events[name]
        symbols = [SYMBOLS.get(event, OTHER)[0] for event in told["event"]]
        line = {"width": 2, "color": color}
        add(
            1, told, y=[name] * len(told), mode="markers", name=name, legendgroup=name,
            marker={"color": color, "size": 11, "line": line, "symbol": symbols},
            text=told["text"], hoverinfo="text",
        )  # fmt: skip
        for row, (column, label, has_steps, _) in enumerate(panels, 2):
            points = _points(runs[name], tables[name], column)
            if not len(points):
                continue
            values = points[column] / (UNITS[unit] if column == "idle" else 1)
            add(
                row, points, y=values, name=name, legendgroup=name, showlegend=False,
                mode="lines+markers" if len(points) < 200 else "lines",
                line={"color": color, "shape": "vh" if has_steps else "linear"},
                marker={"size": 4},
                customdata=points[["step", "epoch"]].to_numpy(),
                hovertemplate="%{y:.6g}<br>step %{customdata[0]}, epoch "
                "%{customdata[1]}, at %{x:.6g}"
                f"<extra>{name}, {label.split('<')[0]}</extra>",
            )  # fmt: skip
    figure.update_yaxes(tickvals=list(runs), title_text="events", row=1)
    for row, (column, label, _, may_log) in enumerate(panels, 2):
        values = pd.concat([_measured(table, column) for table in tables.values()])
        kind = "log" if may_log and len(values) and (values > 0).all() else "linear"
        label = label.replace("of all replicas", f"replica-{unit}")
        label += "<br>(log)" if kind == "log" else ""
        figure.update_yaxes(title_text=label, type=kind, row=row)
    last = "xaxis" if rows == 1 else f"xaxis{rows}"
    buttons = []
    for axis, label in AXES.items():
        title = unit if axis == "elapsed" else label
        shown = {f"{last}.title.text": title, f"{last}.autorange": True}
        places = [place[axis].tolist() for place in positions]
        buttons.append(
            {"label": label, "method": "update", "args": [{"x": places}, shown]}
        )
    top = {"y": 1.0, "yanchor": "bottom"}
    menu = {"type": "buttons", "direction": "right", "x": 0.0, "xanchor": "left"}
    figure.update_xaxes(title_text=unit, row=rows)
    figure.update_xaxes(gridcolor="rgba(128,128,128,0.25)")
    figure.update_yaxes(gridcolor="rgba(128,128,128,0.25)")
    figure.update_layout(
        height=sum(heights) + 200,
        template="plotly_white",
        # Legible on a light page and on a dark one.
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#808080"},
        margin={"l": 110, "r": 20, "t": 100, "b": 50},
        legend={"orientation": "h", "x": 0.0, **top},
        # Above the legend, which on a phone is as wide as the page.
        updatemenus=[{**menu, **top, "y": 1 + 40 / sum(heights), "buttons": buttons}],
    )
    return figure


def _table(run: Run) -> pd.DataFrame:
    """Returns the updates with the columns of `AXES` and `PANELS` that are known."""
    table = run.updates.reindex(
        columns={**dict.fromkeys(run.updates), "time": 0, "samples": 0, "epoch": 0}
    )
    if not np.isnan(num_replicas := _num_replicas(run)).all():
        table["replicas"] = num_replicas
    table["elapsed"] = table["time"] - (run.events[0]["time"] if run.events else np.nan)
    if "idle_seconds" in table:
        table["idle"] = table["idle_seconds"].cumsum()
    return table


def _events(run: Run, table: pd.DataFrame) -> pd.DataFrame:
    """Returns the events with the columns of `AXES`, and what to say of each."""
    known = table.dropna(subset=["samples"])
    rows = []
    for event in _named(run):
        before = known["samples"][known["step"] < event["step"]]
        told = {k: v for k, v in event.items() if not isinstance(v, (dict, list))}
        lines = [
            f"{html.escape(str(k))}: {html.escape(str(v))}" for k, v in told.items()
        ]
        rows.append(
            {
                "event": event["event"],
                "elapsed": event["time"] - run.events[0]["time"],
                "samples": before.iloc[-1] if len(before) else 0,
                "step": event["step"],
                "text": "<br>".join(lines),
            }
        )
    return pd.DataFrame(rows, columns=["event", *AXES, "text"])


def _points(run: Run, table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Returns what a line is drawn through, with gaps where the run was resumed."""
    if column not in table:
        return table[:0]
    points = table.dropna(subset=[column])
    if len(points) > MOST_POINTS:
        chosen = np.linspace(0, len(points) - 1, MOST_POINTS).astype(int)
        points = points.iloc[chosen]
    resumed = [e["step"] - 0.5 for e in run.events if e["event"] == BEGINNINGS[1]]
    gaps = pd.DataFrame({"step": resumed}, columns=points.columns, dtype=float)
    return pd.concat([points, gaps]).sort_values("step") if resumed else points
