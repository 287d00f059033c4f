"""What makes the host wait for an accelerator, whose place the 'meta' device takes."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.variable_batch_size.elastic import OPTIMIZERS
from support.xla_replica.replicas import on_gpu
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
import xla_replica
from xla_replica import DeviceTraits, LocalReplica, Replica
from xla_replica.backends.overlapped_sum import OverlappedSum
from xla_replica.common.trees import tensors_in
from xla_replica.device import device_traits

META = torch.device("meta")


class BlockingCopies(TorchDispatchMode):
    """Counts operations that take a tensor of the host's memory to the device."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        devices = {tensor.device.type for tensor in tensors_in([args, results])}
        self.number += devices == {"cpu", "meta"}
        return results


class KnownOrder(OverlappedSum):
    """Does not read in which order gradients have appeared, as it would once."""

    def _learn_order(self) -> None:
        self._has_order = True


class OneOfTwo(Replica):
    """A replica of two, whose peer brings the same."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor.detach(), tensor.detach()])

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, value]


class Overlapping(OneOfTwo):
    def gradient_sum(self, may_begin, *others):
        return KnownOrder(self, may_begin)

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], None]:
        return lambda: None


def test_a_number_is_brought_to_the_device_without_a_copy():
    with BlockingCopies() as copies:
        torch.tensor([1.0]).to(META)
    assert copies.number == 1
    for value, dtype in ((0.1, torch.float32), (True, torch.bool), (3, torch.int64)):
        with BlockingCopies() as copies:
            found = LocalReplica(META).scalar(value, dtype)
        assert (copies.number, found.dtype, found.shape) == (0, dtype, (1,))
    floats, integers = (0.1, 1e-40, 2**53 + 1, float("nan")), (3, 3.0, -(2**40))
    for values, dtype in (
        ([True], torch.bool), (integers, torch.int64), (floats, torch.float32),
        (floats, torch.float64),
    ):  # fmt: skip
        found = torch.cat([LocalReplica("cpu").scalar(each, dtype) for each in values])
        expected = torch.tensor(values, dtype=dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def model_on(device: torch.device) -> nn.Module:
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    return nn.Sequential(*layers).to(device)


@pytest.mark.parametrize(("optimizer", "rule", "scheduled", "options"), [
    ("sgd-momentum", "linear", False, {}),
    ("sgd-momentum", "linear", True, {"max_grad_norm": 1.0}),
    ("sgd-momentum", "linear", True, {"reduction": "sum"}),
    ("adamw", "adam-root", True, {}),
    ("sgd-momentum", "adascale", True, {"decay_per_sample": True}),
    ("sgd-momentum", "adascale", True, {"reduction": "sum"}),
])  # fmt: skip
@pytest.mark.parametrize(("cls", "lazy"), [
    (OneOfTwo, False), (Overlapping, False), (Overlapping, True),
])  # fmt: skip
def test_an_update_never_waits_for_the_device(
    optimizer, rule, scheduled, options, cls, lazy, monkeypatch
):
    """Not for a new learning rate either; a lazy device is sent it, and never read."""
    monkeypatch.setitem(device_traits._TRAITS, "meta", DeviceTraits(is_lazy=lazy))
    model = model_on(META)
    trace, of_two = [8, 24, 16, 32], {"num_replicas": 2, "rank": 0}
    sampler = vbs.CustomSampler(range(80), trace, minibatch_size=4, **of_two)
    weighted = "reduction" in options
    options = {"ref_weight" if weighted else "ref_batchsize": 16, **options}
    inner = OPTIMIZERS[optimizer](model.parameters(), 0.25)
    replica = cls(0, 2, META, "a test")
    wrapper = vbs.ElasticOptimizer(inner, sampler, rule, replica=replica, **options)
    if scheduled:
        wrapper.attach(torch.optim.lr_scheduler.CosineAnnealingLR(inner, 4))
    wrapper.set_epoch(0)
    x, y = torch.ones(4, 6, device=META), torch.ones(4, dtype=torch.int64, device=META)
    copies, updates = BlockingCopies(), 0
    for _ in sampler:
        F.cross_entropy(model(x), y).backward()
        with copies:
            updates += wrapper.step(**({"weight": 4 + updates} if weighted else {}))
    assert updates == len(trace)
    assert lazy or copies.number == 0


@contextlib.contextmanager
def gpu_waits() -> Iterator[Callable[[], int]]:
    """Counts what waits for a GPU, of which torch warns where it is asked to."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("synchronizing CUDA" in str(w.message) for w in caught)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@on_gpu
