"""`CustomSampler`: the order depends on seed and epoch, the minibatches on the plan."""

import functools
import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import NonCallableMagicMock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.variable_batch_size.wrapping import sampler_of as sampler
from support.xla_replica.replicas import row
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.data.account import Account
from variable_batch_size.data.schedule import Cursor
from xla_replica.device.loader import DeviceLoader, FreshBatches


def flat(minibatches) -> list[int]:
    return list(itertools.chain(*minibatches))


def test_the_order_is_pinned():
    """``torch.randperm`` of seed 42 + epoch: a change would break every earlier run."""
    one, two = (sampler(t, dataset_size=10, minibatch_size=2) for t in ([4, 4], 4))
    assert list(one) == list(two) == [[2, 6], [1, 8], [4, 5], [0, 9]]
    for each in (one, two):
        each.set_epoch(1)
    assert list(one) == []  # the trace has ended
    assert one  # a sampler without minibatches is true
    generator = torch.Generator().manual_seed(43)
    assert flat(two) == torch.randperm(10, generator=generator)[:8].tolist()


def test_order_providers():
    expected, random = list(range(255, -1, -1)), RandomSampler(range(256))
    once = NonCallableMagicMock(spec=["__iter__"])
    once.__iter__.return_value = iter(expected)
    for kind in (np.array, torch.tensor):
        assert flat(sampler(order=lambda epoch, kind=kind: kind(expected))) == expected
    assert flat(sampler(order=once)) == expected
    assert sorted(flat(sampler(order=random))) == list(range(256))


def test_what_is_dropped_is_logged_on_rank_0_and_an_empty_epoch_warns(caplog):
    with caplog.at_level(logging.INFO):
        for options in ({}, {"num_replicas": 2, "rank": 1}, {"verbose": False}):
            one = sampler(trace=[64, 96, 128], **{"verbose": True} | options)
            one.load_state_dict(one.state_dict())
            one.set_epoch(0)
    assert len(caplog.records) == 1
    assert "2 steps from step 0 on, 96 of 256 samples dropped" in caplog.text
    one = sampler(verbose=True)
    one.set_epoch(1)
    assert "epoch 1 is empty" in caplog.text
    assert one.num_epochs == 1


def through_a_stateful_loader(one, state) -> list[list[int]]:
    """Restores a pass as torchdata's loaders do, and returns what is left of it."""
    iteration = iter(one)
    iteration.load_state_dict(state)
    return list(iteration)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
def test_the_state_of_a_pass_is_that_of_the_steps_it_has_handed_out(num_replicas):
    """Of replica 0 on any number of replicas; a step that was begun is run again."""
    options = {"trace": [64, 96, 32, 64], "minibatch_size": 16, "on_end": "cycle"}
    whole = list(sampler(**options))
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
        assert sorted(left) == sorted(whole[one.plan.starts[first] :])


def test_the_state_of_another_replica_than_the_first_is_refused():
    """It may lack steps in which that was idle."""
    options = {"trace": [32, 128], "on_end": "cycle", "num_replicas": 2}
    state = iter(sampler(rank=1, **options)).state_dict()
    with pytest.raises(ValueError, match=r"of replica 1, .* load replica 0's"):
        through_a_stateful_loader(sampler(rank=1, **options), state)


def test_a_pass_does_not_move_a_sampler_whose_place_is_known():
    """The optimizer's state has the place; a loader's may agree, but not differ."""
    iteration = iter(sampler(on_end="cycle"))
    whole, states = zip(*((rows, iteration.state_dict()) for rows in iteration))
    for step, state in zip((1, 2, 3), (states[1], states[4], states[7])):
        placed = placed_at(step)
        left = through_a_stateful_loader(placed, state)
        assert left == [*whole[placed.plan.starts[step] :]]
    between, ended = sampler(on_end="cycle"), sampler(on_end="cycle")
    assert list(ended)  # a checkpoint then has the digest of that epoch's order
    between.load_state_dict({**ended.state_dict(), "epoch": 1, "step": 0})
    assert between.order_digest(1) is None
    assert len(through_a_stateful_loader(between, states[-1])) == 8  # the same place
    with pytest.raises(ValueError, match=r"step=1\), .*step=2\)"):
        through_a_stateful_loader(placed_at(2), states[1])
    later = sampler(on_end="cycle")
    later.set_epoch(1)
    with pytest.raises(ValueError, match=r"call sampler\.set_epoch\(0\) first"):
        through_a_stateful_loader(later, states[1])
    with pytest.raises(ValueError, match="of another run"):
        through_a_stateful_loader(sampler(seed=1), states[1])


