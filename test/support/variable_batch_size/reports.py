"""A replica that counts transfers."""

from xla_replica import LocalReplica


class CountingReplica(LocalReplica):
    """A replica that counts its transfers to the host."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.num_fetches = 0

    def fetch(self, tensors):
        self.num_fetches += 1
        return super().fetch(tensors)
