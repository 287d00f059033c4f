"""Steps are of the next samples of the order, and those that are not are told."""

import contextlib
import itertools
from typing import Any

import pytest
import torch
from support.grab_xla import ordering
from support.grab_xla.ordering import KINDS
from support.xla_replica.replicas import of_torch_alone
from torch.utils.data import BatchSampler, DataLoader

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
MORE_LOADERS: dict[str, dict[str, Any]] = {
    "single samples": {"batch_size": 1},
    "unbatched": {"batch_size": None},
    "unbatched, by a worker": {"batch_size": None, "num_workers": 1},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
    "several sizes": {"num_workers": 1},
}


class SeveralSizes(BatchSampler):
    def __iter__(self):
        samples, sizes = iter(self.sampler), itertools.cycle([4, 7, 1, 9])
        while batch := list(itertools.islice(samples, next(sizes))):
            yield batch


def loader_of(sampler: GraBSampler, kind: str = "plain") -> DataLoader | DeviceLoader:
    batches: dict[str, Any] = {"batch_size": BATCH, "sampler": sampler}
    if kind == "several sizes":
        batches = {"batch_sampler": SeveralSizes(sampler, BATCH, False)}
    options = batches | (LOADERS | MORE_LOADERS)[kind]
    loader = DataLoader(range(sampler.num_samples), **options)
    return DeviceLoader(loader, lambda x: x) if kind == "device loader" else loader


def ordered(kind: str = "plain") -> tuple[GraBSampler, Any]:
    return (sampler := KINDS["mean"].sampler(N)), loader_of(sampler, kind)


def step(sampler: GraBSampler, batch, epoch: int, **options) -> None:
    rows = ordering.gradients(epoch, sampler.num_samples)[batch]
    sampler.step(ordering.as_dict(rows), **options)


def train(kind: str, at=None, when=None, between=list) -> list[list[int]]:
    """Returns the samples of every epoch; calls ``between`` once in the first one."""
    (sampler, loader), seen = ordered(kind), []
    for epoch in range(3):
        seen.append([])
        for place, batch in enumerate(loader):
            if (epoch, place, when) == (0, at, "before"):
                between(loader)
            step(sampler, batch, epoch)
            if (epoch, place, when) == (0, at, "after"):
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
@pytest.mark.parametrize(("kind", "num_samples"), [
    ("mean", LONG), ("mean", LONG - 1), ("rr", LONG),
])  # fmt: skip
def test_steps_that_are_not_those_of_all_samples_are_told(
    name, left_out, kind, num_samples
):
    sampler = KINDS[kind].sampler(num_samples)

    def run() -> None:
        for number, batch in enumerate(loader_of(sampler, name)):
            for part in LEFT_OUT[left_out](number, batch):
                step(sampler, part, 0)
        iter(sampler)

    told = r"only \d are left|were drawn, and \d+ had a step"
    with pytest.raises((ValueError, GraBWarning), match=told):  # warnings are errors
        run()


@pytest.mark.parametrize("kind", [*LOADERS, *MORE_LOADERS])
@pytest.mark.parametrize(("pieces", "gives_indices"), [
    (1, True), (1, False), (2, False), (4, False),
])  # fmt: skip
def test_every_kind_of_loader_with_one_or_several_steps_for_a_batch(
    kind, pieces, gives_indices
):
    (sampler, loader), seen = ordered(kind), []
    told = contextlib.nullcontext()
    if kind == "drop_last" and pieces > 1:  # it leaves out more than a step has
        told = pytest.warns(GraBWarning, match="22 samples .*and 20 had a step")
    with told:
        for epoch in range(3):
            seen.append([])
            for batch in loader:
                for part in torch.as_tensor(batch).reshape(-1).chunk(pieces):
                    step(sampler, part, epoch, indices=part if gives_indices else None)
                    seen[-1] += part.tolist()
    if kind == "drop_last":  # what it drops comes next time
        assert [len(set(epoch)) for epoch in seen] == [20] * 3
        for epoch, following in itertools.pairwise(seen):
            assert set(range(N)) - set(epoch) <= set(following)
    else:
        expected = KINDS["mean"].sampler(N)
        assert [ordering.run_epoch(expected, e, N) for e in range(3)] == seen
