"""Weights have the same bits on any number of replicas, wherever they are resumed."""

import functools
import hashlib
import math
import unittest.mock
from typing import Any

import pytest
import torch
from support.variable_batch_size import exact
from support.xla_replica.replicas import GPUS, Backend, backends, of_torch_alone, on_xla
from torch import nn

import variable_batch_size as vbs
import xla_replica
from grab_xla import GraBSampler
from rigl_xla import RigLScheduler

ALONE = Backend("cpu", 1)


@pytest.fixture(scope="module")
def alone():
    [found] = ALONE.run(exact.finished, tuple(exact.RUNS))
    return dict(zip(exact.RUNS, found))


@of_torch_alone
@pytest.mark.parametrize("backend", [*backends("cpu", 2, 3, slow=(5, 8)), *GPUS])
def test_bits_are_those_of_one_replica(backend, alone):
    found = backend.run(exact.finished, tuple(exact.RUNS))
    if backend.device != "cpu":
        [again] = Backend(backend.device, 1).run(exact.finished, tuple(exact.RUNS))
        alone = dict(zip(exact.RUNS, again))
    for expected, *outcomes in zip(alone.values(), *found):
        exact.assert_same_bits([expected], outcomes)
        assert {0, 3, 9} <= set(expected.repeated)  # no grid yet; and jumps up
        assert len({*expected.repeated}) == len(expected.repeated)  # once each


@on_xla
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "small")) for n in exact.RUNS],
)
def test_replicas_on_xla_have_one_hash(name):
    numbers = (1, 2) if name == "small" else (1, 2, 8)
    runs = [Backend("xla", n).run(exact.finished, [name]) for n in numbers]
    runs = [[found for [found] in run] for run in runs]
    exact.assert_same_bits(*runs)
    for run in runs:
        # Every replica reads one flag for each time that a step is run.
        at_least = len(exact.TRACE) * len(run)
        for *_, (first, second) in run:
            assert not any(count.fallbacks for count in (first, second))
            assert at_least <= second.transfers <= 2 * at_least


def states(rank: int) -> list[dict[str, Any]]:
    training = exact.Training("small")
    return [training.state() for _ in training.train()]


def resumed(rank: int, saved: list[dict[str, Any]]) -> set[str]:
    runs = (exact.Training("small", saved=each).finish() for each in saved)
    return {run.outcome().digest for run in runs}


@of_torch_alone
def test_a_run_continues_with_the_same_bits_on_other_numbers_of_replicas(alone):
    saved, _ = Backend("cpu", 2).run(states)
    assert len(saved) == exact.NUM_EPOCHS * len(exact.TRACE)
    for number, some in (1, saved), (3, saved[::5]):
        for found in Backend("cpu", number).run(resumed, some):
            assert found == {alone["small"].digest}


def test_weights_are_those_of_float_sums_and_what_is_not_finite_stays_in_its_tensor():
    runs = exact.Training("small"), exact.Training("small", is_exact=False)
    runs[0].is_exact = False  # whose gradients become None in a step
    for run in runs:  # without dropout, which is seeded by minibatch
        run.model.eval()
        run.optimizer.set_lr((1e-4,))
        run.finish()
    mine, theirs = (run.model.state_dict() for run in runs)
    assert all(state.pop("extra").isnan().all() for state in (mine, theirs))
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)  # NaN is not close
    assert runs[0].optimizer.state_dict()["elastic"]["sums"]["extra"] < 8


def test_running_statistics_move_once_a_step():
    """By the mean of what its minibatches would have moved them by."""
    model = exact.small()
    _, linear, norm, *_ = model
    parts = torch.rand(2, exact.MINIBATCH, 64)
    values = [linear(part) for part in parts]
    means = (sum(x.mean(0) for x in values) / 2, sum(x.var(0) for x in values) / 2)
    losses = (model(part).sum() for part in (*parts, *parts))
    assert exact.steps(losses, *exact.wrapped(model, lr=0.0)) == [0, 0, 0, 1]
    torch.testing.assert_close(norm.running_mean, 0.1 * means[0])
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * means[1])
    assert norm.num_batches_tracked == 1


