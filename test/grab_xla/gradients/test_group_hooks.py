"""Tests of the hooks that take a group's gradient and are removed after the pass."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from grab_xla import BALANCE_TYPES, Balancer, GraBSampler

N, GROUP = 12, 4
F64 = torch.float64


class Network(nn.Module):
    """Its middle is computed again within the pass, by a pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.table = nn.Embedding(N, 3, sparse=True)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.table(x))
        x = x + checkpoint(self.second, x, use_reentrant=True)
        return self.first(x).square().mean(1)


def recorded(model: nn.Module, balance: str = "mean", **options) -> GraBSampler:
    options = {"fidelity": "group", "group_size": GROUP} | options
    parameters = dict(model.named_parameters())
    return GraBSampler(range(N), parameters, balance, dtype=F64, **options)


def taken(grab: GraBSampler, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Returns what a step adds to the sum of what is balanced."""

    def total() -> torch.Tensor:
        return grab.state_dict()["engine"]["state"]["sums"][-1]

    before = total()
    with grab.record(model):
        losses = model(batch)
    grab.backward(losses)
    return total() - before


def test_rows_are_what_a_pass_adds():
    """The second step has more in ``.grad``, and a parameter that nothing comes to."""
    model = Network().double()
    grab = recorded(model)
    for turn, batch in enumerate(torch.tensor(list(grab)).split(GROUP)):
        if turn == 2:
            model.first.bias.grad = None
        before = [
            None if p.grad is None else p.grad.clone() for p in model.parameters()
        ]
        row = taken(grab, model, batch)
        added = []
        for parameter, old in zip(model.parameters(), before):
            new = (
                torch.zeros_like(parameter)
                if parameter.grad is None
                else parameter.grad
            )
            added.append((new if old is None else new - old).to_dense().flatten())
        torch.testing.assert_close(row, torch.cat(added))


def test_hooks_are_there_during_the_pass_alone():
    """Other passes, copies and files of the model do not know of them."""
    model = Network().double()
    grab = recorded(model)
    counts = []
    weight = model.first.weight
    weight.register_hook(lambda grad: counts.append(len(weight._backward_hooks)))
    first, second, _ = torch.tensor(list(grab)).split(GROUP)
    assert taken(grab, model, first).any()
    assert counts == [2]
    model(second).mean().backward()
    assert counts == [2, 1]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(Network()))):
        assert not any(p._backward_hooks for p in twin.parameters())
    with grab.record(model):
        losses = model(second)
    losses.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        grab.backward(losses)
    assert all(len(p._backward_hooks) == (p is weight) for p in grab_hooked(model))
    assert taken(grab, model, second).any()
    gone = weakref.ref(grab)
    del grab
    gc.collect()
    assert gone() is None


def grab_hooked(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p._backward_hooks is not None]


def test_a_sampler_does_not_keep_the_model_and_copies_of_both_go_on():
    model = Network().double()
    grab = recorded(model)
    first, second, _ = torch.tensor(list(grab)).split(GROUP)
    taken(grab, model, first)
    twin, twin_grab = copy.deepcopy((model, grab))
    assert torch.equal(taken(twin_grab, twin, second), taken(grab, model, second))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("change", ["module", "parameter", "hooks", "dtype"])
def test_what_changes_between_steps_is_found_anew(change):
    model = Network() if change == "dtype" else Network().double()
    grab = recorded(model)
    batches = torch.tensor(list(grab)).split(GROUP)
    taken(grab, model, batches[0])
    model.zero_grad()
    if change == "module":
        model.first = nn.Linear(3, 3).double()
    elif change == "parameter":
        model.first.weight = nn.Parameter(torch.ones(3, 3, dtype=F64))
    elif change == "hooks":
        model.first.weight._backward_hooks = None
    else:
        model.double()
    row = taken(grab, model, batches[1])
    wanted = [
        torch.zeros(p.numel()) if p.grad is None else p.grad.to_dense().flatten()
        for p in model.parameters()
    ]
    torch.testing.assert_close(row, torch.cat(wanted).double())


def test_another_model_is_refused():
    model, other = Network(), Network()
    grab = recorded(model)
    batch = torch.tensor(list(grab)[:GROUP])
    with grab.record(model):
        losses = other(batch)
    with pytest.raises(RuntimeError, match="do not depend on the sampler's parameters"):
        grab.backward(losses)
    other.first = nn.Linear(3, 4)
    with pytest.raises(ValueError, match=r"first\.weight.*of the same shapes"):
        grab.record(other)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keeping(Balancer):
    """Keeps the rows themselves, or a view of them."""

    view: bool = False

    def init(self, num_columns, dtype, device):
        return {"rows": torch.zeros(1, num_columns, dtype=dtype, device=device)}

    def begin_epoch(self, state):
        return state

    def balance(self, state, rows, decide):
        placements = torch.ones(1, dtype=self.placement_dtype)
        return {"rows": rows[:1].view(1, -1) if self.view else rows}, placements


@pytest.mark.parametrize("view", [False, True])
def test_rows_that_somebody_keeps_do_not_change(monkeypatch, view):
    monkeypatch.setitem(BALANCE_TYPES, "keeping", Keeping)
    model = nn.Linear(3, 2, dtype=F64)
    grab = recorded(model, "keeping", view=view)
    kept = []
    for batch in torch.tensor(list(grab)).split(GROUP):
        with grab.record(model):
            losses = model(torch.eye(N, 3, dtype=F64)[batch] + 1).square().sum(1)
        grab.backward(losses)
        kept.append(grab._balancer.state["rows"])
        wanted = torch.cat([model.weight.grad.flatten(), model.bias.grad])
        assert torch.equal(kept[-1][0], wanted)
        model.zero_grad()
    assert len({tuple(rows[0].tolist()) for rows in kept}) == 3
