"""How `GraBSampler` is used, and which errors it raises when it is used wrongly."""

from __future__ import annotations

import contextlib
import enum
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.grab_xla import balancing, ordering
from support.grab_xla.ordering import KINDS
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from grab_xla import GraBSampler, GraBWarning, herding

N = 22


# Samples that know their index.
INDEXED = list(enumerate(ordering.gradients(0, N)))


LOADERS = {
    "batches": {"batch_size": 4},
    "drop_last": {"batch_size": 4, "drop_last": True},
    "one by one": {},
    "unbatched": {"batch_size": None},
    "workers": {"batch_size": 4, "num_workers": 2},
    "persistent": {"batch_size": 4, "num_workers": 1, "persistent_workers": True},
    "unbatched workers": {"batch_size": None, "num_workers": 1},
    "batch_sampler": {},
}


@pytest.mark.parametrize("kind", LOADERS)
def test_every_kind_of_loader(kind):
    sampler, seen = KINDS["mean"].sampler(N), []
    options = {"sampler": sampler, **LOADERS[kind]}
    if kind == "batch_sampler":
        options = {"batch_sampler": BatchSampler(sampler, 5, drop_last=False)}
    loader = DataLoader(INDEXED, **options)
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
    seen = balancing.mean(order[:6], rows[order].numpy(), 0.0)
    with pytest.warns(GraBWarning, match="22 samples of epoch 0 were drawn, and 6 had"):
        following = list(sampler)
    assert sampler.epoch == 1
    front = following.index(order[6])
    assert following == seen[:front] + order[6:] + seen[front:]


def test_names_and_arguments_of_grab_sampler_are_taken():
    sections, named = [], enum.Enum("Named", {"PAIR_BALANCE": "pair", "NONE": "none"})

    @contextlib.contextmanager
    def timer(name):
        sections.append(name)
        yield

    sampler = GraBSampler(
        range(N), {"w": torch.zeros(3)}, named.PAIR_BALANCE, "cpu", timer, True,
        random_first_epoch=False, normalize_grads=True, pi_eps=0.1, seed=1,
        random_projection=named.NONE, kron_order=2, prob_balance=False,
        prob_balance_c=30, dtype=torch.float64, record_herding=True,
        stale_mean_herding=False, cuda_herding=False, record_norm=True,
    )  # fmt: skip
    order = list(sampler)
    assert order == list(range(N))
    assert sampler.sorter.herding == -np.inf
    rows = torch.randn(N, 3, dtype=torch.float64)
    for index in order:
        sampler.step({"w": rows[index]}, False)
    expected = herding(nn.functional.normalize(rows, dim=1))
    assert sampler.sorter.herding == pytest.approx(float(expected.infinity))
    assert sampler.sorter.avg_grad_error == pytest.approx(float(expected.euclidean))
    assert sampler.sorter.grad_norms == pytest.approx([1.0] * N)
    told = {"herding", "avg_grad_error", "norm/mean", "norm/max"}
    assert sampler.scalars().keys() == told
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
    params = dict(model.named_parameters())
    given = {"model": model, "params": params, "buffers": {}, "loss_fn": loss_fn}

    def sampler(kind: str, size: int = 12, **options) -> GraBSampler:
        if "eigen" in kind:
            options |= {"centered_feature_map": False, "largest_eig": True}
        return GraBSampler(range(size), params, kind, dataset=dataset, **options)

    fixed = sampler("ntk-fixed", num_rounds=4, **given)
    assert sorted(fixed) == list(range(12))
    assert list(fixed) == fixed.order.tolist()
    eigen, restored = sampler("ntk-eigen"), sampler("ntk-eigen")
    first = list(eigen)
    eigen.sorter.compute_order(**given)
    second = list(eigen)
    assert first != second
    assert list(eigen) == second  # until it is computed again
    assert list(sampler("ntk-fixed-eigen", **given)) == second
    restored.load_state_dict(eigen.state_dict())
    assert list(restored) == second
    for size in (6, 20):
        with pytest.raises(ValueError, match=rf"permutation of range\({size}\)"):
            sampler("ntk-eigen", size).sorter.compute_order(**given)
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
        ({k: v.repeat(8, *[1] * v[0].dim()) for k, v in GOOD.items()},
         "only 22 are left"),
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
        ({"random_projection": "svd"}, ValueError, "one of .*'jl_sparse'.*'svd'"),
        ({"kron_order": 0}, ValueError, "kron_order must be an integer >= 1, got 0"),
        ({"pi_eps": 1.0, "random_projection": "jl"}, ValueError,
         "pi_eps must be a finite number > 0 and < 1"),
        ({"fidelity": "exact", "random_projection": "jl"}, ValueError,
         "leave out fidelity='exact' or random_projection='jl'"),
        ({"fidelity": "rough"}, ValueError, "fidelity must be one of 'exact', 'proj"),
        ({"fidelity": "group"}, TypeError, "needs group_size="),
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
    mean, columns = KINDS["mean"].sampler, GraBSampler(range(48), PARAMETERS)
    for other, says in [
        (KINDS["pair"].sampler(), "balance_type was 'mean' and is 'pair'"),
        (mean(30), "num_samples was 48 and is 30"),
        (columns, "num_columns was 13 and is 9"),
        (mean(tie="positive"), "tie was 'negative' and is 'positive'"),
        (mean(normalize_grads=True), "normalize_grads was False and"),
        (mean(prob_balance=True), "prob_balance was None and is 30$"),
    ]:
        with pytest.raises(ValueError, match=f"another sampler: .*{says}"):
            other.load_state_dict(state)
    for parameters in ({"w": torch.zeros(9)}, dict(reversed(PARAMETERS.items()))):
        other = GraBSampler(range(48), parameters)
        with pytest.raises(ValueError, match="shapes and sequence"):
            other.load_state_dict(columns.state_dict())
    for wrong, error, says in [
        (None, TypeError, "the state must be a dict, got None"),
        ({**state, "version": 1}, ValueError, "the state has format 1, which an earl"),
        ({k: v for k, v in state.items() if k != "order"}, ValueError, "has no order"),
    ]:
        with pytest.raises(error, match=says):
            mean().load_state_dict(wrong)
