"""`epochs` is the loop that the pages write by hand, and says what ends it."""

import fcntl
import itertools
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from support.variable_batch_size.checkpointed import Order
from support.variable_batch_size.elastic import Killed
from support.variable_batch_size.wrapping import FakeReplica
from support.xla_replica.replicas import of_torch_alone, row
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.data.schedule import Cursor

TRACE = [8, 16, 4, 12, 32, 8, 4, 24]


def parts(trace=TRACE, **options):
    replica = xla_replica.current()
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    with replica.seeded(0):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    model.to(replica.device)
    options = {"minibatch_size": 4, "on_end": "cycle"} | options
    sampler = vbs.CustomSampler(dataset, trace, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
    optimizer = vbs.LinearRuleOptimizer(optimizer, sampler, ref_batchsize=8)
    loader = DataLoader(dataset, batch_sampler=sampler)
    return model, sampler, optimizer, StepLR(optimizer, 3, 0.5), loader


def result(model) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns weights, which BatchNorm's statistics do not change, and these."""
    replica = xla_replica.current()
    return replica.fetch([*model.parameters()]), replica.fetch([*model.buffers()])


def train(model, optimizer, minibatches) -> None:
    add = minibatches.add if getattr(minibatches, "log", None) else id
    for x, y in minibatches:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        add(loss)
        optimizer.step()


def by_hand(rank: int):
    model, sampler, optimizer, scheduler, loader = parts()
    optimizer.attach(scheduler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        train(model, optimizer, xla_replica.current().loader(loader))
        optimizer.average_buffers(model)
    return result(model)


def by_epochs(rank: int, folder: str, stop_after: int | None):
    """Trains three epochs; with ``stop_after`` it is killed after so many updates."""
    model, _, optimizer, scheduler, loader = parts()
    seen = []

    def stop(update: vbs.Update) -> None:
        seen.append(update)
        if len(seen) == stop_after:
            raise Killed

    run = {"checkpoint": folder, "log": f"{folder}/run.jsonl", "every_updates": 1}
    run |= {"model": model, "scheduler": scheduler, "settings": {"name": "a run"}}
    for number, epoch in enumerate(vbs.epochs(optimizer, loader, 3, **run)):
        if number == 0 and stop_after:
            optimizer.attach(stop)
        train(model, optimizer, epoch)
        epoch.write(epochs_done=epoch.number)
    return result(model)


def both_ways(rank: int, folder: str):
    return by_hand(rank), by_epochs(rank, folder, None)


@pytest.mark.parametrize("backend", [row("cpu", 3), row("xla", 2)])
def test_it_is_the_loop_by_hand_and_resumes_where_it_was_killed(backend, tmp_path):
    expected, whole = zip(*backend.run(both_ways, str(tmp_path / "whole")))
    with pytest.raises(xla_replica.ReplicaError):
        backend.run(by_epochs, str(tmp_path / "killed"), 7)
    resumed = backend.run(by_epochs, str(tmp_path / "killed"), None)
    for (hand, _), *others in zip(expected, whole, resumed):
        for found, _ in others:
            torch.testing.assert_close(found, hand)
    for outcomes in (whole, resumed):  # averaged over replicas
        for _, buffers in outcomes[1:]:
            assert all(map(torch.equal, buffers[:2], outcomes[0][1]))
    for folder in ("whole", "killed"):
        run = vbs.read_run(tmp_path / folder / "run.jsonl")
        assert run.updates["step"].tolist() == list(range(len(run.updates)))
        assert run.updates["epochs_done"].dropna().tolist() == [0, 1, 2]
        assert run.header["settings"] == {"name": "a run"}
        assert run.events[-1]["event"] == "stop"


def trained(optimizer, loader, num_epochs, model, **options):
    for epoch in vbs.epochs(optimizer, loader, num_epochs, model=model, **options):
        train(model, optimizer, epoch)
        yield epoch


def test_the_end_of_a_trace_and_a_complete_run_are_said(tmp_path, caplog):
    for told, num_epochs, expected in (
        ("ends after 8 steps, in epoch 2, and so does training", 5, [0, 1, 2]),
        ("the run is complete: all 3 epochs were trained", 3, []),
    ):
        model, sampler, optimizer, _, loader = parts(on_end="stop")
        epochs = trained(optimizer, loader, num_epochs, model, checkpoint=tmp_path)
        assert [epoch.number for epoch in epochs] == expected
        assert told in caplog.text
    assert sampler.num_updates(5) == 8


def test_lines_say_what_was_decided_and_how_far_a_run_is(tmp_path, caplog):
    caplog.set_level("INFO", "variable_batch_size.runs.progress")
    for num_epochs, first, last in ((1, 0, 4), (3, 4, 12)):
        caplog.clear()
        model, _, optimizer, _, loader = parts()
        run = {"checkpoint": tmp_path, "log": tmp_path / "run.jsonl", "progress": "log"}
        [*trained(optimizer, loader, num_epochs, model, **run)]
        begun, *_, line = caplog.messages  # more where updates take seconds
        assert begun.startswith(f"{optimizer.replica}: updates {first} to {last} of ")
        assert begun.endswith(f"minibatches of 4, checkpoints in {tmp_path}")
        count = r"(\S+) of \1 samples, "
        where = rf"update={last}/{last}, epoch={num_epochs - 1}, batch=12, lr=0.075, "
        rest = r"loss=[\d.]+, [\d.k]+ samples/s, \S+ left"
        assert re.fullmatch(count + where + rest, line)
    caplog.clear()
    model, _, optimizer, _, loader = parts()
    [*trained(optimizer, loader, 1, model, progress=False)]
    assert not caplog.messages


# In a process, where nobody has set up logging.
TRAIN = """
import sys
sys.path[:0] = sys.argv[1:]
from test_training import parts, trained
model, _, optimizer, _, loader = parts()
[*trained(optimizer, loader, 1, model)]
"""


@of_torch_alone
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_has_a_bar_and_a_file_has_lines(is_terminal):
    read, write = os.openpty() if is_terminal else os.pipe()
    if is_terminal:  # 24 lines of 200 characters
        fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("4H", 24, 200, 0, 0))
    command = [sys.executable, "-c", TRAIN, *filter(None, sys.path)]
    assert subprocess.run(command, stderr=write).returncode == 0
    os.close(write)
    said = os.read(read, 100_000).decode()
    os.close(read)
    assert re.search(r"\d\d:\d\d:\d\d replica 0 of 1 .*: updates 0 to 4 of ", said)
    assert ("| 40.0/40.0 [" in said) == is_terminal
    assert ("40.0 of 40.0 samples, update=4/4" in said) != is_terminal


def test_an_order_and_a_scheduler_that_needs_a_metric_are_saved(tmp_path):
    """The order is told of updates; the scheduler is stepped by hand."""
    for num_epochs in (1, 3):  # a run of one epoch, and what resumes it
        model, _, optimizer, _, loader = parts(order=(order := Order(64)))
        plateau = ReduceLROnPlateau(optimizer, patience=1)
        run = {"checkpoint": tmp_path, "plateau": plateau}
        for _ in trained(optimizer, loader, num_epochs, model, **run):
            plateau.step(3.0)
        assert order.value == optimizer.sampler.num_updates(num_epochs)
    assert optimizer.get_lr() == pytest.approx((0.005,))


def test_the_best_checkpoint_is_kept_by_the_metric(tmp_path):
    model, _, optimizer, _, loader = parts()
    checkpointer = vbs.Checkpointer(tmp_path, optimizer, best="max", model=model)
    for epoch in trained(optimizer, loader, 3, model, checkpoint=checkpointer):
        epoch.metric = [0.5, 0.9, 0.7][epoch.number]
    assert checkpointer.best_metric == 0.9


def test_what_cannot_be_run_is_refused():
    model, _, optimizer, _, loader = parts()
    run = {"optimizer": optimizer, "loader": loader, "num_epochs": 3, "model": model}
    for changes, message in (
        ({"loader": DataLoader(range(64))}, "not those of the optimizer's sampler"),
        ({"every_updates": 3}, "every_updates= needs checkpoint="),
        ({"chekpoint": "x"}, "epochs: chekpoint='x' is neither an option nor a part"),
        ({"on_end": print}, "epochs: on_end=.* nor a part"),
        ({"schedules": [1]}, r"epochs: schedules=\[1\] .* one by one"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            vbs.epochs(**run | changes)
    epochs = vbs.epochs(**run)
    next(epochs)
    with pytest.raises(ValueError, match="epoch 0 was left before its last minibatch"):
        next(epochs)
    with pytest.raises(ValueError, match="was called for this optimizer before"):
        vbs.epochs(**run)


def test_a_checkpointer_that_was_loaded_is_not_loaded_again(tmp_path):
    for settings, num_epochs in ((1, 1), (2, 2)):
        model, _, optimizer, _, loader = parts()
        options = {"settings": {"version": settings}, "model": model}
        checkpointer = vbs.Checkpointer(tmp_path, optimizer, **options)
        checkpointer.load(allow_changes=True)
        [*trained(optimizer, loader, num_epochs, model, checkpoint=checkpointer)]
    assert checkpointer.num_updates == optimizer.sampler.num_updates(2)


@pytest.mark.parametrize("how", ["never", "attached", "by hand"])
def test_a_scheduler_that_is_only_saved_is_told(how, tmp_path, caplog):
    model, sampler, optimizer, scheduler, loader = parts()
    checkpointer = vbs.Checkpointer(tmp_path, optimizer, model=model, lr=scheduler)
    if how == "attached":
        optimizer.attach(scheduler)
    optimizer.attach(checkpointer)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        train(model, optimizer, loader)
        if how == "by hand":
            scheduler.step()
    told = "the scheduler lr= has not stepped in two epochs"
    assert caplog.text.count(told) == (how == "never")


@pytest.mark.parametrize(("how", "left_out"), [
    *itertools.product(("epochs", "followed"), (0, 3, 7)),
    ("loader", 3), ("loader", 7),  # which may have read the first one ahead
])  # fmt: skip
def test_a_minibatch_without_a_step_is_an_error(how, left_out):
    model, _, optimizer, _, loader = parts([16])
    if how == "epochs":
        minibatches = next(vbs.epochs(optimizer, loader, 1, model=model))
    else:
        minibatches = optimizer.replica.loader(loader) if how == "followed" else loader
        next(iter(minibatches))  # looking at the data does no harm
        optimizer.set_epoch(0)

    def run() -> None:
        for number, (x, _) in enumerate(minibatches):
            if number != left_out:
                model(optimizer.replica.send(x)).mean().backward()
                optimizer.step()

    told = "was not called for a minibatch of epoch 0: remove an accumulation of your"
    with pytest.raises(ValueError, match=told):
        run()


def test_evaluation_deals_every_sample_once():
    for num_replicas, size in itertools.product((1, 2, 3), (1, 7, 64, 100)):
        found = []
        for rank in range(num_replicas):
            replica = FakeReplica(rank, num_replicas)
            batches = vbs.EvaluationSampler(range(100), size, replica=replica)
            found += batches
            assert len([*batches]) == len(batches)
        assert repr(sorted(itertools.chain(*found))) == repr([*range(100)])  # integers
        assert max(map(len, found)) == size


def summed(rank: int) -> float:
    """What the docstring of EvaluationSampler shows; batches are 7, 7, 2 and none."""
    replica = xla_replica.current()
    batches = DataLoader(range(16), batch_sampler=vbs.EvaluationSampler(range(16), 7))
    found = torch.zeros(1, device=replica.device)
    for numbers in replica.loader(batches):
        found += numbers.sum()
    replica.all_reduce_([found])
    return replica.fetch([found])[0].item()


def test_what_replicas_with_other_or_no_batches_count_is_summed():
    assert xla_replica.launch(summed, num_replicas=4) == [120] * 4


def test_a_request_ends_with_its_run_where_nothing_launched_it(tmp_path):
    """As in a notebook: the next run goes on, and its end is as before."""
    for is_asked in (True, False):
        model, _, optimizer, _, loader = parts()
        if is_asked:
            optimizer.attach(lambda update: signal.raise_signal(signal.SIGINT))
        with pytest.raises(xla_replica.Stopped) if is_asked else nullcontext():
            [*trained(optimizer, loader, 2, model, checkpoint=tmp_path)]
        assert xla_replica.stop_requested() is None
        handler = signal.getsignal(signal.SIGINT)
        assert getattr(handler, "__module__", None) != "xla_replica.stopping"
    assert optimizer.sampler.cursor == (1, optimizer.sampler.plan.num_steps)


@pytest.mark.parametrize(("step", "num_idle"), [(1, 0), (1, 3)])
def test_epochs_that_other_members_have_trained_are_passed_over(step, num_idle):
    """Also where an epoch has begun, and its minibatches are not asked for yet.

    Or where this member was idle in what was left of its steps.
    """

    def order(epoch: int) -> torch.Tensor:
        assert epoch == 2, "it is gone"
        return torch.arange(64)

    model, sampler, optimizer, _, loader = parts([16], order=order)
    seen = []
    for epoch in vbs.epochs(optimizer, loader, 3, model=model, progress=False):
        if epoch.number == 0:
            sampler.ledger.move(0, 1, Cursor(2 - bool(num_idle), step))
            for _ in range(num_idle):
                optimizer.updates.account.commit()
        with mock.patch.object(optimizer, "step", wraps=optimizer.step) as step_of:
            train(model, optimizer, epoch)
        seen.append(step_of.call_count)
    assert seen == [0, 0, 16 if num_idle else 12]
