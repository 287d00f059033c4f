"""Every rule keeps the same promises.

A new one is one row of support/variable_batch_size/rules.py.
"""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.variable_batch_size import rules
from support.variable_batch_size.elastic import large_batch_run
from support.variable_batch_size.rules import LR, REF, ROWS, Training, train
from support.variable_batch_size.wrapping import make, sampler_of
from support.xla_replica import replicas
from torch.optim import AdamW

import variable_batch_size as vbs
from variable_batch_size.rules.rule import rule_named

EPOCHS = 3  # in each of which every step of the trace comes once
NAMES = list(ROWS)
# XLA compiles a second for every row. Two replicas of it have, by default, a row of
# each kind of program: the others differ in little, or in numbers that are uploaded.
FEW = [
    "linear-momentum", "power, inside, decay", "adascale, inside", "adascale, causal",
    "root, adamw, decay", "half-life, amsgrad",
]  # fmt: skip


def train_all(rank: int, names: list[str]) -> dict[str, dict[str, object]]:
    return {name: train(rank, name, EPOCHS) for name in names}


@pytest.fixture(scope="module", params=[*replicas.FEW_BACKENDS, replicas.TPU_LIKE])
def outcomes(request):
    """Returns the rules' results by rank; one launch for all."""
    names = FEW if request.param == replicas.Backend("xla", 2) else NAMES
    found = request.param.run(train_all, names, timeout=150)
    if request.param.device == "tpu-like":  # its processes sum on their hosts
        for each in (result for by_name in found for result in by_name.values()):
            each["count"] = (each["count"][0], 0, each["count"][2])
    return found


def test_every_registered_rule_has_a_row():
    assert {row.rule for row in ROWS.values()} >= vbs.RULES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_learning_rates_are_those_of_a_run_by_hand(outcomes, name):
    if name not in outcomes[0]:
        pytest.skip("slow runs have it")
    expected = rules.by_hand(ROWS[name], EPOCHS)
    for outcome in outcomes:
        # After warm-up nothing is compiled or read back, and replicas are equal.
        assert outcome[name]["count"] == (0, 0, 0)
        assert outcome[name]["lrs"] == outcomes[0][name]["lrs"]
        pairs = zip(outcome[name]["weights"], outcomes[0][name]["weights"])
        assert all(torch.equal(one, other) for one, other in pairs)
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


def mean_loss(model: rules.Weights, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return rules.loss_of(model, sum(x[::4].unbind()).unsqueeze(0) / 4, y)


@replicas.of_torch_alone
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_identity_at_the_reference_batch(name, dtype):
    found = train(0, name, 1, trace=(REF,), dtype=dtype)
    inner = rules.INNER[ROWS[name].inner]
    case = replace(rules.CASE, trace=(REF,), optimizer=inner, rule="constant")
    made = rules.Weights(dtype), rules.inputs_of(dtype), torch.zeros(256)
    expected, _ = large_batch_run(case, mean_loss, made)
    assert set(found["lrs"]) == {(LR, LR)}
    assert all(map(torch.equal, found["weights"], expected))


@pytest.mark.parametrize("name", NAMES)
def test_narrow_weights_have_wide_statistics(name):
    training = Training(ROWS[name], dtype=torch.bfloat16)
    training.epoch(0)
    assert {weight.dtype for weight in training.weights()} == {torch.bfloat16}
    assert all(weight.isfinite().all() for weight in training.weights())
    if training.optimizer.noise:
        state = training.optimizer.noise.state_dict()
        assert {state[key].dtype for key in ("averages", "fraction")} == {torch.float32}


def stopped_and_resumed(rank: int) -> dict[str, tuple[object, object]]:
    """Runs two epochs, and what comes after the second update again in a new run."""
    found = {}
    for name, row in ROWS.items():
        straight, resumed, file = Training(row), Training(row), io.BytesIO()

        def save(update: vbs.Update, file=file, run=straight) -> None:
            if update.step == 2 * len(rules.TRACE) - 8:  # within the second epoch
                torch.save(run.state(), file)

        straight.optimizer.attach(save)
        for epoch in range(2):
            straight.epoch(epoch)
        file.seek(0)
        resumed.load(torch.load(file))
        resumed.epoch(1)
        found[name] = (straight.result(), resumed.result())
    return found


@pytest.mark.parametrize("backend", [
    *replicas.backends("cpu", 1, slow=(3,)), *replicas.SLOW_XLA_BACKENDS[1:],
])  # fmt: skip
def test_a_saved_state_goes_on_as_if_nothing_had_happened(backend):
    for found in backend.run(stopped_and_resumed, timeout=120):
        for name, (straight, resumed) in found.items():
            assert straight["lrs"][-7:] == resumed["lrs"], name
            assert straight["progress"] == resumed["progress"]
            assert all(map(torch.equal, resumed["weights"], straight["weights"])), name


MINE = vbs.Rule("mine", lambda ratio: 1.0, needs_reference=False, for_sgd=True)
GROUP = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}