def test_means_are_right_whatever_numbers_do():
    """Rare rows, jumps, nothing for ten steps, a minibatch that is not finite."""
    model = nn.Sequential(nn.Embedding(3000, 4), nn.Flatten(), nn.Linear(24, 3))
    parameters = [*model.parameters()]
    scales = [1.0, 1.0, 1.0, 2.0**40, 1.0, *10 * [0.0], 1e-3, math.nan, 1.0, 1.0]
    optimizer, minibatches = exact.wrapped(
        model, trace=(12,), lr=0.0, size=12 * len(scales)
    )
    means, minibatches_of_step, num_steps = [], [], 0
    optimizer.register_step_pre_hook(
        lambda *_: means.extend(p.grad for p in parameters)
    )
    for _ in minibatches:
        tokens = (3000 * torch.rand(4, 6) ** 4).long()  # seeded by the minibatch
        scale = scales[num_steps]
        if math.isnan(scale) and len(minibatches_of_step) != 1:
            scale = 1.0
        (model(tokens).square().sum() * scale).backward()
        minibatches_of_step.append([p.grad.double() for p in parameters])
        num_steps += optimizer.step()
        if means:
            for mean, *terms in zip(means, *minibatches_of_step):
                assert_mean(mean, torch.stack(terms))
        if optimizer.place.substep == 0:
            means, minibatches_of_step = [], []
    assert num_steps == len(scales)


def assert_mean(mean: torch.Tensor, terms: torch.Tensor) -> None:
    """Asserts that a mean is that of `math.fsum`, by its tensor's largest number."""
    finite = terms.nan_to_num(0.0)
    expected = torch.tensor([math.fsum(x) for x in finite.flatten(1).T.tolist()])
    expected = expected.view(mean.shape) / len(terms)
    error = finite.abs().max().item() * 2**-16
    is_bad = terms.isnan().any(0)
    assert mean[is_bad].isnan().all()
    good = ~(is_bad.any(1, keepdim=True).expand_as(mean) if mean.dim() > 1 else is_bad)
    torch.testing.assert_close(mean[good], expected[good], atol=error, rtol=1e-6)


def sums_of_a_step(rank: int) -> tuple[int, list[tuple[torch.dtype, int]], int]:
    """Returns how many sums began in a backward pass, and what a step has summed."""
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
    optimizer, minibatches = exact.wrapped(model)
    all_reduce, sums = torch.distributed.all_reduce, []

    def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sums.append((tensor.dtype, tensor.nbytes))
        return all_reduce(tensor, *arguments, **options)

    with unittest.mock.patch.object(torch.distributed, "all_reduce", counted):
        for rows in minibatches:
            sums.clear()
            model(torch.eye(128)[rows]).square().sum().backward()
            num_early = len(sums)
            optimizer.step()
    return num_early, sums, sum(p.numel() for p in model.parameters())


@of_torch_alone
def test_sums_begin_in_the_backward_pass_and_take_four_bytes_a_number():
    for num_early, sums, num_numbers in Backend("cpu", 2).run(sums_of_a_step):
        assert num_early == 1
        assert sums[0] == (torch.int32, 4 * num_numbers)
        # And the largest numbers of rows, and ballots.
        assert sum(size for _, size in sums[1:]) < num_numbers / 16


@of_torch_alone
@pytest.mark.parametrize("num_minibatches", [511, 2048])
def test_large_steps_have_the_same_bits(num_minibatches):
    runs = [Backend("cpu", n).run(large_step, num_minibatches) for n in (1, 3)]
    assert len({digest for run in runs for digest in run}) == 1


