"""Fixed groups of samples are ordered by what a backward pass adds to ``.grad``."""

from __future__ import annotations

import copy
import dataclasses
import gc
import warnings
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.grab_xla import balancing, training
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import xla_replica
from grab_xla import BALANCE_TYPES, Balancer, GraBSampler, GraBWarning
from per_sample_grad import CoverageError

N, GROUP, EPOCHS = 26, 4, 5


def batch_norm_model() -> nn.Module:
    """Statistics of the batch: no sample has a gradient of its own."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


class Recurrent(nn.Module):
    """An LSTM over two steps of three numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.unflatten(1, (2, 3)))[0][:, -1])


def samples() -> training.Data:
    return training.samples(N)


def losses_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    x, y = samples()
    return training.cross_entropies(model, x[batch], y[batch])


def grouped(model: nn.Module, balance: str = "mean", **options) -> GraBSampler:
    options = {"fidelity": "group", "group_size": GROUP, "seed": 3} | options
    params = dict(model.named_parameters())
    return GraBSampler(range(N), params, balance, dtype=torch.float64, **options)


def step(grab: GraBSampler, model: nn.Module, batch: torch.Tensor, **options) -> None:
    """Has the gradient of a group's recorded losses balanced."""
    with grab.record(model):
        losses = losses_of(model, batch)
    grab.backward(losses, **options)


def mean_gradient(model: nn.Module, group: list[int]) -> np.ndarray:
    """Returns a group's gradient as a vector, and leaves the model as it is."""
    model = copy.deepcopy(model)
    loss = losses_of(model, torch.tensor(group)).mean()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads]).numpy()


def trained(
    balance: str,
    accumulated: int = 1,
    how: str = "recorded",
    make: Callable[[], nn.Module] = batch_norm_model,
    **options,
):
    """Returns every epoch's samples, the oracle's, and the model.

    The oracle orders groups by materialised mean gradients.
    """
    model = make()
    grab = grouped(model, balance, **options)
    loader = DataLoader(range(N), GROUP, sampler=grab)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    orders, expected = [], []
    groups, rest, centre = None, [], 0.0
    for _ in range(EPOCHS):
        batches, rows = [], []
        for number, batch in enumerate(loader):
            batches.append(batch.tolist())
            rows.append(mean_gradient(model, batches[-1]))
            if how == "given":
                before = {n: p.grad for n, p in model.named_parameters()}
                model.zero_grad()
                losses_of(model, batch).mean().backward()
                own = {n: p.grad.clone() for n, p in model.named_parameters()}
                grab.step(own, batch=False, indices=batch)
                for name, param in model.named_parameters():
                    param.grad = own[name] + (
                        0 if before[name] is None else before[name]
                    )
            else:
                with grab.record(model):
                    losses = losses_of(model, batch)
                loss = losses.mean() if how == "mean loss" else losses
                grab.backward(loss, indices=batch)
            if (number + 1) % accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()
        orders.append([i for each in batches for i in each])
        if groups is None:
            groups, rest = batches[:-1], batches[-1]
        expected.append([i for each in [*groups, rest] for i in each])
        numbers, rows = list(range(len(groups))), np.stack(rows[:-1])
        if balance == "mean":
            following = balancing.mean(numbers, rows, centre)
        elif balance == "recursive-pair":
            following = balancing.recursive_pair(numbers, rows, 2)
        else:
            following = balancing.pair(numbers, rows)
        centre = rows.mean(0)
        groups = [groups[i] for i in following]
    assert len({tuple(order) for order in orders}) > 2
    return orders, expected, model


@pytest.mark.parametrize("how", ["recorded", "mean loss", "given"])
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("balance", ["mean", "pair", "recursive-pair"])
def test_groups_are_ordered_by_their_materialised_gradients(balance, accumulated, how):
    options = {"batch_size": 2} if balance == "recursive-pair" else {}
    orders, expected, _ = trained(balance, accumulated, how, **options)
    assert orders == expected


def test_a_recurrent_model_is_told_of_groups_which_order_it():
    model = Recurrent()
    grab = GraBSampler(range(N), dict(model.named_parameters()), dtype=torch.float64)
    iter(grab)
    with pytest.raises(CoverageError, match=r'(?s)LSTM.*fidelity="group"'):
        step(grab, model, torch.arange(GROUP))
    orders, expected, _ = trained("mean", make=Recurrent)
    assert orders == expected