def test_the_power_rule_holds_the_others():
    powers = vbs.power(1), vbs.power(0), rule_named("power:0.5"), vbs.power(0.25)
    assert [each.lr_factor(4.0) for each in powers] == [4.0, 1.0, 2.0, 2**0.5]
    assert rule_named(powers[-1]).name == "power:0.25"


@pytest.mark.parametrize("rule", ["linear", "adascale", MINE])
def test_a_rule_that_suits_another_optimizer_warns(rule):
    """Its row says so, not its name: a rule of one's own warns, too."""
    ref = None if rule is MINE else 32
    with pytest.warns(UserWarning, match=r"' is derived for SGD.*for AdamW"):
        make(inner=AdamW, cls=vbs.ElasticOptimizer, rule=rule, ref_batchsize=ref)


def test_betas_that_a_scheduler_cycles():
    """Betas are torch's own while every ratio is one; then true weights count."""
    rule, state, product = rule_named("adam-half-life"), None, 1.0
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
    sampler = sampler_of((4, 8, 8, 16, 4, 8, 12) * 5 + (4,) * 5, 320, minibatch_size=4)
    inner = torch.optim.Adam([{"params": g} for g in groups], LR, (0.9, 0.99), 0.0)
    wrapper = vbs.AdamRootRuleOptimizer(inner, sampler, ref_batchsize=4)
    updates, weights = [], [0.0]
    wrapper.attach(updates.append)
    for _ in sampler:
        (early + late).sum().backward()
        if wrapper.step():
            late.requires_grad_(len(updates) >= 20)
            weights.append(late.item())
    lrs = [0.0] * 20 + [update.lr[0] for update in updates[20:]]
    return (-np.diff(weights)).tolist(), lrs


def test_a_group_that_begins_to_train_later_needs_a_history_of_its_own():
    steps, expected = unfreezing(own_group=True)
    assert steps == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ValueError, match="begin to train later into a group"):
        unfreezing(own_group=False)


def test_a_frozen_group_survives_a_checkpoint():
    weight, frozen = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    frozen.requires_grad_(False)
    groups = {"params": [weight]}, {"params": [frozen]}
    wrapper, other = (
        make(32, lambda *_: torch.optim.Adam(groups, LR), vbs.AdamRootRuleOptimizer)[2]
        for _ in range(2)
    )
    for _ in zip(range(4), wrapper.minibatches):
        weight.sum().backward()
        wrapper.step()
    state = wrapper.state_dict()
    other.load_state_dict(state)
    assert other.state_dict()["elastic"] == state["elastic"]


def test_no_first_moment_at_all():
    """beta1 = 0 stays 0 at ratio one, and below it the average begins to remember."""
    rule, group, state = rule_named("adam-root"), GROUP | {"betas": (0.0, 0.999)}, None
    for ratio, beta1 in ((1.0, 0.0), (0.5, 0.5)):
        scaled, state = rule.update(ratio, group, state)
        assert scaled.betas[0] == beta1
