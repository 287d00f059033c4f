"""The log of a run tells what was trained, costs nothing, and survives kills."""

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import math
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.variable_batch_size import elastic
from support.variable_batch_size.elastic import Case, Killed, large_batch_run
from support.variable_batch_size.wrapping import one_weight
from support.xla_replica.replicas import row

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.checkpoint import files

# Steps of 1 to 8 minibatches, of which several replicas have none; three epochs.
CASE = Case((4, 24, 12, 32, 8, 16), epochs=3, exact=True)
# A setting that is another in each run, as the number of replicas is.
NUMBERS = itertools.count()
LOG_STEPS = 5


class Training(elastic.Training):
    """A run with a log, as a user writes it; it ends before step ``kill_at``."""

    def __init__(self, folder: Path | None, case: Case = CASE, log=True, **own) -> None:
        super().__init__(case)
        self.log, self.kill_at = None, math.inf
        self.sent: list[tuple[int, dict[str, float]]] = []  # to a sink
        self.losses: list[tuple[int, torch.Tensor]] = []  # (step, loss) of minibatches
        if log:
            settings = {"name": "a run", "path": folder, "number": next(NUMBERS)}
            sinks = [lambda values, step: self.sent.append((step, values))]
            options = {"log_steps": LOG_STEPS, "settings": settings, "sinks": sinks}
            path = folder and folder / "run.jsonl"
            self.log = vbs.RunLog(path, self.optimizer, **options | own)
            self.optimizer.attach(self.log)

    def minibatch(self, x: torch.Tensor, y: torch.Tensor) -> int:
        if self.step >= self.kill_at:
            raise Killed
        loss = self.loss(self.model, x, y)
        loss.backward()
        if self.log:
            self.log.add(loss)
        self.losses.append((self.step, loss.detach()))
        return self.optimizer.step()


def train(rank: int, folder: Path, case: Case) -> dict[str, object]:
    """Returns losses by step, what was sent, and what the last epoch cost."""
    replica = xla_replica.current()
    runs = [Training(folder, case, log) for log in (True, False)]
    counts = [training.counted_run(case.epochs) for training in runs]
    log, (steps, losses) = runs[0].log, zip(*runs[0].losses)
    log.write(accuracy=70.5)
    log.close()
    told = list(zip(steps, [loss.item() for loss in replica.fetch(losses)]))
    return {"losses": told, "sent": runs[0].sent, "counts": counts}


@pytest.fixture(scope="module", params=[row("cpu", 1), row("cpu", 3), row("xla", 2)])
def adascale(request, tmp_path_factory):
    """A run whose learning rates are known to the device alone."""
    folder = tmp_path_factory.mktemp("adascale")
    case = dataclasses.replace(CASE, rule="adascale")
    outcomes = request.param.run(train, folder, case)
    return request.param, outcomes, vbs.read_run(folder / "run.jsonl")


def test_every_update_is_told_as_it_was(adascale):
    backend, outcomes, run = adascale
    _, updates = large_batch_run(dataclasses.replace(CASE, rule="constant"))
    table, (epochs, steps, sizes, _) = run.updates, zip(*updates)
    samples = itertools.accumulate(sizes)
    told = table[["epoch", "step", "batch_size", "samples"]]
    assert [*told.itertuples(index=False)] == [*zip(epochs, steps, sizes, samples)]
    assert (table["lr"] >= CASE.lr * (table["batch_size"] / 16).clip(upper=1)).all()
    # Losses are means over all minibatches since the last logging step.
    measured = table[table["loss"].notna()]
    assert measured["step"].tolist() == list(range(0, len(table), LOG_STEPS))
    assert measured["noise_scale"].notna().tolist() == [False] + 4 * [True]
    losses = [one for outcome in outcomes for one in outcome["losses"]]
    for step, loss in zip(measured["step"], measured["loss"]):
        window = [value for at, value in losses if step - LOG_STEPS < at <= step]
        assert loss == pytest.approx(sum(window) / len(window), rel=1e-12)
    for size, seconds, idle in zip(sizes, table["seconds"], table["idle_seconds"]):
        substeps = math.ceil(size / 4 / backend.num_replicas)
        unused = substeps * backend.num_replicas - size // 4
        assert idle == pytest.approx(unused / substeps * seconds)
    assert table["accuracy"].fillna(0).tolist() == [*[0] * (len(table) - 1), 70.5]


