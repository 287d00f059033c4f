"""Minibatches with weights: a step's gradient is the mean over all of its tokens."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from support.variable_batch_size.elastic import OPTIMIZERS, Case, batches
from support.xla_replica.replicas import row
from torch import nn

import variable_batch_size as vbs
import xla_replica
from variable_batch_size import gradient_noise

VOCABULARY, LENGTH, PADDING = 11, 7, -100
NUM_SAMPLES = 96
# Batches from one minibatch to eight; several replicas are idle, two of them at first.
TRACE = (4, 24, 12, 32, 8, 16)


@dataclasses.dataclass(frozen=True)
class Run:
    """How a language model is trained; ``reference`` is ref_batchsize or ref_weight."""

    rule: str
    reference: dict[str, float]
    optimizer: str = "sgd-momentum"
    weight: str = "tensor"
    options: dict[str, object] = dataclasses.field(default_factory=dict)

    def ratio(self, num_samples: int, num_tokens: int) -> float:
        if "ref_weight" in self.reference:
            return num_tokens / self.reference["ref_weight"]
        return num_samples / self.reference["ref_batchsize"]


RUNS = {
    "by samples": Run("linear", {"ref_batchsize": 16}, weight="number"),
    "by samples, clipped": Run(
        "root", {"ref_batchsize": 16}, options={"max_grad_norm": 0.05}
    ),
    "by tokens": Run("linear", {"ref_weight": 64}),
    "by tokens, in the buffer": Run("linear-momentum", {"ref_weight": 64}),
    "by tokens, decay": Run(
        "root", {"ref_weight": 64.0}, options={"decay_per_sample": True}
    ),
    "by tokens, adamw": Run("root", {"ref_weight": 64}, "adamw", "number"),
}


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 6),
        nn.Linear(6, 8),
        nn.Tanh(),
        nn.Linear(8, VOCABULARY),
    ).double()


def make_texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and padded targets, ``(N, T)``, of texts of 0 to T tokens."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_SAMPLES, LENGTH)
    inputs = torch.randint(0, VOCABULARY, shape, generator=generator)
    targets = torch.randint(0, VOCABULARY, shape, generator=generator)
    lengths = torch.randint(0, LENGTH + 1, (NUM_SAMPLES, 1), generator=generator)
    return inputs, targets.where(torch.arange(LENGTH) < lengths, PADDING)


def loss_sum(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(
        model(x).flatten(0, 1), y.flatten(), reduction="sum", ignore_index=PADDING
    )


def start(run: Run, **options):
    """Returns replica, model, sampler, optimizer and the texts."""
    replica = xla_replica.current()
    with replica.seeded(0):
        model = make_model()
    model.to(replica.device)
    sampler = vbs.CustomSampler(
        range(NUM_SAMPLES), TRACE, minibatch_size=4, on_end="cycle", verbose=False
    )
    optimizer = vbs.ElasticOptimizer(
        OPTIMIZERS[run.optimizer](model.parameters(), 2**-4),
        sampler,
        run.rule,
        reduction="sum",
        **run.reference,
        **run.options,
        **options,
    )
    return replica, model, sampler, optimizer


def train_epoch(epoch: int, run: Run, replica, model, sampler, optimizer) -> None:
    inputs, targets = make_texts()
    sampler.set_epoch(epoch)
    optimizer.set_epoch(epoch)
    for minibatch in sampler:
        x, y = replica.send((inputs[minibatch], targets[minibatch]))
        loss_sum(model, x, y).backward()
        if run.weight == "tensor":
            optimizer.step(weight=(y != PADDING).sum())
        else:
            optimizer.step(weight=int((targets[minibatch] != PADDING).sum()))


def elastic_runs(rank: int) -> dict[str, dict[str, object]]:
    found = {}
    for name, run in RUNS.items():
        parts = start(run)
        replica, model, _, optimizer = parts
        updates: list[vbs.Update] = []
        optimizer.attach(updates.append)
        for epoch in range(2):
            train_epoch(epoch, run, *parts)
        with xla_replica.count(replica) as count:
            train_epoch(2, run, *parts)
        told = [float(number) for u in updates for number in (u.weight, u.lr[0])]
        found[name] = {
            "weights": replica.fetch([p.detach() for p in model.parameters()]),
            "told": told,
            "count": (count.compilations, count.transfers, len(count.fallbacks)),
        }
    return found


def one_process(run: Run) -> tuple[list[torch.Tensor], list[float]]:
    """Trains in plain torch, with all tokens of a step in one batch."""
    with xla_replica.seeded(0):
        model = make_model()
    inputs, targets = make_texts()
    lr = 2**-4
    optimizer = OPTIMIZERS[run.optimizer](model.parameters(), lr)
    told = []
    case = Case(TRACE, epochs=3, num_samples=NUM_SAMPLES)
    for _, rows in batches(case):
        optimizer.zero_grad()
        num_tokens = int((targets[rows] != PADDING).sum())
        (loss_sum(model, inputs[rows], targets[rows]) / num_tokens).backward()
        if "max_grad_norm" in run.options:
            nn.utils.clip_grad_norm_(model.parameters(), run.options["max_grad_norm"])
        ratio = run.ratio(len(rows), num_tokens)
        factor = math.sqrt(ratio) if run.rule == "root" else ratio
        [group] = optimizer.param_groups
        decay = group["weight_decay"]
        if run.rule == "linear-momentum":
            for parameter in model.parameters():
                parameter.grad.add_(parameter.detach(), alpha=decay).mul_(factor)
            group["weight_decay"] = 0.0
        else:
            group["lr"] = lr * factor
        if "decay_per_sample" in run.options:
            group["weight_decay"] = decay * ratio / factor
        optimizer.step()
        group["weight_decay"] = decay
        told += [num_tokens, lr * factor]
    return [p.detach() for p in model.parameters()], told


@pytest.fixture(
    scope="module",
    params=[
        row("cpu", 1),
        row("cpu", 2),
        row("xla", 1, slow=True),
        row("xla", 2),
        row("xla", 8, slow=True),
    ],
)
def outcomes(request):
    return request.param.run(elastic_runs, timeout=150)


@pytest.mark.parametrize("name", RUNS)
def test_ragged_batches_equal_one_process_with_all_tokens(outcomes, name):
    weights, told = one_process(RUNS[name])
    for outcome in outcomes:
        torch.testing.assert_close(
            outcome[name]["weights"], weights, rtol=1e-12, atol=1e-12
        )
        assert outcome[name]["told"] == pytest.approx(told, rel=1e-12)


@pytest.mark.parametrize("name", RUNS)
def test_after_warm_up_nothing_is_compiled_or_read_back(outcomes, name):
    for outcome in outcomes:
        assert outcome[name]["count"] == (0, 0, 0)


def test_the_mean_of_means_is_something_else():
    """The texts differ so much in length that the test above can fail."""
    _, targets = make_texts()
    tokens = (targets != PADDING).sum(1)
    assert tokens.min() == 0
    assert tokens.max() == LENGTH


# --- weights of zero ---------------------------------------------------------------


def test_a_minibatch_of_weight_zero_adds_nothing():
    """A step of two minibatches, one of them padding, is a step of the other one."""
    found = []
    for weights in ((5.0, 0.0), (0.0, 5.0)):
        replica = xla_replica.LocalReplica("cpu")
        parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
        sampler = vbs.CustomSampler(range(8), [8], minibatch_size=4, verbose=False)
        optimizer = vbs.ElasticOptimizer(
            torch.optim.SGD([parameter], 0.5),
            sampler,
            "constant",
            reduction="sum",
            replica=replica,
        )
        for weight, _ in zip(weights, sampler):
            (parameter.sum() * weight).backward()
            optimizer.step(weight=weight)
        found.append(parameter.detach())
    assert torch.equal(*found)
    assert torch.equal(found[0], torch.full((3,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("reference", [{"ref_weight": 4}, {"ref_batchsize": 4}])
def test_a_step_of_weight_zero_has_a_gradient_of_zero(reference):
    parameter = nn.Parameter(torch.ones(3))
    sampler = vbs.CustomSampler(
        range(8), [4], on_end="cycle", minibatch_size=4, verbose=False
    )
    optimizer = vbs.ElasticOptimizer(
        torch.optim.SGD([parameter], 0.5),
        sampler,
        "linear",
        reduction="sum",
        noise="ref_weight" in reference,
        **reference,
    )
    for weight, _ in zip((0, 2), sampler):
        before = parameter.detach().clone()
        (parameter.sum() * weight).backward()
        optimizer.step(weight=weight)
        assert torch.isfinite(parameter).all()
        assert torch.equal(parameter, before) == (weight == 0)


# --- noise -------------------------------------------------------------------------


def test_the_estimates_are_unbiased_whatever_the_weights():
    """Every outcome of six tokens, each of gradient m + 1 or m - 1, is averaged."""
    mean, sizes = 0.75, (1, 3, 2)
    total = torch.tensor([float(sum(sizes))], dtype=torch.float64)
    count = torch.tensor([float(len(sizes))], dtype=torch.float64)
    matrix = gradient_noise.weighted_coefficients(count, total)
    estimates = []
    for signs in itertools.product((-1.0, 1.0), repeat=sum(sizes)):
        tokens = iter(mean + sign for sign in signs)
        sums = [sum(next(tokens) for _ in range(size)) for size in sizes]
        squares = sum(s**2 / size for s, size in zip(sums, sizes))
        mean_square = (sum(sums) / total) ** 2
        estimates.append(
            gradient_noise.estimate(
                torch.full_like(total, squares), mean_square, matrix
            )
        )
    variance, square, _ = torch.stack(estimates).mean(0)[:, 0].tolist()
    assert variance == pytest.approx(1.0, rel=1e-12)
    assert square == pytest.approx(mean**2, rel=1e-12)


def measured(rank: int, weighted: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Runs AdaScale where every sample is one token, with and without weights."""
    replica = xla_replica.current()
    inputs, targets = make_texts()
    targets = targets.clamp(min=0)[:, :1]
    with replica.seeded(0):
        model = make_model().to(replica.device)
    sampler = vbs.CustomSampler(
        range(NUM_SAMPLES), TRACE, minibatch_size=4, on_end="cycle", verbose=False
    )
    options = {"reduction": "sum", "ref_weight": 16} if weighted else {}
    optimizer = vbs.AdaScaleOptimizer(
        torch.optim.SGD(model.parameters(), 2**-4, momentum=0.5),
        sampler,
        ref_batchsize=None if weighted else 16,
        **options,
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for minibatch in sampler:
            x, y = replica.send((inputs[minibatch, :1], targets[minibatch]))
            loss = loss_sum(model, x, y)
            if weighted:
                loss.backward()
                optimizer.step(weight=(y != PADDING).sum())
            else:
                (loss / 4).backward()
                optimizer.step()
    numbers = [*optimizer.noise.measure(), *optimizer.current_lr()]
    return numbers, replica.fetch([p.detach() for p in model.parameters()])


@pytest.mark.parametrize("backend", [row("cpu", 1), row("cpu", 3), row("xla", 2)])
def test_adascale_with_equal_weights_is_adascale(backend):
    [numbers, weights] = backend.run(measured, False)[0]
    for found in backend.run(measured, True):
        assert found[0] == pytest.approx(numbers, rel=1e-10)
        torch.testing.assert_close(found[1], weights, rtol=1e-11, atol=1e-12)


# --- what is told, kept and refused ------------------------------------------------


def test_the_log_tells_tokens(caplog):
    parts = start(RUNS["by tokens"], log_steps=1)
    with caplog.at_level(logging.INFO, logger="variable_batch_size"):
        train_epoch(0, RUNS["by tokens"], *parts)
    _, told = one_process(RUNS["by tokens"])
    first = caplog.records[0].getMessage()
    assert f"batch size 4, weight {told[0]:g}, learning rate {told[1]:.6g}" in first
    assert parts[-1].current_lr() == pytest.approx(told[2 * 5 + 1])


def test_loading_a_state_forgets_the_weight_of_the_step_under_way():
    run = RUNS["by tokens"]
    _, model, sampler, optimizer = start(run)
    state = optimizer.state_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    ends = []
    for interrupted in (False, True):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        if interrupted:
            sampler.set_epoch(0)
            optimizer.set_epoch(0)
            inputs, targets = make_texts()
            for minibatch in itertools.islice(sampler, 3):  # of 1 and then 6
                loss_sum(model, inputs[minibatch], targets[minibatch]).backward()
                optimizer.step(weight=1000)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        train_epoch(0, run, xla_replica.current(), model, sampler, optimizer)
        ends.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def step_with(weight, **options):
    parameter = nn.Parameter(torch.ones(3))
    sampler = vbs.CustomSampler(range(8), [4], minibatch_size=4, verbose=False)
    inner = torch.optim.SGD([parameter], 0.5)
    optimizer = vbs.ElasticOptimizer(inner, sampler, "constant", **options)
    parameter.sum().backward()
    optimizer.step(**({} if weight is None else {"weight": weight}))


@pytest.mark.parametrize(
    ("weight", "options", "error", "message"),
    [
        (3, {}, TypeError, "needs reduction='sum'"),
        (None, {"reduction": "sum"}, TypeError, "needs weight="),
        (-1, {"reduction": "sum"}, ValueError, "got -1"),
        (math.nan, {"reduction": "sum"}, ValueError, "got nan"),
        (True, {"reduction": "sum"}, TypeError, "got True"),
        (torch.tensor(-2.0), {"reduction": "sum"}, ValueError, "got -2.0"),
        (torch.ones(2), {"reduction": "sum"}, ValueError, r"shape \(2,\)"),
        (torch.ones((), dtype=torch.complex64), {"reduction": "sum"}, ValueError, "c"),
        (1, {"reduction": "tokens"}, ValueError, "got 'tokens'"),
        (1, {"ref_weight": 4}, TypeError, "needs reduction='sum'"),
        (
            1,
            {"reduction": "sum", "ref_weight": 4, "ref_batchsize": 4},
            TypeError,
            "give one of them",
        ),
        (1, {"reduction": "sum", "noise": True}, TypeError, "needs ref_weight="),
        (
            1,
            {
                "reduction": "sum",
                "ref_weight": 4,
                "noise": vbs.NoiseOptions(single_minibatch="difference"),
            },
            TypeError,
            "all count the same",
        ),
    ],
)
def test_refused(weight, options, error, message):
    with pytest.raises(error, match=message):
        step_with(weight, **options)


def test_betas_cannot_follow_tokens():
    parameter = nn.Parameter(torch.ones(3))
    sampler = vbs.CustomSampler(range(8), [4], minibatch_size=4, verbose=False)
    with pytest.raises(TypeError, match="ref_batchsize= in place of ref_weight="):
        vbs.ElasticOptimizer(
            torch.optim.AdamW([parameter]),
            sampler,
            "adam-root",
            reduction="sum",
            ref_weight=4,
        )


def test_iterations_cannot_be_counted():
    parts = start(dataclasses.replace(RUNS["by tokens"], rule="adascale"))
    scheduler = torch.optim.lr_scheduler.StepLR(parts[-1], 1)
    with pytest.raises(TypeError, match="'updates' or 'samples'"):
        parts[-1].attach(scheduler, unit="iterations")
