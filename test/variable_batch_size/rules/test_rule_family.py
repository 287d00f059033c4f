"""Every rule keeps the same promises.

A new one is one row of support/variable_batch_size/rules.py.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from support.variable_batch_size import rules
from support.variable_batch_size.rules import LR, REF, ROWS, TRACE, Training, train
from support.xla_replica.replicas import (
    FEW_BACKENDS,
    SLOW_XLA_BACKENDS,
    TPU_LIKE,
    Backend,
    backends,
)

import variable_batch_size as vbs

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
        for weight, reference in zip(outcome[name]["weights"], first["weights"]):
            assert torch.equal(weight, reference)


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
    for weight, reference in zip(found["weights"], expected):
        assert torch.equal(weight, reference)


@pytest.mark.parametrize("backend", SLOW_XLA_BACKENDS)
def test_identity_at_the_reference_batch_on_xla(backend):
    """Rules that measure or change betas then do what the constant rule does."""
    outcome = backend.run(constant_batches, timeout=120)[0]
    for name, row in ROWS.items():
        if "compat" in name:
            continue
        assert set(outcome[name]["lrs"]) == {(LR, LR)}
        twin = {"sgd": "constant", "adamw": "root, adamw"}.get(row.inner)
        for weight, reference in zip(
            outcome[name]["weights"], outcome[twin]["weights"] if twin else []
        ):
            torch.testing.assert_close(weight, reference, rtol=1e-12, atol=0)


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
            for weight, reference in zip(resumed["weights"], straight["weights"]):
                assert torch.equal(weight, reference), name


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


def test_the_rows_are_worth_running():
    """It has idle replicas, also at first, ratios around one, and distinct betas."""
    assert TRACE[0] < 8 * 4
    assert min(TRACE) < REF < max(TRACE)
    assert rules.BETAS[0] > 1 - REF / max(TRACE)
    assert rules.DECAY > 0
    assert rules.EPS > 1e-8