def test_sinks_get_the_numbers_of_logging_steps_and_the_rates_between(adascale):
    backend, outcomes, run = adascale
    assert [outcome["sent"] for outcome in outcomes[1:]] == [[]] * (len(outcomes) - 1)
    *sent, last = outcomes[0]["sent"]
    table = run.updates
    assert last == (table["step"].iloc[-1], {"accuracy": 70.5})
    assert [step for step, _ in sent] == list(range(0, len(table), LOG_STEPS))
    first = 0
    for step, values in sent:
        window, row = table.iloc[first : step + 1], table.iloc[step]
        of_files = ["step", "time", "seconds", "idle_seconds"]
        expected = row.drop([*of_files, "accuracy"])
        expected = expected.dropna().to_dict()  # the first has no noise scale
        seconds = window["seconds"].sum()
        expected["samples_per_second"] = window["batch_size"].sum() / seconds
        idle = window["idle_seconds"].sum() / seconds
        expected["idle_share"] = idle / backend.num_replicas
        assert values == pytest.approx(expected, rel=1e-9)
        assert {type(value) for value in values.values()} <= {int, float}
        first = step + 1


def test_a_log_without_a_file_has_sinks_alone(tmp_path):
    scalars: dict = collections.defaultdict(list)  # as TensorBoard has them
    history: dict = collections.defaultdict(dict)

    def wandb_log(data: dict[str, float], step=None, commit=None) -> None:
        assert step >= max(history, default=0)  # it takes no step that is over
        history[step].update(data)

    def add_scalar(tag: str, value: float, step: int) -> None:
        scalars[tag].append((step, value))

    sinks = [vbs.tensorboard(SimpleNamespace(add_scalar=add_scalar)), wandb_log]
    training = Training(None, log_steps=4, sinks=sinks)
    training.epoch(0)
    training.log.write(accuracy=50.0)
    training.log.close()
    assert training.log.path is None
    assert scalars["batch_size"] == [(0, CASE.trace[0]), (4, CASE.trace[4])]
    assert [step for step, _ in scalars["loss"]] == [0, 4]
    newest = {name: values[-1][1] for name, values in scalars.items()}
    assert {**history[4], **history[max(history)]} == newest


def test_the_header_has_settings_and_it_compiles_and_reads_next_to_nothing(adascale):
    backend, outcomes, run = adascale
    expected = {"event": "start", "num_replicas": backend.num_replicas}
    expected |= {"rule": "adascale", "minibatch_size": 4}
    assert run.header.items() >= expected.items()
    assert run.header["versions"]["torch"] == torch.__version__
    assert run.header["settings"]["name"] == "a run"
    assert [event["event"] for event in run.events] == ["start", "stop"]
    last = run.updates[run.updates["epoch"] == CASE.epochs - 1]
    num_logged = last["loss"].notna().sum()
    assert num_logged == 2
    for outcome in outcomes:
        (compiled, transfers, fallbacks), (_, without, _) = outcome["counts"]
        assert (compiled, fallbacks) == (0, 0)
        # One of each replica, and one for the gradient noise.
        assert transfers - without <= num_logged * (backend.num_replicas + 1)


class Saved(Training):
    """A run with a log and a checkpointer, of two epochs."""

    def __init__(self, folder: Path, **options) -> None:
        super().__init__(folder, dataclasses.replace(CASE, epochs=2))
        parts = {"model": self.model, "log": self.log, "stop_on": ()}
        self.saver = vbs.Checkpointer(folder, self.optimizer, **parts, **options)

    def train(self, between: Any = lambda: None) -> None:
        self.optimizer.attach(self.saver)
        with contextlib.closing(self.log):
            for epoch in range(self.sampler.epoch, 2):
                self.epoch(epoch)
                between()
                self.log.write(accuracy=epoch)
                self.saver.save()


def resumed(folder: Path, kill_at: float, resume_at: int | None) -> vbs.Run:
    """Trains from a checkpoint of so many updates to the end, or until it is killed."""
    training = Saved(folder, every_updates=3)
    is_resumed = training.saver.load() is not None
    assert (training.saver.num_updates if is_resumed else None) == resume_at
    training.kill_at = kill_at
    with contextlib.suppress(Killed), mock.patch.object(training.log, "close"):
        training.train()
    return vbs.read_run(folder / "run.jsonl")


