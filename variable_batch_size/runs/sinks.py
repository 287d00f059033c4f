"""Where a run log's numbers go beside its file: TensorBoard, W&B, MLflow and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """A function that logs numbers by name, and takes the step that they are of.

    ``run.log`` of a Weights & Biases run, ``mlflow.log_metrics`` and ``log_metrics`` of
    a Lightning logger are such functions as they are.
    """

    def __call__(self, values: dict[str, float], /, *, step: int) -> Any:
        """Logs numbers. ``step`` never falls in a run; a resumed run repeats a few."""


class _ScalarWriter(Protocol):
    """A ``SummaryWriter`` of tensorboardX or of torch."""

    def add_scalar(self, tag: str, value: float, global_step: int) -> Any: ...


def tensorboard(writer: _ScalarWriter) -> Sink:
    """Returns a sink that adds one scalar per name to a TensorBoard writer."""

    def log(values: Mapping[str, float], /, *, step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log
