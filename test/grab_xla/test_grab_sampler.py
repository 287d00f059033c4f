"""How `GraBSampler` is used, and which errors it raises when it is used wrongly."""

from __future__ import annotations

import contextlib
import enum
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.grab_xla import ordering
from support.grab_xla.ordering import KINDS
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from grab_xla import GraBSampler, GraBWarning, herding

N = 22


# Samples that know their index.
INDEXED = list(enumerate(ordering.gradients(0, N)))


LOADERS = {
    "batches": lambda ds, s: DataLoader(ds, batch_size=4, sampler=s),
    "drop_last": lambda ds, s: DataLoader(ds, batch_size=4, sampler=s, drop_last=True),
    "one by one": lambda ds, s: DataLoader(ds, sampler=s),
    "unbatched": lambda ds, s: DataLoader(ds, batch_size=None, sampler=s),
    "workers": lambda ds, s: DataLoader(ds, batch_size=4, sampler=s, num_workers=2),
    "persistent": lambda ds, s: DataLoader(
        ds, batch_size=4, sampler=s, num_workers=1, persistent_workers=True
    ),
    "unbatched workers": lambda ds, s: DataLoader(
        ds, batch_size=None, sampler=s, num_workers=1
    ),
    "batch_sampler": lambda ds, s: DataLoader(
        ds, batch_sampler=BatchSampler(s, 5, drop_last=False)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOADERS)
def test_every_kind_of_loader(kind):
    sampler = KINDS["mean"].sampler(N)
    loader, seen = LOADERS[kind](INDEXED, sampler), []
    for _ in range(3):
        seen.append([])
        for indices, rows in loader:
            indices = torch.as_tensor(indices).reshape(-1)
            sampler.step(ordering.as_dict(rows.reshape(-1, 13)), indices=indices)
            seen[-1] += indices.tolist()
    if kind == "drop_last":  # what it drops comes next time
        assert [len(set(epoch)) for epoch in seen] == [20] * 3
        for epoch, following in pairwise(seen):
            assert set(range(N)) - set(epoch) <= set(following)
    else:
        expected = KINDS["mean"].sampler(N)
        assert [ordering.run_epoch(expected, 0, N) for _ in seen] == seen


def test_an_abandoned_epoch_orders_what_was_seen():
    sampler = KINDS["mean"].sampler(N)
    order = list(sampler)
    rows = ordering.gradients(0, N)
    sampler.step(ordering.as_dict(rows[order[:6]]))
    signs = sampler._balancer.placements()
    front = [s for s, sign in zip(order, signs) if sign > 0]
    back = [s for s, sign in zip(order, signs) if sign < 0][::-1]
    with pytest.warns(GraBWarning, match="22 samples of epoch 0 were drawn, and 6 had"):
        assert list(sampler) == front + order[6:] + back
    assert sampler.epoch == 1


def test_functional_training_as_the_readme_of_grab_sampler_shows():
    """Only the import is different."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 5, generator=generator)
    y = (x.sum(1) > 0).long()
    dataset = TensorDataset(x, y)
    model, loss_fn = nn.Linear(5, 2), nn.CrossEntropyLoss()
    params = {k: v.detach() for k, v in model.named_parameters()}
    buffers = dict(model.named_buffers())
    sampler = GraBSampler(dataset, params)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)

    def compute_loss(params, buffers, inputs, targets):
        return loss_fn(functional_call(model, (params, buffers), (inputs,)), targets)

    compute = vmap(grad_and_value(compute_loss), in_dims=(None, None, 0, 0))
    losses = []
    for _ in range(4):
        for inputs, targets in loader:
            grads, loss = compute(params, buffers, inputs, targets)
            sampler.step(grads)
            params = {k: p - 0.5 * grads[k].mean(0) for k, p in params.items()}
        losses.append(float(loss.mean()))
    assert losses[-1] < losses[0]
    assert sampler.epoch == 3


def test_names_and_arguments_of_grab_sampler_are_taken():
    class BalanceType(enum.Enum):
        PAIR_BALANCE = "pair"

    class Projection(enum.Enum):
        NONE = "none"

    sections = []

    @contextlib.contextmanager
    def timer(name):
        sections.append(name)
        yield

    sampler = GraBSampler(
        range(N), {"w": torch.zeros(3)}, BalanceType.PAIR_BALANCE, "cpu", timer, True,
        random_first_epoch=False, normalize_grads=True, pi_eps=0.1, seed=1,
        random_projection=Projection.NONE, kron_order=2, prob_balance=False,
        prob_balance_c=30, dtype=torch.float64, record_herding=True,
        stale_mean_herding=False, cuda_herding=False, record_norm=True,
    )  # fmt: skip
    order = list(sampler)
    assert order == list(range(N))
    assert sampler.sorter.herding == -np.inf
    rows = torch.randn(N, 3, dtype=torch.float64)
    for index in order:
        sampler.step({"w": rows[index]}, False)
    unit = nn.functional.normalize(rows, dim=1)
    expected = herding(unit)
    assert sampler.sorter.herding == pytest.approx(float(expected.infinity))
    assert sampler.sorter.avg_grad_error == pytest.approx(float(expected.euclidean))
    assert sampler.sorter.grad_norms == pytest.approx([1.0] * N)
    assert sampler.scalars().keys() == {
        "herding", "avg_grad_error", "norm/mean", "norm/max",
    }  # fmt: skip
    following = list(sampler)
    assert sampler.orders_history == [order, following]
    assert sampler.sorter.herding == -np.inf
    assert {"sorter_step", "reset_epoch"} <= set(sections)
    assert len(sampler) == N


@pytest.mark.parametrize(("name", "is_stale"), [("norm", True), ("rr", False)])
def test_herding_is_around_the_mean_of_its_epoch_or_of_the_one_before(name, is_stale):
    options = {"record_herding": True, "record_norm": True}
    sampler = KINDS[name].sampler(N, stale_mean_herding=is_stale, **options)
    assert sampler.sorter.herding == -np.inf
    rows, orders = ordering.gradients(0, N), []
    for before in (torch.zeros(13).double(), rows.mean(0)):
        orders.append(ordering.run_epoch(sampler, 0, 5))
        expected = herding(rows, orders[-1], before if is_stale else None)
        assert sampler.sorter.herding == pytest.approx(float(expected.infinity))
        assert sampler.sorter.avg_grad_error == pytest.approx(float(expected.euclidean))
        assert len(sampler.sorter.grad_norms) == N
    assert orders[0] != orders[1]


def test_adaptive_mean_divides_by_what_it_is_given():
    second_moment = torch.rand(13, dtype=torch.float64) + 0.1
    plain, scaled = KINDS["mean"].sampler(N), KINDS["adamean"].sampler(N)
    list(plain), list(scaled)
    scaled.sorter.update_v(second_moment)
    for epoch in range(3):
        order = plain.order.tolist()
        assert scaled.order.tolist() == order
        rows = ordering.gradients(epoch, N)[order]
        scaled.step(ordering.as_dict(rows))
        plain.step(ordering.as_dict(rows / (second_moment.sqrt() + 1e-8)))
        list(plain), list(scaled)


def test_draws_depend_on_the_generator_alone():
    def orders(seed, disturb):
        torch.manual_seed(disturb)
        generator = torch.Generator().manual_seed(seed)
        options = {"prob_balance": True, "prob_balance_c": 2.0}
        sampler = KINDS["mean"].sampler(generator=generator, **options)
        return [ordering.run_epoch(sampler, epoch, 8) for epoch in range(3)]

    assert orders(1, 2) == orders(1, 3)
    assert orders(1, 2) != orders(4, 2)
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    orders(1, 2)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("tie", ["negative", "positive"])
def test_ties_go_where_they_are_told(tie):
    sampler = KINDS["mean"].sampler(8, random_first_epoch=False, tie=tie)
    list(sampler)
    sampler.step(ordering.as_dict(torch.zeros(8, 13)))
    forwards = list(range(8))
    assert list(sampler) == (forwards if tie == "positive" else forwards[::-1])


def test_one_epoch_of_each_kernel_order():
    x = torch.randn(12, 3)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    model, loss_fn = nn.Linear(3, 1), nn.functional.mse_loss
    model_options = {
        "model": model,
        "params": dict(model.named_parameters()),
        "buffers": {},
        "loss_fn": loss_fn,
    }
    options = {"dataset": dataset, "centered_feature_map": False, "largest_eig": True}
    fixed = GraBSampler(dataset, model_options["params"], "ntk-fixed",
                        **model_options, dataset=dataset, num_rounds=4)  # fmt: skip
    assert sorted(fixed) == list(range(12))
    assert list(fixed) == fixed.order.tolist()
    eigen = GraBSampler(dataset, model_options["params"], "ntk-eigen", **options)
    first = list(eigen)
    eigen.sorter.compute_order(**model_options)
    second = list(eigen)
    assert first != second
    assert list(eigen) == second  # until it is computed again
    once = GraBSampler(
        dataset, model_options["params"], "ntk-fixed-eigen", **model_options, **options
    )
    assert list(once) == second
    restored = GraBSampler(dataset, model_options["params"], "ntk-eigen", **options)
    restored.load_state_dict(eigen.state_dict())
    assert list(restored) == second
    for size in (6, 20):
        other = GraBSampler(
            range(size), model_options["params"], "ntk-eigen", **options
        )
        with pytest.raises(ValueError, match=rf"permutation of range\({size}\)"):
            other.sorter.compute_order(**model_options)
    for name in ("compute_order", "update_v"):
        with pytest.raises(AttributeError, match=f"NTKFixedBalance has no '{name}'"):
            getattr(fixed.sorter, name)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(24))


PARAMETERS = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}
GOOD = {"w": torch.zeros(4, 2, 3), "b": torch.zeros(4, 3)}


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ([GOOD["w"]], "must be a dict from"),
        ({"w": GOOD["w"]}, r"missing \['b'\]"),
        ({**GOOD, "c": GOOD["b"]}, r"unknown \['c'\]"),
        ({**GOOD, "w": torch.zeros(4, 3, 2)}, r"needs \(B, 2, 3\)"),
        ({**GOOD, "w": torch.zeros(2, 3)}, r"needs \(B, 2, 3\)"),
        ({**GOOD, "w": torch.zeros(5, 2, 3)}, "different numbers of samples"),
        ({k: v.expand(30, *v.shape[1:]) for k, v in {
            "w": GOOD["w"][:1], "b": GOOD["b"][:1]}.items()}, "only 22 are left"),
    ],
)  # fmt: skip
def test_gradients_that_cannot_be_are_refused(grads, message):
    sampler = GraBSampler(range(N), PARAMETERS)
    list(sampler)
    with pytest.raises((TypeError, ValueError), match=message):
        sampler.step(grads)
    assert sampler.num_seen == 0


def test_steps_out_of_turn_are_refused():
    sampler = GraBSampler(range(N), PARAMETERS)
    with pytest.raises(ValueError, match="before the first epoch"):
        sampler.step(GOOD)
    order = list(sampler)
    with pytest.raises(ValueError, match="next 4 samples of the order"):
        sampler.step(GOOD, indices=order[4:8])
    sampler.step(GOOD, indices=torch.tensor(order[:4]))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"balance_type": "median"}, ValueError, "allowed are mean, pair"),
        ({"prob_balanced": True}, TypeError, "not an option of balance_type='mean'"),
        ({"depth": 3}, TypeError, "not an option of balance_type='mean'"),
        ({"balance_type": "recursive", "depth": -1}, ValueError,
         "depth must be an integer >= 0"),
        ({"balance_type": "recursive-pair"}, TypeError, "needs batch_size="),
        ({"balance_type": "recursive-pair", "batch_size": 6}, ValueError, "power of"),
        ({"balance_type": "fixed"}, TypeError, "needs orders="),
        ({"balance_type": "fixed", "orders": [0] * N}, ValueError, "permutation"),
        ({"balance_type": "fixed", "orders": None}, ValueError, "permutation"),
        ({"balance_type": "ema", "ema_decay": 1.5}, ValueError, "> 0 and < 1"),
        ({"balance_type": "adaema", "betas": (0.9,)}, ValueError, "two numbers"),
        ({"balance_type": "pair", "num_workers": 0}, ValueError, "num_workers"),
        ({"tie": "even"}, ValueError, "'negative', 'positive'"),
        ({"tile_size": 0}, ValueError, "tile_size must be an integer >= 1"),
        ({"prob_balance": True, "prob_balance_c": 0}, ValueError, "prob_balance_c"),
        ({"scheme": "ring"}, ValueError, "'sharded', 'gather'"),
        ({"random_projection": "svd"}, ValueError, "projection must be one of .*'svd'"),
        ({"seed": 1.5}, TypeError, "seed must be an integer"),
        ({"generator": 3}, TypeError, "torch.Generator"),
        ({"num_replicas": 3, "rank": 1}, ValueError, "leave both out"),
        ({"trainable_params": [torch.zeros(3)]}, TypeError, "map names to tensors"),
        ({"trainable_params": {}}, ValueError, "empty"),
        ({"data_source": range(0)}, ValueError, "data_source is empty"),
        *(
            ({"data_source": source}, TypeError, "no length: an order needs a dataset")
            for source in (Stream(), N, iter(range(N)))
        ),
        ({"balance_type": "recursive-pair", "batch_size": 32}, ValueError,
         "whole blocks of 32 .* there are only"),
        ({"balance_type": "pair", "num_workers": 13}, ValueError,
         "whole blocks of 26 .* there are only"),
        *(
            ({"dtype": dtype}, ValueError, r"dtype must be one of torch\.float32")
            for dtype in (torch.bfloat16, torch.float16)
        ),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_are_refused(options, error, message):
    arguments = {"data_source": range(N), "trainable_params": PARAMETERS, **options}
    with pytest.raises(error, match=message):
        GraBSampler(**arguments)


def test_a_state_of_another_sampler_is_refused():
    state = KINDS["mean"].sampler().state_dict()
    for other, says in [
        (KINDS["pair"].sampler(), "balance_type was 'mean' and is 'pair'"),
        (KINDS["mean"].sampler(30), "num_samples was 48 and is 30"),
        (GraBSampler(range(48), PARAMETERS), "num_columns was 13 and is 9"),
        (KINDS["mean"].sampler(tie="positive"), "tie was 'negative' and is 'positive'"),
        (KINDS["mean"].sampler(normalize_grads=True), "normalize_grads was False and"),
        (KINDS["mean"].sampler(prob_balance=True), "prob_balance was None and is 30$"),
    ]:
        with pytest.raises(ValueError, match=f"another sampler: .*{says}"):
            other.load_state_dict(state)
    own = GraBSampler(range(48), PARAMETERS).state_dict()
    for parameters in ({"w": torch.zeros(9)}, dict(reversed(PARAMETERS.items()))):
        other = GraBSampler(range(48), parameters)
        with pytest.raises(ValueError, match="shapes and sequence"):
            other.load_state_dict(own)
    with pytest.raises(TypeError, match="the state must be a dict, got None"):
        KINDS["mean"].sampler().load_state_dict(None)
    with pytest.raises(ValueError, match="the state has format 1, which an earlier"):
        KINDS["mean"].sampler().load_state_dict({**state, "version": 1})
    del state["order"]
    with pytest.raises(ValueError, match="has no order"):
        KINDS["mean"].sampler().load_state_dict(state)
