"""Steps are of the next samples of the order, and those that are not are told."""

import contextlib
import itertools
from typing import Any

import pytest
from support.grab_xla import ordering
from support.grab_xla.ordering import KINDS
from support.xla_replica.replicas import of_torch_alone
from torch.utils.data import DataLoader

from grab_xla import GraBSampler, GraBWarning
from xla_replica.device.loader import DeviceLoader

N, BATCH = 22, 4  # six batches, the last one of two samples
LEFT = "only 0 are left of this epoch .* evaluate in the middle of an epoch with a"
TOLD = f"{LEFT}|samples of epoch \\d were drawn, and \\d+ had a step"


LOADERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drop_last": {"drop_last": True},
    # Draws five batches ahead of the first step.
    "workers": {"num_workers": 1, "prefetch_factor": 4},
    "all drawn ahead": {"num_workers": 1, "prefetch_factor": 9},
    "device loader": {},
}
WITH_WORKERS_ONCE = [
    pytest.param(kind, marks=[of_torch_alone] * ("num_workers" in options))
    for kind, options in LOADERS.items()
]


def loader_of(sampler: GraBSampler, kind: str = "plain") -> DataLoader | DeviceLoader:
    samples = range(sampler.num_samples)
    loader = DataLoader(samples, BATCH, sampler=sampler, **LOADERS[kind])
    return DeviceLoader(loader, lambda x: x) if kind == "device loader" else loader


def ordered(kind: str = "plain", name: str = "mean") -> tuple[GraBSampler, Any]:
    return (sampler := KINDS[name].sampler(N)), loader_of(sampler, kind)


def step(sampler: GraBSampler, batch, epoch: int, **options) -> None:
    rows = ordering.gradients(epoch, sampler.num_samples)[batch]
    sampler.step(ordering.as_dict(rows), **options)


def train(kind: str, at=None, when=None, between=list) -> list[list[int]]:
    """Returns the samples of every epoch; calls ``between`` once in the first one."""
    (sampler, loader), seen = ordered(kind), []
    for epoch in range(3):
        seen.append([])
        for place, batch in enumerate(loader):
            for moment in ("before", "after"):
                if moment == "after":
                    step(sampler, batch, epoch)
                if (epoch, place, when) == (0, at, moment):
                    between(loader)
            seen[-1] += batch.tolist()
    return seen


@pytest.mark.parametrize("between", [list, lambda loader: next(iter(loader))])
@pytest.mark.parametrize("kind", WITH_WORKERS_ONCE)
def test_a_pass_inside_another_one_is_told_or_changes_nothing(kind, between):
    expected = train("drop_last" if kind == "drop_last" else "plain")
    num_batches = len(expected[0]) // BATCH + (kind != "drop_last")
    slow = "workers" in kind or "ahead" in kind
    for at in (0, 1, num_batches - 1) if slow else range(num_batches):
        for when in ("before", "after"):
            # Where no step, or every step, of the epoch has been taken, the pass is the
            # beginning of an epoch, which is repeated.
            if (at, when) in ((0, "before"), (num_batches - 1, "after")):
                assert train(kind, at, when, between) == expected, (at, when)
            else:  # here, where warnings are errors
                with pytest.raises((ValueError, GraBWarning), match=TOLD):
                    train(kind, at, when, between)


@pytest.mark.filterwarnings("ignore:.*had a step:grab_xla.GraBWarning")
@pytest.mark.parametrize("kind", WITH_WORKERS_ONCE)
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("used", [1, 3, 5])
def test_an_epoch_that_is_left_early_is_not_refused(kind, used, evaluates):
    sampler, loader = ordered(kind)
    for epoch in range(3):
        for place, batch in enumerate(loader):
            if place == used:
                break
            step(sampler, batch, epoch)
        assert sampler.epoch == epoch
        if evaluates:
            list(loader)  # on the next order
            assert sampler.epoch == epoch + 1


def test_a_pass_does_not_go_on_after_another_state_is_loaded():
    sampler, loader = ordered()
    first = iter(loader)
    step(sampler, next(first), 0)
    saved = sampler.state_dict()
    step(sampler, next(first), 0)
    waiting = next(first)
    sampler.load_state_dict(saved)
    with pytest.raises(ValueError, match=LEFT):
        step(sampler, waiting, 0)
    rest = list(loader)
    assert sum(map(len, rest)) == N - BATCH
    with pytest.raises(ValueError, match=LEFT):
        step(sampler, next(first), 0)
    for batch in loader:
        step(sampler, batch, 0)
    assert sampler.num_seen == N


def test_passes_that_need_no_gradients_are_told_apart_too():
    sampler, loader = ordered(name="rr")
    first = iter(loader)
    for _ in range(2):
        step(sampler, next(first), 0)
    list(loader)
    with pytest.raises(ValueError, match=LEFT):
        step(sampler, next(first), 0)


# From a batch's number and samples to those of its steps, where some have none, or two.
LEFT_OUT = {
    "one of every batch": lambda number, batch: [batch[1:]],
    "half of every batch": lambda number, batch: [batch[: BATCH // 2]],
    "a batch": lambda number, batch: [] if number == 2 else [batch],
    "the first batch": lambda number, batch: [batch] if number else [],
    "two steps": lambda number, batch: [batch, batch] if number == 2 else [batch],
}
LONG = 80  # samples, of which "workers" draw 20 before the first step


@pytest.mark.parametrize("left_out", LEFT_OUT)
@pytest.mark.parametrize("name", ["plain", "drop_last", "workers"])
@pytest.mark.parametrize("num_samples", [LONG, LONG - 1])
def test_steps_that_are_not_those_of_all_samples_are_told(name, left_out, num_samples):
    """Later steps were taken for those of other samples."""
    sampler = KINDS["mean"].sampler(num_samples)

    def run() -> None:
        for number, batch in enumerate(loader_of(sampler, name)):
            for part in LEFT_OUT[left_out](number, batch):
                step(sampler, part, 0)
        iter(sampler)

    told = r"only \d are left|were drawn, and \d+ had a step"
    with pytest.raises((ValueError, GraBWarning), match=told):  # warnings are errors
        run()


SIZES = [4, 12, 4, 4, 7, 12, 4, 1, 9, 4, 16]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_of_several_sizes_may_be_drawn_ahead(num_workers):
    class Batches:
        def __iter__(self):
            samples, sizes = iter(sampler), itertools.cycle(SIZES)
            while batch := list(itertools.islice(samples, next(sizes))):
                yield batch

    sampler, options = KINDS["mean"].sampler(LONG * 3), {"num_workers": num_workers}
    loader = DataLoader(range(LONG * 3), batch_sampler=Batches(), **options)
    for epoch in range(2):
        for batch in loader:
            step(sampler, batch, epoch)
        assert sampler.num_seen == LONG * 3


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("name", LOADERS)
def test_batches_may_have_several_steps(name, pieces):
    sampler = KINDS["mean"].sampler(N)
    # What drop_last leaves out is more than one of these steps has.
    told = contextlib.nullcontext()
    if name == "drop_last" and pieces > 1:
        told = pytest.warns(GraBWarning, match="22 samples .*and 20 had a step")
    with told:
        for epoch in range(3):
            for batch in loader_of(sampler, name):
                for part in batch.chunk(pieces):
                    step(sampler, part, epoch)
