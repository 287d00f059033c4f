"""What a forward pass and training of a sparse model cost, in operations per sample.

A pure function, in the conventions of Evci et al. 2020 (arXiv:1911.11134, App. H):
multiplications and additions count one each, biases and activations too, norms and the
loss do not; a backward pass costs two forward passes. Ideal hardware would do so few;
masked training runs dense kernels.

>>> dense, sparse = (cost_of({"fc": (1000, 10)}, {"fc": s}) for s in (0.0, 0.9))
>>> dense.flops, round(sparse.flops), round(sparse.training_ratio, 4)
(2010.0, 210, 0.1074)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rigl_xla.topology.methods import METHODS, Method
from rigl_xla.topology.update_schedule import UpdateSchedule, gradual_sparsity
from xla_replica.common.arguments import (
    check_choice,
    check_integer,
    check_names,
    check_number,
    check_type,
)

# By the name of a weight: multiply-accumulates of a dense forward pass, and the numbers
# that come out of it, each of which has a bias and an activation; per sample.
Operations = Mapping[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Operations per sample of a sparse model, and of the same one dense.

    Attributes:
        flops: Those of a forward pass.
        dense_flops: Those of the dense model's forward pass.
        training_flops: Those of training. None for gradual pruning in a run of unknown
            length.
    """

    flops: float
    dense_flops: float
    training_flops: float | None

    @property
    def inference_ratio(self) -> float:
        """Operations of a forward pass over those of the dense model's."""
        return self.flops / self.dense_flops

    @property
    def training_ratio(self) -> float | None:
        """Operations of training over those of dense training."""
        if self.training_flops is None:
            return None
        return self.training_flops / (3 * self.dense_flops)


def cost_of(
    operations: Operations,
    sparsities: Mapping[str, float],
    method: str | Method = "rigl",
    schedule: UpdateSchedule | None = None,
    num_steps: int | None = None,
) -> Cost:
    """Returns what a forward pass and training cost.

    With f_S and f_D of a sparse and a dense forward pass, a sample costs 3 f_S where
    dense gradients are never collected (static, SET) and 2 f_S + f_D where they always
    are (SNFS). Where an update needs those of n steps (RigL), n steps in delta + 1 cost
    2 f_S + f_D and the others 3 f_S. Gradual pruning costs the mean of 3 f_S over the
    steps of the run, of which each has the sparsities of the last update before it.

    Args:
        operations: The result of `operations_of`.
        sparsities: By name, of the layers that are not dense; in the end, for gradual
            pruning.
        method: A key of `METHODS`, or such a row.
        schedule: When the topology changes. Default: every 100 steps, by the gradients
            of one step.
        num_steps: Steps of the whole run, which only gradual pruning needs.

    Raises:
        ValueError, TypeError: A number is out of range, a name is not known, or the
            layers compute nothing.
    """
    check_type("operations", operations, Mapping, "the result of operations_of")
    check_type("sparsities", sparsities, Mapping, "a dict of numbers by name")
    check_names("a sparsity is given for", sparsities, operations, "the operations")
    for name, sparsity in sparsities.items():
        check_number(f"the sparsity of {name!r}", sparsity, 0, 1)
    if not isinstance(method, Method):
        method = METHODS[check_choice("method", method, METHODS, "a Method")]
    schedule = schedule or UpdateSchedule()
    sparse, dense = _forward(operations, sparsities), _forward(operations, {})
    if not dense:
        raise ValueError(
            f"the layers {list(operations)} compute nothing, so that nothing can be "
            "compared; give the result of operations_of for a model that calls them"
        )
    if not method.gradual:
        in_updates = schedule.grad_accumulation_n / (schedule.delta + 1)
        shares = {"never": 0.0, "updates": in_updates, "always": 1.0}
        training = 3 * sparse + shares[method.collects] * (dense - sparse)
        return Cost(sparse, dense, training)
    if num_steps is None or not schedule.last_update:
        return Cost(sparse, dense, None)
    delta, total = schedule.delta, 0.0
    for first in range(0, check_integer("num_steps", num_steps, 1), delta):
        now = {
            name: gradual_sparsity(first, final, 0, schedule.last_update)
            for name, final in sparsities.items()
        }
        total += 3 * min(delta, num_steps - first) * _forward(operations, now)
    return Cost(sparse, dense, total / num_steps)


def _forward(operations: Operations, sparsities: Mapping[str, float]) -> float:
    """Returns multiplications, additions, biases and activations of a forward pass."""
    return sum(
        2.0 * macs * (1 - sparsities.get(name, 0.0)) + outputs
        for name, (macs, outputs) in operations.items()
    )
