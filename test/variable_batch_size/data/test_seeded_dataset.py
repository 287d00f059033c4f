"""`SeededDataset`: equal data for every number of replicas and loader workers."""

import pickle
import random

import numpy as np
import pytest
import torch
from support.xla_replica.replicas import SEVERAL_REPLICAS, of_torch_alone
from torch.utils.data import DataLoader, Dataset

import variable_batch_size as vbs
import xla_replica

NUM_SAMPLES = 12


class Noisy(Dataset):
    """A dataset whose samples are their number and a draw from three generators."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = [index, torch.rand(()).item(), random.random(), np.random.rand()]
        return torch.tensor(draws, dtype=torch.float64)

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        raise AssertionError("a batch has no seed")


def load(dataset=None, replica=None, **options) -> torch.Tensor:
    """Returns two epochs; replicas of one process share the dataset."""
    dataset = dataset or vbs.SeededDataset(Noisy(), 1)
    loader, loaded = DataLoader(dataset, batch_size=4, **options), []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        loaded.append(torch.cat(list(loader)))
        if replica:
            replica.barrier()  # like the last update
    return torch.stack(loaded)


def test_epochs_samples_and_seeds_differ_and_nothing_else():
    first = load()
    draws = torch.cat([first, load(vbs.SeededDataset(Noisy(), 2))])[..., 1:]
    assert len(set(draws.flatten().tolist())) == draws.numel()
    assert torch.equal(first, load())


@pytest.mark.parametrize(("context", "persistent"), [
    ("fork", False), ("fork", True),
    pytest.param("spawn", True, marks=of_torch_alone),
])  # fmt: skip
def test_workers_load_the_same(context, persistent):
    options = {"multiprocessing_context": context, "persistent_workers": persistent}
    options["num_workers"] = 1 + (context == "fork")  # others take seconds to begin
    assert torch.equal(load(**options), load())


def load_my_part(rank: int, dataset: vbs.SeededDataset) -> torch.Tensor:
    replica = xla_replica.current()
    mine = range(rank, NUM_SAMPLES, replica.num_replicas)
    return load(dataset, replica, sampler=mine)


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_replicas_load_the_same(backend):
    """Emulated replicas too, whose threads share the generators."""
    parts = backend.run(load_my_part, vbs.SeededDataset(Noisy(), 1))
    assert torch.equal(torch.stack(parts, dim=2).flatten(1, 2), load())


def test_the_states_of_the_generators_are_restored_even_after_an_error():
    def states() -> str:
        found = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()
        return repr(found)

    before = states()
    vbs.SeededDataset(Noisy(), 1)[3]
    assert states() == before
    with pytest.raises(KeyError):
        vbs.SeededDataset({1: 0}, 1)[0]
    assert states() == before


def test_a_sample_is_the_same_under_any_index_and_a_copy_has_its_own_epoch():
    dataset = vbs.SeededDataset(Noisy(), 1)
    last = dataset[len(dataset) - 1]
    assert torch.equal(dataset[-1][1:], last[1:])
    assert torch.equal(dataset[np.int64(NUM_SAMPLES - 1)], last)
    dataset.set_epoch(3)
    copy = pickle.loads(pickle.dumps(dataset))
    dataset.set_epoch(4)
    assert (copy.epoch, dataset.epoch) == (3, 4)
