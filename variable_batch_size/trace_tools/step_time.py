"""How long a step takes: a model with two numbers, stated or fitted to a run."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class StepTime(NamedTuple):
    """Seconds of a step: a constant and, for each substep, another one.

    Replicas run their substeps side by side, so a step of n minibatches on R replicas
    takes ceil(n / R) of them, those of replica 0.

    >>> StepTime(per_update=0.5, per_substep=0.25).seconds(4)
    1.5

    Attributes:
        per_update: Of the sum over replicas and the update.
        per_substep: Of one minibatch's forward and backward pass.
    """

    per_update: float
    per_substep: float

    def seconds(self, num_substeps: Any) -> Any:
        """Returns the seconds of a step, or of an array of steps."""
        return self.per_update + self.per_substep * num_substeps


def fit_step_time(seconds: Any, num_substeps: Any, num_updates: Any = 1) -> StepTime:
    """Returns the step-time model with the least squared error over a run.

    Neither number of the model is negative. Where substeps and updates are always in
    proportion, nothing tells the two apart: then substeps have all of the seconds.

    Args:
        seconds: ``(n,)``: of each step, or of several steps together. Leave out those
            that compile.
        num_substeps: ``(n,)``: minibatches of replica 0 in them.
        num_updates: ``(n,)``, or one number: how many steps they are.

    Raises:
        ValueError: There are no steps, arrays do not fit together, or a number is not
            finite or out of range.
    """
    times = np.asarray(seconds, dtype=np.float64)
    columns = [np.asarray(n, np.float64) for n in (num_updates, num_substeps)]
    if times.ndim != 1 or len(times) == 0 or columns[1].shape != times.shape:
        raise ValueError(
            "seconds and num_substeps must be arrays of one length above 0, got shapes "
            f"{times.shape} and {columns[1].shape}"
        )
    updates, substeps = (np.broadcast_to(column, times.shape) for column in columns)
    for name, values, least in (
        ("seconds", times, 0),
        ("num_updates", updates, 1),
        ("num_substeps", substeps, 1),
    ):
        if not (np.isfinite(values) & (values >= least)).all():
            raise ValueError(f"{name} must be finite and >= {least}, got {values!r}")
    only_substeps = StepTime(0.0, float(substeps @ times / (substeps @ substeps)))
    ratios = substeps / updates
    if np.ptp(ratios) <= 1e-9 * ratios.max():
        return only_substeps
    design = np.stack([updates, substeps], axis=1)
    (per_update, per_substep), *_ = np.linalg.lstsq(design, times, rcond=None)
    if per_update < 0:
        return only_substeps
    if per_substep < 0:
        return StepTime(float(updates @ times / (updates @ updates)), 0.0)
    return StepTime(float(per_update), float(per_substep))
