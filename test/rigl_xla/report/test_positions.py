"""`costs_of` counts the operations of a forward pass that torch counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.flop_counter import FlopCounterMode

from rigl_xla import LayerCost, costs_of, inference_flops, inference_macs, size_in_bytes

CONVOLUTIONS = {
    "strided": nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "grouped": nn.Conv2d(4, 6, 3, groups=2),
    "depthwise": nn.Conv1d(4, 4, 5, groups=4),
    "transposed": nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1),
    "transposed grouped": nn.ConvTranspose2d(4, 6, (2, 3), groups=2),
    "linear": nn.Linear(9, 5),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_multiplications_are_those_that_torch_counts(kind):
    layer = CONVOLUTIONS[kind]
    sides = 1 if isinstance(layer, nn.Conv1d) else 2
    x = torch.randn(5, 4, *[9] * sides)
    with FlopCounterMode(display=False) as counter:
        output = layer(x)
    [cost] = costs_of(layer, x).values()
    assert 5 * 2 * cost.macs() == counter.get_total_flops()
    assert 5 * cost.num_outputs == output.numel()
    assert cost.num_biases == layer.bias.numel()
    costs = {"layer": cost}
    assert 5 * inference_flops(costs) == counter.get_total_flops() + output.numel()
    stored = layer.weight.numel() + layer.bias.numel()
    assert size_in_bytes(costs) == 4 * stored


class Tied(nn.Module):
    """A model whose head is an embedding's weight, with one layer in two places."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.never = nn.Linear(5, 5)
        self.two.weight = self.one.weight
        self.head.weight = self.words.weight

    def forward(self, words, *, deep=True):
        x = self.one(self.words(words))
        return self.head(self.two(x) if deep else x)


def test_a_shared_weight_costs_what_all_its_places_do():
    costs = costs_of(Tied(), torch.zeros(3, 7, dtype=torch.long))
    assert costs == {
        "one.weight": LayerCost((8, 8), 14),
        "words.weight": LayerCost((12, 8), 7),  # looking words up is free
        "never.weight": LayerCost((5, 5), 0),
    }
    model = Tied()
    costs = costs_of(model, words=torch.zeros(3, 7, dtype=torch.long), deep=False)
    assert costs["one.weight"] == LayerCost((8, 8), 7)
    assert not any(module._forward_hooks for module in model.modules())


class Attends(nn.Module):
    def __init__(self, by_name, **sizes):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True, **sizes)
        self.by_name = by_name

    def forward(self, x, memory):
        if self.by_name:
            return self.inner(value=memory, query=x, key=memory)[0]
        return self.inner(x, memory, memory)[0]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("size", [8, 6])
def test_queries_and_what_they_attend_to_are_counted_each(by_name, size):
    """Products of queries, keys and values are left out of torch's count."""
    model = Attends(by_name, kdim=size, vdim=size).eval()
    x, memory = torch.randn(3, 5, 8), torch.randn(3, 7, size)
    costs = costs_of(model, x, memory)
    with FlopCounterMode(display=False) as counter:
        model(x, memory)
    products = 2 * 2 * 3 * 5 * 7 * 8
    expected = (counter.get_total_flops() - products) / 3 / 2
    assert inference_macs(costs) == pytest.approx(expected)
    assert costs["inner.out_proj.weight"].positions == 5
    if size != 8:
        assert costs["inner.q_proj_weight"].positions == 5
        assert costs["inner.k_proj_weight"].positions == 7
        assert costs["inner.v_proj_weight"].positions == 7


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(4, 3, bidirectional=True)

    def forward(self, x):
        lengths = [6, 3]
        packed = pack_sequence([x[i, :n] for i, n in enumerate(lengths)])
        return self.inner(input=packed)[0].data


def test_packed_sequences_are_as_long_as_they_are():
    costs = costs_of(Recurrent(), torch.randn(2, 6, 4))
    assert {cost.positions for cost in costs.values()} == {4.5}
    assert len(costs) == 4


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        raise RuntimeError("no")


def test_a_model_that_fails_is_left_as_it_was():
    model = Fails()
    with pytest.raises(RuntimeError, match="no"):
        costs_of(model, torch.zeros(1, 2))
    assert model.training
    assert not model.inner._forward_hooks
    assert torch.backends.mha.get_fastpath_enabled()


def test_samples_must_be_counted():
    with pytest.raises(ValueError, match="the first tensor of it counts samples"):
        costs_of(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="the first tensor of it counts samples"):
        costs_of(nn.Linear(2, 2), torch.ones(0, 2))
    with pytest.raises(TypeError, match=r"model must be a torch module, got 3 \(int"):
        costs_of(3, torch.ones(1, 2))
