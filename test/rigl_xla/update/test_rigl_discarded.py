"""Which backward passes count for growth: those that nobody has thrown away."""

from __future__ import annotations

import pytest
import torch
from support.rigl_xla import sparse
from torch import nn

ACTIVE = torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 0]])


class Row:
    """A Linear of one row whose first four weights are active, and its pruner."""

    def __init__(self, delta: int = 1, **options: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 1, bias=False)
        self.sgd = torch.optim.SGD(self.model.parameters(), 0.1)
        masks = {"initial_masks": {"weight": ACTIVE}, "dense_first": False}
        options = {"dense_allocation": 0.5, "alpha": 0.5, "T_end": 1000, **options}
        self.pruner = sparse.pruned(
            self.model, self.sgd, delta=delta, **masks, **options
        )

    def backward(self, *gradient: float) -> None:
        (self.model.weight * torch.tensor([gradient])).sum().backward()

    @property
    def active(self) -> list[int]:
        return self.pruner.masks["weight"][0].nonzero().flatten().tolist()


@pytest.mark.parametrize("skip_step", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clips", [False, True])
def test_a_layer_whose_masked_gradient_is_zero_grows(clips, set_to_none, skip_step):
    row, draw = Row(delta=2, skip_step=skip_step), torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.randn(32, 8, generator=draw)
        x[:, :4] = 0
        row.sgd.zero_grad(set_to_none=set_to_none)
        (row.model(x)[:, 0] - x[:, 5] - x[:, 6]).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(row.model.parameters(), 1.0)
        if row.pruner():
            row.sgd.step()
    assert {5, 6} <= {*row.active}


A, B = (0, 0, 0, 0, 9, 0, 0, 0), (1, 1, 1, 1, 0, 5, 0, 0)


@pytest.mark.parametrize(
    ("passes", "discards", "grown"),
    [((A, B), None, 4), ((B, A), None, 4), ((A, B), False, 5), ((B, A), False, 4),
     ((A, B), True, 5), ((B, A), True, 4)],
)  # fmt: skip
def test_passes_add_up_and_discarded_ones_do_not(passes, discards, grown):
    row = Row()
    for number, gradient in enumerate(passes):
        row.backward(*gradient)
        if discards is not None and number == 0:
            row.sgd.zero_grad(set_to_none=discards)
    assert not row.pruner()
    assert len(row.active) == 4
    assert max(row.active) == grown


@pytest.mark.parametrize(
    "replace",
    [
        lambda grad: grad.clamp(-1, 1),
        lambda grad: grad.clamp_(-1, 1),
        lambda grad: grad / 2,
        lambda grad: torch.tensor([[1.0, -2, 3, 1, 4, 0, 0, 0]]),  # a dense one
    ],
)
def test_a_discarded_batch_does_not_grow_if_the_next_gradient_is_replaced(replace):
    row = Row()
    row.backward(1, 1, 1, 1, 0, 0, 0, 1e6)
    row.sgd.zero_grad()
    row.backward(1, -2, 3, 1, 4, 0, 0, 0)
    row.model.weight.grad = replace(row.model.weight.grad)
    row.pruner()
    assert max(row.active) == 4
    assert not row.model.weight.grad[0, 5:].any()


@pytest.mark.parametrize("replace", [torch.clone, lambda grad: grad.clamp(-1, 1)])
def test_a_masked_gradient_of_zeros_may_be_replaced_between_passes(replace):
    row = Row()
    row.backward(*A)
    row.model.weight.grad = replace(row.model.weight.grad)
    row.backward(*B)
    row.pruner()
    assert max(row.active) == 4
