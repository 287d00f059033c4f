"""What a run costs: operations and size, as multiples of the dense model's.

Pure functions of shapes, sparsities and schedules; `flops` has the conventions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rigl_xla.report.flops import (
    TRAINED_LIKE,
    Costs,
    Sparsities,
    gradual_training_ratio,
    inference_flops,
    inference_macs,
    size_in_bytes,
    training_ratio,
)


@dataclasses.dataclass(frozen=True)
class CostReport:
    """Operations per sample and bytes, of a sparse model and of the same one dense.

    Attributes:
        macs, dense_macs: Multiply-accumulates of a forward pass.
        flops, dense_flops: Its operations: multiplications and additions count one
            each, with biases and activations.
        size_in_bytes, dense_size_in_bytes: Stored: float32 weights and biases, and a
            mask of one bit per weight.
        training_ratios: By method: operations of training, as a multiple of dense
            training for as many samples. ``'gmp'`` is among them where the number of
            steps is known.
        method: The key of the method in use.
    """

    macs: float
    dense_macs: float
    flops: float
    dense_flops: float
    size_in_bytes: float
    dense_size_in_bytes: float
    training_ratios: Mapping[str, float]
    method: str

    @property
    def inference_ratio(self) -> float:
        """Operations of a forward pass over those of the dense model."""
        return self.flops / self.dense_flops

    @property
    def training_ratio(self) -> float:
        """Of the method in use.

        Raises:
            ValueError: It is gradual pruning, and the number of steps is not known.
        """
        if self.method not in self.training_ratios:
            raise ValueError(
                f"what training by method={self.method!r} costs depends on the length "
                "of the run; give report(..., num_steps=)"
            )
        return self.training_ratios[self.method]


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """What of a run its cost depends on.

    Attributes:
        method: A key of `CostReport.training_ratios`.
        delta: Steps between topology updates.
        num_collected: Of them, steps that need the dense gradient.
        last_update: The last step that changes the topology; 0 if none does.
        num_steps: Of the whole run.
        final: Sparsities that gradual pruning leads to, by name.
    """

    method: str
    delta: int
    num_collected: int
    last_update: int
    num_steps: int | None
    final: Sparsities


def cost_report(costs: Costs, now: Sparsities, run: TrainingRun) -> CostReport:
    """Adds it all up.

    Args:
        costs: Of every layer, dense ones too.
        now: Sparsities by name; layers without one are dense.
        run: What it depends on besides.

    >>> from rigl_xla.report.flops import LayerCost
    >>> run = TrainingRun("rigl", 100, 1, 74_900, 100_000, {"fc": 0.9})
    >>> found = cost_report({"fc": LayerCost((10, 100))}, {"fc": 0.9}, run)
    >>> round(found.macs), round(found.dense_macs), round(found.training_ratio, 4)
    (100, 1000, 0.1074)
    >>> {method: round(ratio, 2) for method, ratio in found.training_ratios.items()}
    {'dense': 1.0, 'static': 0.1, 'set': 0.1, 'rigl': 0.11, 'snfs': 0.4, 'gmp': 0.27}
    """
    ratios = {
        method: training_ratio(costs, now, method, run.delta, run.num_collected)
        for method in TRAINED_LIKE
    }
    last, num_steps = run.last_update, run.num_steps
    if num_steps is not None and last > 0:
        ratios["gmp"] = gradual_training_ratio(
            costs, run.final, 0, last, run.delta, num_steps
        )
    return CostReport(
        macs=inference_macs(costs, now),
        dense_macs=inference_macs(costs),
        flops=inference_flops(costs, now),
        dense_flops=inference_flops(costs),
        size_in_bytes=size_in_bytes(costs, now),
        dense_size_in_bytes=size_in_bytes(costs),
        training_ratios=ratios,
        method=run.method,
    )
