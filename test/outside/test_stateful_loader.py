"""torchdata's StatefulDataLoader: what is left after a stop, on any replicas."""

import contextlib
import itertools
from pathlib import Path

import pytest
import torch
from support.outside import package
from support.variable_batch_size.elastic import Killed
from support.xla_replica.replicas import Backend

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.data.account import Account

stateful = package("torchdata.stateful_dataloader")

# torchdata's own, of a newer torch.
pytestmark = [pytest.mark.outside, pytest.mark.filterwarnings("ignore")]
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
TRACE = [32, 64, 16, 8, 48, 40]
NUM_SAMPLES = 400


def numbers(position: int = 0) -> range:
    """Samples that are their own numbers: a dataset, or a stream that can seek."""
    return range(position, NUM_SAMPLES)


def stream() -> vbs.BlockDataset:
    return vbs.BlockDataset.from_stream(numbers, NUM_SAMPLES, 16)


def loader_of(num_workers=0, rank=0, num_replicas=1, dataset=None, **options):
    dataset = numbers() if dataset is None else dataset
    is_stream = isinstance(dataset, vbs.BlockDataset)
    sampler = vbs.CustomSampler(
        dataset, TRACE, minibatch_size=8, on_end="cycle", verbose=False,
        num_replicas=num_replicas, rank=rank,
        order=dataset.shuffled(3) if is_stream else vbs.IndexShuffle(1),
    )  # fmt: skip
    options |= {"num_workers": num_workers, "collate_fn": list}
    return stateful.StatefulDataLoader(dataset, batch_sampler=sampler, **options)


def epoch_of(loader, epoch: int) -> list[list[int]]:
    loader.batch_sampler.set_epoch(epoch)
    return list(loader)


@WORKERS
@pytest.mark.parametrize("dataset", [numbers, stream])
def test_a_loader_that_is_restored_hands_out_exactly_what_is_left(num_workers, dataset):
    """Without an optimizer: from its own state, after every minibatch of an epoch."""
    expected = epoch_of(loader_of(dataset=dataset()), 1)
    options = {"persistent_workers": num_workers > 0}
    loader = loader_of(num_workers, dataset=dataset(), **options)
    assert epoch_of(loader, 0)
    loader.batch_sampler.set_epoch(1)
    starts = loader.batch_sampler.plan.starts
    for number, minibatch in enumerate(loader, start=1):
        assert minibatch == expected[number - 1]
        if num_workers and number % 5:
            continue  # workers take a while to start
        other = loader_of(num_workers, dataset=dataset())
        other.load_state_dict(loader.state_dict())
        place = starts[starts <= number].max()
        assert epoch_of(other, 1) == expected[place:]
        if dataset is stream and not num_workers:  # no more than a window of what was
            assert other.dataset.num_blocks_read <= (NUM_SAMPLES - 8 * place) / 16 + 6
        assert epoch_of(other, 2) == epoch_of(loader_of(dataset=dataset()), 2)


@WORKERS
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_the_first_replicas_state_loads_on_another_number(num_workers, num_replicas):
    expected = epoch_of(loader_of(), 0)
    loaders = [loader_of(num_workers, rank, 2) for rank in range(2)]
    plan = loaders[0].batch_sampler.plan
    passes = [iter(loader) for loader in loaders]
    for rank, minibatches in enumerate(passes):
        # Four steps; replica 1 is idle in the last of them.
        for _ in range(sum(plan.num_substeps(rank)[:4])):
            next(minibatches)
    state = loaders[0].state_dict()
    left, expected = [], expected[plan.starts[4] :]
    for rank in range(num_replicas):
        other = loader_of(num_workers, rank, num_replicas)
        other.load_state_dict(state)
        left += epoch_of(other, 0)
    found, expected = (sorted(itertools.chain(*rows)) for rows in (left, expected))
    assert found == expected
    wrong = loader_of(num_workers, 1, 3)
    wrong.load_state_dict(loaders[1].state_dict())
    with pytest.raises(ValueError, match=r"of replica 1, .* load replica 0's"):
        next(iter(wrong))


@WORKERS
def test_a_state_has_a_step_that_is_run_again_when_it_is_done(num_workers):
    expected = epoch_of(loader_of(), 0)
    loader = loader_of(num_workers)
    sampler, step, redone = loader.batch_sampler, 0, {1, 4}
    account = Account(sampler.ledger, 0)  # an optimizer's
    starts = sampler.plan.starts
    for _ in xla_replica.LocalReplica("cpu").loader(loader):
        account.check()
        if not account.train():
            continue
        if step in redone:
            redone.remove(step)
            sampler.ledger.redeal()
            if num_workers:
                continue
        else:
            account.commit()
            step += 1
        other = loader_of(num_workers)
        other.load_state_dict(loader.state_dict())
        assert epoch_of(other, 0) == expected[starts[step] :]
    assert step == sampler.plan.num_steps


def test_what_would_skip_minibatches_is_refused():
    loader = loader_of(2, snapshot_every_n_steps=3)
    with pytest.raises(TypeError, match="snapshot_every_n_steps=1, the default"):
        iter(loader)
    del loader
    with pytest.raises(TypeError, match="in_order=True, the default"):
        iter(loader_of(2, in_order=False))


def train(rank, folder: Path, num_workers: int, updates: int, keeps_loader, dataset):
    """Trains until so many updates are made in all; returns samples and the weight."""
    loader = loader_of(num_workers, rank, xla_replica.current().num_replicas, dataset())
    sampler = loader.batch_sampler
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.ones_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=8)
    parts = {"loader": loader} if keeps_loader else {}
    checkpointer = vbs.Checkpointer(folder, optimizer, model=model, **parts)
    checkpointer.load()
    seen: list[tuple[int, list[int]]] = []

    def after_update(update: vbs.Update) -> None:
        seen.extend((update.step, rows) for rows in own)
        own.clear()
        if update.step + 1 == updates:
            checkpointer.save()
            raise Killed

    own: list[list[int]] = []  # of the step under way
    optimizer.attach(after_update)
    optimizer.attach(checkpointer)
    with contextlib.suppress(Killed):
        for epoch in range(sampler.epoch, 9):
            sampler.set_epoch(epoch)
            optimizer.set_epoch(epoch)
            for minibatch in loader:
                own.append(minibatch)
                x = torch.tensor(minibatch, dtype=torch.float64)[:, None] % 8
                (model(x) / 8).mean().backward()
                optimizer.step()
    return seen, model.weight.detach().clone()


def by_step(outcomes) -> dict[int, list[int]]:
    """Returns the samples of the steps from the fifth on, sorted."""
    steps: dict[int, list[int]] = {}
    for step, minibatch in itertools.chain(*(seen for seen, _ in outcomes)):
        if step >= 5:
            steps[step] = sorted(steps.get(step, []) + minibatch)
    return steps


@pytest.mark.parametrize(("num_workers", "keeps", "dataset"), [
    (0, True, numbers), (2, True, stream), (2, False, numbers),
])  # fmt: skip
def test_stopped_runs_go_on_with_other_replicas(tmp_path, num_workers, keeps, dataset):
    """With an elastic optimizer, whose state has the place; a loader's may be saved."""
    whole = [train(0, tmp_path / "whole", num_workers, 11, False, dataset)]
    train(0, tmp_path / "cut", num_workers, 5, keeps, dataset)
    arguments = tmp_path / "cut", num_workers, 11, keeps, dataset
    after = Backend("cpu", 3).run(train, *arguments)
    assert by_step(after) == by_step(whole)
    assert all(torch.allclose(w, whole[0][1], rtol=1e-12) for _, w in after)
