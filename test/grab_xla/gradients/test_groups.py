"""Fixed groups of samples are ordered by what a backward pass adds to ``.grad``."""

import contextlib
import copy
import gc
import weakref
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from support.grab_xla import ordering, training
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from grab_xla import BALANCE_TYPES, Balancer, GraBSampler, GraBWarning
from per_sample_grad import CoverageError

N, GROUP = 26, 4
X, Y = training.samples(N)


def batch_norm_model() -> nn.Module:
    """Statistics of the batch: no sample has a gradient of its own."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def losses_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return training.cross_entropies(model, X[batch], Y[batch])


def grouped(model: nn.Module, balance: str = "mean", **options) -> GraBSampler:
    options = {"fidelity": "group", "group_size": GROUP, "seed": 3} | options
    return training.sampler_of(model, N, balance, **options)


def groups_of(grab: GraBSampler) -> tuple[torch.Tensor, ...]:
    return torch.tensor(list(grab)).split(GROUP)


def step(grab: GraBSampler, model: nn.Module, batch: torch.Tensor, **options) -> None:
    training.balance(grab, model, losses_of, model, batch, **options)


def whole_of(model: nn.Module) -> torch.Tensor:
    grads = ((p, p.grad) for p in model.parameters())
    dense = (torch.zeros_like(p) if g is None else g.to_dense() for p, g in grads)
    return torch.cat([each.flatten() for each in dense])


def mean_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return losses_of(model, batch).mean()


def following(balance: str, rows: np.ndarray, centre: np.ndarray) -> list[int]:
    """Returns the oracle's next order of groups, whose mean gradients are rows."""
    numbers = list(range(len(rows)))
    if balance == "recursive-pair":
        return ordering.recursive_pair(numbers, rows, size=2)
    return ordering.KINDS[balance].oracle(numbers, rows, centre, None)


@pytest.mark.parametrize("how", ["recorded", "mean loss", "given"])
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("balance", ["mean", "pair", "recursive-pair"])
def test_groups_are_ordered_by_gradients_of_ordinary_passes(balance, accumulated, how):
    """Also ``.grad`` and statistics are those of an ordinary backward pass."""
    options = {"batch_size": 2} if balance == "recursive-pair" else {}
    model = batch_norm_model()
    params = dict(model.named_parameters())
    grab = grouped(model, balance, **options)
    optimizer = torch.optim.SGD(params.values(), 0.1, momentum=0.9)
    orders, expected, groups, centre = [], [], [], 0.0
    for _ in range(5):
        batches, rows = [], []
        for number, batch in enumerate(DataLoader(range(N), GROUP, sampler=grab)):
            batches.append(batch.tolist())
            twin = copy.deepcopy(model)  # whose statistics may change
            own = torch.autograd.grad(mean_loss(twin, batch), list(twin.parameters()))
            rows.append(torch.cat([grad.flatten() for grad in own]))
            same = whole_of(model) + rows[-1], twin.state_dict()
            if how == "given":
                mean_loss(model, batch).backward()
                grab.step(dict(zip(params, own)), batch=False, indices=batch)
            else:
                loss_of = mean_loss if how == "mean loss" else losses_of
                training.balance(grab, model, loss_of, model, batch, indices=batch)
            found = whole_of(model), model.state_dict()
            torch.testing.assert_close(found, same, rtol=0, atol=0)
            if (number + 1) % accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()
        orders.append(batches)
        expected.append(groups := [*(groups or batches)[:-1], orders[0][-1]])
        rows = torch.stack(rows[:-1]).numpy()
        groups = [groups[i] for i in [*following(balance, rows, centre), -1]]
        centre = rows.mean(0)
    assert orders == expected
    assert len(set(map(str, orders))) > 2


class Network(nn.Module):
    """Its middle is computed again within the pass, by a pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.table = nn.Embedding(N, 3, sparse=True)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.table(x))
        x = x + checkpoint(self.second, x, use_reentrant=True)
        return self.first(x).square().mean(1)


def row_of(grab: GraBSampler, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Returns what a step adds to the sum of all rows, which is the last one."""
    before = grab.state_dict()["engine"]["state"]["sums"][-1]
    training.balance(grab, model, model, batch)
    return grab.state_dict()["engine"]["state"]["sums"][-1] - before


def test_shared_sparse_and_unused_parameters_are_balanced():
    """Steps have more in ``.grad``, another parameter, another module, no gradient."""
    model = Network().double()
    grab = grouped(model)
    for turn, batch in enumerate(groups_of(grab)[:5]):
        if turn == 2:
            model.first.bias.grad = None
        elif turn == 3:
            model.first = nn.Linear(3, 3).double()
        elif turn == 4:
            model.second.weight = nn.Parameter(torch.ones(3, 3).double())
        before = whole_of(model)
        row = row_of(grab, model, batch)
        torch.testing.assert_close(row, whole_of(model) - before)


