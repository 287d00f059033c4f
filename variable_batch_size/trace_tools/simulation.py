"""What a trace is like, and what it does to a run: steps, rates, progress, time, cost.

Steps, samples and learning rates are those of a real run: they come from the same
`Schedule` and the same rules.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from variable_batch_size.data.schedule import Schedule
from variable_batch_size.rules.rule import Rule, rule_named
from variable_batch_size.trace_tools.step_time import StepTime
from variable_batch_size.traces.batch_trace import Trace
from xla_replica.common.arguments import check_integer, check_number
from xla_replica.common.later import pd

# torch's Adam; rules for it change these.
ADAM: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}


def stats(trace: Trace) -> dict[str, Any]:
    """Returns sizes, changes and the minibatch sizes that divide all batch sizes.

    Of a trace without end: those of the steps before its last row, if there are any.
    """
    whole = trace.batch_sizes[: len(trace) - trace.endless]
    sizes = whole if len(whole) else trace.batch_sizes
    return {
        "steps": len(whole),
        "has no end": trace.endless,
        "samples": int(whole.sum()),
        "smallest batch size": int(sizes.min()),
        "median batch size": float(np.median(sizes)),
        "mean batch size": float(sizes.mean()),
        "largest batch size": int(sizes.max()),
        "first batch size": int(sizes[0]),
        "last batch size": int(sizes[-1]),
        "distinct batch sizes": len(np.unique(sizes)),
        "changes": int((np.diff(sizes) != 0).sum()),
        "largest minibatch size": int(np.gcd.reduce(sizes)),
    }


def simulate(
    schedule: Schedule,
    num_epochs: int | None = None,
    *,
    rule: str | Rule = "constant",
    ref_batchsize: int | None = None,
    lr: float = 1.0,
    noise_scale: float | None = None,
    devices: np.ndarray | int = 1,
    step_time: StepTime | None = None,
) -> pd.DataFrame:
    """Returns one row per step of a run.

    The columns are ``epoch``, ``step``, ``batch_size``, ``samples`` (used up to the end
    of the step), ``devices``, ``num_substeps`` (of the first device), ``idle_substeps``
    (of all others together, compared with the first) and ``lr`` (the effective one).
    With a noise scale also ``gain`` and ``progress`` (the sum of gains, in steps at
    ``ref_batchsize``); with a step-time model ``seconds``, and the ``idle_seconds`` of
    all devices together.

    Args:
        schedule: Trace, dataset length and minibatch size.
        num_epochs: How many; default: all of the trace.
        rule: How the learning rate follows the batch; see `vbs.RULES`. 'adascale' takes
            the gain that the noise scale says.
        ref_batchsize: Batch size at which the learning rate was tuned.
        lr: The reference learning rate.
        noise_scale: tr Sigma / |G|^2, in samples.
        devices: How many replicas there are, or, ``(num_rows,)``, in each row of the
            trace, as `convert` says.
        step_time: How long a step takes.

    Raises:
        TypeError: The rule needs ``ref_batchsize``.
        ValueError: The trace has no end, and ``num_epochs`` is not given; or the rule
            needs a noise scale, or has no meaning at some ratio.
    """
    rule = rule_named(rule)
    reference = 1
    if rule.needs_reference or noise_scale is not None:
        reference = check_integer("ref_batchsize", ref_batchsize, least=1)
    if rule.measured and noise_scale is None:
        raise ValueError(f"rule {rule.name!r} measures the gradients: pass noise_scale")
    table = _steps(schedule, num_epochs, devices)
    ratios = table["batch_size"] / reference
    if noise_scale is not None:
        noise = check_number("noise_scale", noise_scale, least=0) / reference
        table["gain"] = ratios * (1 + noise) / (ratios + noise)
        table["progress"] = table["gain"].cumsum()
    group = {"lr": check_number("lr", lr, least=0), **ADAM}
    table["lr"] = [
        rule.update(ratio, group, gain=gain)[0].effective_lr
        for ratio, gain in zip(ratios, table.get("gain", [None] * len(table)))
    ]
    if step_time is not None:
        table["seconds"] = step_time.seconds(table["num_substeps"])
        table["idle_seconds"] = step_time.per_substep * table["idle_substeps"]
    return table


def _steps(
    schedule: Schedule, num_epochs: int | None, devices: int | np.ndarray = 1
) -> pd.DataFrame:
    """Returns the columns of `simulate` that a schedule and devices say."""
    name, end = schedule.trace.name, schedule.num_epochs
    most = None if end == math.inf else int(end)
    num_epochs = most if num_epochs is None else num_epochs
    if num_epochs is None:
        raise ValueError(f"{name} has no end: give num_epochs=N")
    num = check_integer(f"num_epochs of {name}", num_epochs, 1, most)
    sizes = [schedule.plan(epoch, 1).batch_sizes for epoch in range(num)]
    table = pd.DataFrame({"epoch": np.repeat(np.arange(num), [*map(len, sizes)])})
    table["step"] = np.arange(len(table))
    table["batch_size"] = np.concatenate(sizes)
    table["samples"] = table["batch_size"].cumsum()
    rows = len(schedule.trace)
    held = np.full(rows, devices) if np.ndim(devices) == 0 else np.asarray(devices)
    if held.shape != (rows,) or (held < 1).any() or (held % 1 != 0).any():
        raise ValueError(
            "devices or num_replicas must be an integer >= 1, or one for each of the "
            f"{rows} rows of {name}, got {devices!r}"
        )
    row = table["step"] % rows if schedule.on_end == "cycle" else table["step"]
    table["devices"] = held.astype(np.int64)[np.minimum(row, rows - 1)]
    num_minibatches = -(-table["batch_size"] // schedule.minibatch_size)
    table["num_substeps"] = -(-num_minibatches // table["devices"])
    slots = table["num_substeps"] * table["devices"]
    return table.assign(idle_substeps=slots - num_minibatches)


def totals(
    steps: pd.DataFrame,
    *,
    restart_seconds: float = 0.0,
    compile_seconds: float = 0.0,
    price: float = 0.0,
) -> dict[str, Any]:
    """Returns what the steps of `simulate` come to, as numbers by name.

    A run restarts where the number of devices differs from that of the step before, and
    compiles at its beginning and after every restart. Device-hours and cost are told
    with and without both.

    Args:
        steps: What `simulate` returned.
        restart_seconds: From the last step before a restart to the first one after it.
        compile_seconds: Of the first step after a start.
        price: Of one device in one hour.

    Raises:
        ValueError: A number is out of range, or needs the seconds of steps, which
            `simulate` does not know without a step time.
    """
    numbers = {"restart_seconds": restart_seconds, "compile_seconds": compile_seconds}
    for name, value in (numbers | {"price": price}).items():
        check_number(name, value, least=0)
        if value and "seconds" not in steps:
            raise ValueError(f"{name}={value} needs a step time, got none")
    rates, restarts = steps["lr"], steps["devices"].diff().fillna(0) != 0
    result: dict[str, Any] = {
        "steps": len(steps),
        "epochs": int(steps["epoch"].nunique()),
        "samples": int(steps["batch_size"].sum()),
        "first lr": float(rates.iloc[0]),
        "largest lr": float(rates.max()),
        "last lr": float(rates.iloc[-1]),
    }
    if "gain" in steps:
        result["progress in steps at the reference"] = float(steps["gain"].sum())
    result["restarts"] = int(restarts.sum())
    if "seconds" not in steps:
        return result
    result["idle device-seconds"] = float(steps["idle_seconds"].sum())
    starts = restarts | (steps.index == 0)
    overhead = restarts * restart_seconds + starts * compile_seconds
    for what, more in (("without", 0.0), ("with", overhead)):
        hours = (steps["seconds"] + more) / 3600
        device_hours = float(hours @ steps["devices"])
        result[f"hours {what} restarts and compiling"] = float(hours.sum())
        result[f"device-hours {what} restarts and compiling"] = device_hours
        if price:
            result[f"cost {what} restarts and compiling"] = device_hours * price
    return result


def check(
    schedule: Schedule, num_replicas: int | np.ndarray, num_epochs: int | None = None
) -> dict[str, Any]:
    """Returns epochs, dropped samples and idle replicas of a run.

    A replica is idle while another one runs a minibatch of the same step and it has
    none left. Samples are dropped at the end of an epoch whose next step does not fit.

    Args:
        schedule: Trace, dataset length and minibatch size.
        num_replicas: Over which minibatches are dealt; or, ``(num_rows,)``, in each row
            of the trace.
        num_epochs: How many; default: all of the trace.

    Raises:
        ValueError: The trace has no end, and ``num_epochs`` is not given.
    """
    steps = _steps(schedule, num_epochs, num_replicas)
    used = steps.groupby("epoch")["batch_size"].sum()
    dropped = schedule.num_samples - used.to_numpy()
    num_epochs, idle = len(dropped), int(steps["idle_substeps"].sum())
    slots = int(steps["num_substeps"] @ steps["devices"])
    unused = len(schedule.trace) - len(steps) if schedule.num_epochs < math.inf else 0
    left = 0
    if num_epochs == schedule.num_epochs:  # what is left when the trace has ended
        left, dropped = int(dropped[-1]), dropped[:-1]
    per_cent = 100 * dropped.sum() / (max(len(dropped), 1) * schedule.num_samples)
    result = {
        "epochs": num_epochs,
        "steps": len(steps),
        "samples": int(steps["batch_size"].sum()),
        "steps of the trace that are not used": unused,
        "samples of the last epoch after the trace's end": left,
        "dropped samples": int(dropped.sum()),
        "dropped samples in per cent": float(per_cent),
        "substeps": slots - idle,
        "idle replica-substeps": idle,
        "idle replica-substeps in per cent": 100 * idle / max(slots, 1),
    }
    if schedule.pad_minibatches:
        held = (slots - idle) * schedule.minibatch_size
        result["samples of padding"] = held - result["samples"]
    return result
