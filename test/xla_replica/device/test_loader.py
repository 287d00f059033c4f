"""The device loader; the 'meta' device takes the place of an accelerator."""

from __future__ import annotations

import threading

import torch

from xla_replica import DeviceLoader, LocalReplica

META = torch.device("meta")
send = LocalReplica(META).send


def test_every_batch_comes_once_and_in_order():
    loader = DeviceLoader([[torch.ones(n), None] for n in range(20)], send)
    assert len(loader) == 20
    for _ in range(2):
        sent = list(loader)
        assert [len(batch) for batch, _ in sent] == list(range(20))
        assert all(batch.device == META for batch, _ in sent)


def test_breaking_out_stops_the_thread():
    before = threading.active_count()
    produced = []

    def batches():
        for n in range(1000):
            produced.append(n)
            yield torch.ones(n)

    for _ in DeviceLoader(batches(), send, prefetch=3):
        break
    assert threading.active_count() == before
    assert len(produced) <= 6


def test_an_epoch_begins_in_the_thread_of_the_training_loop():
    """A sampler may compute its order on the device at the first batch."""
    threads = []

    class Batches:
        def __iter__(self):
            threads.append(threading.current_thread())
            yield torch.ones(1)
            threads.append(threading.current_thread())
            yield torch.ones(1)

    assert len(list(DeviceLoader(Batches(), send))) == 2
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()
    assert list(DeviceLoader([], send)) == []


def test_what_has_ended_is_not_asked_again():
    """A sampler that deals a step again after the end deals to the next iteration."""
    asked = []

    class Batches:
        def __iter__(self):
            return self

        def __next__(self):
            asked.append(len(asked))
            if len(asked) == 3:
                raise StopIteration
            return torch.ones(len(asked))

    assert [len(batch) for batch in DeviceLoader(Batches(), send, 5)] == [1, 2]
    assert asked == [0, 1, 2]
