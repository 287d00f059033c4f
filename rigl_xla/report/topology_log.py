"""How a topology changes, for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rigl_xla.report.costs import LayerCost
from rigl_xla.report.report import Report
from xla_replica.common.arguments import check_flag, check_type

if TYPE_CHECKING:
    from rigl_xla.scheduler import RigLScheduler

_OF_LAYERS = ("sparsity", "churn", "exploration_rate")


class ScalarWriter(Protocol):
    """A ``SummaryWriter`` of tensorboardX or of torch."""

    def add_scalar(self, tag: str, value: float, step: int) -> Any: ...


class TopologyLog:
    """Writes a `Report` for every topology update.

    Call it after the optimizer's step, or attach it to an elastic optimizer: it takes
    a report if the topology has changed, and reads nothing. Call `flush` where training
    reads its loss.

    Tags are ``prefix/sparsity``, ``/drop_fraction``, ``/churn``, ``/grown``,
    ``/dropped``, ``/exploration_rate``, ``/size_in_bytes`` and, with costs,
    ``/inference_flops_ratio`` and ``/training_flops_ratio``; of single layers
    ``prefix_sparsity/NAME``, ``prefix_churn/NAME``, ``prefix_exploration_rate/NAME``.

    Args:
        pruner: The pruner whose topology is logged.
        writer: Takes scalars; None, as on all replicas but one, logs nothing.
        costs: The result of `costs_of`, for operations.
        num_steps: Steps of the whole run, for the operations of gradual pruning.
        layers: Whether to log single layers too.
        prefix: Begins the tags.

    Raises:
        TypeError: The writer takes no scalars, or another argument is of a wrong type.
        ValueError: The costs are of another model.
    """

    def __init__(
        self,
        pruner: RigLScheduler,
        writer: ScalarWriter | None,
        *,
        costs: Mapping[str, LayerCost] | None = None,
        num_steps: int | None = None,
        layers: bool = True,
        prefix: str = "rigl",
    ) -> None:
        if not hasattr(pruner, "report"):
            raise TypeError(f"pruner must be a RigLScheduler, got {pruner!r}")
        if writer is not None and not hasattr(writer, "add_scalar"):
            raise TypeError(
                f"writer must be a SummaryWriter or have its add_scalar, got {writer!r}"
            )
        check_flag("layers", layers)
        check_type("prefix", prefix, str, "a string")
        self._pruner, self._writer = pruner, writer
        self._costs, self._num_steps = costs, num_steps
        self._layers, self._prefix = layers, prefix
        self._waiting: list[Report] = []
        self._num_updates = -1  # so that the first call logs how it began
        pruner.report(costs, num_steps)  # costs that do not fit are found now

    def __call__(self, *update: object) -> None:
        """Call it after a step; it ignores the argument of an elastic optimizer."""
        del update
        if self._writer is None or self._pruner.rigl_steps == self._num_updates:
            return
        self._num_updates = self._pruner.rigl_steps
        self._waiting.append(self._pruner.report(self._costs, self._num_steps))

    def flush(self) -> None:
        """Reads, in one transfer, and writes the reports taken since the last flush."""
        waiting, self._waiting = self._waiting, []
        if not waiting or self._writer is None:
            return
        Report.read(waiting)
        for report in waiting:
            for name, value in report.scalars().items():
                self._writer.add_scalar(f"{self._prefix}/{name}", value, report.step)
            for layer, of_layer in report.layers.items() if self._layers else ():
                for name in _OF_LAYERS:
                    tag = f"{self._prefix}_{name}/{layer}"
                    self._writer.add_scalar(tag, getattr(of_layer, name), report.step)
