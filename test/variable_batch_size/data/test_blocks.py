"""`BlockDataset` and `BlockShuffle`: streams that any number of replicas can go on."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info

import variable_batch_size as vbs

SIZES = [40, 24, 64, 8, 56, 0, 32, 48, 16, 80, 32]  # 400 samples
NUM_SAMPLES = sum(SIZES)
TRACE = [32, 64, 16, 8, 48]
WINDOW = 3


def dataset_of(sizes=SIZES, **options) -> vbs.BlockDataset:
    ends = np.cumsum(sizes).tolist()
    blocks = [range(end - size, end) for size, end in zip(sizes, ends)]
    return vbs.BlockDataset(blocks.__getitem__, sizes, **options)


def whole(order: vbs.BlockShuffle, epoch: int) -> list[int]:
    total = int(order.block_sizes.sum())
    return order.samples(epoch, total, np.arange(total)).tolist()


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(sum),
    st.integers(1, 50), st.integers(0, 3), st.booleans(),
)  # fmt: skip
def test_samples_come_once_in_a_window_of_whole_blocks(sizes, window, epoch, in_order):
    order = vbs.BlockShuffle(sizes, window, seed=1, in_order=in_order)
    samples = whole(order, epoch)
    assert sorted(samples) == list(range(sum(sizes)))
    backwards = order.samples(epoch, sum(sizes), np.arange(sum(sizes))[::-1])
    assert backwards.tolist() == samples[::-1]
    if 0 in sizes:  # an empty block takes a place in a window, which is not seen
        return
    block_of = np.repeat(np.arange(len(sizes)), sizes)
    visited = [block_of[sample] for sample in samples]
    while visited:
        blocks = set(itertools.islice(dict.fromkeys(visited), window))
        num_samples = sum(sizes[block] for block in blocks)
        assert set(visited[:num_samples]) == blocks
        visited = visited[num_samples:]


@pytest.mark.parametrize("in_order", [False, True])
def test_blocks_and_samples_are_shuffled_by_seed_and_epoch(in_order):
    orders, first = set(), sum(SIZES[:WINDOW])
    for seed, epoch in itertools.product((0, 1), repeat=2):
        order = whole(vbs.BlockShuffle(SIZES, WINDOW, seed, in_order=in_order), epoch)
        assert (sorted(order[:first]) == list(range(first))) == in_order
        orders.add(tuple(order))
    assert len(orders) == 4


def sampler_of(dataset, order, **options) -> vbs.CustomSampler:
    common = {"minibatch_size": 8, "on_end": "cycle", "verbose": False}
    return vbs.CustomSampler(dataset, TRACE, order=order, **common, **options)


class Run:
    """One replica's sampler and loader, over a dataset that it reads alone."""

    def __init__(self, dataset, rank=0, num_replicas=1, state=None, **options):
        self.dataset = dataset
        order = dataset.shuffled(WINDOW, seed=5)
        self.sampler = sampler_of(dataset, order, num_replicas=num_replicas, rank=rank)
        if state is not None:
            self.sampler.load_state_dict(state)
        options |= {"batch_sampler": self.sampler, "collate_fn": list}
        self.loader = DataLoader(dataset, **options)

    @staticmethod
    def of_stream(stream, **options) -> Run:
        dataset = vbs.BlockDataset.from_stream(stream, NUM_SAMPLES, 32)
        return Run(dataset, **options)

    def steps(self, epoch: int) -> list[list]:
        """Returns the samples of each step of an epoch that are this replica's."""
        self.sampler.set_epoch(epoch)
        minibatches, plan = iter(self.loader), self.sampler.plan
        numbers = plan.num_substeps(self.sampler.rank)[plan.start_step :]
        return [[s for _ in range(n) for s in next(minibatches)] for n in numbers]

    def state_at(self, epoch: int, step: int) -> dict:
        place = {"epoch": epoch, "step": step}
        order = self.sampler.order_digest(epoch)
        return {**self.sampler.state_dict(), **place, "order": order}


def flat(parts) -> list[int]:
    return sorted(itertools.chain(*parts))


def together(runs: list[Run], epoch: int) -> list[list]:
    return [flat(parts) for parts in zip(*(r.steps(epoch) for r in runs))]


def runs_of(num: int, state=None) -> list[Run]:
    """Returns those of so many replicas."""
    return [Run(dataset_of(), rank, num, state) for rank in range(num)]


def most_read(runs: list[Run]) -> int:
    return max(run.dataset.num_blocks_read for run in runs)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_any_number_of_replicas_reads_the_same_steps_and_every_block_once(num_replicas):
    runs = runs_of(num_replicas)
    for epoch in (0, 1):
        expected = together(runs_of(1), epoch)
        assert together(runs, epoch) == expected
        used = flat(expected)
        assert used == sorted(whole(runs[0].sampler.order, epoch)[: len(used)])
    assert most_read(runs) <= 2 * np.count_nonzero(SIZES)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("step", [0, 3, 5, 9])
def test_a_resumed_run_reads_no_more_than_a_window_of_what_was_seen(step, num_replicas):
    [before] = runs_of(1)
    expected = together([before], 1)
    runs = runs_of(num_replicas, before.state_at(1, step))
    for run in runs:
        next(iter(run.loader), None)
    assert most_read(runs) <= WINDOW
    assert together(runs, 1) == expected[step:]
    place = before.sampler.plan.start(step)
    block_of = np.repeat(np.arange(len(SIZES)), SIZES)
    left = set(block_of[whole(before.sampler.order, 1)[place:]])
    assert most_read(runs) <= len(left) + 2 * WINDOW


