"""What a trace is like, and how it fits a dataset and replicas, as numbers by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from variable_batch_size.data.schedule import Schedule
from variable_batch_size.trace_tools.simulation import epoch_table, simulate
from variable_batch_size.traces.batch_trace import Trace
from xla_replica.common.arguments import check_integer, check_number


def stats(trace: Trace) -> dict[str, Any]:
    """Returns sizes, changes and the minibatch sizes that divide all batch sizes.

    Of a trace without end: those of its rows.
    """
    sizes = trace.batch_sizes
    return {
        "steps": len(sizes),
        "samples": int(sizes.sum()),
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


def check(
    schedule: Schedule,
    num_replicas: int,
    num_epochs: int | None = None,
    seconds_per_substep: float | None = None,
) -> dict[str, Any]:
    """Returns epochs, dropped samples and idle replicas of a run.

    A replica is idle while another one runs a minibatch of the same step and it has
    none left. Samples are dropped at the end of an epoch whose next step does not fit.

    Args:
        schedule: Trace, dataset length and minibatch size.
        num_replicas: Over which minibatches are dealt.
        num_epochs: How many; default: all of the trace.
        seconds_per_substep: What a minibatch takes, for idle replica-seconds.

    Raises:
        ValueError: The trace has no end, and ``num_epochs`` is not given.
    """
    check_integer("num_replicas", num_replicas, least=1)
    epochs = epoch_table(schedule, num_epochs)
    steps = simulate(schedule, num_epochs, devices=num_replicas)
    slots = steps["num_substeps"] * num_replicas
    counts = slots - steps["idle_substeps"]
    idle = int(steps["idle_substeps"].sum())
    dropped = epochs["dropped_samples"].to_numpy(copy=True)
    left, unused = 0, 0
    if schedule.num_epochs < math.inf:
        unused = max(len(schedule.trace) - len(counts), 0)
        if len(epochs) >= schedule.num_epochs:  # what is left when the trace has ended
            last = int(schedule.num_epochs) - 1
            left, dropped = int(dropped[last]), dropped[:last]
    whole_epochs = max(len(dropped), 1) * schedule.num_samples
    few = int((counts < num_replicas).sum())
    result = {
        "epochs": len(epochs),
        "steps": len(counts),
        "samples": int(epochs["samples"].sum()),
        "steps of the trace that are not used": unused,
        "samples of the last epoch after the trace's end": left,
        "dropped samples": int(dropped.sum()),
        "dropped samples in an epoch, at most": int(dropped.max(initial=0)),
        "dropped samples in per cent": 100 * float(dropped.sum() / whole_epochs),
        "substeps": int(counts.sum()),
        "steps with a replica that is idle throughout": few,
        "idle replica-substeps": idle,
        "idle replica-substeps in per cent": 100 * idle / max(int(slots.sum()), 1),
    }
    if schedule.pad_minibatches:
        slots = int(counts.sum()) * schedule.minibatch_size
        result["samples of padding"] = slots - result["samples"]
    if seconds_per_substep is not None:
        check_number("seconds_per_substep", seconds_per_substep, above=0)
        result["idle replica-seconds"] = idle * seconds_per_substep
    return result
