"""`CustomSampler.redeal`: a step that is run again gets its minibatches again."""

from __future__ import annotations

import functools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.xla_replica.replicas import row
from torch.utils.data import DataLoader

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.data.schedule import Position
from xla_replica.device.loader import DeviceLoader, FreshBatches

UNIT, NUM_SAMPLES = 4, 150


def sampler_of(trace=(8, 24, 4, 12), **options):
    defaults = {"dataset_size": NUM_SAMPLES, "num_replicas": 1, "rank": 0}
    defaults |= {"minibatch_size": UNIT, "on_end": "cycle", "verbose": False}
    return vbs.CustomSampler(trace=trace, **(defaults | options))


def expected(one, redone=()) -> list[list[int]]:
    """Returns the minibatches of an epoch in the obvious way, with steps run again."""
    plan, minibatches = one.plan, []
    generator = torch.Generator().manual_seed(42 + one.epoch)
    order = torch.randperm(NUM_SAMPLES, generator=generator).numpy()
    if one.order is not None:
        order = one.order.samples(one.epoch, NUM_SAMPLES, np.arange(NUM_SAMPLES))
    for step, size in enumerate(plan.batch_sizes.tolist()):
        samples, order = order[:size], order[size:]
        parts = [samples[at : at + UNIT] for at in range(0, size, UNIT)]
        dealt, firsts = parts[one.rank :: one.num_replicas], parts[:: one.num_replicas]
        if plan.padded and len(dealt) < len(firsts):
            dealt.append(parts[-1])
        runs = 0 if step < plan.start_step else 1 + redone.count(step)
        minibatches += runs * [np.resize(part, UNIT).tolist() for part in dealt]
    return minibatches


def run(one, loader, redone=(), change=None) -> list[list[int]]:
    """Returns what a loop is handed; plays the optimizer's part in it."""
    position, redone, got = Position(one.plan, one.rank), [*redone], []

    def advance() -> None:
        position.advance()
        one.commit(one.epoch, position.step)
        if change and position.step == change[0] and not position.ended:
            with one.dealing_paused() as looked_at:
                present = position.plan.first_step + position.step
                one.change_from(1 + max(looked_at, present), change[1])
            position.replan(one.replanned(position.plan))
        if position.idle:
            advance()

    if position.idle:
        advance()
    for batch in loader:
        got.append(torch.as_tensor(batch).tolist())
        one.newest_pass.count_step()
        if position.count_minibatch() and position.step in redone:
            redone.remove(position.step)
            position.rollback()
            one.redeal(one.epoch, position.step)
        elif position.substep == position.num_substeps:
            advance()
    assert position.ended
    return got


@given(st.data())
def test_a_loop_gets_again_the_steps_that_are_run_again_and_nothing_else(data):
    """With any plan, resumed or not, and loaders that read ahead by any number."""
    draw = data.draw
    unit, num_replicas = draw(st.sampled_from([1, UNIT])), draw(st.integers(1, 4))
    sizes = st.integers(1, 40 // unit).map(lambda n: n * unit)
    one = sampler_of(
        draw(st.lists(sizes, min_size=1, max_size=5)),
        pad_minibatches=unit == 1,
        num_replicas=num_replicas,
        rank=draw(st.integers(0, num_replicas - 1)),
        order=draw(st.sampled_from([None, vbs.IndexShuffle(3)])),
        on_end=draw(st.sampled_from(["hold", "cycle"])),
    )
    if draw(st.booleans()):
        one.pad_steps()
    step = draw(st.integers(0, one.plan.num_steps - 1))
    one.load_state_dict(one.state_dict() | {"step": step})
    depth = draw(st.integers(0, 9))
    ahead = functools.partial(DeviceLoader, send=lambda rows: rows, prefetch=depth)
    loader = FreshBatches(one, one, ahead) if depth else one
    for epoch in (0, 1):
        one.set_epoch(epoch)
        steps = st.integers(one.plan.start_step, one.plan.num_steps - 1)
        redone = draw(st.lists(steps, max_size=6))
        is_held = epoch == 0 and one.schedule.on_end == "hold"
        change = draw(st.tuples(steps, sizes)) if is_held else None
        assert run(one, loader, redone, change) == expected(one, redone)
    assert list(one) == expected(one)  # another pass over an epoch is a whole one


def train(rank: int, is_followed: bool, options) -> None:
    """Asserts that two epochs are as `expected`, the first of them resumed."""
    replica = xla_replica.current()
    one = sampler_of(num_replicas=replica.num_replicas, rank=rank)
    one.load_state_dict(one.state_dict() | {"step": 3})
    loader = DataLoader(range(NUM_SAMPLES), batch_sampler=one, **options)
    batches = replica.loader(loader) if is_followed else loader
    for epoch in (0, 1):
        one.set_epoch(epoch)
        last = one.plan.num_steps - 1
        redone = [4, 4] if epoch else [3, 5, last - 1, last, last]
        assert len(batches) == len(expected(one))
        assert run(one, batches, redone) == expected(one, redone)


def test_torchs_loader():
    train(0, False, {})
    workers = {"num_workers": 2, "prefetch_factor": 3}
    for options in ({}, workers, workers | {"persistent_workers": True}):
        train(0, True, options)


@pytest.mark.parametrize("backend", [row("xla", 2)])
def test_torchs_loader_on_devices(backend):
    backend.run(train, True, {})


def test_a_loader_that_reads_ahead_is_refused_unless_it_is_followed():
    one = sampler_of([4])
    loader = DataLoader(range(NUM_SAMPLES), batch_sampler=one, num_workers=1)
    with pytest.raises(ValueError, match=r"for minibatch 1, .* has read 3"):
        run(one, loader)
    ahead = iter(one)
    assert [next(ahead), next(ahead)] == expected(one)[:2]
    with pytest.raises(ValueError, match=r"1, .* has read 2.* replica\.loader\(load"):
        one.newest_pass.count_step()
    ahead = iter(xla_replica.LocalReplica("cpu").loader(one))
    assert [next(ahead), next(ahead)] == expected(one)[:2]
    with pytest.raises(ValueError, match=r"1, .* has read 2.* nothing may read ahead"):
        one.newest_pass.count_step()
    assert list(one) == expected(one)
    with pytest.raises(ValueError, match=r"1, .* has read"):
        one.newest_pass.count_step()
    next(iter(one))  # looking at the data does no harm
    assert run(one, one) == expected(one)
    one.newest_pass.count_step()  # the pass has ended


def test_a_redeal_leaves_iterations_of_other_epochs_and_copies_alone():
    one, earlier = sampler_of(), []
    for minibatch in one:
        earlier.append(minibatch)
        one.set_epoch(1)
        one.redeal(1, 2)
    assert earlier == expected(sampler_of())
    assert list(pickle.loads(pickle.dumps(one))) == list(one) == expected(one)