def test_a_gpu_says_what_waits_for_it():
    replica = xla_replica.current()
    value = torch.ones(3, device=replica.device)
    with gpu_waits() as waits:
        value.add_(1)
        replica.scalar(2.0)
    assert waits() == 0
    with gpu_waits() as waits:
        replica.fetch([value])
        value.sum().item()
    assert waits() == 2
    assert replica.device_model == f"cuda, {torch.cuda.get_device_name()}"


@on_gpu
@pytest.mark.parametrize(("rule", "options", "waits"), [
    ("linear", {"max_grad_norm": 1.0}, 0),
    ("adascale", {}, 0),
    ("linear", {"noise": True}, 0),
    ("linear", {"exact": True}, 1),  # whether to run the step again
])  # fmt: skip
def test_an_update_on_a_gpu_waits_for_nothing_but_exact_sums(rule, options, waits):
    replica = xla_replica.current()
    model = model_on(replica.device)
    if "exact" in options:
        torch.use_deterministic_algorithms(True)
        options = {"exact": model}
    trace, cycles = [4, 8, 16, 12], {"minibatch_size": 4, "on_end": "cycle"}
    sampler = vbs.CustomSampler(range(800), trace, verbose=False, **cycles)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    wrapper = vbs.ElasticOptimizer(inner, sampler, rule, 8, **options)
    wrapper.attach(torch.optim.lr_scheduler.CosineAnnealingLR(inner, 80))
    wrapper.set_epoch(0)
    data = TensorDataset(torch.randn(800, 6), torch.arange(800) % 3)
    batches = DataLoader(data, batch_sampler=sampler)
    updates = 0
    try:
        for number, (x, y) in enumerate(replica.loader(batches)):
            with gpu_waits() as found:
                F.cross_entropy(model(x), y).backward()
                made = wrapper.step()
            if number >= 40:
                # It waits, too, to hear that a step is to be run again.
                assert found() in ([waits] if made else [0, waits])
                updates += made
    finally:
        torch.use_deterministic_algorithms(False)
    assert updates > 20


def test_batches_are_copied_from_pinned_memory_when_their_turn_has_come(monkeypatch):
    """By the thread of the training loop, on whose stream they are used."""
    monkeypatch.setitem(device_traits._TRAITS, "meta", DeviceTraits(has_streams=True))
    to, pinned, pinning, copies = torch.Tensor.to, [], [], []

    def copy(tensor, device, non_blocking=False):
        assert any(tensor is each for each in pinned)
        assert non_blocking
        copies.append((int(tensor[0]), threading.current_thread().name))
        return to(tensor, device)

    def pin(tensor):
        pinning.append(threading.current_thread().name)
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    numbers, main = range(1, 6), threading.current_thread().name
    full = torch.full
    batches = [{"x": full((n,), n), "y": [full((1,), n), "text"]} for n in numbers]
    for n, batch in zip(numbers, LocalReplica(META).loader(batches), strict=True):
        assert (len(batch["x"]), batch["y"][1]) == (n, "text")
        assert batch["x"].device == batch["y"][0].device == META
        assert copies == [(each, main) for each in range(1, n + 1) for _ in "xy"]
    assert len(pinning) == 10
    assert pinning.count(main) == 2  # the first batch, see DeviceLoader