# The last logging step before the kill was step 10: neither 12 nor 13 was written; but
# the checkpoint of 12 updates has written those that are made again after it is lost.
@pytest.mark.parametrize(("resume_at", "num_lost"), [(12, 0), (9, 3)])
def test_a_killed_run_tells_what_an_undisturbed_one_does(resume_at, num_lost, tmp_path):
    expected, killed = resumed(tmp_path / "whole", math.inf, None), tmp_path / "killed"
    resumed(killed, 14, None)
    if resume_at == 9:
        files.saved_files(killed)[0].path.unlink()
    with (killed / "run.jsonl").open("ab") as file:
        file.write(b'{"step": 12, "batch_s')  # what a kill leaves
    received = resumed(killed, math.inf, resume_at)
    columns = ["step", "epoch", "batch_size", "samples", "lr", "loss", "accuracy"]
    assert received.updates[columns].equals(expected.updates[columns])
    assert received.updates["step"].tolist() == [*range(len(expected.updates))]
    assert len(received.updates) > 10
    begun = [event for event in received.events if "num_lost" in event]
    told = [(event["event"], event["step"], event["num_lost"]) for event in begun]
    assert told == [("start", 0, 0), ("resume", resume_at, num_lost)]
    saved = {e["step"] for e in received.events if e["event"] == "checkpoint"}
    assert saved >= {*range(3, len(received.updates) + 1, 3)}


