"""The commands: functions of parsed options that return what is printed.

The docstring of a command is its help; its options are rows of one table.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from variable_batch_size import trace_tools as tools
from variable_batch_size.data.schedule import Schedule
from variable_batch_size.runs.picture import draw_runs
from variable_batch_size.runs.run_file import Run, read_run
from variable_batch_size.trace_tools.options import (
    REQUIRED,
    Option,
    amount,
    listed,
    options_of,
)
from variable_batch_size.traces.batch_trace import Trace
from variable_batch_size.traces.trace_csv import COLUMN, Table, read_table
from xla_replica.common.arguments import check_integer, check_number

TRACE = "a CSV file, - for the standard input, or one batch size"
RUNS, TIMED, SIMULATE = "check simulate", "convert simulate", "simulate"
OPTIONS = (
    Option("trace", str, REQUIRED, "check simulate stats", TRACE),
    Option("files", list, REQUIRED, "plot",
           f"logs of vbs.RunLog, folders with a run.jsonl, and traces: {TRACE}"),
    Option("log", str, REQUIRED, "convert", "the file of the log"),
    Option("--tokens-per-sample", int, None, "check simulate stats plot",
           "of a trace with the column tokens"),
    Option("--dataset-size", int, REQUIRED, RUNS, "in samples"),
    Option("--minibatch-size", int, 32, "check simulate convert",
           "samples that a replica runs at once"),
    Option("--epochs", int, None, RUNS, "default: all of the trace"),
    Option("--pad-minibatches", bool, False, RUNS,
           "allow batch sizes that are not multiples of the minibatch"),
    Option("--on-end", str, "stop", RUNS,
           "what follows the last row: stop, error, hold or cycle"),
    Option("--num-replicas", int, None, RUNS,
           "that share a step; default: the trace's column devices, or 1"),
    Option("--rule", str, "constant", SIMULATE,
           "from batch to learning rate: a key of vbs.RULES, or power:ALPHA"),
    Option("--ref-batchsize", int, None, SIMULATE,
           "batch size at which --lr was tuned; most rules need it"),
    Option("--lr", float, 1.0, SIMULATE, "the reference learning rate"),
    Option("--noise-scale", float, None, SIMULATE, "of the gradients, in samples"),
    Option("--seconds-per-step", float, None, TIMED,
           "of every step; without a step time, each row of a log is a step"),
    Option("--seconds-per-update", float, None, TIMED, "of a step's sum and update"),
    Option("--seconds-per-substep", float, None, "check convert simulate",
           "of each minibatch that the first replica runs"),
    Option("--restart-seconds", float, 0.0, TIMED, "whenever the devices change"),
    Option("--compile-seconds", float, 0.0, SIMULATE, "of the first step, and of the "
           "first one after a restart"),
    Option("--losses-per-hour", float, 0.0, SIMULATE, "of replicas, without notice"),
    Option("--checkpoint-seconds", float, 600.0, SIMULATE, "between two checkpoints"),
    Option("--detection-seconds", float, 1.0, SIMULATE,
           "until live members know that one of them is lost"),
    Option("--exchange-seconds", float, 0.0, SIMULATE,
           "what live members take in every step to sum over their hosts"),
    Option("--price", float, 0.0, SIMULATE, "of one device in one hour"),
    Option("--time-column", str, None, "convert", "default: Time, time or timestamp"),
    Option("--device-column", str, None, "convert",
           "default: TPU_cores, GPUs, devices or replicas"),
    Option("--last-row-seconds", float, 0.0, "convert",
           "how long the devices of the log's last row are there"),
    Option("--x", str, "updates", "plot",
           "the common axis: updates, samples, or hours without pauses"),
    Option("--out", Path, None, "make convert simulate plot",
           "a CSV file; of plot PNG, PDF or SVG, by default beside the first file"),
    Option("--force", bool, False, "make convert simulate plot", "replace that file"),
    Option("--json", bool, False, "check stats simulate", "print numbers as JSON"),
)  # fmt: skip


def run_check(args: argparse.Namespace) -> Mapping[str, Any]:
    """Says whether a trace fits a dataset, and what it wastes.

    Epochs, samples that are dropped at their ends, and replicas that are idle because a
    step has no minibatch for them. A trace that cannot be used is an error with file,
    line and column.

    example:
      vbs check trace.csv --dataset-size 60000 --minibatch-size 32 --num-replicas 8
    """
    schedule, devices = _schedule(args)
    return tools.check(schedule, devices, args.epochs, args.seconds_per_substep)


def run_stats(args: argparse.Namespace) -> Mapping[str, Any]:
    """Describes a trace: its sizes, how often they change, which minibatches fit.

    example:
      vbs stats trace.csv
    """
    return tools.stats(_trace(args.trace, args)[0])


def run_plot(args: argparse.Namespace) -> str:
    """Draws runs and traces: batch size, learning rate, loss and replicas.

    All are in one picture, a line for each. It needs matplotlib (the extra 'plot').

    examples:
      vbs plot run.jsonl
      vbs plot runs/a runs/b --x hours --out both.pdf
      vbs plot trace.csv run.jsonl --x samples --out planned.png
    """
    runs = dict(_drawn(name, args) for name in args.files)
    out = args.out
    if out is None:
        first = Path(args.files[0] if args.files[0] != "-" else "trace")
        out = first / "run.png" if first.is_dir() else first.with_suffix(".png")
        if out.exists():
            raise ValueError(f"{out} exists: --out {out} --force replaces it")
    draw_runs(runs, out, args.x)
    return f"wrote {out}"


def run_make(args: argparse.Namespace) -> str:
    """Makes a trace from a few numbers.

    Integers may end in K, M, B or T (thousands, millions ...). The trace is written to
    --out, or printed. `vbs make FAMILY --help` has the options of a family.

    examples:
      vbs make ramp --steps 1000 --first 256 --last 4096 --multiple-of 32 --out ramp.csv
      vbs make thresholds --rows "0:768 250B:1536" --unit tokens --total 300B \\
          --tokens-per-sample 4096 --out tokens.csv
      vbs make seesaw --first 256 --most 4096 --total-samples 10M --out seesaw.csv
      vbs make spot-market --steps 500 --devices 64 --samples-per-device 32 --seed 1
    """
    options = options_of(args, tools.FAMILIES[args.member])
    return _written(tools.make(args.member, **options), args.out)


def run_convert(args: argparse.Namespace) -> str:
    """Turns a log of devices into a trace.

    The log is a CSV file with the columns Time (seconds, such as Unix times) and
    TPU_cores or GPUs, two columns of numbers without a header, or SkyPilot's JSON of
    available instances. Rows may be irregular, and zeros are pauses. Without a step
    time every row with devices is one step. With one, steps follow each other as long
    as there are devices; a step during which some are lost is run again. The trace also
    has the columns devices and start_seconds.

    examples:
      vbs convert proportional log.csv --samples-per-device 32 --out trace.csv
      vbs convert capped log.csv --samples-per-device 32 --most 1024 \\
          --seconds-per-step 2.5 --restart-seconds 60 --out trace.csv
      vbs convert fixed log.csv --batch-size 1024 --minibatch-size 32 \\
          --seconds-per-update 0.1 --seconds-per-substep 0.4 --out trace.csv
    """
    found = tools.read_availability(args.log, args.time_column, args.device_column)
    policy = tools.POLICIES[args.member]
    batch_size_of = policy(**options_of(args, policy))
    step_time = _step_time(args)
    if step_time is None:
        if args.restart_seconds or args.last_row_seconds:
            raise ValueError("restart_seconds and last_row_seconds need a step time")
        return _written(tools.convert_rows(found, batch_size_of), args.out)

    def seconds(size: int, devices: int) -> float:
        return float(step_time.seconds(-(-size // (args.minibatch_size * devices))))

    found = found.longer(args.last_row_seconds)
    result = tools.convert(found, batch_size_of, seconds, args.restart_seconds)
    told = _written(result.steps, args.out)
    if args.out is None:
        return told
    hours = {
        "hours of the log": found.seconds / 3600,
        "device-hours of the log": result.device_seconds / 3600,
        "device-hours in steps": result.in_steps / 3600,
        "device-hours in steps that were lost": result.lost / 3600,
        "device-hours idle": result.idle / 3600,
    }
    return f"{told}\n{listed(hours)}"


def run_simulate(args: argparse.Namespace) -> Mapping[str, Any]:
    """Says what a run on a trace will be, without training.

    Steps, samples and learning rates are those of a real run whose reference learning
    rate stays as it is. The noise scale gives progress, in steps at the reference batch
    size. A step time gives wall-clock, device-hours and cost, with and without restarts
    (where the column devices of the trace changes) and compiling; how often a replica
    is lost, the time that this costs with restarts and with live members. --out writes
    one row per step, which is a trace too.

    examples:
      vbs simulate trace.csv --dataset-size 60000 --minibatch-size 32 --rule linear \\
          --ref-batchsize 128 --lr 0.1 --noise-scale 800
      vbs simulate trace.csv --dataset-size 60000 --minibatch-size 32 \\
          --num-replicas 8 --seconds-per-update 0.02 --seconds-per-substep 0.1 \\
          --price 1.2 --restart-seconds 60 --compile-seconds 40 --out steps.csv
    """

    def given(names: str) -> dict[str, Any]:
        return {name: vars(args)[name] for name in names.split()}

    schedule, devices = _schedule(args)
    model: dict[str, Any] = {"step_time": _step_time(args)}
    numbers = given("rule ref_batchsize lr noise_scale")
    steps = tools.simulate(schedule, args.epochs, devices=devices, **numbers, **model)
    numbers = given("restart_seconds compile_seconds price")
    told = tools.totals(steps, **numbers, **model)
    if args.losses_per_hour:
        numbers = given("checkpoint_seconds detection_seconds exchange_seconds")
        numbers["restart_seconds"] = args.restart_seconds + args.compile_seconds
        told |= tools.time_lost(steps, args.losses_per_hour, **numbers)
    if args.out is not None:
        steps = steps.rename(columns={"batch_size": COLUMN})
        told = {"file": _written(steps, args.out).removeprefix("wrote "), **told}
    return told


# Functions of the options, parsed, that return the output. Where there are members,
# functions by name, the command line chooses one, whose name and options come first.
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], Any], Mapping[str, Any]]] = {
    "check": (run_check, {}),
    "make": (run_make, tools.FAMILIES),
    "convert": (run_convert, tools.POLICIES),
    "stats": (run_stats, {}),
    "plot": (run_plot, {}),
    "simulate": (run_simulate, {}),
}


def _trace(name: str, args: argparse.Namespace) -> tuple[Trace, Table]:
    """Returns a trace, and the columns of its file."""
    source: Any = name
    if name == "-":
        source = io.StringIO(sys.stdin.read())
        source.name = "the standard input"
    elif not Path(name).exists():
        with contextlib.suppress(ValueError):  # and then there is no such file
            return Trace(amount(name)), Table(name, [], [])
    table = read_table(source)
    return Trace(table, tokens_per_sample=args.tokens_per_sample), table


def _devices(table: Table) -> np.ndarray | None:
    """Returns the devices of every row, if there is such a column."""
    return table.numbers("devices") if "devices" in table.header else None


def _schedule(args: argparse.Namespace) -> tuple[Schedule, Any]:
    """Returns the schedule that the options say, and the number of replicas."""
    trace, table = _trace(args.trace, args)
    options = args.minibatch_size, args.on_end, args.pad_minibatches
    schedule = Schedule(trace, args.dataset_size, *options)
    if args.num_replicas is not None:
        return schedule, check_integer("num_replicas", args.num_replicas, least=1)
    devices = _devices(table)
    return schedule, 1 if devices is None else devices


def _step_time(args: argparse.Namespace) -> tools.StepTime | None:
    """Returns the step-time model that the options state, if they do."""
    names = "seconds_per_step", "seconds_per_update", "seconds_per_substep"
    stated = [vars(args)[name] for name in names]
    if stated == [None, None, None]:
        return None
    if stated[0] is not None and stated[1:] != [None, None]:
        raise ValueError("give either --seconds-per-step or the seconds of its parts")
    whole, *parts = (check_number("seconds", each or 0.0, least=0) for each in stated)
    return tools.StepTime(whole + parts[0], parts[1])


def _drawn(name: str, args: argparse.Namespace) -> tuple[str, Run]:
    """Returns what is drawn, with its name: a run, or the one that a trace plans."""
    path = Path(name, "run.jsonl") if Path(name).is_dir() else Path(name)
    if path.is_file() and path.read_bytes()[:1] == b"{":
        return name, read_run(path)
    trace, columns = _trace(name, args)
    name, sizes = trace.name, trace.batch_sizes
    if trace.endless:  # the last size gets a part of the picture that can be seen
        sizes = np.append(sizes, np.repeat(sizes[-1], len(sizes) // 8))
        name += f" ...: {sizes[-1]} without end"
    table = pd.DataFrame({"batch_size": sizes, "samples": np.cumsum(sizes)})
    table["step"] = np.arange(len(sizes))
    devices = _devices(columns)
    if devices is not None and len(devices) == len(table):  # and not of thresholds
        table["replicas"] = devices
    return name, Run(path, table, [])


def _written(table: pd.DataFrame, path: Path | None) -> str:
    """Writes a table as CSV and says so, or returns its text if there is no file."""
    if path is None:
        return str(table.to_csv(index=False)).removesuffix("\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, index=False)
    first = table[COLUMN].iloc[0]
    return f"wrote {path}: {len(table)} steps, the first of {first} samples"