def placed_at(step: int, **options):
    one = sampler(**{"on_end": "cycle", **options})
    one.load_state_dict({**one.state_dict(), "epoch": 0, "step": step})
    return one


class Loader(SimpleNamespace):
    """Iterates as torch's and torchdata's loaders do, and Accelerate's sampler."""

    def __iter__(self):
        loader = self
        return iter([*loader.batch_sampler])


WORKERS = {"num_workers": 2}
SKIPS = {"snapshot_every_n_steps": 3}


@pytest.mark.parametrize(("loader", "options", "message"), [
    (Loader, WORKERS | {"in_order": False}, "in_order=False: .* in another order"),
    (Loader, WORKERS | SKIPS, "snapshot_every_n_steps=3: .* skips"),
    (Loader, {"num_processes": 2}, "leave the loader out of acc"),
    (DataLoader, {"num_workers": 1, "in_order": False}, "pass in_order=True"),
    # A shorter one would be an IndexError, and of a longer one a part is never run.
    (DataLoader, {"dataset": range(300)}, r"has 300 samples, and .*'s 256"),
    (DataLoader, {"sampler": True}, "once more: pass batch_sampler="),
    # Without workers they change nothing, nor do others of one process.
    (Loader, SKIPS | {"num_workers": 0, "in_order": False}, None),
    (Loader, {"num_processes": 1}, None),
    (DataLoader, {"sampler": True, "batch_size": None}, None),
])  # fmt: skip
def test_loaders_that_change_what_is_dealt_are_refused(loader, options, message):
    one = vbs.CustomSampler(range(256), 64, verbose=False)
    name = "sampler" if options.get("sampler") else "batch_sampler"
    options = {"dataset": torch.arange(256), **options, name: one}
    if message is None:
        assert len(next(iter(loader(**options)))) == 32
        return
    with pytest.raises((TypeError, ValueError), match=message):
        next(iter(loader(**options)))


def test_what_only_has_a_loader_or_the_sampler_is_no_loader_of_it():
    one, whole = vbs.CustomSampler(range(256), 64, verbose=False), range(300)
    loader = DataLoader(whole)  # which does not iterate the sampler
    assert len(next(iter(one))) == 32
    del loader
    assert len(next(iter(DataLoader(whole, batch_sampler=sampler(trace=64))))) == 32

    def through(self):  # as in accelerate's, which is one and yields another's
        return next(iter(one))

    assert len(through(BatchSampler(range(9), 3, False))) == 32


def test_a_state_of_the_next_epoch_ends_the_iteration():
    def dealt(rank, num_replicas):
        common = {"trace": [16, 8], "dataset_size": 64, "minibatch_size": 4}
        return sampler(on_end="cycle", num_replicas=num_replicas, rank=rank, **common)

    one, waits, other = dealt(2, 3), dealt(2, 3), dealt(1, 2)
    kept, minibatches = Account(one.ledger, 0), iter(one)
    next(minibatches)
    one.ledger.move(1, 2, Cursor(1, 0))
    assert list(minibatches) == []
    for each in (one, waits, other):
        each.set_epoch(1)  # where others end epoch 0
    waits.ledger.move(1, 2, Cursor(0, waits.schedule.plan(0, 1).num_steps))
    assert list(one) == list(waits) == list(other)
    assert kept.cursor == (1, 0)


# --- redeal: a step that is run again gets its minibatches again --------------------

UNIT, NUM_SAMPLES = 4, 150


def redealt(trace=(8, 24, 4, 12), **options):
    options = {"minibatch_size": UNIT, "on_end": "cycle"} | options
    return sampler(trace, NUM_SAMPLES, **options)


def expected(one, redone=()) -> list[list[int]]:
    """Returns the minibatches of an epoch in the obvious way, with steps run again."""
    plan, minibatches = one.plan, []
    order = one.order_of(plan)(np.arange(NUM_SAMPLES))
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
    """Returns what a loop is handed; an account plays the optimizer's part in it."""
    account, redone, got = accounts_of(one), [*redone], []

    def advance() -> None:
        account.commit()
        if change and account.number == change[0] and not account.ended:
            with one.ledger.paused() as looked_at:
                one.change_from(1 + max(looked_at, account.global_step), change[1])
        if account.idle:
            advance()

    account.begin(one.epoch)
    if account.idle:
        advance()
    for batch in loader:
        got.append(torch.as_tensor(batch).tolist())
        account.check()
        if account.train() and account.number in redone:
            redone.remove(account.number)
            one.ledger.redeal()
        elif account.substep == account.now.num_substeps:
            advance()
    assert account.ended
    return got


