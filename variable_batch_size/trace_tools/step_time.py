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
        ValueError: Arrays do not fit together, or a number is not finite.
    """
    times = np.asarray_chkfinite(seconds, float)
    updates = np.broadcast_to(num_updates, times.shape)
    design = np.stack([updates, np.asarray_chkfinite(num_substeps, float)], axis=1)
    (per_update, per_substep), _, rank, _ = np.linalg.lstsq(design, times, rcond=1e-9)
    columns = [1] if rank < 2 or per_update < 0 else [0] if per_substep < 0 else [0, 1]
    found = np.zeros(2)
    found[columns] = np.linalg.lstsq(design[:, columns], times, rcond=None)[0]
    return StepTime(*found.tolist())
