"""Replicas choose the masks of one process on all their data; XLA compiles once."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from support.rigl_xla.sparse import batch, convnet, equal, pruned, sgd, sparse_convnet
from support.xla_replica.replicas import (
    SEVERAL_REPLICAS,
    TORCHTPU,
    TPU_LIKE,
    Backend,
    backends,
    on_xla,
    row,
)

import xla_replica
from xla_replica import ReplicaError

STEPS = 10
SIZE = 120  # samples of a step, over all replicas: equal shares of 1, 2, 3, 5 and 8
OPTIONS = {
    "rigl": {},
    "window": {"delta": 4, "grad_accumulation_n": 3},
    "set": {"method": "set"},
    "snfs": {"method": "snfs"},
    "2:4": {"structure": "2:4", "dense_allocation": 1, "exclude": ["7"]},
}


def run_of(
    rank: int, kind: str, ddp: bool = False, parts: int = 1
) -> tuple[dict[str, torch.Tensor], dict[int, dict[str, float]]]:
    """Returns masks after every update, and what reports say then, by step.

    Each replica has its part of every batch; in float64, so that rounding does not
    decide which connection is larger. All read their loss now and then.
    """
    replica = xla_replica.current()
    model = convnet().double().to(replica.device)
    called = torch.nn.parallel.DistributedDataParallel(model) if ddp else model
    optimizer = sgd(model)
    pruner = pruned(called, optimizer, **OPTIONS[kind])
    found, reports = {}, []
    for step in range(STEPS):
        images, labels = batch(step, SIZE)
        share = slice(replica.rank, None, replica.num_replicas)
        x, y = replica.send((images[share].double(), labels[share]))
        optimizer.zero_grad()
        for part in range(parts):
            alone = ddp and part < parts - 1  # only the last backward pass reduces
            with called.no_sync() if alone else contextlib.nullcontext():
                loss = F.cross_entropy(called(x[part::parts]), y[part::parts])
                (loss / parts).backward()
        if pruner():
            gradients = [parameter.grad for parameter in model.parameters()]
            if not ddp:
                replica.sync()
                replica.all_reduce_(gradients)
                for gradient in gradients:
                    gradient /= replica.num_replicas
            optimizer.step()
        else:
            for name, mask in pruner.masks.items():
                found[f"{name} after update {pruner.rigl_steps}"] = mask.clone()
            reports.append(pruner.report())
        replica.sync()
        if step % 5 == 4:
            replica.fetch([loss.detach().reshape(1)])
    pruner.check_replicas()
    assert pruner.rigl_steps >= 2
    replica.barrier()  # no replica leaves the process group while others reduce
    masks = dict(zip(found, replica.fetch(list(found.values()))))
    return masks, {report.step: report.scalars() for report in reports}


run_of_one = functools.cache(functools.partial(run_of, 0))


def runs_of(rank: int, runs: list[tuple[str, bool, int]]):
    return [run_of(rank, *run) for run in runs]


def check_runs(backend: Backend, *runs: tuple[str, bool, int]) -> None:
    """Compares runs, by kind, DDP and parts, with those of one process."""
    for found in backend.run(runs_of, runs):
        for (kind, *_), (masks, reported) in zip(runs, found, strict=True):
            expected, told = run_of_one(kind)
            first, *others = expected.values()
            same = [torch.equal(first, m) for m in others if m.shape == first.shape]
            assert not all(same)  # connections move
            assert equal(masks, expected)
            assert reported == told
            assert [*told] == ([4, 8] if kind == "window" else [3, 6, 9])


@pytest.mark.parametrize(
    "backend", [row("cpu", 3), *backends("xla", 3, slow=(1, 2, 8)), TPU_LIKE]
)
def test_replicas_choose_as_one_process_on_all_their_data(backend):
    kinds = [*OPTIONS] if backend in (("cpu", 3), ("xla", 2)) else ["rigl"]
    runs = [(kind, False, 1) for kind in kinds]
    if len(kinds) > 1:
        runs += [("rigl", False, 5)]  # the share in several backward passes
    check_runs(backend, *runs)


def test_under_ddp_with_gradients_accumulated_in_parts():
    runs = ("rigl", True, 1), ("rigl", True, 2), ("window", True, 2)
    check_runs(Backend("cpu", 2), *runs)


def change_weights(model, what: str, scale: torch.Tensor) -> None:
    """Changes weights of a layer, most kinds only where ``scale`` is not 1."""
    weight = model[5].weight
    if what == "weights":
        weight.mul_(scale)
    elif what == "signs":
        weight.copy_(torch.where(scale > 1, -weight, weight))
    elif what == "places":
        weight.copy_(torch.where(scale > 1, weight.flip(1), weight))
    elif what == "nan":
        weight.fill_(float("nan"))
    elif what == "some nan":
        weight[0].copy_(torch.where(scale > 1, torch.nan, weight[0]))


def drift(rank: int) -> dict[str, str]:
    """Returns messages of the check for equal replicas, other weights, other masks."""
    replica = xla_replica.current()
    messages = {}
    for what in ("", "nan", "weights", "signs", "places", "some nan", "masks"):
        model = convnet().to(replica.device)
        options = {"seed": rank if what == "masks" else 0, "method": "static"}
        if what == "places":  # a mask would have to be symmetric
            options |= {"sparsities": {"5": 0.0001}}
        pruner = pruned(model, sgd(model), **options)
        with torch.no_grad():
            change_weights(model, what, replica.scalar(1 + rank))
        try:
            pruner.check_replicas()
            messages[what] = ""
        except ReplicaError as error:
            messages[what] = str(error)
    return messages


@pytest.mark.parametrize("backend", [*SEVERAL_REPLICAS, TPU_LIKE])
def test_drift_is_found(backend):
    for messages in backend.run(drift):
        assert messages.pop("") == ""
        assert messages.pop("nan") == ""  # the same on every replica
        masks = messages.pop("masks")
        assert masks.startswith("masks differ between replicas in ['2.weight', '5")
        for what, message in messages.items():
            kind = "weights that are not finite" if what == "some nan" else "weights"
            assert message.startswith(f"{kind} differ between replicas in ['5."), what


COUNTED = {
    **OPTIONS,
    "window": {"grad_accumulation_n": 3},
    "gmp": {"method": "gmp"},
    "single-call": {"skip_step": False},
    "adam": {},
}


def counted_run(rank: int, kind: str):
    """Returns compilations, transfers and fallbacks by 10 of 110 steps, and masks.

    Updates are at 10, 20, ..., 100; the last 10 steps come after all of them. A report
    of each is read in the end, in one transfer.
    """
    replica = xla_replica.current()
    size = 2 * (
        4 + list(COUNTED).index(kind)
    )  # another shape for every kind, so other programs
    model = convnet().double().to(replica.device)
    optimizer = sgd(model)
    if kind == "adam":  # its count of steps must not be a number in the program
        compiles = replica.is_lazy
        optimizer = torch.optim.Adam(model.parameters(), 0.01, capturable=compiles)
    pruner = pruned(model, optimizer, **{**COUNTED[kind], "delta": 10, "T_end": 102})
    counts, masks, reports = [], [], []
    for first in range(0, 110, 10):
        with xla_replica.count(replica) as count:
            for step in range(first, first + 10):
                images, labels = batch(step, size)
                share = slice(replica.rank, None, replica.num_replicas)
                x, y = replica.send((images[share].double(), labels[share]))
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if pruner():
                    gradients = [parameter.grad for parameter in model.parameters()]
                    replica.all_reduce_(gradients)
                    for gradient in gradients:
                        gradient /= replica.num_replicas
                    optimizer.step()
                if pruner.rigl_steps > len(reports):
                    reports.append(pruner.report())
                replica.sync()
        counts.append((count.compilations, count.transfers, count.fallbacks))
        masks.append(replica.fetch(list(pruner.masks.values())))
    assert pruner.rigl_steps == 10
    with xla_replica.count(replica) as count:
        reported = {report.step: report.scalars() for report in reports}
    assert (count.compilations, count.fallbacks) == (0, {})
    num_transfers = len(reports) * replica.num_replicas
    assert count.transfers == (num_transfers if replica.is_lazy else 0)
    return counts, masks, reported


def counted_runs(rank: int, kinds: list[str]):
    return {kind: counted_run(rank, kind) for kind in kinds}


def _counted(backend, kinds: list[str], what: str = "rigl"):
    (one,) = backend.values
    return pytest.param(one, kinds, marks=backend.marks, id=f"{what}-{backend.id}")


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        _counted(row("xla", 1, slow=True), ["rigl"]),
        _counted(row("xla", 2), ["rigl"]),
        _counted(row("xla", 1, slow=True), [*COUNTED][1:], "others"),
        _counted(row("xla", 2, slow=True), ["window", "snfs"], "others"),
        _counted(row("xla", 8, slow=True), ["rigl"]),
        *(_counted(each, ["rigl"]) for each in TORCHTPU),
    ],
)
def test_after_the_first_update_nothing_compiles_and_nothing_is_read(backend, kinds):
    num_replicas = backend.num_replicas
    for found in backend.run(counted_runs, kinds, timeout=300.0):
        for kind, (counts, masks, reported) in found.items():
            _, on_cpu, expected = counted_run(0, kind)
            assert reported == expected
            assert [*reported] == [*range(10, 110, 10)]
            # The sum of a step that collects but does not update is one more program.
            apart = num_replicas > 1 and kind in ("window", "snfs")
            programs = [count[0] for count in counts]
            if backend.device == "xla":
                assert 2 <= programs[0] <= 4 + apart, (kind, counts)
                assert programs[1:] == [0] * 10, (kind, counts)
            # TorchTPU compiles operations, and some come after the first update.
            assert programs[2:] == [0] * 9, (kind, counts)
            assert all(count[1:] == (0, {}) for count in counts), (kind, counts)
            for update, (some, others) in enumerate(zip(masks, on_cpu)):
                for one, other in zip(some, others):
                    assert torch.equal(one, other), (kind, update)


def saved_and_misplaced(rank: int) -> int:
    """Returns transfers of a state inside a window."""
    replica = xla_replica.current()
    model = convnet().to(replica.device)
    pruner = pruned(model, sgd(model), delta=3, grad_accumulation_n=2)
    for step in range(2):
        x, y = replica.send(batch(step))
        F.cross_entropy(model(x), y).backward()
        assert pruner()
        replica.sync()
    with xla_replica.count(replica) as count:
        state = pruner.state_dict()
    assert all("gradient" in layer for layer in state["layers"].values())
    pruner.close()
    model[5].to("cpu")
    with pytest.raises(ValueError, match="have their values on one device"):
        pruned(model, sgd(model))
    model, _, pruner = sparse_convnet()
    model.to(replica.device)
    with pytest.raises(ValueError, match="build optimizer and pruner after the move"):
        pruner()
    return count.transfers


@on_xla
def test_a_state_is_one_transfer_and_misplaced_weights_are_errors():
    assert xla_replica.launch(saved_and_misplaced, (), 1, "xla") == [1]
