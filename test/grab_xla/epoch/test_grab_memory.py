"""What a sampler holds, and what a step forms beyond the gradients that it is given."""

import dataclasses
import re

import pytest
import torch
from support.documents import read
from support.grab_xla import ordering, training
from support.grab_xla.ordering import ALL, BALANCING, INVARIANT, KINDS
from support.xla_replica.replicas import of_torch_alone

import per_sample_grad
from grab_xla import BALANCE_TYPES, GraBSampler, herding
from grab_xla.balancing import decisions, prefix_sums
from grab_xla.gradients import rows as matrix
from tools.peak_memory import peak_memory

pytestmark = of_torch_alone
SHAPES = {"weight": (100, 100), "bias": (100,), "other": (9000,)}
PARAMETERS = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
NUM_BYTES = 4 * sum(value.numel() for value in PARAMETERS.values())
BATCH = 40


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces of 13 rows, as many as of a model with 320,000 parameters."""
    monkeypatch.setattr(matrix, "PIECE_ON_HOST", 2**18)


def gradients(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(BATCH, *shape, generator=generator).to(dtype)
        for name, shape in SHAPES.items()
    }


def peak_of_step(sampler: GraBSampler, grads: dict[str, torch.Tensor]) -> int:
    list(sampler)
    sampler.step(grads)
    return peak_memory(lambda: sampler.step(grads))


def sampler_of(name: str, **options) -> GraBSampler:
    kind, size = KINDS[name], 3 * BATCH
    return GraBSampler(range(size), PARAMETERS, kind.name, **kind.options, **options)


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("name", BALANCING)
def test_a_step_does_not_copy_its_gradients(name, products, monkeypatch):
    ordering.by_products(monkeypatch, products)
    peak = peak_of_step(sampler_of(name), gradients())
    most = 1.5 if BALANCE_TYPES[KINDS[name].name].piece_size is None else 0.9
    assert peak <= most * BATCH * NUM_BYTES


def test_gradients_that_must_be_converted_are_not_copied_either():
    transposed = {**gradients(), "weight": gradients()["weight"].mT.contiguous().mT}
    for grads in (transposed, gradients(torch.bfloat16)):
        assert peak_of_step(sampler_of("mean"), grads) <= 0.8 * BATCH * NUM_BYTES


@pytest.mark.parametrize("name", ["mean", "batch"])
def test_a_projection_saves_memory(name):
    totals = []
    for projection in ("none", "kron"):
        sampler = sampler_of(name, pi_eps=0.5, random_projection=projection)
        state = sampler.state_dict()["engine"]["state"].values()
        held = sum(each.nbytes for each in state)
        totals.append(held + peak_of_step(sampler, gradients()))
    assert totals[1] < totals[0]


@pytest.mark.parametrize("name", ["ema", "mean"])
def test_a_projection_is_formed_once_in_a_step(name, monkeypatch):
    formed = []
    project = per_sample_grad.Projection.of

    def counted(self, name, uses, budget) -> torch.Tensor:
        formed.append(len(uses[0].values))
        return project(self, name, uses, budget)

    monkeypatch.setattr(per_sample_grad.Projection, "of", counted)
    list(sampler := sampler_of(name, pi_eps=0.5, random_projection="kron"))
    sampler.step(gradients())
    assert sum(formed) == BATCH * len(SHAPES)


def test_an_epoch_begins_without_a_copy_of_the_accumulators():
    list(sampler := GraBSampler(range(BATCH), PARAMETERS, "recursive"))
    sampler.step(gradients())
    assert peak_memory(lambda: list(sampler)) <= 3 * NUM_BYTES


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize(("options", "few"), [
    ({}, 0.0),
    ({"prob_balance": True, "prob_balance_c": 3.0}, 0.0),
    (dict.fromkeys(["normalize_grads", "record_norm", "record_herding"], 1), 0.0),
    ({"fidelity": "projected", "projection_size": 8}, 1e-9),
])  # fmt: skip
@pytest.mark.parametrize("name", BALANCING)
def test_pieces_change_rounding_only(name, options, few, products, monkeypatch):
    ordering.by_products(monkeypatch, products)
    found, states = [], []
    for numbers in (10**6, 1, 4 * ordering.NUM_PARAMETERS):
        monkeypatch.setattr(matrix, "PIECE_ON_HOST", numbers)
        sampler = KINDS[name].sampler(**options)
        orders = [ordering.run_epoch(sampler, epoch, 16 + epoch) for epoch in range(4)]
        found.append((orders, sampler.scalars()))
        states.append(sampler.state_dict()["engine"]["state"])
        monkeypatch.setattr(decisions, "_PIECE", 4)
    few = few or (0.0 if name in INVARIANT and not products else 1e-12)
    for (orders, scalars), state in zip(found[1:], states[1:]):
        assert (orders, pytest.approx(scalars)) == found[0]
        torch.testing.assert_close(state, states[0], rtol=few, atol=few)


@pytest.mark.parametrize("name", ALL)
def test_a_state_has_the_vectors_that_the_pages_table_says(name):
    row = r"(?m)^\| (`.+?) \|.*?\| `([^`]+)`[^`|]*\|[^|]*\|$"
    rows = re.findall(row, read("docs/grab_xla.md"))
    told = {each: held for types, held in rows for each in re.findall("`(.*?)`", types)}
    assert told.keys() == BALANCE_TYPES.keys()
    kind, most = KINDS[name], 0
    sampler = kind.sampler()
    for epoch in range(2):
        order = list(sampler)
        for batch in ordering.batches(order, 5):
            ordering.take_steps(sampler, epoch, batch, 5)
            state = sampler.state_dict()["engine"]["state"].values()
            most = max(most, sum(len(value) for value in state if value.dim() == 2))
    options = {"orders": order} if kind.name == "fixed" else kind.options
    fields = dataclasses.asdict(BALANCE_TYPES[kind.name](**options))
    assert most == eval(told[kind.name], fields)


def test_herding_copies_some_vectors_at_a_time(monkeypatch):
    monkeypatch.setattr(prefix_sums, "_PIECE", 2**12)
    vectors = torch.randn(BATCH, 1000)
    for order in (None, list(range(BATCH))[::-1]):
        peak = peak_memory(lambda order=order: herding(vectors, order))
        assert peak <= 0.5 * vectors.nbytes
    parameters = {"w": torch.zeros(1000)}
    list(sampler := GraBSampler(range(BATCH), parameters, record_herding=True))
    sampler.step({"w": vectors})
    assert peak_memory(lambda: sampler.sorter.herding) <= 2.2 * vectors.nbytes


def test_a_group_takes_one_row_more_than_training(monkeypatch):
    """No gradient is copied for ``.grad`` because the balance keeps it, too."""
    monkeypatch.setattr(decisions, "_PIECE", 2**10)  # of a model that is as small
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    x, options = torch.randn(4, 300), {"fidelity": "group", "dtype": torch.float32}
    list(sampler := training.sampler_of(model, 40, group_size=4, **options))

    def losses() -> torch.Tensor:
        model.zero_grad()
        return model(x).square().mean(1)

    training.balance(sampler, model, losses)
    row = 4 * sum(value.numel() for value in model.parameters())
    alone = peak_memory(lambda: losses().mean().backward())
    balanced = peak_memory(lambda: training.balance(sampler, model, losses))
    assert balanced <= alone + 1.05 * row
