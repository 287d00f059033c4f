"""How `GraBSampler` is used, also midway and on replicas, and what it refuses."""

import contextlib
import enum
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.grab_xla import ordering
from support.grab_xla.ordering import KINDS
from support.xla_replica.replicas import on_xla
from torch import nn
from torch.utils.data import TensorDataset

import per_sample_grad as psg
import xla_replica
from grab_xla import GraBSampler, Measurements, RandomProjection, Signs, herding
from grab_xla.options import KINDS as PROJECTIONS
from tools.tpu import cases
from tools.tpu.program_checks import CASE_MARK, products, programs_by_case

N = 22
PARAMETERS = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}
LARGE = {"w": torch.zeros(100, 100), "b": torch.zeros(100), "s": torch.zeros(())}
GOOD = {"w": torch.zeros(4, 2, 3), "b": torch.zeros(4, 3)}  # gradients of PARAMETERS


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
    assert sampler.sorter.herding == -np.inf
    assert list(sampler) == list(range(N))
    rows = torch.randn(N, 3, dtype=torch.float64)
    for row in rows:
        sampler.step({"w": row}, False)
    expected = herding(nn.functional.normalize(rows, dim=1))
    assert sampler.sorter.herding == pytest.approx(float(expected.infinity))
    assert sampler.sorter.avg_grad_error == pytest.approx(float(expected.euclidean))
    assert sampler.sorter.grad_norms == pytest.approx([1.0] * N)
    told = {"herding", "avg_grad_error", "norm/mean", "norm/max"}
    assert sampler.scalars().keys() == told
    following = list(sampler)
    assert sampler.orders_history == [list(range(N)), following]
    assert {"sorter_step", "reset_epoch"} <= set(sections)
    assert len(sampler) == N


def test_options_of_a_family_are_one_value_or_arguments():
    signs = {"tie": "positive", "prob_balance": True, "prob_balance_c": 2.0}
    measured = {"record_norm": True, "record_herding": True}
    projecting = {"random_projection": "kron", "pi_eps": 0.9, "kron_order": 3}
    values = {"signs": Signs(**signs), "measurements": Measurements(**measured)}
    values |= {"projecting": RandomProjection(**projecting)}
    found = []
    for options in (values, signs | measured | projecting):
        with pytest.warns(UserWarning, match="reduces nothing"):
            sampler = KINDS["mean"].sampler(N, **options)
        orders = [ordering.run_epoch(sampler, epoch, 5) for epoch in range(3)]
        found.append((orders, sampler.scalars(), repr(sampler.projection)))
    assert found[0] == found[1]
    assert found[0][1].keys() == {"herding", "avg_grad_error", "norm/mean", "norm/max"}


def test_adaptive_mean_divides_by_what_is_good_of_what_it_is_given():
    second_moment = torch.rand(13, dtype=torch.float64) + 0.1
    bad = torch.tensor([np.nan, -1.0, np.inf, *second_moment[3:]], dtype=torch.float64)
    plain, scaled = KINDS["mean"].sampler(N), KINDS["adamean"].sampler(N)
    for epoch in range(4):
        order = list(plain)
        assert list(scaled) == order
        if epoch < 2:
            scaled.sorter.update_v(bad if epoch else second_moment)
        rows = ordering.gradients(epoch, N)[order]
        scaled.step(ordering.as_dict(rows))
        plain.step(ordering.as_dict(rows / (second_moment.sqrt() + 1e-8)))


def test_draws_depend_on_the_seed_alone():
    def orders(seed, disturb):
        torch.manual_seed(disturb)
        options = {"prob_balance": True, "prob_balance_c": 2.0}
        sampler = KINDS["mean"].sampler(seed=seed, **options)
        return [ordering.run_epoch(sampler, epoch, 8) for epoch in range(3)]

    assert orders(1, 2) == orders(1, 3) != orders(4, 2)
    state = torch.manual_seed(2).get_state()
    orders(1, 2)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(("tie", "step"), [("negative", -1), ("positive", 1)])
def test_ties_go_where_they_are_told(tie, step):
    order = list(sampler := KINDS["mean"].sampler(tie=tie))
    sampler.step(ordering.as_dict(torch.zeros(48, 13)))
    assert list(sampler) == order[::step]


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


