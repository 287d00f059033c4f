"""`CustomSampler`: the order depends on seed and epoch, the minibatches on the plan."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.variable_batch_size.elastic import steps_of
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import variable_batch_size as vbs
from variable_batch_size.data.schedule import Cursor


def sampler(trace=(64, 96, 96), **options):
    defaults = {"dataset_size": 256, "num_replicas": 1, "rank": 0}
    return vbs.CustomSampler(trace=trace, **(defaults | options))


def flat(minibatches) -> list[int]:
    return list(itertools.chain(*minibatches))


def global_order(num_replicas: int, epoch: int, **options) -> list[list[int]]:
    """Returns every step's samples, sorted: they do not depend on who runs them."""
    ranks = range(num_replicas)
    options["num_replicas"] = num_replicas
    return steps_of([sampler(rank=rank, **options) for rank in ranks], epoch)


@given(
    st.lists(st.integers(1, 8).map(lambda n: 32 * n), min_size=1, max_size=9),
    st.integers(2, 9),
    st.integers(0, 3),
    st.sampled_from([(256, None), (1500, vbs.IndexShuffle(7))]),
)
def test_steps_do_not_depend_on_the_number_of_replicas(trace, replicas, epoch, data):
    size, order = data
    options = {"trace": trace, "on_end": "cycle", "dataset_size": size, "order": order}
    expected = global_order(1, epoch, **options)
    assert global_order(replicas, epoch, **options) == expected
    if order is not None:
        used = flat(expected)
        whole = order.samples(epoch, size, np.arange(size))
        assert sorted(used) == sorted(whole[: len(used)])


def test_the_order_is_pinned():
    """``torch.randperm`` of seed 42 + epoch: a change would break every earlier run."""
    one = sampler(trace=[4, 4], dataset_size=10, minibatch_size=2)
    assert list(one) == [[2, 6], [1, 8], [4, 5], [0, 9]]
    one.set_epoch(1)
    assert list(one) == []  # the trace has ended
    assert one  # a sampler without minibatches is true
    two = sampler(trace=4, dataset_size=10, minibatch_size=2)
    two.set_epoch(1)
    generator = torch.Generator().manual_seed(43)
    assert flat(two) == torch.randperm(10, generator=generator)[:8].tolist()


class Backwards:
    iterations = 0

    def __iter__(self):
        self.iterations += 1
        return iter(range(255, -1, -1))


def test_order_providers():
    expected = list(range(255, -1, -1))
    function = sampler(order=lambda epoch: np.roll(np.arange(256), epoch))
    function.set_epoch(0)
    assert flat(function) == list(range(256))
    iterated = Backwards()
    assert flat(sampler(order=iterated)) == expected
    assert iterated.iterations == 1
    assert flat(sampler(order=lambda epoch: torch.tensor(expected))) == expected
    assert sorted(flat(sampler(order=RandomSampler(range(256))))) == list(range(256))


@pytest.mark.parametrize(
    "order", [range(255), [0] * 256, range(1, 257), np.arange(256.0), []]
)
def test_an_order_must_be_a_permutation(order):
    with pytest.raises(ValueError, match=r"must be a permutation of range\(256\)"):
        list(sampler(order=order))


def test_what_is_dropped_is_logged_on_rank_0_and_an_empty_epoch_warns(caplog):
    with caplog.at_level(logging.INFO):
        for options in ({}, {"num_replicas": 2, "rank": 1}, {"verbose": False}):
            one = sampler(trace=[64, 96, 128], **options)
            one.load_state_dict(one.state_dict())
            one.set_epoch(0)
    assert len(caplog.records) == 1
    assert "2 steps from step 0 on, 96 of 256 samples dropped" in caplog.text
    one = sampler()
    one.set_epoch(1)
    assert "epoch 1 is empty" in caplog.text
    assert one.num_epochs == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"in_order": False}, r"in_order=False .* counted in another"),
        ({"snapshot_every_n_steps": 3}, r"snapshot_every_n_steps=3\) skips"),
    ],
)
def test_a_loader_that_changes_the_order_is_refused(option, message):
    def iterate(loader):  # as DataLoader and StatefulDataLoader do
        return next(iter(loader.batch_sampler))

    loader = SimpleNamespace(num_workers=2, batch_sampler=sampler(), **option)
    with pytest.raises(TypeError, match=message):
        iterate(loader)
    loader.num_workers = 0  # without workers they change nothing
    assert len(iterate(loader)) == 32
    if "in_order" in option:
        options = {"num_workers": 1, "in_order": False}
        loader = DataLoader(range(256), batch_sampler=sampler(), **options)
        with pytest.raises(TypeError, match="in_order=True, the default"):
            iter(loader)


def test_a_loader_of_another_dataset_is_refused():
    """A shorter one would be an IndexError, and of a longer one a part is never run."""
    one, whole = vbs.CustomSampler(range(256), 64, verbose=False), range(300)
    with pytest.raises(ValueError, match=r"has 300 samples, and .* given has 256"):
        next(iter(DataLoader(whole, batch_sampler=one)))
    loader = DataLoader(whole)  # one that does not iterate the sampler
    assert len(next(iter(one))) == 32
    del loader
    one = vbs.CustomSampler(dataset_size=256, trace=64, verbose=False)
    assert len(next(iter(DataLoader(whole, batch_sampler=one)))) == 32


def test_it_is_not_taken_for_a_sampler_of_samples():
    one = sampler()
    with pytest.raises(TypeError, match="pass it as batch_sampler="):
        next(iter(DataLoader(range(256), sampler=one)))
    wrapped = BatchSampler(range(9), 3, False)
    wrapped.inside = one  # as accelerate's, which is one and yields another's

    def through(self):
        return next(iter(self.inside))

    assert len(through(wrapped)) == 32
    with pytest.raises(TypeError, match="a DataLoader, whose length counts batches"):
        vbs.CustomSampler(DataLoader(range(256), batch_size=16), 32)
    loader = DataLoader(torch.arange(256), sampler=one, batch_size=None)
    assert next(iter(loader)).shape == (32,)  # which makes no batches


