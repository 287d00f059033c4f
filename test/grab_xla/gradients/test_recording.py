"""An ordinary module's ordinary backward pass orders its samples."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.grab_xla import training
from torch import nn

import grab_xla
import per_sample_grad as psg
from grab_xla import GraBSampler
from grab_xla.balancing.rows import FactoredRows
from grab_xla.epoch.online_balancer import OnlineBalancer
from grab_xla.gradients import samples as gradients_of_samples

N, BATCH, EPOCHS, VOCABULARY = 24, 4, 3, 11


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


class TiedTransformer(nn.Module):
    """The output layer's weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 12, 0.0))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens).transpose(0, 1)
        return self.head(self.blocks(hidden).transpose(0, 1))


def sampler(model: nn.Module, **options) -> GraBSampler:
    return GraBSampler(range(N), dict(model.named_parameters()), **options)


def samples(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "transformer":
        tokens = torch.randint(0, VOCABULARY, (N, 6), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    if name == "mlp":
        return training.samples(N)
    inputs = torch.randn(N, 2, 5, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (N,), generator=generator)


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    outputs = model(x)
    if y.dim() == 1:
        return F.cross_entropy(outputs, y, reduction="none")
    return psg.token_cross_entropy(outputs, y)


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": TiedTransformer}


def options_of(name: str, model: nn.Module) -> dict[str, object]:
    if name != "transformer":
        return {}
    inside = (n for n, _ in model.named_modules() if n.startswith("blocks"))
    return {"batch_dim": {"": 0} | dict.fromkeys(inside, 1)}


def trained(name: str, balance: str, how: str, **options) -> tuple[list, nn.Module]:
    """Returns every epoch's order, and the model; ``how`` gradients are made."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x, y = samples(name)
    params = dict(model.named_parameters())
    if options.pop("backwards", False):  # another sequence than the model's
        params = dict(reversed(params.items()))
    grab = GraBSampler(range(N), params, balance, dtype=torch.float64, **options)
    captured = options_of(name, model)
    if how == "projected by hand":
        projection = psg.Projection(params, options.pop("projection_size"), seed=42)
        shapes = {n: torch.empty(math.prod(k)) for n, k in projection.kept.items()}
        options.pop("fidelity")
        grab = GraBSampler(range(N), shapes, balance, dtype=torch.float64, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    orders = []
    for _ in range(EPOCHS):
        order = list(grab)
        orders.append(order)
        for batch in torch.tensor(order).split(BATCH):
            optimizer.zero_grad()
            if how in ("recorded", "from samples"):
                with grab.record(model, **captured):
                    losses = losses_of(model, x[batch], y[batch])
                reuses = how == "from samples"
                grab.backward(losses, indices=batch, from_samples=reuses)
            else:
                grads = psg.per_sample_grads(
                    model, losses_of, (x[batch], y[batch]), **captured
                )
                if how == "projected by hand":
                    grads = {n: projected(projection, n, g) for n, g in grads.items()}
                grab.step(grads, indices=batch)
                losses_of(model, x[batch], y[batch]).mean().backward()
            optimizer.step()
    return orders, model


@functools.cache
def formed(name: str, balance: str) -> tuple[list, nn.Module]:
    """Returns what `trained` does with gradients that are formed."""
    return trained(name, balance, "formed", **(FACTORED | FORMED)[balance])


def projected(projection: psg.Projection, name: str, gradients: torch.Tensor):
    count = gradients[0].numel()
    impulses = torch.eye(count, dtype=torch.float64).view(-1, *gradients.shape[1:])
    places = projection.of(name, [psg.Dense(impulses)], 2**30)
    return gradients.flatten(1) @ places


def assert_same_training(one: tuple, other: tuple) -> None:
    assert one[0] == other[0]
    assert len({tuple(order) for order in one[0]}) == EPOCHS
    for mine, theirs in zip(one[1].parameters(), other[1].parameters()):
        assert torch.equal(mine, theirs)


@pytest.fixture
def placed(monkeypatch) -> list[FactoredRows]:
    """What was balanced without being formed."""
    found, original = [], OnlineBalancer.place

    def place(self, pieces):
        found.extend(rows for rows in pieces if isinstance(rows, FactoredRows))
        original(self, pieces)

    monkeypatch.setattr(OnlineBalancer, "place", place)
    return found


@pytest.fixture
def factored(placed, monkeypatch) -> list[FactoredRows]:
    """The same, where factors are kept of all layers."""
    monkeypatch.setattr(gradients_of_samples, "LEAST_COMPRESSION", 0)
    monkeypatch.setattr(gradients_of_samples, "LEAST_SPARED", 0)
    return placed


FACTORED = {
    "mean": {},
    "pair": {},
    "recursive": {"depth": 2},
}
FORMED = {
    "recursive-pair": {"batch_size": BATCH},
    "batch": {},
    "batch-uncentred": {},
    "norm": {},
}


@pytest.mark.parametrize("forms", [True, False])
@pytest.mark.parametrize("balance", FACTORED | FORMED)
@pytest.mark.parametrize("name", MODELS)
def test_exact_orders_are_those_of_formed_gradients(name, balance, forms, request):
    factored = [] if forms else request.getfixturevalue("factored")
    recorded = trained(name, balance, "recorded", **(FACTORED | FORMED)[balance])
    forms |= balance in FORMED
    steps = [] if forms else [BATCH] * (N // BATCH * EPOCHS)
    assert [len(rows) for rows in factored] == steps
    assert_same_training(recorded, formed(name, balance))


@pytest.mark.parametrize("forms", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_samples_may_make_those_of_the_model(name, forms, request):
    if not forms:
        request.getfixturevalue("factored")
    recorded = trained(name, "mean", "from samples")
    orders, model = formed(name, "mean")
    assert recorded[0] == orders
    for mine, theirs in zip(recorded[1].parameters(), model.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def weights(epoch: int) -> np.ndarray:
    return np.random.default_rng(epoch).uniform(0.5, 2.0, N)


@pytest.mark.parametrize(
    ("balance", "options"),
    [
        ("pair", {"num_workers": 2}),
        ("pair", {"prob_balance": True, "num_workers": 2}),
        ("recursive", {"prob_balance": True, "tie": "positive"}),
        ("mean", {"backwards": True}),
    ],
)
def test_sequences_workers_and_drawn_signs_are_those_of_formed_gradients(
    balance, options, factored
):
    recorded = trained("mlp", balance, "recorded", **options)
    assert len(factored) == N // BATCH * EPOCHS
    assert_same_training(recorded, trained("mlp", balance, "formed", **options))


@pytest.mark.parametrize(
    ("balance", "options"),
    [
        ("pair", {"num_workers": 4}),  # pairs over two steps
        ("recursive-pair", {"batch_size": 2}),  # two blocks in a step
        *((name, {"weights": weights}) for name in ("mean", "pair", "batch")),
        ("sign", {}),
        ("adamean", {}),
        ("mean", {"normalize_grads": True}),
        ("mean", {"random_projection": "kron", "pi_eps": 0.9}),
        ("mean", {"record_norm": True}),
    ],
)
@pytest.mark.filterwarnings("ignore:random_projection")
def test_what_factors_do_not_tell_is_formed(balance, options, factored):
    recorded = trained("mlp", balance, "recorded", **options)
    assert factored == []
    assert_same_training(recorded, trained("mlp", balance, "formed", **options))


@pytest.mark.parametrize(("width", "is_formed"), [(160, True), (4000, False)])
def test_wide_layers_that_are_applied_once_are_not_formed(width, is_formed, placed):
    """The other layer holds as many factors as its gradient has numbers."""
    model = nn.Sequential(nn.Linear(250, width), nn.Tanh(), nn.Linear(width, 1))
    grab = sampler(model)
    list(grab)
    with grab.record(model):
        losses = model(torch.randn(BATCH, 250)).sum(1)
    grab.backward(losses)
    assert grab.num_seen == BATCH
    assert bool(placed) != is_formed
    for rows in placed:
        assert [set(each.shapes) for each in rows.factors] == [{"0.weight"}]
        # Small gradients wait for others, and are formed.
        assert set(rows.formed) == {"0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("balance", FACTORED)
@pytest.mark.filterwarnings("ignore::grab_xla.GraBWarning")
def test_a_sample_that_is_not_finite_is_left_out_of_factors(balance, factored):
    grab, other = (
        sampler(mlp(), balance_type=balance, dtype=torch.float32, **FACTORED[balance])
        for _ in range(2)
    )
    model = mlp()
    for each in (grab, other):
        list(each)
    for batch in torch.tensor(grab.order).split(BATCH):
        x = torch.randn(BATCH, 6)
        x[1] = math.nan
        gradients = psg.per_sample_grads(
            model, lambda model, x: model(x).sum(1), (x,), check="never"
        )
        other.step(gradients, indices=batch)
        with grab.record(model, check="never"):
            losses = model(x).sum(1)
        grab.backward(losses, indices=batch)
        model.zero_grad()
    assert len(factored) == N // BATCH
    mine, theirs = (each.state_dict()["engine"] for each in (grab, other))
    assert torch.equal(mine["codes"], theirs["codes"])
    for name, value in mine["state"].items():
        assert torch.isfinite(value).all()
        torch.testing.assert_close(value, theirs["state"][name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("balance", ["mean", "pair"])
@pytest.mark.parametrize("name", MODELS)
def test_projected_orders_are_those_of_projected_gradients(name, balance):
    options = {"fidelity": "projected", "projection_size": 60}
    recorded = trained(name, balance, "recorded", **options)
    assert_same_training(
        recorded, trained(name, balance, "projected by hand", **options)
    )
    assert recorded[0] != formed(name, balance)[0]


@pytest.mark.parametrize("fidelity", ["exact", "projected", "group"])
def test_losses_of_a_model_that_was_not_recorded_are_refused(fidelity):
    model, other = mlp().double(), mlp().double()
    options = {"group_size": 4} if fidelity == "group" else {}
    grab = sampler(model, fidelity=fidelity, **options)
    x, y = samples("mlp")
    first = list(grab)[:4]
    for wrong, recorded in [(other, model), (model, other)]:
        with grab.record(recorded):
            losses = losses_of(wrong, x[first], y[first])
        with pytest.raises(RuntimeError, match="do not depend on the sampler's param"):
            grab.backward(losses)
    if fidelity != "group":  # which takes the mean loss of a group, too
        with grab.record(model):
            losses = losses_of(model, x[first], y[first]).mean()
        with pytest.raises(ValueError, match=r"shape \(\): give one number per sample"):
            grab.backward(losses)


@pytest.mark.parametrize("fidelity", ["exact", "projected", "group"])
def test_frozen_parameters_are_named_with_those_to_pass(fidelity):
    model = mlp()
    grab = sampler(
        model, fidelity=fidelity, group_size=None if fidelity != "group" else 2
    )
    next(model.parameters()).requires_grad_(False)
    told = "0.weight of GraBSampler's trainable_params .* if p.requires_grad}"
    with pytest.raises(ValueError, match=told):
        grab.record(model)
    assert grab._recorded is None


def test_what_is_balanced_has_the_size_of_the_projection():
    model = mlp()
    grab = sampler(model, fidelity="projected", projection_size=30)
    assert grab.projection.size <= 30
    state = grab.state_dict()
    assert state["num_columns"] == grab.projection.size
    other = sampler(model, fidelity="projected", projection_size=30, seed=1)
    for wrong in (other, sampler(model)):
        with pytest.raises(ValueError, match="the state of another sampler"):
            wrong.load_state_dict(state)
    sampler(model, fidelity="projected", projection_size=30).load_state_dict(state)
    assert sampler(model).projection is None


@pytest.mark.parametrize(
    ("size", "options", "fidelity"),
    [
        (2**20, {}, "exact"),
        (2**20 + 1, {}, "projected"),
        (2**20 + 1, {"fidelity": "exact"}, "exact"),
        (2**20 + 1, {"random_projection": "kron", "pi_eps": 0.9}, "exact"),
        (2**20 + 1, {"balance_type": "rr"}, "exact"),
        (8, {"fidelity": "projected"}, "projected"),
    ],
)
def test_the_size_of_the_model_chooses_the_fidelity(size, options, fidelity):
    grab = GraBSampler(range(N), {"weight": torch.zeros(size)}, **options)
    assert grab.fidelity == fidelity
    same = GraBSampler(range(N), {"weight": torch.zeros(size)}, **options)
    same.load_state_dict(grab.state_dict())
    list(grab)
    if grab.projection is not None and size > 8:
        with pytest.raises(ValueError, match="pass fidelity='exact' to give gradients"):
            grab.step({"weight": torch.zeros(2, size)})
        other = GraBSampler(range(N), {"weight": torch.zeros(size)}, fidelity="exact")
        with pytest.raises(ValueError, match="the state of another sampler"):
            other.load_state_dict(grab.state_dict())


def test_mistakes_are_named():
    model = mlp()
    with pytest.raises(ValueError, match="fidelity must be one of 'exact', 'proj"):
        sampler(model, fidelity="rough")
    grab = sampler(model)
    list(grab)
    losses = model(torch.randn(BATCH, 6)).sum(1)
    with pytest.raises(RuntimeError, match=r"backward\(\) without record\(\)"):
        grab.backward(losses)
    with grab.record(model):
        losses = model(torch.randn(BATCH, 6)).sum(1)
    grab.backward(losses)
    with pytest.raises(RuntimeError, match="once for every backward"):
        grab.backward(losses)
    with pytest.raises(ValueError, match=r"2\.weight, 2\.bias of GraBSampler.s"):
        grab.record(copy.deepcopy(model[0]))


@pytest.mark.parametrize("options", [{}, {"fidelity": "group", "group_size": BATCH}])
def test_an_order_that_needs_no_gradients_forms_none(options):
    """So any model will do: this one's samples have no gradients of their own."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    other = copy.deepcopy(model)
    x, y = torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,))
    grab = sampler(model, balance_type="rr", **options)
    list(grab)
    with grab.record(model):
        losses = losses_of(model, x, y)
    grab.backward(losses, indices=grab.order[:BATCH])
    losses_of(other, x, y).mean().backward()
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(mine.grad, theirs.grad)
    assert grab.num_seen == BATCH
    losses = losses_of(model, x, y)
    with pytest.raises(ValueError, match="indices are"):
        grab.backward(losses, indices=grab.order[:BATCH])
    with pytest.raises(ValueError, match="reduction must be one of 'mean', 'sum'"):
        grab.backward(losses_of(model, x, y), reduction="max")
    if not options:
        with pytest.raises(ValueError, match="give one number per sample"):
            grab.backward(losses_of(model, x, y).mean())


