"""An ordinary module's ordinary backward pass orders its samples."""

import copy
import functools

import pytest
import torch
from support.grab_xla import training
from support.grab_xla.ordering import KINDS
from support.xla_replica.replicas import TORCHTPU, backends, of_torch_alone, row
from torch import nn

import per_sample_grad as psg
import xla_replica
from grab_xla import GraBSampler, GraBWarning

N, BATCH, EPOCHS, VOCABULARY = 24, 4, 3, 11


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


def samples(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if name == "mlp":
        return training.samples(N)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (N, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    outputs = model(x)
    if y.dim() == 1:
        return nn.functional.cross_entropy(outputs, y, reduction="none")
    return psg.token_cross_entropy(outputs, y)


@functools.cache
def trained(name: str, balance: str, how: str, **options) -> tuple[list, list]:
    """Returns every epoch's order, and the weights; ``how`` gradients are made."""
    torch.manual_seed(0)
    model = (training.mlp if name == "mlp" else TiedTransformer)().double()
    kind = KINDS[balance]
    given = {"losses_of": losses_of, "size": BATCH, **kind.options, **options}
    if name == "transformer":
        inside = (n for n, _ in model.named_modules() if n.startswith("blocks"))
        given["captured"] = {"batch_dim": {"": 0} | dict.fromkeys(inside, 1)}
    orders = training.ordered(model, samples(name), how, kind.name, **given)
    return orders, [parameter.detach() for parameter in model.parameters()]


def assert_same_training(one: tuple, other: tuple, rtol=0.0, atol=0.0) -> None:
    assert one[0] == other[0]
    assert len({tuple(order) for order in one[0]}) == EPOCHS
    torch.testing.assert_close(one[1], other[1], rtol=rtol, atol=atol)


GROUP = {"fidelity": "group", "group_size": BATCH}
PROJECTED = {"fidelity": "projected", "projection_size": 60}
each_fidelity = pytest.mark.parametrize("options", [{}, PROJECTED, GROUP])
ORDERS = [
    *((name, {}) for name, kind in KINDS.items() if kind.oracle),
    ("mean", PROJECTED),
    ("pair", PROJECTED),
    ("mean", {"random_projection": "jl", "pi_eps": 0.9}),
    ("recursive", {"random_projection": "kron", "pi_eps": 0.9}),
]


@pytest.mark.parametrize(("name", "balance", "options"), [
    *(("mlp", *order) for order in ORDERS),
    *(pytest.param("transformer", *order, marks=of_torch_alone) for order in ORDERS),
    ("mlp", "pair", {"num_workers": 2}),
    ("mlp", "pair", {"prob_balance": True, "num_workers": 2}),
    ("mlp", "recursive", {"prob_balance": True, "tie": "positive"}),
    ("mlp", "recursive-pair", {"batch_size": 2}),  # two blocks in a step
    ("mlp", "mean", {"backwards": True}),
    ("mlp", "mean", {"normalize_grads": True}),
    ("mlp", "mean", {"record_norm": True}),
])  # fmt: skip
def test_orders_are_those_of_formed_gradients(name, balance, options):
    formed = trained(name, balance, "formed", **options)
    assert_same_training(trained(name, balance, "recorded", **options), formed)
    if (balance, options) == ("mean", {}):  # samples' may make those of the model
        found = trained(name, balance, "from samples")
        assert_same_training(found, formed, rtol=1e-9, atol=1e-12)
    if options.keys() & {"fidelity", "random_projection"}:
        assert formed[0] != trained(name, balance, "formed")[0]


@each_fidelity
def test_models_that_were_not_recorded_or_are_frozen_are_named(options):
    model, other, (x, y) = training.mlp(), training.mlp(), samples("mlp")
    first = list(grab := training.sampler_of(model, **options))[:BATCH]
    for wrong, recorded in [(other, model), (model, other)]:
        with pytest.raises(RuntimeError, match="do not depend on the sampler's param"):
            training.balance(grab, recorded, losses_of, wrong, x[first], y[first])
    model[0].weight.requires_grad_(False)
    told = "0.weight of GraBSampler's trainable_params .* if p.requires_grad}"
    with pytest.raises(ValueError, match=told):
        grab.record(model)


@pytest.mark.parametrize(("size", "options", "fidelity"), [
    (2**20, {}, "exact"),
    (2**20 + 1, {}, "projected"),
    (2**20 + 1, {"fidelity": "exact"}, "exact"),
    (2**20 + 1, {"balance_type": "rr"}, "exact"),
    (8, {"fidelity": "projected"}, "projected"),
])  # fmt: skip
def test_the_size_of_the_model_chooses_the_fidelity(size, options, fidelity):
    parameters = {"weight": torch.zeros(size)}
    grab, other = (GraBSampler(range(N), parameters, **options) for _ in range(2))
    assert grab.fidelity == fidelity
    other.load_state_dict(grab.state_dict())
    list(grab)
    grab.step({"weight": torch.randn(2, size)})
    if grab.projection is not None and size > 8:
        other = GraBSampler(range(N), parameters, fidelity="exact")
        with pytest.raises(ValueError, match="the state of another sampler"):
            other.load_state_dict(grab.state_dict())


def test_mistakes_are_named():
    model, (x, y) = training.mlp(), samples("mlp")
    first = list(grab := training.sampler_of(model))[:BATCH]
    given = losses_of, model, x[first], y[first]
    with pytest.raises(RuntimeError, match=r"backward\(\) without record\(\)"):
        grab.backward(losses_of(*given[1:]))
    with pytest.raises(ValueError, match=r"shape \(\): give one number per sample"):
        training.balance(grab, model, lambda *of: losses_of(*of).mean(), *given[1:])
    training.balance(grab, model, *given)
    losses = losses_of(*given[1:])
    with pytest.raises(RuntimeError, match="once for every backward"):
        grab.backward(losses)
    with pytest.raises(ValueError, match=r"2\.weight, 2\.bias of GraBSampler.s"):
        grab.record(copy.deepcopy(model[0]))


@pytest.mark.parametrize("options", [{}, GROUP])
def test_an_order_that_needs_no_gradients_forms_none(options):
    """So any model will do: this one's samples have no gradients of their own."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    other = copy.deepcopy(model)
    x, y = torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,))
    first = list(grab := training.sampler_of(model, N, "rr", **options))[:BATCH]
    training.balance(grab, model, losses_of, model, x, y, indices=first)
    losses_of(other, x, y).mean().backward()
    found, expected = ([p.grad for p in m.parameters()] for m in (model, other))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert grab.num_seen == BATCH
    losses = losses_of(model, x, y)
    refusals = [
        ({"indices": first}, losses, "indices are"),
        ({"reduction": "max"}, losses, "reduction must be one of 'mean', 'sum'"),
        ({}, losses.mean(), "give one number per sample"),
    ]
    for given, losses, says in refusals[: 2 if options else 3]:
        with pytest.raises(ValueError, match=says):
            grab.backward(losses, **given)


def elastic(from_samples: bool = False, **options) -> tuple[list, list, list]:
    """Returns orders, weights, and each epoch's compilations and transfers."""
    model, data, orders, counts = training.mlp(), samples("mlp"), [], []
    grab = training.sampler_of(model, **options)
    run = training.Training(model, torch.optim.SGD(model.parameters(), 0.1), grab)

    def minibatch(indices: list[int]) -> None:
        given = run.replica.send(tuple(each[indices] for each in data))
        passed = {"indices": indices, "from_samples": from_samples}
        training.balance(grab, model, losses_of, model, *given, **passed)

    for epoch in range(EPOCHS):
        with xla_replica.count(run.replica) as count:
            orders.append(run.epoch(epoch, minibatch))
            run.replica.sync()
        counts.append((count.compilations, count.transfers))
    return orders, run.replica.fetch([p.detach() for p in model.parameters()]), counts


def elastic_runs(rank: int) -> list[tuple[list, list, list]]:
    return [elastic(from_samples=True), elastic(**PROJECTED), elastic(**GROUP)]


@pytest.mark.parametrize(
    "backend", [row("cpu", 3), *backends("xla", 1, slow=(2, 8)), *TORCHTPU]
)
def test_under_a_trace_replicas_order_as_one_does(backend):
    expected = elastic_runs(0)
    for found in backend.run(elastic_runs, timeout=240.0):
        for run, other in zip(found, expected, strict=True):
            assert_same_training(run, other, rtol=1e-9, atol=1e-12)
            if backend.device == "xla":
                # The epoch's signs are one transfer of each replica.
                assert run[2][1:] == [(0, backend.num_replicas)] * (EPOCHS - 1)


@each_fidelity
def test_recorded_losses_that_are_never_balanced_are_told(options):
    model, (x, y) = training.mlp(), samples("mlp")
    grab = training.sampler_of(model, **options)
    loader = torch.utils.data.DataLoader(range(N), BATCH, sampler=grab)

    def epoch(backward=grab.backward) -> None:
        for indices in loader:
            with grab.record(model):
                losses = losses_of(model, x[indices], y[indices])
            backward(losses)

    epoch(lambda losses: losses.mean().backward())
    with pytest.warns(GraBWarning, match="call sampler.backward"):
        epoch()
    epoch()
    assert len([*loader]) == N // BATCH  # as in an evaluation
    epoch()