def large_step(rank: int, num_minibatches: int) -> str:
    replica = xla_replica.current()
    with replica.seeded(0):
        model, inputs = nn.Linear(3, 2), torch.randn(num_minibatches, 3)
    model.to(replica.device)
    size = 4 * num_minibatches
    optimizer, minibatches = exact.wrapped(model, trace=(size,), size=size)
    optimizer.set_epoch(0)
    for rows in minibatches:
        x = replica.send(inputs[rows[0] // 4])
        xla_replica.backward(model(x).square().sum())
        optimizer.step()
    [weight] = replica.fetch([model.weight.detach()])
    replica.barrier()
    return hashlib.sha256(weight.numpy().tobytes()).hexdigest()


def test_a_buffer_that_a_pass_changes_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("calls", torch.zeros(()))
    model[0].register_forward_hook(lambda *_: model.calls.add_(1))
    _held = exact.wrapped(model)  # the model's hooks do not hold it
    with torch.no_grad():
        model(torch.ones(4))  # not a pass of training
    with pytest.raises(ValueError, match="has changed the buffer 'calls'"):
        model(torch.ones(4))


def test_reentrant_checkpoints_leave_no_move_behind():
    layer = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), layer)
    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, layer)
    model.forward = lambda x: checkpoint(model[0](x), use_reentrant=True)
    losses = (model(x).square().sum() for x in torch.randn(4, 4).expand(2, 4, 4))
    assert exact.steps(losses, *exact.wrapped(model, trace=(4,))) == [0, 1]
    assert layer.num_batches_tracked == 1


def logged(rank: int) -> list[float]:
    """Returns the losses that are logged of steps whose losses are 1, 1, 100 and 1."""
    replica, lines, updates = xla_replica.current(), [], []
    model = nn.Linear(1, 1, bias=False).to(replica.device)
    nn.init.ones_(model.weight)
    optimizer, minibatches = exact.wrapped(model, trace=(8, 4, 16, 4), lr=0.0)
    sinks = [lambda line, step: lines.append(line["loss"])]
    log = vbs.RunLog(None, optimizer, log_steps=3, sinks=sinks)
    for target in (log, updates.append):
        optimizer.attach(target)
    optimizer.set_epoch(0)
    for rows in minibatches:
        x = torch.full((len(rows), 1), 100.0 if len(updates) == 2 else 1.0)
        loss = model(replica.send(x)).mean()
        xla_replica.backward(loss)
        log.add(loss)
        optimizer.step()
    replica.barrier()
    return lines


@pytest.mark.parametrize("backend", [*backends("cpu", 1, 3), *backends("xla", 2)])
def test_losses_of_steps_that_are_run_again_count_once(backend):
    # Run again: the first step, which has no units yet, and the third.
    primary, *others = backend.run(logged)
    assert primary == pytest.approx([1.0, (1 * 1 + 4 * 100 + 1 * 1) / 6])
    assert others == [[]] * len(others)


ORDERS: dict[str, dict[str, Any]] = {
    "group": {"fidelity": "group", "group_size": 4, "balance_type": "pair"},
    "exact": {"fidelity": "exact"},
    "projected": {"fidelity": "projected", "projection_size": 24},
    "drawn": {"prob_balance": True, "balance_type": "recursive", "depth": 1},
}
MASKS: dict[str, dict[str, Any]] = {
    "rigl": {"T_end": 10},
    "window": {"delta": 4, "grad_accumulation_n": 3},
    "snfs": {"method": "snfs"},
    "assigned": {},  # gradients, in place of a backward pass
}
MODEL = functools.partial(exact.perceptron, nn.Tanh())
RUN = exact.Run(MODEL, options={"max_grad_norm": 1.0}, zero_step=None)


class Ordered(exact.Training):
    def __init__(self, kind: str, is_exact: bool = True) -> None:
        self.options = {"exact": is_exact, **ORDERS[kind]}
        run = RUN._replace(trace=(2, 1, 4), num_epochs=4, scales={1: 1e4})
        super().__init__(run)
        self.optimizer.attach(self.grab.after_update)

    def order(self) -> GraBSampler:
        parameters = dict(self.model.named_parameters())
        del parameters["extra"]
        self.grab = GraBSampler(
            self.inputs, parameters, scheme="gather", record_orders=True, **self.options
        )
        return self.grab

    def losses(self, rows: list[int]) -> tuple[torch.Tensor, Any]:
        self.rows = rows
        with self.grab.record(self.model):
            return super().losses(rows)

    def backward(self, losses: torch.Tensor) -> None:
        self.grab.backward(losses, indices=self.rows)

    def results(self) -> list[torch.Tensor]:
        orders, state = self.grab.orders_history, self.grab.state_dict()["engine"]
        assert len({tuple(order) for order in orders}) == self.run.num_epochs
        balance = [*state["state"].values(), state["codes"]]
        return [torch.tensor(orders), *self.model.parameters(), *balance]