def test_grad_is_that_of_an_ordinary_backward_pass():
    orders, _, model = trained("mean", 3)
    plain = batch_norm_model()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    for order in orders:
        for number, batch in enumerate(torch.tensor(order).split(GROUP)):
            losses_of(plain, batch).mean().backward()
            if (number + 1) % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    for mine, theirs in zip(model.state_dict().values(), plain.state_dict().values()):
        assert torch.equal(mine, theirs)


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
    """Returns what a step adds to the sum of what is balanced."""
    before = grab.state_dict()["engine"]["state"]["sums"][-1]
    with grab.record(model):
        losses = model(batch)
    grab.backward(losses)
    return grab.state_dict()["engine"]["state"]["sums"][-1] - before


def test_shared_sparse_and_unused_parameters_are_balanced():
    """Steps have more in ``.grad``, another parameter, another module, no gradient."""
    model = Network().double()
    grab = grouped(model)
    for turn, batch in enumerate(torch.tensor(list(grab)).split(GROUP)[:5]):
        if turn == 2:
            model.first.bias.grad = None
        elif turn == 3:
            model.first = nn.Linear(3, 3).double()
        elif turn == 4:
            model.second.weight = nn.Parameter(torch.ones(3, 3).double())
        old = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        row, added = row_of(grab, model, batch), []
        for parameter, before in zip(model.parameters(), old):
            new = parameter.grad
            new = torch.zeros_like(parameter) if new is None else new
            added.append((new if before is None else new - before).to_dense().flatten())
        torch.testing.assert_close(row, torch.cat(added))


def test_hooks_are_there_during_the_pass_alone():
    """Also where the pass fails; and the sampler keeps no model."""
    model = Network().double()
    grab = grouped(model)
    counts, weight = [], model.first.weight
    weight.register_hook(lambda grad: counts.append(len(weight._backward_hooks)))
    first, second, *_ = torch.tensor(list(grab)).split(GROUP)
    assert row_of(grab, model, first).any()
    assert counts == [2]
    model(second).mean().backward()
    assert counts == [2, 1]
    with grab.record(model):
        losses = model(second)
    losses.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        grab.backward(losses)
    del losses
    for parameter in model.parameters():
        assert len(parameter._backward_hooks or ()) == (parameter is weight)
    weight._backward_hooks.clear()
    twin, twin_grab = copy.deepcopy((model, grab))
    assert torch.equal(row_of(twin_grab, twin, second), row_of(grab, model, second))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keeping(Balancer):
    """Keeps the rows themselves."""

    def init(self, num_columns, dtype, device):
        return {"rows": torch.zeros(1, num_columns, dtype=dtype, device=device)}

    def balance(self, state, rows, decide):
        return {"rows": rows}, torch.ones(1, dtype=self.placement_dtype)


def test_rows_that_somebody_keeps_do_not_change(monkeypatch):
    monkeypatch.setitem(BALANCE_TYPES, "keeping", Keeping)
    model = nn.Linear(6, 3).double()
    grab, kept, wanted = grouped(model, "keeping"), [], []
    for batch in torch.tensor(list(grab)).split(GROUP)[:3]:
        step(grab, model, batch)
        kept.append(grab._balancer.state["rows"])
        wanted.append(torch.cat([model.weight.grad.flatten(), model.bias.grad]))
        model.zero_grad()
    assert torch.equal(torch.cat(kept), torch.stack(wanted))
    assert len(torch.unique(torch.cat(kept), dim=0)) == 3


@pytest.mark.parametrize("stop", [2, 6, 7])
def test_a_state_goes_on_after_any_group(stop):
    """The seventh is the smaller one."""

    def run(grab, batches):
        for batch in batches:
            step(grab, model, torch.tensor(batch), indices=batch)
        return batches

    def batches_of(grab):
        return [each.tolist() for each in torch.tensor(list(grab)).split(GROUP)]

    model = batch_norm_model()
    grab = grouped(model)
    for _ in range(2):
        run(grab, batches_of(grab))
    batches = batches_of(grab)
    run(grab, batches[:stop])
    saved = copy.deepcopy(grab.state_dict())
    restored = grouped(model, seed=8)
    restored.load_state_dict(saved)
    run(grab, batches[stop:])
    if stop < len(batches):
        assert run(restored, batches_of(restored)) == batches[stop:]
    for _ in range(2):
        following = batches_of(grab)
        assert batches_of(restored) == following
        run(grab, following)
        run(restored, following)
    for other in (grouped(model, group_size=2), grouped(model, "rr", group_size=2)):
        with pytest.raises(ValueError, match="group_size"):
            other.load_state_dict(saved)


