"""Tensors inside states move at once, and what holds them keeps its kind."""

from __future__ import annotations

import collections
import types
from typing import NamedTuple

import torch
from torch import nn

from xla_replica import LocalReplica


class Place(NamedTuple):
    epoch: int
    weights: torch.Tensor


class Counting(LocalReplica):
    """Notes how many tensors each transfer had."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.fetched: list[int] = []

    def fetch(self, tensors):
        self.fetched.append(len(tensors))
        return super().fetch(tensors)


def test_a_state_comes_to_the_host_in_one_transfer():
    norm = nn.BatchNorm1d(3)
    state = {
        "model": norm.state_dict(),
        "place": Place(2, torch.ones(2)),
        "milestones": collections.Counter([5, 5]),
        "read-only": types.MappingProxyType({"x": torch.zeros(1)}),
        "rest": [(torch.arange(3), "text"), None, 0.5],
    }
    replica = Counting()
    found = replica.to_host(state)
    assert replica.fetched == [5 + 1 + 1 + 1]
    assert found["model"]._metadata == state["model"]._metadata
    assert list(found["model"]) == list(state["model"])
    assert found["milestones"] == state["milestones"]
    assert type(found["milestones"]) is collections.Counter
    assert found["place"].epoch == 2
    assert found["rest"][0][0].tolist() == [0, 1, 2]
    assert found["rest"][0][1:] + tuple(found["rest"][1:]) == ("text", None, 0.5)
    assert found["read-only"]["x"].tolist() == [0.0]
    with torch.no_grad():  # a copy: training goes on while it is written
        norm.weight.fill_(7.0)
    assert found["model"]["weight"].tolist() == [1.0] * 3
