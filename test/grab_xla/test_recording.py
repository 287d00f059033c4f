"""An ordinary module's ordinary backward pass orders its samples."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from support.replicas import row
from torch import nn

import per_sample_grad as psg
import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler

N, BATCH, EPOCHS, VOCABULARY = 24, 4, 5, 11


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


class TiedTransformer(nn.Module):
    """Two blocks; the output layer's weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(8, 2, 12, 0.0) for _ in range(2))
        )
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens).transpose(0, 1)
        return self.head(self.blocks(hidden).transpose(0, 1))


def samples(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "transformer":
        tokens = torch.randint(0, VOCABULARY, (N, 6), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    shape = {"mlp": (6,), "cnn": (2, 5, 5)}[name]
    inputs = torch.randn(N, *shape, generator=generator, dtype=torch.float64)
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
            if how == "recorded":
                with grab.record(model, **captured):
                    losses = losses_of(model, x[batch], y[batch])
                grab.backward(losses, indices=batch)
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


@pytest.mark.parametrize("balance", ["mean", "pair", "recursive", "batch"])
@pytest.mark.parametrize("name", MODELS)
def test_exact_orders_are_those_of_formed_gradients(name, balance):
    options = {"batch_size": BATCH} if balance == "batch" else {}
    recorded = trained(name, balance, "recorded", **options)
    assert_same_training(recorded, trained(name, balance, "formed", **options))


@pytest.mark.parametrize("balance", ["mean", "pair"])
@pytest.mark.parametrize("name", MODELS)
def test_projected_orders_are_those_of_projected_gradients(name, balance):
    options = {"fidelity": "projected", "projection_size": 60}
    recorded = trained(name, balance, "recorded", **options)
    assert_same_training(
        recorded, trained(name, balance, "projected by hand", **options)
    )
    assert recorded[0] != trained(name, balance, "formed")[0]


def sampler(model: nn.Module, **options) -> GraBSampler:
    return GraBSampler(range(N), dict(model.named_parameters()), **options)


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
    with pytest.raises(ValueError, match=r"0\.weight, 2\.bias, 2\.weight are not"):
        grab.record(copy.deepcopy(model[0]))


TRACE = [8, 16, 4, 12, 8]


def elastic(rank: int, fidelity: str) -> tuple[list, list, list]:
    """Returns the orders, weights, and counts of every epoch of an elastic run."""
    replica = xla_replica.current()
    with replica.seeded(0):
        model = mlp()
    model = model.double().to(replica.device)
    x, y = samples("mlp")
    grab = GraBSampler(
        range(N), dict(model.named_parameters()), dtype=torch.float64,
        fidelity=fidelity, projection_size=40,
    )  # fmt: skip
    dealt = vbs.CustomSampler(
        range(N), TRACE, minibatch_size=BATCH, on_end="cycle", order=grab, verbose=False
    )
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = vbs.LinearRuleOptimizer(inner, dealt, ref_batchsize=8)
    optimizer.attach(grab.after_update)
    orders, counts = [], []
    for epoch in range(EPOCHS):
        dealt.set_epoch(epoch)
        with xla_replica.count(replica) as count:
            optimizer.set_epoch(epoch)
            for batch in dealt:
                inputs, targets = replica.send((x[batch], y[batch]))
                with grab.record(model):
                    losses = losses_of(model, inputs, targets)
                grab.backward(losses, indices=batch)
                optimizer.step()
            replica.sync()
        orders.append(grab.order.tolist())
        counts.append((count.compilations, count.transfers))
    return orders, replica.fetch([p.detach() for p in model.parameters()]), counts


@pytest.mark.parametrize("fidelity", ["exact", "projected"])
@pytest.mark.parametrize(
    "backend",
    [row("cpu", 3), row("xla", 1), row("xla", 2, slow=True), row("xla", 8, slow=True)],
)
def test_under_a_trace_replicas_order_as_one_does(backend, fidelity):
    orders, weights, _ = elastic(0, fidelity)
    assert len({tuple(order) for order in orders}) == EPOCHS
    for theirs, values, counts in backend.run(elastic, fidelity):
        assert theirs == orders
        for value, expected in zip(values, weights):
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
        if backend.device == "xla":
            # The epoch's signs are one transfer of each replica.
            assert counts[1:] == [(0, backend.num_replicas)] * (EPOCHS - 1)