def test_groups_can_be_reshuffled():
    model = batch_norm_model()
    grab = grouped(model, "rr", record_orders=True)
    first, second = list(grab), list(grab)
    assert first != second
    assert sorted(second) == list(range(N))
    assert {tuple(first[i : i + GROUP]) for i in range(0, N, GROUP)} == {
        tuple(second[i : i + GROUP]) for i in range(0, N, GROUP)
    }
    assert grab.orders_history == [first, second]
    grab.count(2 * GROUP)
    with pytest.raises(ValueError, match="whole groups"):
        grab.count(3)
    restored = grouped(model, "rr")
    restored.load_state_dict(grab.state_dict())
    assert list(restored) == second[2 * GROUP :]


def test_what_does_not_fit_groups_is_named():
    model = batch_norm_model()
    with pytest.raises(TypeError, match="needs group_size="):
        grouped(model, group_size=None)
    with pytest.raises(
        ValueError, match="group_size must be an integer >= 1 and <= 26"
    ):
        grouped(model, group_size=27)
    with pytest.raises(ValueError, match="group_size=4 is an option of fidelity='gr"):
        grouped(model, fidelity="exact")
    with pytest.raises(ValueError, match="cannot be combined with"):
        grouped(model, "swr")
    grab = grouped(model)
    order = list(grab)
    batch = torch.tensor(order[:GROUP])
    with pytest.raises(RuntimeError, match=r"backward\(\) without record\(\)"):
        grab.backward(losses_of(model, batch))
    other = copy.deepcopy(model)
    other[0] = nn.Linear(6, 4)
    with pytest.raises(ValueError, match=r"0\.weight.*of the same shapes"):
        grab.record(other)
    for wrong in (model[0], model.requires_grad_(False)):
        with pytest.raises(ValueError, match=r"are not trainable parameters"):
            grab.record(wrong)
    model.requires_grad_(True)
    with pytest.raises(ValueError, match=r"group has 4 samples.*batch_size= to the D"):
        step(grab, model, torch.tensor(order[: GROUP + 1]))
    with pytest.raises(ValueError, match="indices are"):
        step(grab, model, batch, indices=order[1 : GROUP + 1])

    class Update:
        epoch, batch_size, minibatch_size = 0, 16, 8

    with pytest.raises(ValueError, match="minibatch_size=4"):
        grab.after_update(Update())


@pytest.mark.parametrize("drop_last", [False, True])
def test_samples_that_are_always_left_out_are_reported(drop_last):
    model = batch_norm_model()
    grab = grouped(model)
    loader = DataLoader(range(N), GROUP, sampler=grab, drop_last=drop_last)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GraBWarning)
        for _ in range(3):
            for batch in loader:
                step(grab, model, batch)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == drop_last
    assert not drop_last or "left out 2 samples" in messages[0]


@pytest.mark.filterwarnings("ignore::grab_xla.GraBWarning")
def test_a_group_that_is_not_finite_keeps_its_place():
    model = batch_norm_model()
    grab = grouped(model)
    for _ in range(3):
        order = list(grab)
        for number, batch in enumerate(torch.tensor(order).split(GROUP)):
            with grab.record(model):
                losses = losses_of(model, batch)
            grab.backward(losses * (float("nan") if number == 2 else 1.0))
            model.zero_grad()
        following = grab.state_dict()["engine"]["state"]["sums"]
        assert torch.isfinite(following).all()
    assert list(grab)[2 * GROUP : 3 * GROUP] == order[2 * GROUP : 3 * GROUP]


def elastic() -> tuple[list, list, list]:
    options = {"fidelity": "group", "group_size": GROUP, "seed": 3}
    return training.elastic(training.mlp(), samples(), EPOCHS, **options)


def dealt() -> tuple[list, list, list]:
    """Orders by gradients at the first weights: replicas do not sum gradients."""
    replica, model, (x, y) = xla_replica.current(), training.mlp(), samples()
    grab = grouped(model)
    orders, counts = [], []
    for _ in range(EPOCHS):
        with xla_replica.count(replica) as count:
            for batch in DataLoader(range(N), GROUP, sampler=grab):
                inputs, targets = replica.send((x[batch], y[batch]))
                with grab.record(model):
                    losses = training.cross_entropies(model, inputs, targets)
                grab.backward(losses, indices=batch)
                model.zero_grad()
            replica.sync()
        orders.append(grab.order.tolist())
        counts.append((count.compilations, count.transfers))
    return orders, [], counts


def run_both(rank: int) -> list[tuple[list, list, list]]:
    return [elastic(), dealt()]


@pytest.mark.filterwarnings("ignore::grab_xla.GraBWarning")
@pytest.mark.parametrize("backend", training.BACKENDS)
def test_replicas_order_groups_as_one_does(backend):
    for orders in training.assert_same_runs(run_both, backend=backend):
        assert len({tuple(order) for order in orders}) > 2
