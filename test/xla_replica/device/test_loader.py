"""The device loader; the 'meta' device takes the place of an accelerator."""

import itertools
import threading

import torch

from xla_replica import DeviceLoader, LocalReplica

META = torch.device("meta")
send = LocalReplica(META).send


def test_breaking_out_stops_the_thread_after_the_same_number_of_batches():
    """GraB tells passes apart by how many samples each has drawn."""
    before, left = threading.active_count(), threading.Event()

    def batches():
        for number in numbers:
            if number:  # in the thread, which has more to load when the loop is left
                left.wait()
            yield torch.ones(1)

    numbers, timer = itertools.count(), threading.Timer(0.1, left.set)
    for _ in DeviceLoader(batches(), send, prefetch=3):
        timer.start()
        break
    timer.join()
    assert threading.active_count() == before
    assert next(numbers) == 4


def test_an_epoch_begins_in_the_thread_of_the_training_loop():
    """A sampler may compute its order on the device at the first batch."""
    threads = []

    def batches():
        for _ in range(2):
            threads.append(threading.current_thread())
            yield torch.ones(1)

    assert len(list(DeviceLoader(batches(), send))) == 2
    assert [thread is threading.current_thread() for thread in threads] == [True, False]
    assert list(DeviceLoader([], send)) == []
    assert len(DeviceLoader([[torch.ones(1), None]] * 3, send)) == 3


def test_what_has_ended_is_not_asked_again():
    """A sampler that deals a step again after the end deals to the next iteration."""
    dealt = iter([torch.ones(1), torch.ones(2), None, torch.ones(4)])
    loader = DeviceLoader(iter(lambda: next(dealt), None), send, 5)
    assert [len(batch) for batch in loader] == [1, 2]
    assert len(next(dealt)) == 4