def elastic(rank: int, ways: list[str]) -> list[tuple[list, list, list]]:
    """Trains elastically in several ways.

    ``"factored"`` is exact and keeps factors wherever it can: on one replica. ``"from
    samples"`` is exact and makes ``.grad`` from the gradients of samples.
    """
    found = []
    for how in ways:
        options = {"fidelity": "projected" if how == "projected" else "exact"}
        options |= {"projection_size": 40, "from_samples": how == "from samples"}
        names = ("LEAST_SPARED", "LEAST_COMPRESSION") if how == "factored" else ()
        limits = {"MOST_FORMED": 2**24, **dict.fromkeys(names, 0)}
        with mock.patch.multiple(gradients_of_samples, **limits):
            data = samples("mlp")
            found.append(training.elastic(training.mlp(), data, EPOCHS, **options))
    return found


@pytest.mark.parametrize("backend", training.BACKENDS)
def test_under_a_trace_replicas_order_as_one_does(backend):
    ways = ["exact", "from samples", "projected"]
    if backend.num_replicas == 1:  # several exchange columns, which are formed
        ways.append("factored")
    for orders in training.assert_same_runs(elastic, ways, backend=backend):
        assert len({tuple(order) for order in orders}) == EPOCHS


@pytest.mark.parametrize("fidelity", ["exact", "projected", "group"])
def test_recorded_losses_that_are_never_balanced_are_told(fidelity):
    model = mlp().double()
    x, y = samples("mlp")
    options = {"group_size": BATCH} if fidelity == "group" else {}
    named = dict(model.named_parameters())
    grab = GraBSampler(range(N), named, fidelity=fidelity, **options)
    loader = torch.utils.data.DataLoader(range(N), BATCH, sampler=grab)

    def epoch(backward) -> None:
        for indices in loader:
            with grab.record(model):
                losses = losses_of(model, x[indices], y[indices])
            backward(losses)

    epoch(lambda losses: losses.mean().backward())
    with pytest.warns(grab_xla.GraBWarning, match="call sampler.backward"):
        epoch(grab.backward)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch(grab.backward)
        assert len([*loader]) == N // BATCH  # as in an evaluation
        epoch(grab.backward)


