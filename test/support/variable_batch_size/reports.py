"""A replica that counts transfers, and a log's writer."""

from __future__ import annotations

from xla_replica import LocalReplica


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
