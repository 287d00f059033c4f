"""SNIP's scores follow its definition, and masks follow from scores."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.rigl_xla import sparse
from support.xla_replica.replicas import Backend, needs_xla
from torch import nn
from torch.func import functional_call

import xla_replica
from rigl_xla import global_distribution, snip_scores

NAMES = ["0.weight", "2.weight", "5.weight", "7.weight"]


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images.to(next(model.parameters()).dtype)), labels)


def factors_derivatives(model, batches):
    """Returns |dL/dc| at c = 1 of a model with weights c w: Lee et al. 2019, eq. 3."""
    plain = dict(model.named_parameters())
    factors = {n: torch.ones_like(plain[n]).requires_grad_() for n in NAMES}
    total = 0.0
    for images, labels in batches:
        scaled = {name: plain[name].detach() * factors[name] for name in NAMES}
        logits = functional_call(model, scaled, images.to(plain["0.weight"].dtype))
        total = total + F.cross_entropy(logits, labels)
    total.backward()
    return {name: factor.grad.abs() for name, factor in factors.items()}


@pytest.mark.parametrize("num_batches", [1, 3])
def test_scores_are_derivatives_by_factors_of_weights(num_batches):
    model = sparse.convnet().double()
    batches = [sparse.batch(step) for step in range(num_batches)]
    found = snip_scores(model, iter(batches), loss)
    expected = factors_derivatives(model, batches)
    assert found.keys() == expected.keys()
    for name, score in found.items():
        assert torch.allclose(score, expected[name], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("initial", ["scores", "magnitude"])
@pytest.mark.parametrize("distribution", ["uniform", "erk"])
def test_each_layer_begins_with_its_highest_scores(distribution, initial):
    model = sparse.convnet()
    scores = snip_scores(model, [sparse.batch(0)], loss)
    if initial == "magnitude":
        scores = {n: p.detach().abs() for n, p in sparse.convnet().named_parameters()}
    options = {"sparsity_distribution": distribution}
    by_chance = sparse.pruned(model, sparse.sgd(model), **options)
    expected = sparse.counts(by_chance)
    by_chance.close()
    given = scores if initial == "scores" else initial
    model, _, pruner = sparse.sparse_convnet(initial_masks=given, **options)
    assert sparse.counts(pruner) == expected
    for name, mask in pruner.masks.items():
        assert scores[name][mask].min() >= scores[name][~mask].max()


@pytest.mark.parametrize("density", [0.3, 0.05])
def test_a_global_distribution_is_one_competition(density):
    """The mask is that of all scores sorted together; each layer keeps its best."""
    model = sparse.convnet()
    scores = snip_scores(model, [sparse.batch(0)], loss)
    pruner = sparse.pruned(
        model, sparse.sgd(model), dense_allocation=density, initial_masks=scores,
        sparsity_distribution=global_distribution(scores),
    )  # fmt: skip
    everything = torch.cat([scores[name].flatten() for name in NAMES])
    sizes = [scores[name].numel() for name in NAMES]
    count = sum(size - int(round((1 - density) * size, 6)) for size in sizes)
    chosen = torch.zeros(sum(sizes), dtype=torch.bool)
    chosen[everything.argsort(descending=True, stable=True)[:count]] = True
    assert all(int(part.sum()) > 0 for part in chosen.split(sizes))
    for name, part in zip(NAMES, chosen.split(sizes)):
        mask = pruner.masks.get(name, torch.ones_like(scores[name], dtype=torch.bool))
        assert torch.equal(mask.flatten(), part), name


@pytest.mark.parametrize(
    ("sparsities", "expected"), [({}, [1, 1, 28]), ({"2": 0.5}, [1, 19, 50])]
)
def test_no_layer_is_left_without_connections(sparsities, expected):
    """And overrides are outside of the competition."""
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10))
    scores = {f"{i}.weight": torch.rand(10, 10) + 10.0**i for i in range(3)}
    pruner = sparse.pruned(
        model, sparse.sgd(model), dense_allocation=0.1, initial_masks=scores,
        sparsity_distribution=global_distribution(scores), sparsities=sparsities,
    )  # fmt: skip
    assert sparse.counts(pruner) == expected


@pytest.mark.parametrize("structure", ["2:4", "constant-fan-in"])
def test_patterns_are_filled_by_score(structure):
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
    scores = {f"{i}.weight": torch.rand(model[i].weight.shape) for i in range(2)}
    dense = 0.25 if structure == "constant-fan-in" else 1
    pruner = sparse.pruned(
        model, sparse.sgd(model), dense_allocation=dense, structure=structure,
        initial_masks=scores, exclude="1",
    )  # fmt: skip
    width, per_row = (8, 2) if dense == 0.25 else (4, 2)
    mask_RM = pruner.masks["0.weight"].reshape(-1, width)
    expected = scores["0.weight"].reshape(-1, width).topk(per_row).indices
    assert all(row[best].all() for row, best in zip(mask_RM, expected))
    assert (mask_RM.sum(1) == per_row).all()


@pytest.mark.parametrize("kind", ["as it is", "compiled"])
def test_the_model_stays_as_it_was(kind):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(),
                          nn.Linear(144, 10))  # fmt: skip
    called = torch.compile(model, backend="eager") if kind == "compiled" else model
    model[3].weight.grad = torch.ones_like(model[3].weight)
    before = copy.deepcopy(model.state_dict())
    scores = snip_scores(called, [sparse.batch(0), sparse.batch(1)], loss)
    assert list(scores) == ["0.weight", "3.weight"]
    assert sparse.equal(before, model.state_dict())
    assert model[0].weight.grad is None
    assert (model[3].weight.grad == 1).all()
    assert model.training
    with torch.no_grad():
        assert sparse.equal(
            scores, snip_scores(called, [sparse.batch(0), sparse.batch(1)], loss)
        )


def test_what_cannot_be_scored_is_an_error():
    model = sparse.convnet()
    with pytest.raises(ValueError, match="at least one batch"):
        snip_scores(model, [], loss)
    with pytest.raises(ValueError, match=r"gradient of '0.weight' is not finite"):
        snip_scores(model, [sparse.batch(0)], lambda *args: loss(*args) * float("nan"))
    nn.init.zeros_(model[5].weight)
    with pytest.raises(ValueError, match=r"does not depend on '0.weight'"):
        snip_scores(model, [sparse.batch(0)], loss)
    model.add_module("other", nn.Linear(3, 3))
    scores = snip_scores(sparse.convnet(), [sparse.batch(0)], loss, exclude=["5"])
    assert list(scores) == ["0.weight", "2.weight", "7.weight"]
    with pytest.raises(ValueError, match="no weight of the model can be sparse"):
        snip_scores(model, [sparse.batch(0)], loss, exclude="*")
    with pytest.raises(TypeError, match="model must be a torch module, got 'model'"):
        snip_scores("model", [sparse.batch(0)], loss)
    with pytest.raises(TypeError, match="replica must be an xla_replica"):
        snip_scores(model, [sparse.batch(0)], loss, replica="cpu")


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (lambda model, batch: 3.0, "got 3.0"),
        (lambda model, batch: model(batch[0]), r"got shape \(8, 10\)"),
        (lambda model, batch: loss(model, batch).detach(), r"got shape \(\)"),
    ],
)
def test_a_loss_that_is_none_is_refused(value, got):
    with pytest.raises(ValueError, match=f"a tensor of one number .*{got}"):
        snip_scores(sparse.convnet(), [sparse.batch(0)], value)


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ([torch.ones(2)], "scores must be a dict of tensors by parameter name"),
        ({"a": 3}, r"the scores of 'a' must be a tensor, got 3 \(int"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "real numbers with values, got"),
        ({"a": torch.ones(2, device="meta")}, "got torch.float32 on meta"),
    ],
)
def test_scores_of_another_kind_are_refused(scores, says):
    with pytest.raises(TypeError, match=says):
        global_distribution(scores)({"a": (2,)}, 0.5, {})


def snip_run(rank: int, ddp: bool) -> dict[str, torch.Tensor]:
    replica = xla_replica.current()
    model = sparse.convnet().double().to(replica.device)
    called = torch.nn.parallel.DistributedDataParallel(model) if ddp else model
    share = slice(replica.rank, None, replica.num_replicas)
    batches = [
        replica.send([part[share] for part in sparse.batch(step, 120)])
        for step in range(2)
    ]
    scores = snip_scores(called, batches, loss)
    if ddp:  # it must not wait for gradients of this backward pass
        loss(called, batches[0]).backward()
    pruner = sparse.pruned(
        called, sparse.sgd(model), initial_masks=scores,
        sparsity_distribution=global_distribution(scores),
    )  # fmt: skip
    pruner.check_replicas()
    replica.barrier()
    return dict(zip(pruner.masks, replica.fetch(list(pruner.masks.values()))))


@pytest.mark.parametrize(
    ("backend", "ddp"),
    [
        (Backend("cpu", 2), True),
        pytest.param(Backend("xla", 2), False, marks=[needs_xla, pytest.mark.xla]),
    ],
    ids=["ddp-2", "xla-2"],
)
def test_replicas_have_the_masks_of_one_process_on_all_their_data(backend, ddp):
    expected = snip_run(0, False)
    assert list(expected) == NAMES
    for masks in backend.run(snip_run, ddp):
        assert sparse.equal(masks, expected)
