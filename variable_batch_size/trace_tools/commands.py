"""The commands: functions of parsed options that return what is printed.

The docstring of a command is its help; its options are rows of one table.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
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
from variable_batch_size.trace_tools.options import REQUIRED, Option, amount, rows_of
from variable_batch_size.traces.batch_trace import Trace
from variable_batch_size.traces.trace_csv import COLUMN, read_table
from xla_replica.common.arguments import check_number

TRACE = "a CSV file, - for the standard input, or one batch size"
RUNS, TIMED = "check simulate", "convert simulate"
OPTIONS = (
    Option("trace", str, REQUIRED, "check simulate stats", TRACE),
    Option("files", list, REQUIRED, "plot", f"logs or folders of vbs.RunLog; {TRACE}"),
    Option("log", str, REQUIRED, "convert", "the file of the log"),
    Option("--tokens-per-sample", int, None, "check simulate stats plot",
           "of a trace with the column tokens"),
    Option("--dataset-size", int, REQUIRED, RUNS, "in samples"),
    Option("--minibatch-size", int, 32, RUNS, "samples of a minibatch"),
    Option("--epochs", int, None, RUNS, "default: all of the trace, if it ends"),
    Option("--pad-minibatches", bool, False, RUNS, "minibatches may lack samples"),
    Option("--on-end", str, "stop", RUNS, "after the last row: stop, hold or cycle"),
    Option("--num-replicas", int, None, RUNS, "default: the column devices, or 1"),
    Option("--seconds-per-update", float, None, TIMED,
           "of a step's sum and update; without a step time, a row of a log is a step"),
    Option("--seconds-per-substep", float, None, TIMED,
           "of each minibatch that the first replica runs"),
    Option("--x", str, "updates", "plot", "the axis: updates, samples or hours"),
    Option("--out", Path, None, "make convert simulate plot",
           "a CSV file, or a picture, by default beside the first file"),
    Option("--force", bool, False, "make convert simulate plot", "replace that file"),
    *rows_of(tools.convert, "convert"),
    *rows_of(tools.simulate, "simulate"),
    *rows_of(tools.totals, "simulate"),
)  # fmt: skip


def run_check(args: argparse.Namespace) -> str:
    """Does a trace fit a dataset, and what does it waste?

    Epochs, samples that are dropped at their ends, and replicas that are idle because a
    step has no minibatch for them. A trace that cannot be used is an error with file,
    line and column.

    example:
      vbs check trace.csv --dataset-size 60000 --minibatch-size 32 --num-replicas 8
    """
    told = tools.check(*_schedule(args), args.epochs)
    parts = "dropped samples", "idle replica-substeps"
    wasted = {part: told[f"{part} in per cent"] for part in parts}
    how = "fits well" if max(wasted.values()) < 10 else "fits, but wastes much"
    said = ", ".join(f"{number:.1f} % {part}" for part, number in wasted.items())
    return _listed({"verdict": f"it {how}: {said}", **told})


def run_stats(args: argparse.Namespace) -> str:
    """Which sizes has a trace, how often do they change, and which minibatches fit?

    example:
      vbs stats trace.csv
    """
    return _listed(tools.stats(_trace(args.trace, args)[0]))


def run_plot(args: argparse.Namespace) -> str:
    """How did runs go, and what do traces plan?

    Draws batch size, learning rate, loss and replicas of all in one picture, a line for
    each. It needs matplotlib (the extra 'plot').

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
    _check_out(out, args)
    draw_runs(runs, out, args.x)
    return f"wrote {out}"


def run_make(args: argparse.Namespace) -> str:
    """Which trace do a few numbers make?

    Integers may end in K, M, B or T (thousands, millions ...). The trace is written to
    --out, or printed. `vbs make FAMILY --help` has the options of a family.

    examples:
      vbs make ramp --steps 1000 --first 256 --last 4096 --multiple-of 32 --out ramp.csv
      vbs make thresholds --rows "0:768 250B:1536" --unit tokens --total 300B \\
          --tokens-per-sample 4096 --out tokens.csv
      vbs make seesaw --first 256 --most 4096 --total-samples 10M --out seesaw.csv
      vbs make spot-market --steps 500 --devices 64 --samples-per-device 32 --seed 1
    """
    options = _options_of(args, tools.FAMILIES[args.member])
    return _written(tools.make(args.member, **options), args)


def run_convert(args: argparse.Namespace) -> str:
    """Which trace could the devices of a log have run?

    The log is a CSV file with the columns Time (seconds, such as Unix times) and
    TPU_cores or GPUs, two columns of numbers without a header, or SkyPilot's JSON of
    available instances. Rows may be irregular, and zeros are pauses. Without a step
    time every row with devices is one step. With one, steps follow each other as long
    as there are devices; a step during which some are lost is run again. The trace also
    has the columns devices and start_seconds.

    examples:
      vbs convert proportional log.csv --samples-per-device 32 --out trace.csv
      vbs convert capped log.csv --samples-per-device 32 --most 1024 \\
          --seconds-per-update 2.5 --restart-seconds 60 --out trace.csv
      vbs convert fixed log.csv --batch-size 1024 --minibatch-size 32 \\
          --seconds-per-update 0.1 --seconds-per-substep 0.4 --out trace.csv
    """
    found = tools.read_availability(args.log)
    policy = tools.POLICIES[args.member]
    batch_size_of = policy(**_options_of(args, policy))
    step_time = _step_time(args)
    if step_time is None:
        if args.restart_seconds:
            raise ValueError("restart_seconds needs a step time")
        return _written(tools.convert_rows(found, batch_size_of), args)
    options = _options_of(args, tools.convert)
    result = tools.convert(found, batch_size_of, step_time, **options)
    names = "of the log", "in steps", "in steps that were lost", "idle"
    told = _listed({f"device-hours {n}": s / 3600 for n, s in zip(names, result[1:])})
    written = _written(result.steps, args)
    return f"{written}\n{told}" if args.out else written


