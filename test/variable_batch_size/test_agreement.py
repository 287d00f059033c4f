"""Replicas stop after the same update, though they were asked at different moments."""

from __future__ import annotations

import os
import signal
import types

import pytest
import torch

import xla_replica
from variable_batch_size.checkpoint.save_and_stop import agreed_request
from variable_batch_size.step.agreement import Agreement


class Replicas:
    """Several replicas, of which some have been asked to stop."""

    def __init__(self, monkeypatch, num_replicas: int, device: str) -> None:
        self.asked: set[int] = set()
        self.num_fetched = 0
        self._rank = 0
        monkeypatch.setattr(xla_replica, "stop_requested", self._request)
        replica = types.SimpleNamespace(
            device="cpu",
            is_host=device == "cpu",
            num_replicas=num_replicas,
            fetch=self._fetch,
        )
        scalars = types.SimpleNamespace(get=lambda use, value: torch.tensor([value]))
        self._agreements = [Agreement(replica, scalars) for _ in range(num_replicas)]

    def _request(self):
        asked = self._rank in self.asked
        return xla_replica.StopRequest("test", 143) if asked else None

    def _fetch(self, tensors):
        self.num_fetched += 1
        return tensors

    def update(self, look: bool = False) -> list[bool]:
        """Returns what every replica finds after an update."""
        ballots = []
        for rank, agreement in enumerate(self._agreements):
            self._rank = rank
            ballots.append(agreement.ballots(("lr", 0.1)))
        sums = [sum(each) for each in zip(*ballots)]
        for agreement in self._agreements:
            agreement.count(*(each.clone() for each in sums))
        return [agreement.stop_agreed(look) for agreement in self._agreements]


@pytest.mark.parametrize("device", ["xla", "cuda"])
def test_on_accelerators_nobody_reads_until_asked(monkeypatch, device):
    replicas = Replicas(monkeypatch, 3, device)
    assert replicas.update() == [False] * 3
    assert replicas.num_fetched == 0
    replicas.asked = {0, 2}  # not yet all: those asked read the sum, and continue
    assert replicas.update() == [False] * 3
    assert replicas.num_fetched == 2
    replicas.asked = {0, 1, 2}
    assert replicas.update() == [True] * 3


def test_one_that_was_asked_alone_is_found_where_all_look(monkeypatch):
    replicas = Replicas(monkeypatch, 3, "xla")
    replicas.asked = {1}
    assert replicas.update() == [False] * 3
    assert replicas.update(look=True) == [True] * 3


def test_on_cpus_everybody_looks(monkeypatch):
    replicas = Replicas(monkeypatch, 3, "cpu")
    assert replicas.update() == [False] * 3
    replicas.asked = {1}
    assert replicas.update() == [True] * 3


def stops_for_one_reason(rank: int) -> None:
    """Asks two of three replicas, each in another way, and not the first."""
    if rank == 1:
        xla_replica.catch_signals()
        os.kill(os.getpid(), signal.SIGINT)
    if rank == 2:
        xla_replica.request_stop("maintenance", 75)
    request = agreed_request(xla_replica.current())
    assert request == xla_replica.StopRequest("received SIGINT", 130)
    raise xla_replica.Stopped(request.reason, request.exit_status)


def test_all_replicas_stop_for_the_same_reason():
    with pytest.raises(xla_replica.Stopped, match="received SIGINT") as stopped:
        xla_replica.launch(stops_for_one_reason, (), 3, "cpu")
    assert stopped.value.code == 130


@pytest.mark.parametrize(
    "reason", ["Wartung läuft", "", "x" * 9999 + "ü", "a lone \udc80 surrogate"]
)
def test_a_reason_is_any_text(monkeypatch, reason):
    request = xla_replica.StopRequest(reason, 0)
    monkeypatch.setattr(xla_replica, "stop_requested", lambda: request)
    assert agreed_request(xla_replica.LocalReplica("cpu")) == (reason, 0)