class Numbers:
    """A stream of numbers that can seek, and counts what is read and where from."""

    def __init__(self, end: int = 10**9) -> None:
        self.end, self.num_read, self.opened = end, 0, []

    def __call__(self, position: int):
        self.opened.append(position)
        for number in range(position, self.end):
            self.num_read += 1
            yield number


def sharded(first: int):
    """Returns a stream that gives each worker of a loader a part, as torch's page."""
    info = get_worker_info()
    step, own = (1, 0) if info is None else (info.num_workers, info.id)
    yield from range(first + own, NUM_SAMPLES, step)


@pytest.mark.parametrize("stream", [Numbers(), sharded])
def test_workers_of_a_loader_change_nothing(stream):
    """Nor does pickling, as for workers that are spawned, nor a stream's own parts."""
    run = Run.of_stream(stream)
    expected = run.steps(1)
    assert Run(pickle.loads(pickle.dumps(run.dataset))).steps(1) == expected
    assert Run(run.dataset, num_workers=2).steps(1) == expected


def test_a_stream_is_read_once_an_epoch_and_goes_on_within_a_window():
    stream = Numbers()
    run = Run.of_stream(stream)
    expected = run.steps(0)
    used = sum(map(len, expected))
    assert stream.opened == [0]
    assert used <= stream.num_read <= used + WINDOW * 32
    assert flat(expected[:1])[-1] < WINDOW * 32
    run.steps(1)
    assert stream.opened == [0, 0]
    for step in range(run.sampler.plan.num_steps):
        stream = Numbers()
        resumed = Run.of_stream(stream, state=run.state_at(0, step))
        assert resumed.steps(0) == expected[step:]
        place = run.sampler.schedule.plan(0, 1).start(step)
        # Looked at once from the beginning, to see that it can seek.
        begun = min(filter(None, stream.opened), default=0)
        assert place - WINDOW * 32 <= begun <= place
        assert stream.num_read <= NUM_SAMPLES - place + 2 * WINDOW * 32 + 32


def test_a_stream_that_begins_elsewhere_or_ends_too_early_is_noticed():
    run = Run.of_stream(lambda at: range(500))
    state = run.state_at(0, run.sampler.plan.num_steps - 1)
    again = Run.of_stream(lambda at: range(500), state=state)
    with pytest.raises(ValueError, match=r"begins with the samples of open_at\(0\)"):
        again.steps(0)
    run = Run.of_stream(Numbers(end=390))
    with pytest.raises(ValueError, match=r"block 12 has 6 samples, .* have 16"):
        [run.steps(epoch) for epoch in range(9)]
    # What cannot be compared may begin anywhere.
    dataset = vbs.BlockDataset.from_stream(
        lambda at: ((lambda n=n: n) for n in range(at, 64)), 64, 8
    )
    assert dataset[40]() == 40


def test_parquet_files_are_read_by_row_groups(tmp_path):
    """Of three files of 133 or 134 rows in row groups of 16."""
    pa, pq = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    paths = [tmp_path / f"part-{file}.parquet" for file in range(3)]
    for path, rows in zip(paths, np.array_split(np.arange(NUM_SAMPLES), 3)):
        table = pa.table({"id": rows, "text": [f"text {row}" for row in rows]})
        pq.write_table(table, path, row_group_size=16)
    dataset = vbs.BlockDataset.from_parquet(paths, columns=["text"])
    assert dataset.num_blocks_read == 0
    assert [*dataset] == [{"text": f"text {row}"} for row in range(NUM_SAMPLES)]
    assert dataset.num_blocks_read == 27  # three times nine
    everything = vbs.BlockDataset.from_parquet(str(paths[1]))
    assert everything[-1] == {"id": 266, "text": "text 266"}
    with pytest.raises(ValueError, match=r"No match for .*txt.* in id: int64"):
        vbs.BlockDataset.from_parquet(paths, columns=["txt"])[0]


def test_another_window_or_other_blocks_are_another_run():
    def sampler(sizes=SIZES, size=NUM_SAMPLES, **options):
        order = vbs.BlockShuffle(sizes, **{"window": 3, **options})
        return sampler_of(None, order, dataset_size=size)

    state = sampler().state_dict()
    sampler().load_state_dict(state)
    others = {"window": 4}, {"seed": 1}, {"in_order": True}, {"sizes": [NUM_SAMPLES]}
    for other in others:
        with pytest.raises(ValueError, match="order was 'BlockShuffle"):
            sampler(**other).load_state_dict(state)
    with pytest.raises(ValueError, match=r"=Block.* is of 400 samples, .* has 399"):
        sampler(size=399)


def test_orders_that_read_blocks_over_and_over_are_refused():
    dataset = dataset_of()
    for order in (None, vbs.IndexShuffle(seed=1)):
        for each in (dataset, vbs.SeededDataset(dataset, 1)):
            with pytest.raises(ValueError, match=r"10 blocks.*window=11 shuffles all"):
                sampler_of(each, order)
        sampler_of(dataset_of([NUM_SAMPLES, 0]), order)  # one block, which is kept
    with pytest.raises(ValueError, match=r"w=3, seed=5.* mixes 3 blocks, .* keeps 1"):
        sampler_of(dataset, vbs.BlockShuffle(SIZES, WINDOW, seed=5))
    # As the message says: all blocks at once, each of which is then read once.
    sampler_of(dataset, order := dataset.shuffled(window=11))
    assert sorted(dataset[i] for i in whole(order, 0)) == list(range(NUM_SAMPLES))
    assert dataset.num_blocks_read == 10
    for index in (NUM_SAMPLES, -NUM_SAMPLES - 1):
        with pytest.raises(IndexError):
            dataset[index]
    # Whoever has an order of blocks alone may bring it.
    sampler_of(dataset, lambda epoch: range(NUM_SAMPLES))