def through_a_stateful_loader(one, state) -> list[list[int]]:
    """Restores a pass as torchdata's loaders do, and returns what is left of it."""
    iteration = iter(one)
    iteration.load_state_dict(state)
    return list(iteration)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
def test_the_state_of_a_pass_is_that_of_the_steps_it_has_handed_out(num_replicas):
    """Of replica 0 on any number of replicas; a step that was begun is run again."""
    options = {"trace": [64, 96, 32, 64], "minibatch_size": 16, "on_end": "cycle"}
    whole = global_order(1, 0, **options)
    one = sampler(num_replicas=2, rank=0, **options)
    iteration = iter(one)
    for number, _ in enumerate(itertools.chain([None], iteration)):
        state = iteration.state_dict()
        first = state["step"]
        substeps = one.plan.num_substeps(0)
        assert substeps[:first].sum() <= number
        assert first == len(substeps) or number < substeps[: first + 1].sum()
        left: list[list[int]] = []
        for rank in range(num_replicas):
            other = sampler(num_replicas=num_replicas, rank=rank, **options)
            left += through_a_stateful_loader(other, state)
        assert sorted(flat(left)) == sorted(flat(whole[first:]))


def test_the_state_of_another_replica_than_the_first_loads_on_that_one_alone():
    options = {"trace": [32, 128], "on_end": "cycle", "num_replicas": 2}
    iteration = iter(sampler(rank=1, **options))  # idle, two minibatches, idle ...
    whole = list(sampler(rank=1, **options))
    assert len(whole) == 2
    for number in range(3):
        state = iteration.state_dict()
        first = 0 if number < 2 else 2
        other = sampler(rank=1, **options)
        assert through_a_stateful_loader(other, state) == whole[first:]
        # Beside updates, which it joins where it is idle, its place is one of several.
        if number < 2:
            joined = placed_at(1, rank=1, **options)
            assert through_a_stateful_loader(joined, state) == whole
        next(iteration, None)
    for rank, num_replicas in ((0, 2), (1, 3), (0, 1)):
        other = sampler(rank=rank, **{**options, "num_replicas": num_replicas})
        with pytest.raises(ValueError, match="saved by replica 1 of 2, and this is"):
            through_a_stateful_loader(other, state)


def test_a_pass_does_not_move_a_sampler_whose_place_is_known():
    """The optimizer's state has the place; a loader's may agree, but not differ."""
    iteration = iter(sampler(on_end="cycle"))
    states = [iteration.state_dict() for _ in iteration]
    for step, state in zip((1, 2, 3), (states[1], states[4], states[7])):
        placed = placed_at(step)
        left = through_a_stateful_loader(placed, state)
        assert left == list(sampler(on_end="cycle"))[placed.plan.starts[step] :]
    between = sampler(on_end="cycle")
    between.load_state_dict({**between.state_dict(), "epoch": 1, "step": 0})
    assert len(through_a_stateful_loader(between, states[-1])) == 8  # the same place
    with pytest.raises(ValueError, match=r"after step 1 of epoch 0, .* at step 2"):
        through_a_stateful_loader(placed_at(2), states[1])
    later = sampler(on_end="cycle")
    later.set_epoch(1)
    with pytest.raises(ValueError, match=r"call sampler\.set_epoch\(0\) before"):
        through_a_stateful_loader(later, states[1])
    with pytest.raises(ValueError, match="of another run"):
        through_a_stateful_loader(sampler(seed=1), states[1])


def placed_at(step: int, **options):
    one = sampler(**{"on_end": "cycle", **options})
    one.load_state_dict({**one.state_dict(), "epoch": 0, "step": step})
    return one


def test_a_state_between_two_epochs_tells_no_order_of_the_coming_one():
    """A checkpoint at the end of an epoch has the digest of that epoch's order."""
    one = sampler(on_end="cycle")
    list(one)
    state = one.state_dict() | {"epoch": 1, "step": 0}
    one.load_state_dict(state)
    assert one.order_digest(1) is None
    assert state["order"] is not None


class BatchSamplerShard:
    """As Accelerate's: every process takes its share of what a batch sampler yields."""

    def __init__(self, batch_sampler, num_processes: int) -> None:
        self.batch_sampler, self.num_processes = batch_sampler, num_processes

    def __iter__(self):
        yield from self.batch_sampler


def test_a_loader_that_accelerate_deals_once_more_is_refused():
    one = sampler(num_replicas=2)
    assert len(list(BatchSamplerShard(one, 1))) == len(one)
    with pytest.raises(TypeError, match="leave its loader out of acc"):
        list(BatchSamplerShard(one, 2))


def test_a_state_of_the_next_epoch_ends_the_iteration():
    def dealt(rank, num_replicas):
        common = {"trace": [16, 8], "dataset_size": 64, "minibatch_size": 4}
        return sampler(on_end="cycle", num_replicas=num_replicas, rank=rank, **common)

    one, other = dealt(2, 3), dealt(1, 2)
    minibatches = iter(one)
    next(minibatches)
    one.deal_to(1, 2, Cursor(1, 0))
    assert list(minibatches) == []
    other.set_epoch(1)
    one.set_epoch(1)
    assert list(one) == list(other)
    waits = dealt(2, 3)
    waits.set_epoch(1)  # where others end epoch 0
    waits.deal_to(1, 2, Cursor(0, waits.plan_of(0).num_steps))
    assert list(waits) == list(other)
