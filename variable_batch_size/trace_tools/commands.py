"""The commands for traces: each adds its options to a parser and returns its output."""

from __future__ import annotations

import argparse
import inspect
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from variable_batch_size.data.schedule import Schedule
from variable_batch_size.runs.run_file import read_run
from variable_batch_size.trace_tools import charts, summary
from variable_batch_size.trace_tools.availability import read_availability
from variable_batch_size.trace_tools.columns import optional_column
from variable_batch_size.trace_tools.conversion import (
    POLICIES,
    Seconds,
    convert,
    convert_rows,
)
from variable_batch_size.trace_tools.curves import (
    SHAPES,
    Curve,
    read_curve,
    schedule_named,
)
from variable_batch_size.trace_tools.families import FAMILIES, make
from variable_batch_size.trace_tools.options import (
    add_keywords,
    keywords_of,
    listed,
    summary_line,
    whole,
)
from variable_batch_size.trace_tools.simulation import epoch_table, simulate, totals
from variable_batch_size.trace_tools.step_time import StepTime, step_time_of
from variable_batch_size.traces.batch_trace import Trace
from variable_batch_size.traces.trace_csv import COLUMN
from xla_replica.common.arguments import check_number

Parser = argparse.ArgumentParser


def run_check(args: argparse.Namespace) -> str:
    """Says whether a trace fits a dataset, and what it wastes.

    Epochs, samples that are dropped at their ends, and replicas that are idle because a
    step has no minibatch for them. A trace that cannot be used is an error with file,
    line and column.

    example:
      vbs check trace.csv --dataset-size 60000 --minibatch-size 32 --num-replicas 8
    """
    seconds = args.seconds_per_substep
    numbers = summary.check(_schedule(args), args.num_replicas, args.epochs, seconds)
    return listed(numbers)


def run_stats(args: argparse.Namespace) -> str:
    """Describes a trace: its sizes, how often they change, which minibatches fit.

    example:
      vbs stats trace.csv
    """
    return listed(summary.stats(_trace(args)))


def run_plot(args: argparse.Namespace) -> str:
    """Draws the batch size of every step, in the terminal or as a PNG.

    A PNG needs matplotlib (the extra 'plot'), and also shows the column devices, if the
    trace has one.

    examples:
      vbs plot trace.csv
      vbs plot trace.csv --out trace.png
    """
    trace = _trace(args)
    if args.out is None:
        return charts.terminal_chart(trace.batch_sizes, args.width, args.height)
    table = pd.DataFrame({"batch size (samples)": trace.batch_sizes})
    devices = _devices_column(args, trace)
    if devices is not None:
        table["devices"] = devices
    charts.write_png(table, args.out, trace.name)
    return f"wrote {args.out}"


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
    function = FAMILIES[args.family]
    return _written(make(args.family, **keywords_of(args, function)), args.out)


