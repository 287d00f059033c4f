"""Samples enter the balance with the weights that they have in their updates."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.grab_xla import ordering, training
from support.grab_xla.ordering import KINDS, NUM_SAMPLES
from support.grab_xla.training import MINIBATCH, REFERENCE, TRACE, samples
from support.xla_replica.replicas import backends, row
from torch import nn

import variable_batch_size as vbs


def weights_of(epoch: int) -> np.ndarray:
    """Returns weights of steps of 6 samples; sums of signs times them are exact."""
    drawn = np.random.default_rng(epoch).integers(10, 100, 8) / 1024
    return np.repeat(drawn, 6)


class Centre:
    """The weighted mean of the epoch before."""

    mean = np.zeros(ordering.NUM_PARAMETERS)

    def deviations(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        before, self.mean = self.mean, (weights @ rows) / weights.sum()
        return weights[:, None] * (rows - before)


@pytest.mark.parametrize("tile_size", [None, 3])
@pytest.mark.parametrize("name", [
    "mean", "sign", "recursive", "batch", "pair", "coordinated pair", "recursive-pair",
])  # fmt: skip
def test_weighted_orders_are_the_oracles(name, tile_size):
    sampler = KINDS[name].sampler(tile_size=tile_size, weights=weights_of)
    centre = Centre()
    steps = [(i, i + 6) for i in range(0, NUM_SAMPLES, 6)]
    orders = [ordering.run_epoch(sampler, epoch, 6) for epoch in range(5)]
    unweighted = KINDS[name].sampler(tile_size=tile_size)
    assert orders != [ordering.run_epoch(unweighted, epoch, 6) for epoch in range(5)]
    for epoch, (order, following) in enumerate(pairwise(orders)):
        rows, weights = ordering.gradients(epoch)[order].numpy(), weights_of(epoch)
        rows = np.sign(rows) if name == "sign" else rows
        vectors = centre.deviations(rows, weights)
        if "pair" in name:  # which needs no centre
            vectors = weights[:, None] * rows
        assert following == KINDS[name].oracle(order, vectors, 0.0, steps), epoch


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize(
    ("name", "given"), [("mean", weights_of), ("norm", "equal"), ("rr", "equal")]
)
def test_herding_is_that_of_gradients_with_their_weights(name, given, stale):
    options = {"record_herding": True, "stale_mean_herding": stale, "weights": given}
    sampler = KINDS[name].sampler(**options, record_norm=True)
    centre = Centre()
    for epoch in range(3):
        assert sampler.sorter.herding == -np.inf or epoch
        rows = ordering.gradients(epoch)[ordering.run_epoch(sampler, epoch, 6)].numpy()
        weights = np.ones(NUM_SAMPLES) if given == "equal" else weights_of(epoch)
        deviations = centre.deviations(rows, weights)
        if not stale:
            deviations = weights[:, None] * (rows - centre.mean)
        prefixes = deviations.cumsum(0)
        assert sampler.sorter.herding == pytest.approx(np.abs(prefixes).max())
        longest = np.linalg.norm(prefixes, axis=1).max()
        assert sampler.sorter.avg_grad_error == pytest.approx(longest)
        norms = np.linalg.norm(rows, axis=1)
        assert sampler.sorter.grad_norms == pytest.approx(norms)


def test_weights_that_are_none_are_named():
    bad = [1.0], [-1.0] * NUM_SAMPLES, [np.inf] * NUM_SAMPLES
    for weights, told in [
        *((lambda _, w=w: w, "must be 48 finite numbers of at least 0") for w in bad),
        ("mean", "weights must be one of 'equal', 'update'"),
        ("update", "weights='update' needs an elastic sampler"),
    ]:
        with pytest.raises(ValueError, match=told):
            iter(KINDS["mean"].sampler(weights=weights))


N, EPOCHS, LR = 24, 5, 0.3


def recomputed(model: nn.Module, losses_of, weight_of) -> tuple[list, list]:
    """Returns orders and weights of a loop that knows no elastic training.

    ``losses_of(model, samples)`` have the gradients, which are multiplied by
    ``weight_of(size)`` in an update of so many samples.
    """
    params = list(model.parameters())
    order = torch.randperm(N, generator=torch.Generator().manual_seed(42)).tolist()
    orders, centre, number = [], 0.0, 0
    for _ in range(EPOCHS):
        orders.append(order)
        rows, weights = [], []
        while len(rows) < N:
            size, number = TRACE[number % len(TRACE)], number + 1
            batch = order[len(rows) : len(rows) + size]
            weights += [weight_of(size)] * len(batch)
            for loss in losses_of(model, batch):
                grads = torch.autograd.grad(loss, params, retain_graph=True)
                rows.append(torch.cat([grad.flatten() for grad in grads]).numpy())
            step = torch.from_numpy(weights[-1] * sum(rows[-size:]))
            whole = nn.utils.parameters_to_vector(params).detach() - step
            nn.utils.vector_to_parameters(whole, params)
        gradients, factors = np.stack(rows), np.array(weights)
        order = ordering.mean(order, factors[:, None] * (gradients - centre), 0.0)
        centre = factors @ gradients / factors.sum()
    return orders, [p.detach() for p in params]


def trained(rank: int) -> list[tuple]:
    options = {"rule": "root", "lr": LR, "weights": "update"}
    return [training.elastic(training.mlp(), samples(), EPOCHS, **options)]


def recomputed_alone(rank: int) -> list[tuple]:
    def entropies(model: nn.Module, batch: list[int]) -> torch.Tensor:
        return training.cross_entropies(model, *(each[batch] for each in samples()))

    def weight_of(size: int) -> float:
        return LR * (size / REFERENCE) ** 0.5 / size

    return [(*recomputed(training.mlp(), entropies, weight_of), None)]


@pytest.mark.parametrize(
    "backend", [row("cpu", 1), row("cpu", 3), *backends("xla", 2, slow=(1, 8))]
)
def test_under_a_trace_samples_weigh_what_their_updates_gave_them(backend):
    training.assert_same_runs(trained, backend=backend, oracle=recomputed_alone)


def test_only_the_linear_rule_weighs_all_samples_alike():
    dealt = vbs.CustomSampler(range(N), TRACE, minibatch_size=MINIBATCH, verbose=False)
    assert dealt.update_weights(0) is None
    inner = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
    for rule, later in {"root": 0.5**0.5, "constant": 0.5, "linear": None}.items():
        vbs.ElasticOptimizer(inner, dealt, rule, REFERENCE)
        expected = later and pytest.approx([1] * 8 + [later] * 16)
        assert dealt.update_weights(0) == expected


def counting_tokens(reduction: str) -> tuple[tuple, tuple]:
    """Returns orders and weights where losses are sums over tokens, and the oracle's.

    The linear rule counts tokens, so that all gradients weigh the same.
    """
    inputs, tokens = samples()[0], torch.arange(N) % 5 + 1

    def losses_of(model: nn.Module, batch: list[int]) -> torch.Tensor:
        return model(inputs[batch])[:, 0] ** 2 * tokens[batch]

    model = nn.Linear(6, 1).double()
    twin, grab = copy.deepcopy(model), training.sampler_of(model, weights="update")
    inner, options = torch.optim.SGD(model.parameters(), LR), {"reduction": "sum"}
    run = training.Training(model, inner, grab, ref_weight=100, **options)

    def minibatch(batch: list[int]) -> torch.Tensor:
        training.balance(grab, model, losses_of, model, batch, reduction=reduction)
        return tokens[batch].sum()

    orders = [run.epoch(epoch, minibatch) for epoch in range(EPOCHS)]
    found = orders, [p.detach() for p in model.parameters()]
    return found, recomputed(twin, losses_of, lambda size: LR / 100)


def test_sums_over_tokens_are_balanced_as_the_linear_rule_weighs_them():
    (orders, weights), (expected, others) = counting_tokens("sum")
    assert orders == expected
    assert len(set(map(tuple, orders))) == EPOCHS
    torch.testing.assert_close(weights, others)
    with pytest.raises(ValueError, match="optimizer's reduction is 'sum', but"):
        counting_tokens("mean")