@pytest.mark.parametrize(("grads", "message"), [
    ({"w": GOOD["w"]}, r"missing \['b'\]"),
    ({**GOOD, "c": GOOD["b"]}, r"unknown \['c'\]"),
    ({**GOOD, "w": torch.zeros(4, 3, 2)}, r"needs \(B, 2, 3\)"),
    ({**GOOD, "w": torch.zeros(2, 3)}, r"needs \(B, 2, 3\)"),
    ({**GOOD, "w": torch.zeros(5, 2, 3)}, "all the same B, such as 5"),
    ({k: v.repeat(8, *[1] * v[0].dim()) for k, v in GOOD.items()}, "only 22 are left"),
])  # fmt: skip
def test_gradients_that_cannot_be_are_refused(grads, message):
    sampler = GraBSampler(range(N), PARAMETERS)
    for indices in (None, sampler.order[:4]):
        with pytest.raises(ValueError, match=r"only 0 are left .* begins the n"):
            sampler.step(GOOD, indices=indices)
    list(sampler)
    with pytest.raises((TypeError, ValueError), match=message):
        sampler.step(grads)
    assert sampler.num_seen == 0


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"balance_type": "median"}, ValueError, "one of 'mean', 'pair'.* got 'median'"),
    ({"prob_balanced": True}, TypeError,
     "balance_type='mean' has the options none: .* 'prob_balanced'"),
    ({"balance_type": "recursive-pair"}, TypeError, "missing .* 'batch_size'"),
    ({"balance_type": "recursive-pair", "batch_size": 6}, ValueError, "power of"),
    ({"balance_type": "fixed"}, TypeError, "missing .* 'orders'"),
    ({"balance_type": "fixed", "orders": [0] * N}, ValueError, "permutation"),
    ({"balance_type": "adaema", "betas": (0.9,)}, ValueError, "two numbers"),
    ({"tie": "even"}, ValueError, "'negative', 'positive'"),
    ({"scheme": "ring"}, ValueError, "'sharded', 'gather'"),
    ({"random_projection": "svd"}, ValueError, "one of .*'jl_sparse'.*'svd'"),
    ({"pi_eps": 1.0}, ValueError, "pi_eps=1.0 and kron_order=2 need random_projection"),
    ({"kron_order": 3}, ValueError, "kron_order=3 need random_projection=, one of 'n"),
    ({"signs": Signs(), "tie": "positive"}, TypeError, "tie as fields of Signs"),
    ({"fidelity": "exact", "random_projection": "jl"}, ValueError,
     "leave out fidelity='exact' or random_projection='jl'"),
    ({"fidelity": "rough"}, ValueError, "fidelity must be one of 'exact', 'proj"),
    ({"fidelity": "group"}, TypeError, "group_size must be an integer"),
    ({"seed": 0.5}, TypeError, "seed must be an integer"),
    ({"trainable_params": [torch.zeros(3)]}, TypeError, "names to tensors"),
    ({"trainable_params": {}}, ValueError, "empty"),
    ({"data_source": range(0)}, ValueError, "data_source is empty"),
    *(({"data_source": source}, TypeError, r"has no len\(\)")
      for source in (N, iter(range(N)))),
    ({"balance_type": "recursive-pair", "batch_size": 32}, ValueError,
     "whole blocks of 32 .* there are only"),
    ({"balance_type": "pair", "num_workers": 13}, ValueError,
     "whole blocks of 26 .* there are only"),
    ({"dtype": torch.bfloat16}, ValueError, r"dtype must be one of torch\.float32"),
])  # fmt: skip
def test_arguments_that_cannot_be_are_refused(options, error, message):
    arguments = {"data_source": range(N), "trainable_params": PARAMETERS, **options}
    with pytest.raises(error, match=message):
        GraBSampler(**arguments)


def test_a_state_of_another_sampler_is_refused():
    state = KINDS["mean"].sampler().state_dict()
    mean, columns = KINDS["mean"].sampler, GraBSampler(range(48), PARAMETERS)
    reversed_names = GraBSampler(range(48), dict(reversed(PARAMETERS.items())))
    for other, loaded, says in [
        (KINDS["pair"].sampler(), state, "balance_type was 'mean' and is 'pair'"),
        (mean(30), state, "num_samples was 48 and is 30"),
        (columns, state, "shapes and sequence was"),
        (GraBSampler(range(48), {"w": torch.zeros(9)}), columns.state_dict(), "shapes"),
        (reversed_names, columns.state_dict(), "shapes and sequence was"),
        (mean(tie="positive"), state, "tie was 'negative' and is 'positive'"),
        (mean(normalize_grads=True), state, "normalize_grads was False and"),
        (mean(prob_balance=True), state, "prob_balance was False and is True"),
        (mean(), {**state, "version": 1}, "version was 1 and is 4"),
    ]:
        with pytest.raises(ValueError, match=f"another sampler: .*{says}"):
            other.load_state_dict(loaded)
    with pytest.raises(TypeError, match="the state must be a dict, got None"):
        mean().load_state_dict(None)
    with pytest.raises(KeyError, match="'order'"):
        mean().load_state_dict({k: v for k, v in state.items() if k != "order"})


@pytest.mark.parametrize("stale", [False, True])
def test_instruments_begin_anew_in_a_restored_sampler(stale):
    options = {"record_norm": True, "record_herding": True, "stale_mean_herding": stale}
    sampler, other = (KINDS["mean"].sampler(N, **options) for _ in range(2))
    ordering.take_steps(sampler, 0, list(sampler)[:8], N)
    state = sampler.state_dict()
    ordering.take_steps(sampler, 0, sampler.order[8:], N)
    for restored in (other, sampler):
        restored.load_state_dict(state)
        ordering.take_steps(restored, 0, list(restored), N)
        assert len(restored.sorter.grad_norms) == N - 8
        assert np.isfinite(restored.sorter.herding)


