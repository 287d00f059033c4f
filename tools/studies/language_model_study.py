"""Compares constant, growing and changing batches on a language model.

A byte-level GPT of 5 million parameters trains on the text of this repository in the
ways of `language_model_ways.py`, at equal samples, with five seeds; docs/study.md has
the plan, the measure and what came out. Every run is kept in the folder, and is not
made again. It takes about an hour on two cores; less than a minute with --quick:

    python tools/studies/language_model_study.py \\
        --output docs/benchmarks/language_model_study.json \\
        --image docs/images/language_model_study.png
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

import variable_batch_size as vbs
from tools.record import parser_with_output, picture, save
from tools.studies import language_model_ways as ways
from tools.studies.live_market import live_run
from variable_batch_size.trace_tools import StepTime, simulate

# The cluster that is assumed, in seconds; prices are of a replica in an hour.
PER_WINDOW, PER_UPDATE, DETECTION = 1.0, (1.0, 0.25, 4.0), 1.0
PRICE, SPOT_PRICE = 1.0, 0.4
MARGIN, SAVING = 0.02, 0.1  # nats per byte, and a share
LR = (0.00025, 0.0005, 0.001, 0.002)  # of the pilot
SGD_LR = (0.01, 0.03, 0.1, 0.3, 1.0)
AXES = {
    "samples": "samples (windows)",
    "hours": "simulated hours",
    "money": "simulated cost (replica-hours times their price)",
}


def kept(name: str, seed: int, sizes: ways.Sizes, folder: Path) -> dict[str, Any]:
    """Returns the result of a run, which is made if there is none of these sizes.

    The run called 'live' has live members, whose batches *spot* then replays.
    """
    path, trace = folder / f"{name.replace(' ', '_')}-{seed}.json", None
    if name == "spot" and (folder / f"live-{seed}.json").exists():
        trace = kept("live", seed, sizes, folder)["batch_sizes"]
    settings = {**dataclasses.asdict(sizes), "replayed": trace}
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["settings"] == settings:
            return record["result"]
    if name == "live":
        result = live_run(path.with_suffix(""), sizes, seed)
    else:
        result = ways.result_of(name, seed, sizes, trace)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({"settings": settings, "result": result}))
    unfinished.rename(path)
    return result


def cost(run: dict[str, Any], sizes: ways.Sizes, per_update: float) -> dict[str, Any]:
    """Returns hours and money after every update, in the cluster that is assumed."""
    steps, is_spot = np.array(run["batch_sizes"]), ways.WAYS[run["way"]].is_spot
    devices = -(-steps // sizes.minibatch) if is_spot else sizes.machines
    schedule = vbs.Schedule(vbs.Trace(steps), int(steps.sum()), minibatch_size=1)
    time = StepTime(per_update, PER_WINDOW)
    table = simulate(schedule, devices=devices, step_time=time)
    seconds = table["seconds"]
    if is_spot:  # where a member is lost, its step is run again
        seconds = seconds + (table["devices"].diff() < 0) * (DETECTION + seconds)
    bill = seconds * table["devices"] * (SPOT_PRICE if is_spot else PRICE)
    return {"hours": [*np.cumsum(seconds) / 3600], "money": [*np.cumsum(bill) / 3600]}


def interval(values: Any) -> dict[str, float]:
    """Returns the mean, and the ends of its 95 % interval by Student's t."""
    mean, number = float(np.mean(values)), len(values)
    half = stats.t.ppf(0.975, number - 1) * np.std(values, ddof=1) / number**0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def verdict(difference: dict[str, float], saved: float) -> str:
    """Returns what the plan's rules say of a way."""
    is_near = difference["high"] < MARGIN
    said = {
        "helps": is_near and saved >= SAVING,
        "costs loss": difference["low"] > 0,
        "cannot say": not is_near and difference["low"] <= 0,
    }
    return ", ".join(word for word, holds in said.items() if holds)


def row_of(runs: list[dict[str, Any]], sizes: ways.Sizes) -> dict[str, Any]:
    """Returns means and intervals of a way's runs."""
    costs = {a: [cost(run, sizes, a) for run in runs] for a in PER_UPDATE}
    for run, spent in zip(runs, costs[PER_UPDATE[0]]):
        for point in run["curve"]:
            point |= {key: spent[key][point["updates"] - 1] for key in spent}
    points = zip(*(run["curve"] for run in runs))
    finals = [run["final_loss"] for run in runs]
    return {
        "final_losses": finals,
        "final_loss": interval(finals),
        "updates": np.mean([len(run["batch_sizes"]) for run in runs]),
        "samples": np.mean([sum(run["batch_sizes"]) for run in runs]),
        "costs": {
            f"{a:g}": {k: np.mean([of[k][-1] for of in spent]) for k in spent[0]}
            for a, spent in costs.items()
        },
        "curve": [{k: np.mean([p[k] for p in at]) for k in at[0]} for at in points],
        "noise": [run["noise"] for run in runs],
        "digests": [run["digest"] for run in runs],
    }