def accounts_of(one) -> Account:
    """Returns the sampler's account, of an optimizer that may run steps again."""
    found = [*one.ledger.accounts.values()]
    if not found:
        found = [Account(one.ledger, 0)]
        found[0].strict = True
        one.kept = found[0]
    return found[0]


@given(st.data())
def test_a_loop_gets_again_the_steps_that_are_run_again_and_nothing_else(data):
    """With any plan, resumed or not, and loaders that read ahead by any number."""
    draw = data.draw
    unit, num_replicas = draw(st.sampled_from([1, UNIT])), draw(st.integers(1, 9))
    sizes = st.integers(1, 40 // unit).map(lambda n: n * unit)
    one = redealt(
        draw(st.lists(sizes, min_size=1, max_size=5)),
        pad_minibatches=unit == 1,
        num_replicas=num_replicas,
        rank=draw(st.integers(0, num_replicas - 1)),
        order=draw(st.sampled_from([None, vbs.IndexShuffle(3)])),
        on_end=draw(st.sampled_from(["hold", "cycle"])),
    )
    if draw(st.booleans()):
        one.ledger.pad()
    step = draw(st.integers(0, one.plan.num_steps - 1))
    one.load_state_dict(one.state_dict() | {"step": step})
    depth = draw(st.integers(0, 9))
    ahead = functools.partial(DeviceLoader, send=lambda rows: rows, prefetch=depth)
    loader = FreshBatches(one, one.ledger, ahead) if depth else one
    # All is drawn before a thread reads ahead: what is drawn may not depend on it.
    marks = draw(st.tuples(*2 * [st.lists(st.integers(0, 999), max_size=6)]))
    changes = [draw(st.tuples(st.integers(0, 999), sizes)), None]
    for epoch in (0, 1):
        one.set_epoch(epoch)
        steps = range(one.plan.start_step, one.plan.num_steps)
        redone = [steps[mark % len(steps)] for mark in marks[epoch]]
        change = changes[epoch] if one.schedule.on_end == "hold" else None
        change = change and (steps[change[0] % len(steps)], change[1])
        assert run(one, loader, redone, change) == expected(one, redone)
    assert list(one) == expected(one)  # another pass over an epoch is a whole one


def train(rank: int, is_followed: bool, options) -> None:
    """Asserts that two epochs are as `expected`, the first of them resumed."""
    replica = xla_replica.current()
    one = redealt(num_replicas=replica.num_replicas, rank=rank)
    one.load_state_dict(one.state_dict() | {"step": 3})
    batches = DataLoader(range(NUM_SAMPLES), batch_sampler=one, **options)
    batches = replica.loader(batches) if is_followed else batches
    last = one.plan.num_steps - 1
    for epoch, redone in enumerate([[3, 5, last - 1, last, last], [4, 4]]):
        one.set_epoch(epoch)
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
    one = redealt([4])
    loader = DataLoader(range(NUM_SAMPLES), batch_sampler=one, num_workers=1)
    with pytest.raises(ValueError, match="3 minibatches were read and not"):
        run(one, loader)
    followed = xla_replica.LocalReplica("cpu").loader(one)
    account = accounts_of(one)
    for ahead, message in (
        (iter(one), r"replica\.loader\(load"),
        (iter(followed), "nothing may read ahead"),
    ):
        assert [next(ahead), next(ahead)] == expected(one)[:2]
        with pytest.raises(ValueError, match=f"2 minibatches .*{message}"):
            account.check()
    assert list(one) == expected(one)
    with pytest.raises(ValueError, match="minibatches were read and not trained"):
        account.check()
    next(iter(one))  # looking at the data does no harm
    assert run(one, one) == expected(one)


def test_a_thread_may_begin_to_read_ahead_after_the_first_step():
    one = redealt()
    account, loop = Account(one.ledger, 0), iter(one)
    with ThreadPoolExecutor(1) as thread:
        for reads in (lambda: [next(loop)], lambda: thread.submit(list, loop).result()):
            for _ in reads():
                account.check()
                if account.train():
                    account.commit()
    assert account.ended


def test_a_sampler_says_what_it_is_and_where():
    sampler = vbs.CustomSampler(None, [32] * 4, dataset_size=64, minibatch_size=16)
    sampler.set_epoch(1)
    said = repr(sampler)
    assert said.startswith("CustomSampler(Trace(the list: 4 steps: 32, ")
    assert "'minibatch_size': 16, 'seed': 42, " in said
    assert said.endswith("rank 0 of 1, Cursor(epoch=1, step=0))")
