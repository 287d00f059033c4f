"""Runs to report on, and what counts how often a report is read."""

from __future__ import annotations

from support.sparse import OPTIMIZERS, convnet, pruned
from xla_replica import LocalReplica

KINDS = {
    "rigl": {},
    "set": {"method": "set", "skip_step": False},
    "gmp": {"method": "gmp"},
    "2:4": {"structure": "2:4", "dense_allocation": 1, "exclude": ["7"]},
    "static": {"method": "static"},
}


class CountingReplica(LocalReplica):
    """Counts what is read."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.num_fetches = 0

    def fetch(self, tensors):
        self.num_fetches += 1
        return super().fetch(tensors)


class Writer:
    """Keeps scalars as TensorBoard does: by tag, (step, value)."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.setdefault(tag, []).append((step, value))


def run(kind: str = "rigl", **options):
    """A model, its optimizer and its pruner."""
    model = convnet()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return model, optimizer, pruned(model, optimizer, **KINDS[kind], **options)