def run_simulate(args: argparse.Namespace) -> str:
    """What will a run on a trace be: its steps, learning rates, time and cost?

    Nothing is trained. Steps, samples and learning rates are those of a real run whose
    reference learning rate stays as it is. The noise scale gives progress, in steps at
    the reference batch size. A step time gives wall-clock, device-hours and cost, with
    and without restarts (where the column devices of the trace changes) and compiling.
    --out writes one row per step, which is a trace too.

    examples:
      vbs simulate trace.csv --dataset-size 60000 --minibatch-size 32 --rule linear \\
          --ref-batchsize 128 --lr 0.1 --noise-scale 800
      vbs simulate trace.csv --dataset-size 60000 --minibatch-size 32 \\
          --num-replicas 8 --seconds-per-update 0.02 --seconds-per-substep 0.1 \\
          --price 1.2 --restart-seconds 60 --compile-seconds 40 --out steps.csv
    """
    schedule, devices = _schedule(args)
    step_time = _step_time(args)
    options = _options_of(args, tools.simulate) | {"step_time": step_time}
    steps = tools.simulate(schedule, args.epochs, devices=devices, **options)
    told = tools.totals(steps, **_options_of(args, tools.totals))
    if args.out is not None:
        steps = steps.rename(columns={"batch_size": COLUMN})
        told = {"file": _written(steps, args).removeprefix("wrote "), **told}
    return _listed(told)


# Functions of the parsed options that return the output.
_ALL = run_check, run_make, run_convert, run_stats, run_plot, run_simulate
COMMANDS = {run.__name__.removeprefix("run_"): run for run in _ALL}
# Functions by name, of which the command line chooses one, with its options.
MEMBERS: dict[str, Any] = {"make": tools.FAMILIES, "convert": tools.POLICIES}


def _trace(name: str, args: argparse.Namespace) -> tuple[Trace, np.ndarray | None]:
    """Returns a trace, and the devices of every row if its file has them."""
    if name != "-" and not Path(name).exists():
        with contextlib.suppress(ValueError):  # and then there is no such file
            return Trace(amount(name)), None
    table = read_table(sys.stdin if name == "-" else name)
    devices = table.numbers("devices") if "devices" in table.header else None
    return Trace(table, tokens_per_sample=args.tokens_per_sample), devices


def _schedule(args: argparse.Namespace) -> tuple[Schedule, Any]:
    """Returns the schedule that the options say, and the number of replicas."""
    trace, devices = _trace(args.trace, args)
    options = args.minibatch_size, args.on_end, args.pad_minibatches
    schedule = Schedule(trace, args.dataset_size, *options)
    if args.num_replicas is not None:
        return schedule, args.num_replicas
    return schedule, 1 if devices is None else devices


def _step_time(args: argparse.Namespace) -> tools.StepTime | None:
    """Returns the step-time model that the options state, if they do."""
    stated = args.seconds_per_update, args.seconds_per_substep
    if stated == (None, None):
        return None
    return tools.StepTime(*(check_number("seconds", s or 0.0, least=0) for s in stated))


def _drawn(name: str, args: argparse.Namespace) -> tuple[str, Run]:
    """Returns what is drawn, with its name: a run, or the one that a trace plans."""
    path = Path(name, "run.jsonl") if Path(name).is_dir() else Path(name)
    if path.is_file() and path.read_bytes()[:1] == b"{":
        return name, read_run(path)
    trace, devices = _trace(name, args)
    name, sizes = trace.name, trace.batch_sizes
    if trace.endless:  # the last size gets a part of the picture that can be seen
        sizes = np.append(sizes, np.repeat(sizes[-1], len(sizes) // 8))
    table = pd.DataFrame({"batch_size": sizes, "samples": np.cumsum(sizes)})
    table["step"] = np.arange(len(sizes))
    if devices is not None and len(devices) == len(table):  # and not of thresholds
        table["replicas"] = devices
    return name, Run(path, table, [])


def _options_of(
    args: argparse.Namespace, function: Callable[..., Any]
) -> dict[str, Any]:
    """Returns the parsed options that a function has as keywords."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in vars(args).items() if name in names}


def _listed(numbers: Mapping[str, Any]) -> str:
    """Returns numbers as a table of two columns, one line each."""
    width = max(map(len, numbers))
    texts = (f"{n:.6g}" if isinstance(n, float) else n for n in numbers.values())
    return "\n".join(f"{name:<{width}}  {text}" for name, text in zip(numbers, texts))


def _check_out(out: Path, args: argparse.Namespace) -> None:
    """Raises ValueError if the output would replace a file without ``--force``."""
    if out.is_file() and not args.force:
        raise ValueError(f"--out {out} exists: --force replaces it")


def _written(table: pd.DataFrame, args: argparse.Namespace) -> str:
    """Writes a table as CSV and says so, or returns its text if there is no file."""
    path = args.out
    if path is None:
        return str(table.to_csv(index=False)).removesuffix("\n")
    _check_out(path, args)
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, index=False)
    first = table[COLUMN].iloc[0]
    return f"wrote {path}: {len(table)} steps, the first of {first} samples"