def test_the_next_member_tells_what_one_before_it_died_with(tmp_path, monkeypatch):
    training = Training(tmp_path)
    with monkeypatch.context() as patch:  # another one writes
        patch.setattr(training.optimizer.replica, "rank", 1)
        training.epoch(0)
    path = training.log.path
    path.write_text('{"step": 5, "batch_s')  # as it was about to
    training.log.change_members(2)
    run = vbs.read_run(path)
    assert [event["event"] for event in run.events] == ["members"]
    assert run.updates["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert run.updates["loss"].notna().tolist() == [False] * 4 + [True, False, False]
    training.epoch(1)
    training.log.close()
    table = vbs.read_run(path).updates
    assert table["step"].tolist() == list(range(1, len(table) + 1))


def test_what_is_told_is_written_before_a_state_leaves(tmp_path):
    """Who gave the state to a member that joins may die before it writes again."""
    training = Training(tmp_path, log_steps=1000)
    training.epoch(0)
    training.log.state_dict()
    written = vbs.read_run(training.log.path).updates["step"].tolist()
    training.log.close()
    assert len(written) > 3
    assert written == vbs.read_run(training.log.path).updates["step"].tolist()


def stopped(rank: int, folder: Path, ask_after: int | None) -> None:
    """Is asked to stop after an update, or between the epochs, where it is saved."""
    training = Saved(folder)
    ask = partial(xla_replica.request_stop, "maintenance", 7)
    training.optimizer.attach(lambda update: update.step == ask_after and ask())
    training.train(ask if ask_after is None else lambda: None)


# Within the epoch, in its last update but one, and between epochs.
@pytest.mark.parametrize("ask_after", [2, 5, None])
def test_a_stop_is_told_once_with_its_reason(ask_after, tmp_path):
    with pytest.raises(xla_replica.Stopped):
        xla_replica.launch(stopped, (tmp_path, ask_after), 1, "cpu")
    run = vbs.read_run(tmp_path / "run.jsonl")
    assert run.updates["epoch"].iloc[-1] == (ask_after is None)
    names, stop = [event["event"] for event in run.events], run.events[-1]
    assert names[-2:] == ["checkpoint", "stop"]
    assert names.count("stop") == 1
    assert (stop["reason"], stop["step"]) == ("maintenance", len(run.updates))


def test_another_run_does_not_take_the_place_of_an_earlier_one(tmp_path):
    def written() -> vbs.Run:
        return vbs.read_run(tmp_path / "run.jsonl")

    Training(tmp_path).epoch(0)
    told = len(written().updates)
    # A run that was killed before its first checkpoint begins anew.
    again = Training(tmp_path)
    again.epoch(0)
    assert written().events[-1]["num_lost"] == told
    other = Training(tmp_path, dataclasses.replace(CASE, trace=(8, 24)))
    with pytest.raises(ValueError, match=r"another run, .*: trace was '6 steps"):
        other.epoch(0)
    again.log.close()
    told = len(written().updates)
    with pytest.raises(ValueError, match=r"another run, .* has ended.*another path"):
        Training(tmp_path).epoch(0)
    assert len(written().updates) == told


def test_a_log_that_was_not_attached_is_noticed():
    training = Training(None, log=False)
    training.log = vbs.RunLog(None, training.optimizer)
    with pytest.raises(ValueError, match=r"call optimizer\.attach\(log\) before"):
        training.epoch(0)
    assert training.steps == [0]  # one update was made, not two


def test_a_line_is_merged_with_those_of_its_update_and_is_valid_json(tmp_path):
    file = vbs.RunFile(tmp_path / "a", {"rate": math.inf, "path": tmp_path})
    file.begin(0)
    file.write({"step": 1, "loss": 2.0}, {"step": 0, "loss": math.nan, "x": [math.inf]})
    file.write({"step": 1, "accuracy": np.float32(50)})
    for line in file.path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    run = vbs.read_run(file.path)
    assert run.header["settings"] == {"rate": None, "path": str(tmp_path)}
    assert run.updates.drop(columns="x").fillna(-1).to_dict("list") == {
        "step": [0, 1], "loss": [-1, 2.0], "accuracy": [-1, 50.0]
    }  # fmt: skip
    file.path.write_text("\n")
    run = vbs.read_run(file.path)
    assert (len(run.updates), run.events, run.header) == (0, [], {})


@pytest.mark.parametrize(("text", "message"), [
    ('{"step": 0}\nstep,batchsize\n{"step": 1}\n', "line 2: 'step,batchsize' is"),
    ('[1]\n{"step": 1}\n', "line 1"),
    ('{"loss": 1}\n{"step": 1}\n', "not a JSON object with a 'step'"),
    ('{"event": "start", "step": 0, "format": 9}\n', "line 1: format 9 is not"),
])  # fmt: skip
def test_another_file_is_refused(tmp_path, text, message):
    (tmp_path / "a").write_text(text)
    with pytest.raises(ValueError, match=message):
        vbs.read_run(tmp_path / "a")


def test_with_token_weights_the_loss_is_a_mean_over_tokens(tmp_path):
    options = {"minibatch_size": 2, "numbers": 1, "lr": 0.0, "reduction": "sum"}
    parameter, sampler, optimizer = one_weight([4, 4], **options)
    log = vbs.RunLog(tmp_path / "a", optimizer, log_steps=1)
    optimizer.attach(log)
    for tokens, _ in zip((1, 3, 2, 4), sampler):
        loss = (parameter * tokens**2).sum()
        loss.backward()
        log.add(loss)
        optimizer.step(weight=tokens)
    table = vbs.read_run(tmp_path / "a").updates
    assert table["weight"].tolist() == [4, 6]
    assert table["loss"].tolist() == pytest.approx([10 / 4, 20 / 6])


def test_waiting_for_the_device_is_time_of_the_step_that_waits(tmp_path, monkeypatch):
    """So the seconds from one logging step to the next are those of their updates."""
    training = Training(tmp_path)
    replica = training.optimizer.replica
    fetch, wait = replica.fetch, partial(time.sleep, 0.05)
    monkeypatch.setattr(replica, "fetch", lambda tensors: wait() or fetch(tensors))
    training.epoch(0)
    training.log.close()
    table = vbs.read_run(training.log.path).updates
    assert (table["seconds"][table["loss"].notna()] >= 0.05).all()


def train_to_nan(rank: int, most: int | None) -> list[str]:
    """Returns the warnings of a run whose losses are NaN from step 4 on."""
    training, told = Training(None, log_steps=2, max_nonfinite=most), []
    logger = logging.getLogger("variable_batch_size.runs.run_log")
    logger.addFilter(lambda record: told.append(record.getMessage()) or False)
    of_number = training.loss
    training.loss = lambda *x: of_number(*x) * (math.nan if training.step >= 4 else 1)
    for epoch in range(3):
        training.epoch(epoch)
    return told


@pytest.mark.parametrize("backend", [row("cpu", 2), row("xla", 2)])
def test_a_loss_that_is_not_finite_is_told_once_or_ends_the_run(backend):
    told = backend.run(train_to_nan, None)
    assert sum(len(each) for each in told) == 1, told
    with pytest.raises(xla_replica.ReplicaError, match="as on 3 logging steps in a ro"):
        backend.run(train_to_nan, 3)
