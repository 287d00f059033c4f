"""Replica threads wait for each other at a rendezvous; without XLA."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from xla_replica import ReplicaError
from xla_replica.emulated.rendezvous import Collective, Rendezvous


def sums(*shapes: int) -> tuple[Collective, ...]:
    return tuple(Collective(f"all_reduce(float32[{n}])", "train.py:7") for n in shapes)


def meet_all(rendezvous: Rendezvous, brought: dict[int, tuple[Collective, ...]]):
    """Returns what each replica's call of `meet` gave: a round, or its exception."""

    def visit(rank: int):
        rendezvous.enter(rank)
        try:
            return rendezvous.meet(rank, brought[rank])
        except ReplicaError as error:
            return error

    with ThreadPoolExecutor(len(brought)) as pool:
        return dict(zip(brought, pool.map(visit, brought)))


def test_equal_collectives_let_all_replicas_through_in_every_round():
    rendezvous = Rendezvous(4, timeout=10)
    for shape in range(20):
        rounds = meet_all(rendezvous, {rank: sums(shape) for rank in range(4)})
        assert len(set(map(id, rounds.values()))) == 1


def test_the_odd_one_out_is_named_first():
    brought = {0: sums(4), 1: sums(4), 2: sums(4, 5), 3: sums(4)}
    for error in meet_all(Rendezvous(4, timeout=10), brought).values():
        assert isinstance(error, ReplicaError)
        assert error.rank == 2
        assert "disagree about collective 2" in str(error)
        assert "replica 2: all_reduce(float32[5]) at train.py:7" in str(error)
        assert "replicas 0, 1, 3: nothing" in str(error)


def test_a_place_in_the_code_may_differ():
    other = (Collective("all_reduce(float32[4])", "evaluate.py:9"),)
    rounds = meet_all(Rendezvous(2, timeout=5), {0: sums(4), 1: other})
    assert rounds[0] is rounds[1]


def test_a_late_replica_is_named_with_its_stack():
    rendezvous, done = Rendezvous(2, timeout=0.2), threading.Event()

    def dawdle():
        rendezvous.enter(1)
        done.wait()

    thread = threading.Thread(target=dawdle)
    thread.start()
    with pytest.raises(ReplicaError, match="replica 1 did not reach") as caught:
        rendezvous.meet(0, sums(4))
    done.set()
    thread.join()
    assert caught.value.rank == 1
    assert "done.wait()" in str(caught.value)


def test_a_replica_that_has_left_is_not_waited_for():
    rendezvous = Rendezvous(3, timeout=60)
    rendezvous.leave(1)
    with pytest.raises(ReplicaError, match="replica 1 returned while replica 0 wait"):
        rendezvous.meet(0, sums(4))


def test_all_replicas_must_return_within_the_timeout():
    rendezvous = Rendezvous(2, timeout=0.2)
    rendezvous.leave(0)
    with pytest.raises(ReplicaError, match="replica 1 did not reach the end of its"):
        rendezvous.wait_for_all_to_leave()
    rendezvous.leave(1)
    rendezvous.wait_for_all_to_leave()
