"""What members compare beside the settings of their optimizer."""

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import variable_batch_size as vbs
from variable_batch_size.live.members import first_samples, layers


class Drawn(Dataset):
    """Samples that are drawn, from a generator of the dataset's own if it has one."""

    generator = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict:
        self.opened = True
        return {"x": torch.rand(2, generator=self.generator), "y": index, "z": "text"}


def test_first_samples_are_compared_as_far_as_they_are_the_same_twice():
    numbers = torch.arange(8.0)
    data = TensorDataset(numbers, numbers.int())
    assert first_samples(data) == first_samples(TensorDataset(*data.tensors))
    others = (
        TensorDataset(numbers + 1, numbers.int()), TensorDataset(numbers, numbers), None
    )  # fmt: skip
    assert first_samples(data) not in [first_samples(other) for other in others]
    assert first_samples(None) is first_samples(TensorDataset(numbers[:2])) is None
    drawn, own = Drawn(), Drawn()
    seeds = [first_samples(vbs.SeededDataset(drawn, seed)) for seed in (0, 0, 1)]
    assert seeds[0] == seeds[1] == first_samples(drawn) != seeds[2]
    assert not hasattr(drawn, "opened")  # as workers that are forked would have it
    own.generator = torch.Generator()
    assert first_samples(own) is None


def test_layers_are_counted_by_what_they_show():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Dropout(0.1), nn.ReLU())
    assert layers({"model": model}) == "1 x Dropout(p=0.1, inplace=False), 2 x ReLU()"
    model.add_module("sums", nn.Flatten())
    model.sums.extra_repr = lambda: "<function f at 0x7f00>"
    assert "1 x Flatten(<function f>)" in layers({"model": model})