def ordered_otherwise(rank):
    with pytest.raises(ValueError, match="device=meta"):
        KINDS["mean"].sampler(N, device="meta")
    KINDS["mean"].sampler(N, seed=rank)


def test_replicas_that_cannot_agree_are_named():
    with pytest.raises(xla_replica.ReplicaError, match="about the checksum of"):
        xla_replica.launch(ordered_otherwise, (), 2, "cpu")


def left_in_the_middle(rank):
    """Runs one whole step, then half a step of the same epoch, then another epoch."""
    order = (sampler := KINDS["mean"].sampler(N))(0)
    grads = ordering.gradients(0, N)
    held = grads[order[4 * rank : 4 * rank + 4]].clone()
    sampler.step(ordering.as_dict(held))
    held.zero_()  # A loop may overwrite gradients after use.
    sampler.after_update(SimpleNamespace(epoch=0, batch_size=8, minibatch_size=4))
    sampler.step(ordering.as_dict(grads[order[8 + 4 * rank : 12 + 4 * rank]]))
    return sampler(1).tolist()


def test_an_epoch_left_in_the_middle_of_a_step_orders_what_was_updated():
    sampler = KINDS["mean"].sampler(N)
    order, rows = sampler(0).tolist(), ordering.gradients(0, N)
    sampler.step(ordering.as_dict(rows[order[:8]]))
    seen = ordering.mean(order[:8], rows[order].numpy(), 0.0)
    expected = sampler(1).tolist()
    front = expected.index(order[8])
    assert expected == seen[:front] + order[8:] + seen[front:]
    assert xla_replica.launch(left_in_the_middle, (), 2, "cpu") == [expected] * 2


@pytest.mark.parametrize(("options", "num_samples", "size"), [
    ({"random_projection": "jl"}, 1000, 5920),
    ({"random_projection": "jl_sparse"}, 1000, 5920),
    ({"random_projection": "kron"}, 1000, 77**2),
    ({"random_projection": "kron", "kron_order": 3}, 1000, 19**3),
    ({"random_projection": "kron", "kron_order": 5, "pi_eps": 0.13}, 416, 3125),
    ({"random_projection": "jl"}, 1, len(LARGE)),
])  # fmt: skip
def test_a_kind_is_a_projection_of_its_size(options, num_samples, size):
    sampler = GraBSampler(range(num_samples), LARGE, **options)
    assert repr(sampler.projection) == repr(psg.Projection(LARGE, size, seed=42))
    assert sampler.fidelity == options.get("fidelity", "projected")
    other = GraBSampler(range(num_samples), LARGE, seed=1, **options)
    with pytest.raises(ValueError, match="the state of another sampler"):
        other.load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("kind", sorted(set(PROJECTIONS) - {"none"}))
def test_a_projection_that_reduces_nothing_warns_with_the_numbers(kind):
    parameters = {"w": torch.zeros(50)}
    with pytest.warns(UserWarning, match=r"makes \d+ numbers of 50 .*1000") as caught:
        sampler = GraBSampler(range(1000), parameters, random_projection=kind)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert sampler.projection.size == 50


# --- the precision of programs, which are read: XLA:CPU computes the same with each ---


def of_tokens() -> nn.Module:
    """Returns a model whose weights are applied to several positions of a sample."""
    last = nn.Linear(5 * 9, cases.CLASSES)
    return nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Flatten(), last)


WORK = cases.Work(of_tokens, (5, 8), 6)
FORWARD_AND_BACK = ("30,9 = 30,8 x 8,9", "6,10 = 6,45 x 45,10", "6,45 = 6,10 x 10,45")
OF_WEIGHTS = ("8,9 = 8,30 x 30,9", "45,10 = 45,6 x 6,10")
RUNS = {
    "plain": lambda: cases.plain(WORK),
    **{name: partial(cases.ordered, "mean", name, WORK)
       for name in ("exact", "projected", "group")},
    "norms": lambda: cases.per_sample("norms", WORK),
}  # fmt: skip


def run_all(rank: int) -> None:
    for name in RUNS:
        xla_replica.current().sync()
        cases.write_mark(CASE_MARK + name)
        RUNS[name]()
        xla_replica.current().barrier()


@on_xla
@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_only_the_balance_is_above_the_precision_of_training(
    monkeypatch, tmp_path, num_replicas
):
    log = tmp_path / "log"
    monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(log))
    monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "hlo")
    xla_replica.launch(run_all, (), num_replicas, "xla")
    last_steps = programs_by_case(Path(f"{log}.0").read_text(), last_step=True)
    for name, programs in last_steps.items():
        counts = Counter(each for program in programs for each in products(program))
        expected = FORWARD_AND_BACK + OF_WEIGHTS * (name != "norms")
        by_training = Counter((shapes, "default") for shapes in expected)
        assert counts & by_training == by_training, name
        above = {precision for _, precision in counts - by_training}
        assert above == (set() if name == "plain" else {"highest"}), name