def compare(name: str, rows: dict[str, Any]) -> None:
    """Adds the differences from other ways, what is saved, and the verdict."""
    row, way = rows[name], ways.WAYS[name]
    for key, other in (("difference", way.base), ("from_larger", way.control)):
        theirs = rows[other]["final_losses"]
        row[key] = interval(np.subtract(row["final_losses"], theirs))
    row["saved"] = {
        a: {k: 1 - spent[k] / rows[way.base]["costs"][a][k] for k in spent}
        for a, spent in row["costs"].items()
    }
    saved = max(row["saved"][f"{PER_UPDATE[0]:g}"].values())
    row["verdict"] = "" if name == way.base else verdict(row["difference"], saved)


def tell(rows: dict[str, Any]) -> None:
    """Prints the table of docs/study.md."""
    for name, row in rows.items():
        losses = [
            f"{row[key]['mean']:.3f} ({row[key]['low']:.3f} to {row[key]['high']:.3f})"
            for key in ("final_loss", "difference", "from_larger")
        ]
        spent = row["costs"][f"{PER_UPDATE[0]:g}"]
        costs = f"{spent['hours']:.3f} | {spent['money']:.2f} | {row['verdict']}"
        print(f"| {name} | {row['updates']:.0f} | {' | '.join(losses)} | {costs} |")


def draw(rows: dict[str, Any], path: Path) -> None:
    """Draws the losses by samples and by cost, and the differences."""
    with picture(path, 4, figsize=(19, 4.6)) as (*losses, differences):
        for colour, (name, row) in enumerate(rows.items()):
            style = {"color": f"C{colour}", "label": name}
            for axis, key in zip(losses, AXES):
                x, y = ([point[k] for point in row["curve"]] for k in (key, "loss"))
                line = "--" if ways.WAYS[name].base == "sgd" else "-"
                axis.plot(x, y, line, marker=".", **style)
            mean, high = row["difference"]["mean"], row["difference"]["high"]
            differences.errorbar(mean, name, xerr=high - mean, fmt="o", **style)
        for axis, label in zip(losses, AXES.values()):
            axis.set(xlabel=label, ylabel="held-out loss (nats per byte)")
        losses[0].legend()
        differences.axvspan(0, MARGIN, color="0.9")
        differences.set_xlabel("final loss minus that of constant (of sgd)")
        differences.invert_yaxis()
        for axis in (*losses, differences):
            axis.grid(alpha=0.3)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_with_output(__doc__)
    add = parser.add_argument
    add("--image", type=Path, help="PNG with the losses")
    add("--folder", type=Path, default=Path("runs/language_model_study"),
        help="of the runs' results (default: %(default)s)")  # fmt: skip
    add("--seeds", type=int, default=5, help="how many; default: %(default)s")
    add("--jobs", type=int, default=2, help="runs at a time; default: %(default)s")
    add("--no-live", action="store_true", help="replay the market of every seed")
    add("--pilot", action="store_true", help="tell the loss by peak rates, seed 100")
    add("--plot-only", action="store_true", help="draw what the output has")
    add("--quick", action="store_true", help="a tiny model, two seeds")
    args = parser.parse_args(argv)
    if args.quick:
        args.seeds, args.folder = 2, args.folder / "quick"
    return args


def make(runs: list[tuple[Any, ...]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the results of runs, each of a way, a seed, sizes and a folder."""
    with contextlib.ExitStack() as stack:
        over: Any = map
        if args.jobs > 1:
            context = multiprocessing.get_context("spawn")
            over = stack.enter_context(ProcessPoolExecutor(args.jobs, context)).map
        return [*tqdm(over(kept, *zip(*runs)), total=len(runs), unit="run")]


def pilot(sizes: ways.Sizes, args: argparse.Namespace) -> None:
    """Prints the final loss of both constant ways by the peak rate, of another seed."""
    runs = [
        (way, 100, dataclasses.replace(sizes, **{field: rate}), args.folder / f"{rate}")
        for way, field, rates in (("constant", "lr", LR), ("sgd", "sgd_lr", SGD_LR))
        for rate in rates
    ]
    for (way, *_, folder), result in zip(runs, make(runs, args)):
        print(f"{way}, peak rate {folder.name}: {result['final_loss']:.4f}")


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    sizes = ways.QUICK if args.quick else ways.Sizes()
    if args.pilot:
        pilot(sizes, args)
        return
    if args.plot_only:
        draw(json.loads(args.output.read_text(encoding="utf-8"))["ways"], args.image)
        return
    live = {} if args.no_live else kept("live", 0, sizes, args.folder)
    todo = [(way, n) for n in range(args.seeds) for way in ways.WAYS]
    runs = make([(*each, sizes, args.folder) for each in todo], args)
    found = {way: [run for run in runs if run["way"] == way] for way in ways.WAYS}
    if live:
        live["replayed"] = live["digest"] == found["spot"][0]["digest"]
        print(f"the replay has the bits of the live run: {live['replayed']}")
    rows = {way: row_of(of, sizes) for way, of in found.items()}
    for way in rows:
        compare(way, rows)
    result = {"settings": dataclasses.asdict(sizes), "live": live, "ways": rows}
    tell(rows)
    save(args.output, result)
    if args.image:
        draw(rows, args.image)


if __name__ == "__main__":
    main()
