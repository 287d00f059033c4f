"""Every rule keeps the same promises.

A new one is one row of support/variable_batch_size/rules.py.
"""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.variable_batch_size import rules
from support.variable_batch_size.rules import LR, REF, ROWS, Training, train
from support.variable_batch_size.wrapping import make, sampler_of
from support.xla_replica.replicas import (
    FEW_BACKENDS,
    SLOW_XLA_BACKENDS,
    TPU_LIKE,
    Backend,
    backends,
)
from torch.optim import AdamW

import variable_batch_size as vbs
from variable_batch_size.rules.rule import rule_named, with_options

EPOCHS = 2  # in each of which every step of the trace comes once
NAMES = list(ROWS)


def train_all(rank: int) -> dict[str, dict[str, object]]:
    return {name: train(rank, name, EPOCHS) for name in ROWS}


@pytest.fixture(scope="module", params=[*FEW_BACKENDS, TPU_LIKE])
def outcomes(request):
    """Returns every rule's results by rank; one launch for all."""
    return request.param.run(train_all, timeout=150)


def test_every_registered_rule_has_a_row():
    assert {row.rule for row in ROWS.values()} >= vbs.RULES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_learning_rates_are_those_of_a_run_by_hand(outcomes, name):
    """It holds for any number of replicas, some idle, some of them from the start."""
    expected = rules.by_hand(ROWS[name], EPOCHS)
    for outcome in outcomes:
        for weight, reference in zip(outcome[name]["weights"], expected.weights()):
            np.testing.assert_allclose(weight, reference, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(outcome[name]["lrs"], expected.lrs, rtol=1e-9)
        if vbs.rule_named(ROWS[name].rule).measured:
            progress = outcome[name]["progress"]
            assert progress == pytest.approx(expected.progress, rel=1e-9)


@pytest.mark.parametrize("inner", [name for name in rules.INNER if "sgd," in name])
def test_the_factor_in_the_buffer_suits_every_kind_of_momentum(inner):
    row = rules.Row("linear-momentum", inner)
    expected = rules.by_hand(row, 1).weights()
    for weight, reference in zip(Training(row).train(), expected):
        np.testing.assert_allclose(weight, reference, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_replicas_stay_equal_bit_for_bit(outcomes, name):
    first = outcomes[0][name]
    for outcome in outcomes[1:]:
        assert outcome[name]["lrs"] == first["lrs"]
        assert all(map(torch.equal, outcome[name]["weights"], first["weights"]))


def constant_batches(rank: int, dtype=torch.float64) -> dict[str, dict[str, object]]:
    return {name: train(rank, name, 1, trace=(REF,), dtype=dtype) for name in ROWS}


def plain_torch(inner: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the weights after an epoch at the reference size with torch alone."""
    weights = [torch.nn.Parameter(torch.tensor(w, dtype=dtype)) for w in rules.start()]
    optimizer = rules.INNER[inner](
        [{"params": weights[:2]}, {"params": weights[2:]}], LR
    )
    order = torch.randperm(256, generator=torch.Generator().manual_seed(42))
    for step in order.split(REF):
        optimizer.zero_grad()
        for minibatch in step.split(4):
            for w, g in zip(weights, rules.gradients(int(minibatch[0]))):
                g = torch.tensor(g, dtype=dtype)
                w.grad = g + (0 if w.grad is None else w.grad)
        for w in weights:
            w.grad /= 4
        optimizer.step()
    return [w.detach() for w in weights]


@pytest.fixture(scope="module", params=[torch.float64, torch.float32])
def at_the_reference(request):
    dtype = request.param
    return dtype, Backend("cpu", 1).run(constant_batches, dtype)[0]


@pytest.mark.parametrize("name", [n for n in NAMES if "compat" not in n])
def test_identity_at_the_reference_batch(at_the_reference, name):
    """If every batch is the reference, weights are torch's own bit for bit."""
    dtype, outcome = at_the_reference
    expected, found = plain_torch(ROWS[name].inner, dtype), outcome[name]
    assert set(found["lrs"]) == {(LR, LR)}
    assert all(map(torch.equal, found["weights"], expected))


@pytest.mark.parametrize("backend", SLOW_XLA_BACKENDS)
def test_identity_at_the_reference_batch_on_xla(backend):
    """Rules that measure or change betas then do what the constant rule does."""
    outcome = backend.run(constant_batches, timeout=120)[0]
    for name, row in ROWS.items():
        if "compat" in name:
            continue
        assert set(outcome[name]["lrs"]) == {(LR, LR)}
        twin = {"sgd": "constant", "adamw": "root, adamw"}.get(row.inner)
        expected = outcome[twin or name]["weights"]
        found = outcome[name]["weights"]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_dtypes(name, dtype):
    training = Training(ROWS[name], dtype=dtype)
    training.epoch(0)
    assert {weight.dtype for weight in training.weights()} == {dtype}
    assert all(weight.isfinite().all() for weight in training.weights())
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if training.optimizer.noise:
        state = training.optimizer.noise.state_dict()
        assert {state[key].dtype for key in ("averages", "fraction")} == {wide}


def stopped_and_resumed(rank: int) -> dict[str, tuple[object, object]]:
    """Runs two epochs, and the second one again in a new run from a checkpoint."""
    found = {}
    for name, row in ROWS.items():
        straight, resumed = Training(row), Training(row)
        straight.epoch(0)
        file = io.BytesIO()
        torch.save(straight.state(), file)
        straight.epoch(1)
        file.seek(0)
        resumed.load(torch.load(file))
        resumed.epoch(1)
        found[name] = (straight.result(), resumed.result())
    return found


@pytest.mark.parametrize(
    "backend", [*backends("cpu", 1, slow=(3,)), *SLOW_XLA_BACKENDS[1:]]
)
def test_a_saved_state_goes_on_as_if_nothing_had_happened(backend):
    for found in backend.run(stopped_and_resumed, timeout=120):
        for name, (straight, resumed) in found.items():
            assert straight["lrs"][-len(resumed["lrs"]) :] == resumed["lrs"], name
            assert straight["progress"] == resumed["progress"]
            assert all(map(torch.equal, resumed["weights"], straight["weights"])), name


def counted(rank: int) -> dict[str, list[tuple[int, int, int]]]:
    found = {}
    for name, row in ROWS.items():
        training = Training(row, dtype=torch.float32)
        found[name] = [training.counted_epoch(epoch) for epoch in range(6)]
    return found


@pytest.mark.parametrize("backend", SLOW_XLA_BACKENDS)
def test_after_warm_up_nothing_is_compiled_or_read_back(backend):
    for found in backend.run(counted, timeout=120):
        for name, epochs in found.items():
            assert all(each[1:] == (0, 0) for each in epochs), name
            assert all(each[0] == 0 for each in epochs[2:]), (name, epochs)
        assert sum(epochs[0][0] for epochs in found.values()) > len(found)


# --- rules by themselves -------------------------------------------------------------

GROUP = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
GROUP["decoupled_weight_decay"] = True


@pytest.mark.parametrize("name", sorted({row.rule for row in ROWS.values()}))
@given(ratio=st.floats(1 / 1024, 9))
def test_weight_decay_per_sample(name, ratio):
    """lr * weight_decay, what weights shrink by, is proportional to the batch."""
    rule = with_options(name, False, decay_per_sample=True)
    gain = math.sqrt(ratio)
    scaled, _ = rule.update(ratio, GROUP, rule.init(), gain=gain)
    shrinks = scaled.lr * (scaled.gradient_factor or 1.0) * scaled.weight_decay
    assert shrinks == pytest.approx(0.1 * 0.01 * ratio)


@pytest.mark.parametrize("name", ["adam-root", "adam-half-life"])
def test_adams_rules_keep_their_own_weight_decay_otherwise(name):
    """AdamW's decay follows the learning rate, not the correction of torch's bias."""
    rule, coupled = rule_named(name), GROUP | {"decoupled_weight_decay": False}
    state = rule.init()
    for ratio in (4.0, 2.0, 1.0, 8.0):
        scaled, state = rule.update(ratio, GROUP, state)
        shrinks = scaled.lr * scaled.weight_decay
        assert shrinks == pytest.approx(scaled.effective_lr * 0.01)
        assert rule.update(ratio, coupled, rule.init())[0].weight_decay == 0.01


def test_the_power_rule_holds_the_others():
    assert vbs.power(1).lr_factor(3.0) == 3.0
    assert vbs.power(0).lr_factor(3.0) == 1.0
    assert rule_named("power:0.5").lr_factor(4.0) == 2.0
    assert rule_named(vbs.power(0.25)).name == "power:0.25"


MINE = vbs.Rule("mine", lambda ratio: 1.0, needs_reference=False, for_sgd=True)


@pytest.mark.parametrize("rule", ["linear", "adascale", MINE])
def test_a_rule_that_suits_another_optimizer_warns(rule):
    """Its row says so, not its name: a rule of one's own warns, too."""
    ref = None if rule is MINE else 32
    with pytest.warns(UserWarning, match=r"' is derived for SGD.*for AdamW"):
        make(inner=AdamW, cls=vbs.ElasticOptimizer, rule=rule, ref_batchsize=ref)


# --- Adam: histories of betas, and their limits ---------------------------------------


def test_betas_that_a_scheduler_cycles():
    """Betas are torch's own while every ratio is one; then true weights count."""
    rule, state = rule_named("adam-half-life"), rule_named("adam-half-life").init()
    product = 1.0
    for step, kappa in enumerate([1.0] * 10 + [2.0, 1.0, 4.0]):
        betas = (0.85 + 0.01 * (step % 10), 0.999)
        scaled, state = rule.update(kappa, GROUP | {"betas": betas}, state)
        product *= betas[0] ** kappa
        if step < 10:
            assert (scaled.lr, scaled.betas) == (GROUP["lr"], betas)
        assert state.products[0] == pytest.approx(product)


def unfreezing(own_group: bool) -> tuple[list[float], list[float]]:
    """Returns the steps of a weight that begins to train after 20 updates."""
    early, late = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    late.requires_grad_(False)
    groups = [[early], [late]] if own_group else [[early, late]]
    sampler = sampler_of((4, 8, 8, 16, 4, 8, 12) * 6, 10_000, minibatch_size=4)
    sampler.num_yielded = 1000  # is not iterated
    inner = torch.optim.Adam([{"params": g} for g in groups], LR, (0.9, 0.99), 0.0)
    wrapper = vbs.AdamRootRuleOptimizer(inner, sampler, ref_batchsize=4)
    updates = []
    wrapper.attach(updates.append)
    steps, expected = [], []
    while len(updates) < 40:
        before = late.item()
        (early + late).sum().backward()
        if wrapper.step():
            late.requires_grad_(len(updates) >= 20)
            steps.append(before - late.item())
            expected.append(updates[-1].lr[0] if len(updates) > 20 else 0.0)
    return steps, expected


def test_a_group_that_begins_to_train_later_needs_a_history_of_its_own():
    steps, expected = unfreezing(own_group=True)
    assert steps == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ValueError, match="put parameters that begin to train"):
        unfreezing(own_group=False)


def test_a_frozen_group_survives_a_checkpoint():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    weights[1].requires_grad_(False)

    def built() -> vbs.ElasticOptimizer:
        inner = torch.optim.Adam([{"params": [w]} for w in weights], LR)
        return make(32, lambda *_: inner, vbs.AdamRootRuleOptimizer)[2]

    wrapper = built()
    for _ in range(4):
        weights[0].sum().backward()
        wrapper.step()
    state = wrapper.state_dict()
    other = built()
    other.load_state_dict(state)
    assert other.state_dict()["elastic"] == state["elastic"]


def test_no_first_moment_at_all():
    """beta1 = 0 stays 0 at ratio one, and below it the average begins to remember."""
    rule = rule_named("adam-root")
    group = GROUP | {"betas": (0.0, 0.999)}
    scaled, state = rule.update(1.0, group, rule.init())
    assert scaled.betas == (0.0, 0.999)
    scaled, _ = rule.update(0.5, group, state)
    assert scaled.betas[0] == 0.5
