"""The Adam rules against Adam written by hand in float64, with betas that change."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import variable_batch_size as vbs
from variable_batch_size.rules.adam import half_life_beta, sde_beta
from variable_batch_size.rules.rule import rule_named

RATIOS = [1.0, 4.0, 0.5, 1.0, 2.0, 8.0, 0.25, 1.0, 3.0, 9.0] * 5
LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.999), 1e-3, 0.1
BETA_OF = {
    "adam-root": lambda beta, kappa: 1 - kappa * (1 - beta),
    "adam-half-life": lambda beta, kappa: math.exp(kappa * math.log(beta)),
}
INNER = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}


def by_hand(rule, inner, amsgrad, weight, gradients) -> np.ndarray:
    """Returns the weights by Malladi et al., Definition 5.2, over averages' weights."""
    weight = weight.copy()
    m, v, largest = (np.zeros_like(weight) for _ in range(3))
    weights = np.zeros(2)  # of all gradients in the averages
    for kappa, gradient in zip(RATIOS, gradients):
        lr, eps = math.sqrt(kappa) * LR, EPS / math.sqrt(kappa)
        b1, b2 = (BETA_OF[rule](beta, kappa) for beta in BETAS)
        if inner == "adamw":
            weight *= 1 - lr * DECAY
        else:
            gradient = gradient + DECAY * weight
        m = b1 * m + (1 - b1) * gradient
        v = b2 * v + (1 - b2) * gradient**2
        weights = np.array([b1, b2]) * weights + 1 - np.array([b1, b2])
        largest = np.maximum(largest, v) if amsgrad else v
        weight -= lr * (m / weights[0]) / (np.sqrt(largest / weights[1]) + eps)
    return weight


def with_torch(rule, inner, amsgrad, weight, gradients, ratios=RATIOS) -> torch.Tensor:
    """Returns the weights by torch's optimizer with the rule's numbers; no wrapper."""
    parameter = torch.nn.Parameter(torch.tensor(weight))
    optimizer = INNER[inner](
        [parameter], LR, BETAS, EPS, weight_decay=DECAY, amsgrad=amsgrad
    )
    rule = rule_named(rule)
    group = optimizer.param_groups[0]
    tuned, state = dict(group), rule.init()
    for kappa, gradient in zip(ratios, gradients):
        scaled, state = rule.update(kappa, tuned, state)
        group.update(
            lr=scaled.lr, betas=scaled.betas, eps=scaled.eps,
            weight_decay=scaled.weight_decay,
        )  # fmt: skip
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    return parameter.detach()


@pytest.fixture
def run():
    random = np.random.default_rng(0)
    return random.normal(size=7), random.normal(size=(len(RATIOS), 7))


@pytest.mark.parametrize("rule", BETA_OF)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_fifty_updates_of_varying_batch_size(rule, inner, amsgrad, run):
    found = with_torch(rule, inner, amsgrad, *run)
    np.testing.assert_allclose(found, by_hand(rule, inner, amsgrad, *run), rtol=1e-11)


@pytest.mark.parametrize("rule", BETA_OF)
@pytest.mark.parametrize("inner", INNER)
def test_torchs_own_bias_correction_would_be_wrong(rule, inner, run):
    """Otherwise the test above could not fail."""
    weight, gradients = run
    parameter = torch.nn.Parameter(torch.tensor(weight))
    optimizer = INNER[inner]([parameter], LR, BETAS, EPS, weight_decay=DECAY)
    group = optimizer.param_groups[0]
    for kappa, gradient in zip(RATIOS, gradients):
        group["lr"], group["eps"] = LR * math.sqrt(kappa), EPS / math.sqrt(kappa)
        group["betas"] = tuple(BETA_OF[rule](beta, kappa) for beta in BETAS)
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    error = np.abs(parameter.detach().numpy() - by_hand(rule, inner, False, *run))
    assert error.max() > 1e-3


