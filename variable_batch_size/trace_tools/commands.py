"""The commands: functions whose parameters are the options, and that return the output.

The docstring of a command is its help; see `options`.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

from variable_batch_size import trace_tools as tools
from variable_batch_size.data.schedule import Schedule
from variable_batch_size.runs.picture import draw_runs
from variable_batch_size.runs.run_file import Run, read_run
from variable_batch_size.trace_tools.columns import Columns, amount
from variable_batch_size.trace_tools.options import listed
from variable_batch_size.traces.batch_trace import Trace
from variable_batch_size.traces.trace_csv import COLUMN
from xla_replica.common.arguments import check_number


def run_check(
    trace: str,
    *,
    tokens_per_sample: int | None = None,
    dataset_size: int,
    minibatch_size: int = 32,
    epochs: int | None = None,
    pad_minibatches: bool = False,
    on_end: str = "stop",
    num_replicas: int,
    seconds_per_substep: float | None = None,
) -> Mapping[str, Any]:
    """Says whether a trace fits a dataset, and what it wastes.

    Epochs, samples that are dropped at their ends, and replicas that are idle because a
    step has no minibatch for them. A trace that cannot be used is an error with file,
    line and column.

    example:
      vbs check trace.csv --dataset-size 60000 --minibatch-size 32 --num-replicas 8

    Args:
        trace: A CSV file, - for the standard input, or one batch size.
        tokens_per_sample: Of a trace with the column tokens.
        dataset_size: In samples.
        minibatch_size: Samples that a replica runs at once.
        epochs: Default: all of the trace.
        pad_minibatches: Allow batch sizes that are not multiples of the minibatch.
        on_end: What follows the last row: stop, error, hold or cycle.
        num_replicas: That share the minibatches of a step.
        seconds_per_substep: What one minibatch takes: idle time is then in seconds too.
    """
    read = Trace(_source(trace), tokens_per_sample=tokens_per_sample)
    schedule = Schedule(read, dataset_size, minibatch_size, on_end, pad_minibatches)
    return tools.check(schedule, num_replicas, epochs, seconds_per_substep)


def run_stats(trace: str, *, tokens_per_sample: int | None = None) -> Mapping[str, Any]:
    """Describes a trace: its sizes, how often they change, which minibatches fit.

    example:
      vbs stats trace.csv

    Args:
        trace: A CSV file, - for the standard input, or one batch size.
        tokens_per_sample: Of a trace with the column tokens.
    """
    read = Trace(_source(trace), tokens_per_sample=tokens_per_sample)
    return tools.stats(read)


def run_plot(
    files: list[str],
    *,
    x: str = "updates",
    tokens_per_sample: int | None = None,
    out: Path | None = None,
) -> str:
    """Draws runs and traces: batch size, learning rate, loss and replicas.

    All are in one picture, a line for each. It needs matplotlib (the extra 'plot').

    examples:
      vbs plot run.jsonl
      vbs plot runs/a runs/b --x hours --out both.pdf
      vbs plot trace.csv run.jsonl --x samples --out planned.png

    Args:
        files: Logs of vbs.RunLog, or folders with a run.jsonl; and traces: CSV files, -
            for the standard input, or one batch size.
        x: The common axis: updates, samples, or hours without those between a stop and
            a resumption.
        tokens_per_sample: Of traces with the column tokens.
        out: A PNG, PDF or SVG file to write; default: a PNG beside the first file.
    """
    runs = dict(_drawn(name, tokens_per_sample) for name in files)
    if out is None:
        first = Path(files[0] if files[0] != "-" else "trace")
        out = first / "run.png" if first.is_dir() else first.with_suffix(".png")
        if out.exists():
            raise ValueError(f"{out} exists: --out {out} --force replaces it")
    draw_runs(runs, out, x)
    return f"wrote {out}"


def run_make(
    family: str, options: dict[str, Any], /, *, out: Path | None = None
) -> str:
    """Makes a trace from a few numbers.

    Integers may end in K, M, B or T (thousands, millions ...). The trace is written to
    --out, or printed. `vbs make FAMILY --help` has the options of a family.

    examples:
      vbs make ramp --steps 1000 --first 256 --last 4096 --multiple-of 32 --out ramp.csv
      vbs make thresholds --rows "0:768 250B:1536" --unit tokens --total 300B \\
          --tokens-per-sample 4096 --out tokens.csv
      vbs make seesaw --first 256 --most 4096 --total-samples 10M --out seesaw.csv
      vbs make spot-market --steps 500 --devices 64 --samples-per-device 32 --seed 1

    Args:
        out: The CSV file to write.
    """
    return _written(tools.make(family, **options), out)


def run_convert(
    policy: str,
    options: dict[str, Any],
    /,
    log: str,
    *,
    out: Path | None = None,
    time_column: str | None = None,
    device_column: str | None = None,
    seconds_per_step: float | None = None,
    last_row_seconds: float = 0.0,
    minibatch_size: int | None = None,
    restart_seconds: float = 0.0,
    seconds_per_update: float | None = None,
    seconds_per_substep: float | None = None,
) -> str:
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

    Args:
        log: The file of the log.
        out: The CSV file to write.
        time_column: Default: Time, time or timestamp.
        device_column: Default: TPU_cores, GPUs, devices or replicas.
        seconds_per_step: Of every step; default: one step per row.
        last_row_seconds: How long the devices of the log's last row are there; by
            default it only ends the log.
        minibatch_size: Samples in a substep, for a step-time model.
        restart_seconds: Until the first step, whenever their number changes.
        seconds_per_update: What a step takes for the sum and the update.
        seconds_per_substep: What it takes for each minibatch of its first replica.
    """
    found = tools.read_availability(log, time_column, device_column)
    batch_size_of = tools.POLICIES[policy](**options)
    step_time = _step_time(seconds_per_update, seconds_per_substep)
    if step_time is not None:
        if seconds_per_step is not None:
            raise ValueError("give either --seconds-per-step or a step-time model")
        if minibatch_size is None:
            raise ValueError("a step-time model needs --minibatch-size")
    elif seconds_per_step is None:
        if restart_seconds or last_row_seconds:
            name = "restart" if restart_seconds else "last-row"
            raise ValueError(f"--{name}-seconds needs a step time")
        return _written(tools.convert_rows(found, batch_size_of), out)

    def seconds(size: int, devices: int) -> float:
        if step_time is None:
            return seconds_per_step
        return step_time.seconds(-(-size // (minibatch_size * devices)))

    found = found.longer(last_row_seconds)
    result = tools.convert(found, batch_size_of, seconds, restart_seconds)
    told = _written(result.steps, out)
    if out is None:
        return told
    hours = {
        "hours of the log": found.seconds / 3600,
        "device-hours of the log": result.device_seconds / 3600,
        "device-hours in steps": result.in_steps / 3600,
        "device-hours in steps that were lost": result.lost / 3600,
        "device-hours idle": result.idle / 3600,
    }
    return f"{told}\n{listed(hours)}"


def run_simulate(
    trace: str,
    *,
    tokens_per_sample: int | None = None,
    dataset_size: int,
    minibatch_size: int = 32,
    epochs: int | None = None,
    pad_minibatches: bool = False,
    on_end: str = "stop",
    num_replicas: int | None = None,
    rule: str = "constant",
    ref_batchsize: int | None = None,
    lr: float = 1.0,
    noise_scale: float | None = None,
    restart_seconds: float = 0.0,
    compile_seconds: float = 0.0,
    losses_per_hour: float = 0.0,
    checkpoint_seconds: float = 600.0,
    detection_seconds: float = 1.0,
    exchange_seconds: float = 0.0,
    price: float = 0.0,
    seconds_per_update: float | None = None,
    seconds_per_substep: float | None = None,
    out: Path | None = None,
) -> Mapping[str, Any]:
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

    Args:
        trace: A CSV file, - for the standard input, or one batch size.
        tokens_per_sample: Of a trace with the column tokens.
        dataset_size: In samples.
        minibatch_size: Samples that a replica runs at once.
        epochs: Default: all of the trace.
        pad_minibatches: Allow batch sizes that are not multiples of the minibatch.
        on_end: What follows the last row: stop, error, hold or cycle.
        num_replicas: Default: the trace's column devices, or 1.
        rule: How the learning rate follows the batch: a key of vbs.RULES, or
            power:ALPHA.
        ref_batchsize: Batch size at which --lr was tuned; most rules need it.
        lr: The reference learning rate.
        noise_scale: Of the gradients, in samples.
        restart_seconds: Of every restart.
        compile_seconds: At the beginning and after every restart.
        losses_per_hour: How often a replica is lost without notice.
        checkpoint_seconds: From one checkpoint to the next.
        detection_seconds: Until live members know that one of them is lost.
        exchange_seconds: What they take in every step to sum over their hosts.
        price: Of one device in one hour.
        seconds_per_update: What a step takes for the sum and the update.
        seconds_per_substep: What it takes for each minibatch of its first replica.
        out: The CSV file to write.
    """
    source = _source(trace)
    read = Trace(source, tokens_per_sample=tokens_per_sample)
    cut = Schedule(read, dataset_size, minibatch_size, on_end, pad_minibatches)
    devices: Any = num_replicas or _devices_column(source, read)
    step_time = _step_time(seconds_per_update, seconds_per_substep)
    steps = tools.simulate(
        cut,
        epochs,
        rule=rule,
        ref_batchsize=ref_batchsize,
        lr=lr,
        noise_scale=noise_scale,
        devices=1 if devices is None else devices,
        step_time=step_time,
    )
    numbers = tools.totals(
        steps,
        restart_seconds=restart_seconds,
        compile_seconds=compile_seconds,
        price=price,
        step_time=step_time,
    )
    if losses_per_hour:
        numbers |= tools.time_lost(
            steps,
            losses_per_hour,
            restart_seconds=restart_seconds + compile_seconds,
            checkpoint_seconds=checkpoint_seconds,
            detection_seconds=detection_seconds,
            exchange_seconds=exchange_seconds,
        )
    if out is not None:
        steps = steps.rename(columns={"batch_size": COLUMN})
        numbers = {"file": _written(steps, out).removeprefix("wrote "), **numbers}
    return numbers


# Functions that take options and return the output. Where there are members, functions
# by name, the command line chooses one, whose name and options come first.
Command = tuple[
    Callable[..., "str | Mapping[str, Any]"], Mapping[str, Callable[..., Any]] | None
]
COMMANDS: dict[str, Command] = {
    "check": (run_check, None),
    "make": (run_make, tools.FAMILIES),
    "convert": (run_convert, tools.POLICIES),
    "stats": (run_stats, None),
    "plot": (run_plot, None),
    "simulate": (run_simulate, None),
}


def _source(trace: str) -> int | str | IO[str]:
    """Returns the trace that a command line names, as `Trace` takes it."""
    if trace == "-":
        source = io.StringIO(sys.stdin.read())
        source.name = "the standard input"
        return source
    try:
        return trace if Path(trace).exists() else amount(trace)
    except ValueError:
        return trace


def _drawn(name: str, tokens_per_sample: int | None) -> tuple[str, Run]:
    """Returns what is drawn, with its name: a run, or the one that a trace plans."""
    path = Path(name, "run.jsonl") if Path(name).is_dir() else Path(name)
    if path.is_file() and path.read_bytes()[:1] == b"{":
        return name, read_run(path)
    source = _source(name)
    trace = Trace(source, tokens_per_sample=tokens_per_sample)
    name, sizes = trace.name, trace.batch_sizes
    if trace.endless:  # the last size gets a part of the picture that can be seen
        sizes = np.append(sizes, np.repeat(sizes[-1], len(sizes) // 8))
        name += f" ...: {sizes[-1]} without end"
    table = pd.DataFrame({"batch_size": sizes, "samples": np.cumsum(sizes)})
    table["step"] = np.arange(len(sizes))
    devices = _devices_column(source, trace)
    if devices is not None:
        table["replicas"] = devices
    return name, Run(path, table, [])


def _step_time(
    per_update: float | None, per_substep: float | None
) -> tools.StepTime | None:
    """Returns the step-time model that the options state, if they do."""
    if per_update is None and per_substep is None:
        return None
    stated = per_update or 0.0, per_substep or 0.0
    return tools.StepTime(*(check_number("seconds", each, least=0) for each in stated))


def _devices_column(source: Any, trace: Trace) -> np.ndarray | None:
    """Returns the devices of every row, if the trace's file says them."""
    if isinstance(source, int):
        return None
    if not isinstance(source, str):
        source.seek(0)
    table = Columns(source)
    if "devices" not in table.header:
        return None
    devices = table.numbers("devices", ("devices",))
    if len(devices) != len(trace):
        raise ValueError(
            f"{trace.name}: the column devices has {len(devices)} rows, and the trace "
            f"{len(trace)} steps: leave it out where rows are thresholds"
        )
    return devices


def _written(table: pd.DataFrame, path: Path | None) -> str:
    """Writes a table as CSV and says so, or returns its text if there is no file."""
    if path is None:
        return table.to_csv(index=False).removesuffix("\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(path, index=False)
    sizes = f", the first of {table[COLUMN].iloc[0]} samples" if COLUMN in table else ""
    return f"wrote {path}: {len(table)} steps{sizes}"
