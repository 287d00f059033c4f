"""Where a run stands, and which run it is: what a sampler saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from variable_batch_size.data.schedule import Schedule
from xla_replica.common.differences import differences

VERSION = 1
_UNITS = {
    "trace": "the trace",
    "on_end": "on_end",
    "num_samples": "the number of samples",
    "minibatch_size": "minibatch_size",
    "seed": "seed",
    "order": "the order",
}


class Place(NamedTuple):
    """Behind the last committed update: so many steps into an epoch."""

    epoch: int
    step: int


def fingerprint(schedule: Schedule, seed: int, given_order: bool) -> dict[str, Any]:
    """What decides which samples every step uses; no number of replicas.

    Costs the same for any number of samples; the trace is hashed once.
    """
    trace = schedule.trace
    return {
        "trace": f"{len(trace)} steps, sha256 {trace.digest[:16]}",
        "on_end": schedule.on_end,
        "num_samples": schedule.num_samples,
        "minibatch_size": schedule.minibatch_size,
        "seed": None if given_order else seed,
        "order": "given" if given_order else "shuffled",
    }


def check_fingerprint(
    saved: Mapping[str, Any], own: Mapping[str, Any], allow_changes: bool
) -> None:
    """Whether a state belongs to this run.

    Raises:
        ValueError: It does not, and ``allow_changes`` is False; lists all differences.
    """
    found = differences(saved, own, _UNITS)
    if found and not allow_changes:
        raise ValueError(
            "the saved run used other samples at its steps: "
            + "; ".join(found)
            + ". Restore it with the arguments it had, or pass allow_changes=True to "
            "go on from the same step with these"
        )


def check_state_keys(state: Mapping[str, Any]) -> None:
    """Raises ValueError unless this is a sampler's state of this version."""
    missing = sorted({"version", "epoch", "step", "fingerprint"} - state.keys())
    if missing:
        raise ValueError(
            f"a sampler's state has {', '.join(missing)} too; got {sorted(state)}"
        )
    if state["version"] != VERSION:
        raise ValueError(
            f"the sampler's state is of version {state['version']!r}, and this is "
            f"version {VERSION}"
        )


def place_in(state: Mapping[str, Any], schedule: Schedule) -> Place:
    """The saved place, if this schedule has it.

    Raises:
        ValueError: The schedule has no such step.
    """
    place = Place(state["epoch"], state["step"])
    if isinstance(place.step, bool) or not isinstance(place.step, int):
        raise ValueError(f"the state's step must be an integer, got {place.step!r}")
    first, end = schedule.steps(place.epoch)
    num_steps = end - first
    if not 0 <= place.step <= num_steps:
        raise ValueError(
            f"the state stands behind step {place.step} of epoch {place.epoch}, which "
            f"has {num_steps} steps here"
        )
    return place
