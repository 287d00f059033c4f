"""Replicas choose the masks of one process on all their data; XLA compiles once."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from support.rigl_xla.sparse import batch, convnet, for_each, pruned, same, sgd
from support.xla_replica.replicas import TORCHTPU, Backend, backends, on_xla, row

import xla_replica
from xla_replica import ReplicaError

STEPS, SIZE = 10, 120  # samples of a step: equal shares of 1, 2, 3, 5 and 8
OPTIONS = {
    "rigl": {},
    "window": {"delta": 4, "grad_accumulation_n": 3},
    "set": {"method": "set"},
    "snfs": {"method": "snfs"},
    "2:4": {"structure": "2:4", "dense_allocation": 1, "exclude": ["7"]},
}


class Run:
    """A training loop in float64, so that rounding does not decide which are larger."""

    def __init__(self, optimizer_of=sgd, ddp: bool = False, **options) -> None:
        self.replica = xla_replica.current()
        self.model = convnet().double().to(self.replica.device)
        called = torch.nn.parallel.DistributedDataParallel(self.model) if ddp else None
        self.ddp, self.called = ddp, called or self.model
        self.optimizer = optimizer_of(self.model)
        self.pruner = pruned(self.called, self.optimizer, **options)
        self.masks, self.reports = [], []

    def step(self, number: int, size: int, parts: int = 1) -> torch.Tensor:
        """Runs a step, in some backward passes, and returns the last of its losses."""
        replica = self.replica
        images, labels = batch(number, size)
        share = slice(replica.rank, None, replica.num_replicas)
        x, y = replica.send((images[share].double(), labels[share]))
        self.optimizer.zero_grad()
        for part in range(parts):
            alone = self.ddp and part < parts - 1  # only the last backward pass reduces
            with self.called.no_sync() if alone else contextlib.nullcontext():
                loss = F.cross_entropy(self.called(x[part::parts]), y[part::parts])
                (loss / parts).backward()
        if self.pruner():
            gradients = [parameter.grad for parameter in self.model.parameters()]
            if not self.ddp:
                replica.all_reduce_(gradients)
                torch._foreach_div_(gradients, replica.num_replicas)
            self.optimizer.step()
        if self.pruner.rigl_steps > len(self.reports):
            self.reports.append(self.pruner.report())
            self.masks += [mask.clone() for mask in self.pruner.masks.values()]
        replica.sync()
        return loss.detach()

    def results(self) -> tuple[list[torch.Tensor], dict[int, dict[str, float]]]:
        reported = {report.step: report.scalars() for report in self.reports}
        return self.replica.fetch(self.masks), reported


def run_of(rank: int, kind: str, ddp: bool = False, parts: int = 1):
    run = Run(ddp=ddp, **OPTIONS[kind])
    for step in range(STEPS):
        loss = run.step(step, SIZE, parts)
        if step % 5 == 4:
            run.replica.fetch([loss.reshape(1)])
    run.pruner.check_replicas()
    run.replica.barrier()  # none leaves the process group while others reduce
    return run.results()


run_of_one = functools.cache(functools.partial(run_of, 0))


def of(backend, runs: list, what: str):
    (one,) = backend.values
    return pytest.param(one, runs, marks=backend.marks, id=f"{what}-{backend.id}")


# By kind, whether under DDP, and in how many backward passes.
RIGL = [("rigl", False, 1)]
ALL = [*((kind, False, 1) for kind in OPTIONS), ("rigl", False, 5)]
UNDER_DDP = [("rigl", True, 1), ("rigl", True, 2), ("window", True, 2)]


@pytest.mark.parametrize(("backend", "runs"), [
    of(row("cpu", 3), ALL, "all"),
    pytest.param(Backend("cpu", 2), UNDER_DDP, id="under DDP"),
    # XLA's are also compared where compilations are counted.
    of(row("xla", 2, slow=True), ALL, "all"),
    *(of(each, RIGL, "rigl") for each in backends("xla", slow=(1, 8))),
    of(row("tpu-like", 2), RIGL, "rigl"),
])  # fmt: skip
def test_replicas_choose_as_one_process_on_all_their_data(backend, runs):
    for found in backend.run(for_each, run_of, runs):
        for (kind, *_), (masks, reported) in zip(runs, found, strict=True):
            expected, told = run_of_one(kind)
            num_layers = len(expected) // len(told)
            assert not same(expected[:num_layers], expected[-num_layers:])  # they move
            assert same(masks, expected)
            assert reported == told
            assert [*told] == ([4, 8] if kind == "window" else [3, 6, 9])


# A weight and a number that is 1 on the first replica alone -> the changed weight.
CHANGES = {
    "nan": lambda weight, scale: torch.full_like(weight, torch.nan),
    "weights": lambda weight, scale: weight * scale,
    "signs": lambda weight, scale: torch.where(scale > 1, -weight, weight),
    "places": lambda weight, scale: torch.where(scale > 1, weight.flip(1), weight),
    "some nan": lambda weight, scale: torch.where(
        (scale > 1) & (weight == weight.max()), torch.nan, weight
    ),
}


def drift(rank: int) -> dict[str, str]:
    """Returns messages of the check for equal replicas, other weights, other masks."""
    replica = xla_replica.current()
    messages = {}
    for what in ("", "masks", *CHANGES):
        model = convnet().to(replica.device)
        options = {"seed": rank if what == "masks" else 0, "method": "static"}
        if what == "places":  # a mask would have to be symmetric
            options |= {"sparsities": {"5": 0.0001}}
        pruner = pruned(model, **options)
        if what in CHANGES:
            weight = model[5].weight.detach()
            weight.copy_(CHANGES[what](weight, replica.scalar(1 + rank)))
        messages[what] = ""
        try:
            pruner.check_replicas()
        except ReplicaError as error:
            messages[what] = str(error)
    return messages


@pytest.mark.parametrize("backend", [row("cpu", 3), row("xla", 3), row("tpu-like", 2)])
def test_drift_is_found(backend):
    for messages in backend.run(drift):
        assert messages.pop("") == ""
        assert messages.pop("nan") == ""  # the same on every replica
        masks = messages.pop("masks")
        assert "replica 0 has {'mask of 2.weight': " in masks
        for what, message in messages.items():
            assert "replica 0 has {'weights of 5.weight': " in message, what


COUNTED = {
    **OPTIONS,
    "window": {"grad_accumulation_n": 3},
    "gmp": {"method": "gmp"},
    "single-call": {"skip_step": False},
    "adam": {"optimizer_of": lambda model: torch.optim.Adam(
        # No count of steps may be in the program.
        model.parameters(), 0.01, capturable=xla_replica.current().is_lazy
    )},
}  # fmt: skip


def counted_run(rank: int, kind: str):
    """Returns compilations, transfers and fallbacks by 10 of 110 steps, and results."""
    replica = xla_replica.current()
    # Another shape for every kind, so other programs.
    size = 2 * (4 + list(COUNTED).index(kind))
    run, counts = Run(**{**COUNTED[kind], "delta": 10, "T_end": 102}), []
    for first in range(0, 110, 10):
        with xla_replica.count(replica) as count:
            for step in range(first, first + 10):
                run.step(step, size)
        counts.append((count.compilations, count.transfers, count.fallbacks))
        replica.fetch(run.masks[-1:])
    with xla_replica.count(replica) as count:
        reported = [report.scalars() for report in run.reports]
    assert (count.compilations, count.fallbacks) == (0, {})
    num_transfers = len(reported) * replica.num_replicas
    assert count.transfers == (num_transfers if replica.is_lazy else 0)
    return counts, *run.results()


@pytest.mark.parametrize(("backend", "kinds"), [
    of(row("xla", 2), ["rigl"], "rigl"),
    of(row("xla", 1, slow=True), [*COUNTED], "all"),
    of(row("xla", 2, slow=True), ["window", "snfs"], "others"),
    *(of(each, ["rigl"], "rigl") for each in [row("xla", 8, slow=True), *TORCHTPU]),
])  # fmt: skip
def test_after_the_first_update_nothing_compiles_and_nothing_is_read(backend, kinds):
    num_replicas = backend.num_replicas
    given = [(kind,) for kind in kinds]
    for found in backend.run(for_each, counted_run, given, timeout=300.0):
        for kind, (counts, *results) in zip(kinds, found, strict=True):
            _, *expected = counted_run(0, kind)
            assert [*results[1]] == [*range(10, 110, 10)]
            assert results[1] == expected[1], kind
            assert same(results[0], expected[0]), kind
            # The sum of a step that collects but does not update is one more program.
            apart = num_replicas > 1 and kind in ("window", "snfs")
            programs = [count[0] for count in counts]
            if backend.device == "xla":
                assert 2 <= programs[0] <= 4 + apart, (kind, counts)
                assert programs[1:] == [0] * 10, (kind, counts)
            # TorchTPU compiles operations, and some come after the first update.
            assert programs[2:] == [0] * 9, (kind, counts)
            assert all(count[1:] == (0, {}) for count in counts), (kind, counts)


def saved_and_misplaced(rank: int) -> int:
    """Returns transfers of a state inside a window."""
    run = Run(delta=3, grad_accumulation_n=2)
    for step in range(2):
        run.step(step, SIZE)
    replica, model = run.replica, run.model
    with xla_replica.count(replica) as count:
        state = run.pruner.state_dict()
    assert all("gradient" in layer for layer in state["layers"].values())
    run.pruner.close()
    model[5].to("cpu")
    with pytest.raises(ValueError, match="have their values on one device"):
        pruned(model)
    return count.transfers


@on_xla
def test_a_state_is_one_transfer_and_misplaced_weights_are_errors():
    assert xla_replica.launch(saved_and_misplaced, (), 1, "xla") == [1]
