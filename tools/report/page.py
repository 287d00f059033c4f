"""The page and the pictures of what all benchmarks have found."""

from __future__ import annotations

from typing import Any

from tools.record import GOALS, ROOT, picture

Record = dict[str, Any]
GOALS_PICTURE, SCALE_PICTURE = "report_goals.png", "report_scale.png"
TWICE = 2.0  # where the picture ends
HEAD = f"""\
`make bench` writes this page. Ratios are measured side by side in one run: of processor
time where one process is measured, of the clock where several work together. Quartiles
are those of its rounds. Absolute times belong to the machine.

![What each number takes of its goal](../images/{GOALS_PICTURE})
"""
SCALE = f"""\
## How costs grow

![Costs by replicas, sizes, parameters, samples and steps](../images/{SCALE_PICTURE})
"""


def share_of_goal(row: Record) -> float | None:
    """Returns the part of its goal that a row takes: at most 1 where it is met."""
    median, at_most, at_least = row["median"], row["at_most"], row["at_least"]
    if at_least is not None:
        return at_least / median
    if at_most is None:
        return None
    return median / at_most if at_most else TWICE * (median > 0)


def judged(found: dict[str, Record]) -> list[tuple[Record, float]]:
    """Returns the rows that have a goal, each with the share of it that it takes."""
    shares = [
        (row, share_of_goal(row)) for each in found.values() for row in each["rows"]
    ]
    return [(row, share) for row, share in shares if share is not None]


def shown(number: float | None) -> str:
    """Returns a number with three digits that count, and nothing for None."""
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}".rstrip(".")


def line(row: Record) -> str:
    """Returns the line of a table."""
    low, high = row["quartiles"]
    goals = [
        f"{words} {row[key]:g}" for key, words in GOALS.items() if row[key] is not None
    ]
    share = share_of_goal(row)
    columns = (
        row["work"],
        f"{shown(row['median'])} {row['unit']}".strip(),
        "" if low is None else f"{shown(low)} to {shown(high)}",
        *(goals or [""]),
        "" if share is None else "yes" if share <= 1 else "**missed**",
    )
    return f"| {' | '.join(columns)} |"


def origin(record: Record) -> str:
    """Returns when and where a record was made, and of what."""
    versions = record["versions"]
    libraries = {name: versions.get(name) for name in ("torch", "torch_xla")}
    libraries |= {"Python": versions["python"], **record.get("others", {})}
    told = ", ".join(f"{name} {number}" for name, number in libraries.items() if number)
    return (
        f"{record['date']}, commit {versions['commit']}; {told}; {versions['cores']} "
        f"cores of {versions['processor']}, {versions['vectors']}."
    )


def table(title: str, record: Record) -> str:
    """Returns a benchmark's section."""
    lines = [
        f"## {title}\n",
        f"`{record['command']}`: {origin(record)}\n",
        "| | median | quartiles | goal | met |",
        "| --- | --- | --- | --- | --- |",
        *map(line, record["rows"]),
    ]
    return "\n".join(lines) + "\n"


def curve(each: Record) -> str:
    """Returns the table of how one cost grows."""
    names = [name or "cost" for name in each["y"]]
    lines = [
        f"{each['y label'][0].upper()}{each['y label'][1:]}, by {each['x label']}:\n",
        f"| {each['x label']} | {' | '.join(names)} |",
        f"|{' --- |' * (1 + len(names))}",
    ]
    for x, *values in zip(each["x"], *each["y"].values()):
        lines.append(f"| {x:,} | {' | '.join(map(shown, values))} |")
    return "\n".join(lines) + "\n"


def curves(found: dict[str, Record]) -> list[Record]:
    """Returns what records say of how costs grow."""
    return [each for record in found.values() for each in record.get("curves", [])]


def page(
    titles: dict[str, str], found: dict[str, Record], failed: dict[str, str]
) -> str:
    """Returns the text of the report.

    Args:
        titles: The title of each benchmark's section.
        found: The record of each that has one.
        failed: Why a benchmark has none of this run.
    """
    rows = judged(found)
    missed = [row["work"] for row, share in rows if share > 1]
    parts = [
        "# Benchmark report\n",
        f"{len(rows) - len(missed)} of {len(rows)} goals are met.\n",
        "".join(f"- **missed**: {work}\n" for work in missed),
        *(f"**{name} failed**: {why}.\n" for name, why in failed.items()),
        *(f"**{name} has no record yet**.\n" for name in titles if name not in found),
        HEAD,
        *(table(titles[name], record) for name, record in found.items()),
        SCALE,
        *map(curve, curves(found)),
    ]
    return "\n".join(filter(None, parts))


def draw(found: dict[str, Record]) -> None:
    """Draws what every number takes of its goal, and how costs grow."""
    folder, rows, panels = ROOT / "docs/images", judged(found), curves(found)
    size = (10.0, 1 + 0.21 * len(rows))
    with picture(folder / GOALS_PICTURE, 1, figsize=size) as [axis]:
        for place, (row, share) in enumerate(rows):
            median, color = row["median"], "C0" if share <= 1 else "C3"
            ends = [
                share * n / median if n and median else share for n in row["quartiles"]
            ]
            axis.plot(ends, [place, place], color=color, lw=3, alpha=0.4)
            axis.plot(min(share, TWICE), place, "o", color=color, ms=4)
        axis.axvline(1, color="k", lw=0.8)
        axis.set(ylim=(len(rows), -1), xlim=(0, TWICE + 0.05), yticks=range(len(rows)))
        axis.set_yticklabels([row["work"] for row, _ in rows], fontsize=7)
        axis.set_xlabel("share of its goal: 1 is the goal, 2 is twice and more")
        axis.grid(axis="x", alpha=0.3)
    size = (3.2 * max(1, len(panels)), 3.0)
    with picture(folder / SCALE_PICTURE, max(1, len(panels)), figsize=size) as axes:
        for axis, each in zip(axes, panels):
            draw_curve(axis, each)


def draw_curve(axis: Any, each: Record) -> None:
    """Draws how one cost grows; what grows much has a logarithmic axis."""
    for name, values in each["y"].items():
        axis.plot(each["x"], values, "o-", ms=3, label=name)
    every = [value for values in each["y"].values() for value in values]
    if max(every) > 20 * min(every):
        axis.set_yscale("log")
    else:
        axis.set_ylim(0)
    axis.set(xscale="log", xlabel=each["x label"])
    axis.set_title(each["y label"], fontsize=8)
    if len(each["y"]) > 1:
        axis.legend(fontsize=7)
    axis.grid(alpha=0.3)