def test_hooks_are_there_during_the_pass_alone():
    """Also where the pass fails; and the sampler keeps no model."""
    model = Network().double()
    grab = grouped(model)
    counts, weight = [], model.first.weight
    weight.register_hook(lambda grad: counts.append(len(weight._backward_hooks)))
    first, second, *_ = groups_of(grab)
    assert row_of(grab, model, first).any()
    assert counts == [2]
    model(second).mean().backward()
    assert counts == [2, 1]

    def fails(model: nn.Module) -> torch.Tensor:
        (losses := model(second)).register_hook(lambda grad: 1 / 0)
        return losses

    with pytest.raises(ZeroDivisionError):
        training.balance(grab, model, fails, model)
    for parameter in model.parameters():
        assert len(parameter._backward_hooks or ()) == (parameter is weight)
    weight._backward_hooks.clear()
    twin, twin_grab = copy.deepcopy((model, grab))
    assert torch.equal(row_of(twin_grab, twin, second), row_of(grab, model, second))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class Keeping(Balancer):
    kept: ClassVar[list[torch.Tensor]] = []

    def init(self, num_columns, dtype, device):
        return {}

    def balance(self, state, rows, decide):
        self.kept.append(rows)
        return state, torch.ones(1, dtype=self.placement_dtype)


def test_rows_that_somebody_keeps_do_not_change(monkeypatch):
    monkeypatch.setitem(BALANCE_TYPES, "keeping", Keeping)
    model = nn.Linear(6, 3).double()
    grab, wanted = grouped(model, "keeping"), []
    for batch in groups_of(grab)[:3]:
        step(grab, model, batch)
        wanted.append(whole_of(model))
        model.zero_grad()
    assert torch.equal(torch.cat(Keeping.kept), torch.stack(wanted))
    assert len(set(map(str, wanted))) == 3


@pytest.mark.parametrize("stop", [2, 6, 7])
def test_a_state_goes_on_after_any_group(stop):

    def run(grab, batches) -> list[list[int]]:
        for batch in batches:
            step(grab, model, batch, indices=batch)
        return [batch.tolist() for batch in batches]

    model = batch_norm_model()
    grab, restored = grouped(model), grouped(model, seed=8)
    for _ in range(2):
        run(grab, groups_of(grab))
    batches = groups_of(grab)
    run(grab, batches[:stop])
    restored.load_state_dict(saved := copy.deepcopy(grab.state_dict()))
    rest = run(grab, batches[stop:])
    if rest:
        assert run(restored, groups_of(restored)) == rest
    for _ in range(2):
        assert run(restored, groups_of(restored)) == run(grab, groups_of(grab))
    for other in (grouped(model, group_size=2), grouped(model, "rr", group_size=2)):
        with pytest.raises(ValueError, match="group_size"):
            other.load_state_dict(saved)


def test_groups_can_be_reshuffled():
    model = batch_norm_model()
    grab = grouped(model, "rr", record_orders=True)
    first, second = list(grab), list(grab)
    assert first != second
    assert sorted(second) == list(range(N))
    cut = (sorted(ordering.batches(order, GROUP)) for order in (first, second))
    assert next(cut) == next(cut)
    assert grab.orders_history == [first, second]
    for batch in torch.tensor(second).split(GROUP)[:2]:
        step(grab, model, batch, indices=batch)
    restored = grouped(model, "rr")
    restored.load_state_dict(grab.state_dict())
    assert list(restored) == second[2 * GROUP :]


LSTM = nn.LSTM(6, 3, batch_first=True)  # one operation, in float32
UPDATE = SimpleNamespace(epoch=0, batch_size=16, minibatch_size=8)


@pytest.mark.parametrize(("call", "message"), [
    (lambda model, grab, order: grouped(model, group_size=27),
     "group_size must be an integer >= 1 and <= 26"),
    (lambda model, grab, order: grouped(model, fidelity="exact"),
     "group_size=4 needs fidelity='group', got"),
    (lambda model, grab, order: grouped(model, "swr"), "cannot be combined with"),
    (lambda model, grab, order: grouped(model, random_projection="jl"),
     "leave out fidelity='group' or random_projection='jl'"),
    (lambda model, grab, order: grab.record(nn.Sequential(nn.Linear(6, 4))),
     r"0\.weight.*of the same shapes"),
    (lambda model, grab, order: grab.record(model[0]), "not trainable parameters"),
    (lambda model, grab, order: step(grab, model, order[: GROUP + 1]),
     r"for a group of 4: .*batch_size= to the D"),
    (lambda model, grab, order: step(grab, model, order[:4], indices=order[1:5]),
     "indices are"),
    (lambda model, grab, order: (
        grab(0), step(grab, model, order[:4]), grab.after_update(UPDATE)
    ), "2 minibatches of 8 samples .* of 4 since .*a group is one"),
    (lambda *_: training.balance(
        training.sampler_of(LSTM), LSTM, lambda x: LSTM(x)[0].sum((1, 2)),
        X[:4, None].float(),
    ), r'(?s)LSTM.*fidelity="group"'),
])  # fmt: skip
def test_what_does_not_fit_groups_or_needs_them_is_named(call, message):
    model = batch_norm_model()
    order = torch.tensor(list(grab := grouped(model)))
    with pytest.raises((ValueError, CoverageError), match=message):
        call(model, grab, order)


@pytest.mark.parametrize("drop_last", [False, True])
def test_samples_that_are_always_left_out_are_reported(drop_last):
    model = batch_norm_model()
    grab = grouped(model)
    loader = DataLoader(range(N), GROUP, sampler=grab, drop_last=drop_last)
    told = pytest.warns(GraBWarning, match="left out 2 samples")
    with told if drop_last else contextlib.nullcontext() as caught:
        for _ in range(3):
            for batch in loader:
                step(grab, model, batch)
    assert not drop_last or len(caught) == 1