class Pruned(exact.Training):
    """A run of a sparse model, whose pruner is built after a state is loaded.

    Attributes:
        seen: After each update: masks, weights, and gradients that wait for more.
    """

    def __init__(self, kind: str, is_exact: bool = True, saved: Any = None) -> None:
        run = RUN._replace(trace=(2, 1, 5, 4, 1, 3), scales={5: 1e4})
        super().__init__(run, is_exact, saved=saved)
        self.is_assigned, self.seen = kind == "assigned", []
        options = {"dense_allocation": 0.3, "delta": 3, "T_end": 20, **MASKS[kind]}
        self.pruner = RigLScheduler(
            self.model, self.optimizer, skip_step=False, ignore_linear_layers=False,
            dense_first=False, state_dict=saved and saved["pruner"], **options,
        )  # fmt: skip
        self.optimizer.attach(self.look)

    def look(self, update: vbs.Update) -> None:
        gradients = [layer.gradient for layer in self.pruner._layers]
        found = [*self.pruner.masks.values(), *self.model.parameters(), *gradients]
        self.seen += [x.detach().clone() for x in found if x is not None]
        self.replica.sync()

    def backward(self, losses: torch.Tensor) -> None:
        if not self.is_assigned:
            xla_replica.backward(losses.mean())
            return
        parameters = [*self.model.parameters()]
        for each, grad in zip(parameters, xla_replica.grad(losses.mean(), parameters)):
            each.grad = grad

    def state(self) -> dict[str, Any]:
        return {**super().state(), "pruner": self.pruner.state_dict()}

    def results(self) -> list[torch.Tensor]:
        assert self.pruner.rigl_steps >= 2
        return self.seen


def train(rank: int, kinds: list[str], **options: Any) -> list[exact.Outcome]:
    made = ((Ordered if kind in ORDERS else Pruned)(kind, **options) for kind in kinds)
    return [run.finish().outcome(run.results()) for run in made]


XLA, SLOW_XLA = (each.marks for each in backends("xla", 2, slow=(1,)))


@pytest.mark.parametrize(("device", "numbers", "kinds"), [
    *(pytest.param("cpu", (1, 2, 3), [kind], marks=of_torch_alone, id=kind)
      for kind in (*ORDERS, *MASKS)),
    pytest.param("xla", (1, 2), ["group"], marks=XLA, id="xla"),
    pytest.param("xla", (1, 2), [*[*ORDERS][1:], *MASKS], marks=SLOW_XLA, id="all"),
])  # fmt: skip
def test_orders_masks_and_weights_have_the_same_bits(device, numbers, kinds):
    runs = [zip(*Backend(device, n).run(train, kinds)) for n in numbers]
    for outcomes in zip(*runs, strict=True):
        exact.assert_same_bits(*outcomes)


def test_steps_that_are_run_again_need_rows_that_wait():
    with pytest.raises(ValueError, match=r"exact=True, scheme='gather'"):
        Ordered("exact", is_exact=False).finish()


@pytest.mark.parametrize("kind", ["rigl", "window", "snfs"])
def test_gradients_mean_what_they_do_without_exact_sums(kind):
    mine, plain = (Pruned(kind, each).finish().seen for each in (True, False))
    for number, expected in zip(mine, plain, strict=True):
        largest = expected.float().abs().max().item()
        atol = 1e-6 + largest * 2**-20
        torch.testing.assert_close(number, expected, rtol=1e-4, atol=atol)


def test_a_resumed_pruner_has_the_same_bits():
    run = Pruned("rigl")
    saved = [(run.state(), len(run.seen), run.num_minibatches) for _ in run.train()]
    state, num_seen, num_before = saved[7]
    results = Backend("cpu", 2).run(functools.partial(train, saved=state), ["rigl"])
    # No other step is run again: the units of dense gradients are resumed too.
    expected = run.outcome(run.seen[num_seen:])
    assert {each.digest for [each] in results} == {expected.digest}
    num_after = sum(each.num_minibatches for [each] in results)
    assert num_after == expected.num_minibatches - num_before