@pytest.mark.parametrize("rule", BETA_OF)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_of_one_is_torchs_own_bit_for_bit(rule, inner, dtype, run):
    """The wrapper makes 50 updates at the reference batch size."""
    weight, gradients = run
    plain = torch.nn.Parameter(torch.tensor(weight, dtype=dtype))
    ours = torch.nn.Parameter(plain.detach().clone())
    optimizer = INNER[inner]([plain], LR, BETAS, EPS, weight_decay=DECAY)
    sampler = vbs.CustomSampler(
        range(200), [4] * 50, num_replicas=1, rank=0, minibatch_size=2, verbose=False
    )
    sampler.num_yielded = 1000  # is not iterated
    wrapper = vbs.ElasticOptimizer(
        INNER[inner]([ours], LR, BETAS, EPS, weight_decay=DECAY), sampler, rule, 4
    )
    rows = torch.tensor(gradients, dtype=dtype)
    for row in rows:
        plain.grad = row.clone()
        optimizer.step()
        for _ in range(2):  # two equal minibatches, whose mean is exact
            (ours * row).sum().backward()
            wrapper.step()
        assert torch.equal(ours, plain)


def test_betas_that_a_scheduler_cycles(run):
    """Betas are torch's own while every ratio is one; then true weights count."""
    rule, state = rule_named("adam-half-life"), rule_named("adam-half-life").init()
    product = 1.0
    for step, kappa in enumerate([1.0] * 10 + [2.0, 1.0, 4.0]):
        betas = (0.85 + 0.01 * (step % 10), 0.999)
        scaled, state = rule.update(
            kappa, {"lr": LR, "betas": betas, "eps": EPS}, state
        )
        product *= betas[0] ** kappa
        if step < 10:
            assert scaled.lr == LR
            assert scaled.betas == betas
        assert state.products[0] == pytest.approx(product)


def unfreezing(own_group: bool) -> tuple[list[float], list[float]]:
    """Returns the steps of a weight that begins to train after 20 updates."""
    early, late = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    late.requires_grad_(False)
    groups = [[early], [late]] if own_group else [[early, late]]
    sampler = vbs.CustomSampler(
        dataset_size=10_000, trace=(4, 8, 8, 16, 4, 8, 12), num_replicas=1, rank=0,
        minibatch_size=4, verbose=False, on_end="cycle",
    )  # fmt: skip
    sampler.num_yielded = 1000  # is not iterated
    wrapper = vbs.AdamRootRuleOptimizer(
        torch.optim.Adam([{"params": g} for g in groups], LR, (0.9, 0.99), 0.0),
        sampler,
        ref_batchsize=4,
    )
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


def test_a_group_that_begins_to_train_later_has_its_own_history():
    steps, expected = unfreezing(own_group=True)
    assert steps == pytest.approx(expected, rel=1e-4)


def test_a_group_with_two_histories_is_refused():
    with pytest.raises(ValueError, match="put parameters that begin to train"):
        unfreezing(own_group=False)


def test_a_frozen_group_survives_a_checkpoint():
    def make():
        weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        weights[1].requires_grad_(False)
        sampler = vbs.CustomSampler(
            range(64), 8, num_replicas=1, rank=0, minibatch_size=4, verbose=False
        )
        sampler.num_yielded = 1000  # is not iterated
        inner = torch.optim.Adam([{"params": [w]} for w in weights], LR)
        return weights, vbs.AdamRootRuleOptimizer(inner, sampler, ref_batchsize=4)

    weights, wrapper = make()
    for _ in range(4):
        weights[0].sum().backward()
        wrapper.step()
    _, other = make()
    other.load_state_dict(wrapper.state_dict())
    assert other.state_dict()["elastic"] == wrapper.state_dict()["elastic"]


def test_betas_where_both_forms_agree_to_first_order():
    for kappa in (0.5, 1.0, 2.0):
        assert sde_beta(0.9999, kappa) == pytest.approx(
            half_life_beta(0.9999, kappa), abs=1e-7
        )


def test_no_first_moment_at_all(run):
    """beta1 = 0 stays 0 at ratio one, and below it the average begins to remember."""
    rule = rule_named("adam-root")
    group = {"lr": LR, "betas": (0.0, 0.999), "eps": EPS}
    scaled, state = rule.update(1.0, group, rule.init())
    assert scaled.betas == (0.0, 0.999)
    scaled, _ = rule.update(0.5, group, state)
    assert scaled.betas[0] == 0.5


def test_a_trace_that_the_sde_rule_cannot_follow_is_refused_at_once():
    inner = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], LR)
    sampler = vbs.CustomSampler(
        range(64), [4, 40], num_replicas=1, rank=0, minibatch_size=2, verbose=False
    )
    with pytest.raises(ValueError, match=r"batch ratio 10.* use rule 'adam-half-life'"):
        vbs.AdamRootRuleOptimizer(inner, sampler, ref_batchsize=4)
    vbs.AdamHalfLifeRuleOptimizer(inner, sampler, ref_batchsize=4)