NUM_SAMPLES = 24


def orders(prefixes, change=lambda state: None):
    """Returns two epochs' orders; each epoch's sampler is restored from the last."""
    torch.manual_seed(0)
    data, model = torch.randn(NUM_SAMPLES, 6), nn.Linear(6, 5)
    found, state = [], None
    for prefix in prefixes:
        whole = model if not prefix else nn.ModuleDict({prefix: model})
        sampler = grab_xla.GraBSampler(
            range(NUM_SAMPLES), dict(whole.named_parameters()), "mean",
            fidelity="projected", projection_size=12,
        )  # fmt: skip
        if state is not None:
            change(state)
            sampler.load_state_dict(state)
        found.append(order := list(sampler))
        for first in range(0, NUM_SAMPLES, 6):
            with sampler.record(whole):
                losses = model(data[order[first : first + 6]]).square().sum(1)
            sampler.backward(losses)
        state = copy.deepcopy(sampler.state_dict())
    return found


def test_a_run_that_is_wrapped_when_it_resumes_has_the_same_order():
    plain = orders(["", "", ""])
    assert plain[1] != plain[2]
    assert orders(["", "_orig_mod", "module"]) == plain


def test_the_state_of_another_projection_is_refused():
    def replace(state):
        state["settings"]["projection"] = state["settings"]["projection"][:-1] + "?"

    with pytest.raises(ValueError, match="projection"):
        orders(["", ""], replace)
