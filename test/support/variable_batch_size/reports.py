"""Runs to report on, a replica that counts transfers, and a log's writer."""

from __future__ import annotations

from support.rigl_xla.sparse import OPTIMIZERS, convnet, pruned
from xla_replica import LocalReplica

KINDS = {
    "rigl": {},
    "set": {"method": "set", "skip_step": False},
    "gmp": {"method": "gmp"},
    "2:4": {"structure": "2:4", "dense_allocation": 1, "exclude": ["7"]},
    "static": {"method": "static"},
}


class CountingReplica(LocalReplica):
    """A replica that counts its transfers to the host."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.num_fetches = 0

    def fetch(self, tensors):
        self.num_fetches += 1
        return super().fetch(tensors)


class Writer:
    """Keeps scalars as TensorBoard does: (step, value) by tag."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.setdefault(tag, []).append((step, value))


def run(kind: str = "rigl", **options):
    """Returns a model, its optimizer and its pruner."""
    model = convnet()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    return model, optimizer, pruned(model, optimizer, **KINDS[kind], **options)
