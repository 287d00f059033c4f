"""Which batch size a run should have: pure functions of what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from variable_batch_size.trace_tools.step_time import StepTime
from xla_replica.common.arguments import check_choice, check_integer


class Observation(NamedTuple):
    """What a controller knows when it decides; the same on every replica.

    Attributes:
        step: The update that was made last.
        batch_size: What steps have that nobody has changed yet, in samples.
        noise_scale: tr Sigma / |G|^2, in samples; NaN where nothing is known, or
            measured.
        step_time: Seconds of an update and of a substep, fitted to the run so far; None
            until there was time to measure.
        minibatch_size: In samples.
        num_replicas: How many share a step.
    """

    step: int
    batch_size: int
    noise_scale: float
    step_time: StepTime | None
    minibatch_size: int
    num_replicas: int


Policy = Callable[[Observation], float]


def noise_scale(seen: Observation) -> float:
    """Returns the gradient noise scale, the batch of McCandlish et al. 2018.

    Larger batches then hardly save steps, smaller ones hardly save samples
    (arXiv:1812.06162, section 2.3). NaN where nothing is known.
    """
    return seen.noise_scale


def goodput(seen: Observation) -> float:
    """Returns the batch that makes the most progress per second, in samples.

    Progress per sample falls as 1 / (B + N), with the noise scale N (the efficiency of
    Pollux, arXiv:2008.12260, eq. 5), and a step of B samples on R replicas takes about
    a + c B seconds, with c = seconds per substep / (R * minibatch). The product
    B / ((a + c B) (B + N)) is largest at B = sqrt(N a / c). Where all steps had equally
    many substeps, nothing tells a from c, and the noise scale is returned, so that
    another size is tried.
    """
    time = seen.step_time
    if time is None or not (time.per_update > 0 and time.per_substep > 0):
        return seen.noise_scale
    per_sample = time.per_substep / (seen.num_replicas * seen.minibatch_size)
    return math.sqrt(seen.noise_scale * time.per_update / per_sample)


def per_replica(batch_size: int) -> Policy:
    """Returns a policy of so many samples for every replica that shares a step.

    For a live run, in which replicas come and go. It needs no measurement of noise.

    Args:
        batch_size: Samples of a step for each replica, at least 1.
    """
    check_integer("per_replica: batch_size", batch_size, least=1)
    return lambda seen: batch_size * seen.num_replicas


POLICIES: dict[str, Policy] = {"noise-scale": noise_scale, "goodput": goodput}


def policy_of(policy: str | Policy) -> Policy:
    """Returns the policy of that name; raises ValueError if there is none.

    A function is returned as it is.
    """
    if callable(policy):
        return policy
    return POLICIES[check_choice("policy", policy, POLICIES, "a function")]


def decide(
    seen: Observation, wanted: float, least: int, most: int, factor: float
) -> int:
    """Returns the batch size to go on with: whole minibatches, with hysteresis.

    Args:
        seen: What is known.
        wanted: What the policy asks for; NaN for no change.
        least, most: The limits, in samples; the present size is brought into them
            whatever is wanted.
        factor: Otherwise it changes only to one that is so many times larger or
            smaller, or more.
    """
    unit, now = seen.minibatch_size, seen.batch_size
    low, high = -(-least // unit), most // unit
    limited = min(max(now, low * unit), high * unit)
    wanted = now if math.isnan(wanted) else wanted
    new = unit * round(min(max(wanted / unit, low), high))
    return new if new >= factor * now or new * factor <= now else limited