def run_convert(args: argparse.Namespace) -> str:
    """Turns a log of devices into a trace.

    The log is a CSV file with the columns Time (seconds, such as Unix times) and
    TPU_cores or GPUs. Its rows may be irregular, and zeros are pauses. Without a step
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
    log = read_availability(args.log, args.time_column, args.device_column)
    function = POLICIES[args.policy]
    policy = function(**keywords_of(args, function))
    seconds = _seconds(args)
    if seconds is None:
        if args.restart_seconds:
            raise ValueError("--restart-seconds needs a step time")
        return _written(convert_rows(log, policy), args.out)
    result = convert(log, policy, seconds, args.restart_seconds)
    told = _written(result.steps, args.out)
    if args.out is None:
        return told
    hours = {
        "hours of the log": log.seconds / 3600,
        "device-hours of the log": result.device_seconds / 3600,
        "device-hours in steps": result.in_steps / 3600,
        "device-hours in steps that were lost": result.lost / 3600,
        "device-hours idle": result.idle / 3600,
    }
    return f"{told}\n{listed(hours)}"


def run_simulate(args: argparse.Namespace) -> str:
    """Says what a run on a trace will be, without training.

    Steps, samples and learning rates are those of a real run. The noise scale (a number
    of samples, or a CSV file with the columns samples and noise_scale) gives progress,
    in steps at the reference batch size. A step time gives wall-clock, device-hours and
    cost, with and without restarts (where the column devices of the trace changes) and
    compiling. --out writes one row per step.

    examples:
      vbs simulate trace.csv --dataset-size 60000 --minibatch-size 32 --rule linear \\
          --ref-batchsize 128 --lr 0.1 --noise-scale 800
      vbs simulate trace.csv --dataset-size 60000 --minibatch-size 32 \\
          --num-replicas 8 --seconds-per-update 0.02 --seconds-per-substep 0.1 \\
          --price 1.2 --restart-seconds 60 --compile-seconds 40 --out steps.csv
      vbs simulate trace.csv --dataset-size 60000 --minibatch-size 32 --fit run.jsonl
    """
    schedule = _schedule(args)
    devices: int | np.ndarray | None = args.num_replicas
    if devices is None:
        devices = _devices_column(args, schedule.trace)
    step_time = _step_time(args)
    steps = simulate(
        schedule,
        args.epochs,
        rule=args.rule,
        ref_batchsize=args.ref_batchsize,
        lr=_reference_lr(args, schedule),
        noise_scale=_noise_scale(args.noise_scale),
        devices=1 if devices is None else devices,
        step_time=step_time,
    )
    numbers = totals(
        steps,
        restart_seconds=args.restart_seconds,
        compile_seconds=args.compile_seconds,
        price=args.price,
        step_time=step_time,
    )
    if args.fit is not None:
        numbers["seconds per update, fitted"] = step_time.per_update
        numbers["seconds per substep, fitted"] = step_time.per_substep
    if args.out is None:
        return listed(numbers)
    return f"{_written(steps, args.out)}\n{listed(numbers)}"


def add_check(parser: Parser) -> None:
    """Adds the options of `run_check`."""
    _add_trace(parser)
    _add_schedule(parser)
    parser.add_argument("--num-replicas", type=whole, required=True, metavar="N",
                        help="that share the minibatches of a step")  # fmt: skip
    parser.add_argument(
        "--seconds-per-substep", type=float, metavar="X",
        help="what one minibatch takes: idle time is then in seconds too",
    )  # fmt: skip


def add_stats(parser: Parser) -> None:
    """Adds the options of `run_stats`."""
    _add_trace(parser)


def add_plot(parser: Parser) -> None:
    """Adds the options of `run_plot`."""
    _add_trace(parser)
    parser.add_argument("--out", type=Path, help="a PNG file to write")
    add = parser.add_argument
    add("--width", type=whole, default=72, metavar="N", help="default: %(default)s")
    add("--height", type=whole, default=12, metavar="N", help="default: %(default)s")


def add_make(parser: Parser) -> None:
    """Adds the options of `run_make`."""
    for member in _add_members(parser, "family", FAMILIES):
        _add_out(member)


def add_convert(parser: Parser) -> None:
    """Adds the options of `run_convert`."""
    for member in _add_members(parser, "policy", POLICIES):
        add = member.add_argument
        add("log", help="the CSV file of the log")
        _add_out(member)
        add("--time-column", metavar="NAME", help="default: Time, time or timestamp")
        add("--device-column", metavar="NAME",
            help="default: TPU_cores, GPUs, devices or replicas")  # fmt: skip
        add("--seconds-per-step", type=float, metavar="X",
            help="of every step; default: one step per row")  # fmt: skip
        add("--minibatch-size", type=whole, metavar="N",
            help="samples in a substep, for a step-time model")  # fmt: skip
        add("--restart-seconds", type=float, default=0.0, metavar="X",
            help="until the first step, whenever their number changes")  # fmt: skip
        _add_step_time(member)


def add_simulate(parser: Parser) -> None:
    """Adds the options of `run_simulate`."""
    _add_trace(parser)
    _add_schedule(parser)
    add = parser.add_argument
    add("--num-replicas", type=whole, metavar="N",
        help="default: the trace's column devices, or 1")  # fmt: skip
    add("--rule", default="constant",
        help="how the learning rate follows the batch: a key of vbs.RULES, or "
        "power:ALPHA; default: %(default)s")  # fmt: skip
    add("--ref-batchsize", type=whole, metavar="N",
        help="batch size at which --lr was tuned; most rules need it")  # fmt: skip
    add("--lr", type=float, default=1.0, metavar="X",
        help="the reference learning rate's peak; default: %(default)s")  # fmt: skip
    add("--schedule", default="constant", metavar="NAME",
        help=f"of the reference learning rate: {', '.join(SHAPES)}; or a CSV file with "
        "the columns samples and lr; after 'halved:', the one that halves only, as "
        "Seesaw needs; default: %(default)s")  # fmt: skip
    add(
        "--total-samples",
        type=whole,
        metavar="N",
        help="where the schedule ends; default: with the run",
    )
    add("--warm-up-samples", type=whole, default=0, metavar="N",
        help="where the schedule is at its peak; default: %(default)s")  # fmt: skip
    add("--noise-scale", metavar="N_OR_CSV",
        help="a number of samples, or a CSV file, interpolated")  # fmt: skip
    add(
        "--restart-seconds",
        type=float,
        default=0.0,
        metavar="X",
        help="of every restart; default: 0",
    )
    add("--compile-seconds", type=float, default=0.0, metavar="X",
        help="at the beginning and after every restart; default: 0")  # fmt: skip
    add("--price", type=float, default=0.0, metavar="X",
        help="of one device in one hour")  # fmt: skip
    _add_step_time(parser)
    _add_out(parser)


COMMANDS: dict[str, tuple[Callable[[Parser], None], Callable[..., str]]] = {
    "check": (add_check, run_check),
    "make": (add_make, run_make),
    "convert": (add_convert, run_convert),
    "stats": (add_stats, run_stats),
    "plot": (add_plot, run_plot),
    "simulate": (add_simulate, run_simulate),
}


def _add_members(
    parser: Parser, name: str, members: dict[str, Callable[..., Any]]
) -> list[Parser]:
    """Adds a command for each member, with its keywords as options."""
    choices = parser.add_subparsers(dest=name, required=True, metavar=name.upper())
    parsers = []
    for member, function in members.items():
        text = (inspect.getdoc(function) or "").split("\nArgs:")[0]
        parsers.append(
            choices.add_parser(
                member,
                help=summary_line(function),
                description=text,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
        add_keywords(parsers[-1], function)
    return parsers


def _add_trace(parser: Parser) -> None:
    parser.add_argument(
        "trace", help="a CSV file, - for the standard input, or one batch size"
    )
    parser.add_argument(
        "--tokens-per-sample", type=whole, metavar="N",
        help="of a trace with the column tokens",
    )  # fmt: skip


def _add_schedule(parser: Parser) -> None:
    add = parser.add_argument
    add("--dataset-size", type=whole, required=True, metavar="N", help="in samples")
    add("--minibatch-size", type=whole, default=32, metavar="N",
        help="samples that a replica runs at once; default: %(default)s")  # fmt: skip
    add("--epochs", type=whole, metavar="N", help="default: all of the trace")
    add("--pad-minibatches", action="store_true",
        help="allow batch sizes that are not multiples of the minibatch")  # fmt: skip
    add("--on-end", default="stop", choices=("stop", "error", "hold", "cycle"),
        help="what follows the last row; default: %(default)s")  # fmt: skip


def _add_step_time(parser: Parser) -> None:
    add = parser.add_argument
    add("--seconds-per-update", type=float, metavar="X",
        help="a step takes this, for the sum and the update ...")  # fmt: skip
    add("--seconds-per-substep", type=float, metavar="X",
        help="... and this for each minibatch of its first replica")  # fmt: skip
    add("--fit", type=Path, metavar="LOG",
        help="both numbers from the log of a run, see vbs.RunLog")  # fmt: skip


def _add_out(parser: Parser) -> None:
    parser.add_argument("--out", type=Path, help="the CSV file to write")


def _step_time(args: argparse.Namespace) -> StepTime | None:
    stated = (args.seconds_per_update, args.seconds_per_substep)
    if args.fit is not None:
        if stated != (None, None):
            raise ValueError("give either --fit or the seconds per update and substep")
        run = read_run(args.fit)
        found = step_time_of(run)
        unit = run.header["minibatch_size"]
        if args.minibatch_size not in (None, unit):
            raise ValueError(
                f"{args.fit}: its substeps are minibatches of {unit} samples, not of "
                f"--minibatch-size {args.minibatch_size}"
            )
        return found
    if stated == (None, None):
        return None
    for seconds in stated:
        check_number("seconds", 0.0 if seconds is None else seconds, least=0)
    return StepTime(*(seconds or 0.0 for seconds in stated))


def _seconds(args: argparse.Namespace) -> Seconds | None:
    """Returns how long a step takes; None if the options do not say."""
    step_time, stated = _step_time(args), args.seconds_per_step
    if step_time is None:
        return None if stated is None else lambda size, devices: stated
    if stated is not None:
        raise ValueError("give either --seconds-per-step or a step-time model")
    if args.minibatch_size is None:
        raise ValueError("a step-time model needs --minibatch-size")
    return lambda size, devices: step_time.seconds(
        -(-size // (args.minibatch_size * devices))
    )


def _reference_lr(args: argparse.Namespace, schedule: Schedule) -> float | Curve:
    """Returns the reference learning rate, as `simulate` takes it."""
    if args.schedule == "constant":
        return args.lr
    total = args.total_samples
    if total is None:
        total = int(epoch_table(schedule, args.epochs)["samples"].sum())
    rates = schedule_named(args.schedule, total, args.warm_up_samples)
    return lambda samples: args.lr * rates.factor(samples)


def _trace(args: argparse.Namespace) -> Trace:
    source: Any = args.trace
    if source == "-":
        source = args.trace = io.StringIO(sys.stdin.read())
        source.name = "the standard input"
    elif source.isdecimal():
        source = int(source)
    return Trace(source, tokens_per_sample=args.tokens_per_sample)


def _schedule(args: argparse.Namespace) -> Schedule:
    return Schedule(
        _trace(args),
        args.dataset_size,
        args.minibatch_size,
        args.on_end,
        args.pad_minibatches,
    )


def _devices_column(args: argparse.Namespace, trace: Trace) -> np.ndarray | None:
    """Returns the devices of every row, if the trace's file says them."""
    if isinstance(args.trace, str) and args.trace.isdecimal():
        return None
    devices = optional_column(args.trace, "devices")
    if devices is not None and len(devices) != len(trace):
        raise ValueError(
            f"{trace.name}: the column devices has {len(devices)} rows, and the trace "
            f"{len(trace)} steps: leave it out where rows are thresholds"
        )
    return devices


def _noise_scale(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return read_curve(text)


def _written(table: pd.DataFrame, path: Path | None) -> str:
    """Writes a table as CSV and says so, or returns its text if there is no file."""
    if path is None:
        return table.to_csv(index=False).removesuffix("\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, index=False)
    sizes = f", the first of {table[COLUMN].iloc[0]} samples" if COLUMN in table else ""
    return f"wrote {path}: {len(table)} steps{sizes}"
