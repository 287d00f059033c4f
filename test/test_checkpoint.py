"""`Checkpointer`: what it saves, when it stops, and what it refuses to go on with."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from support.elastic import Case, make
from support.replicas import SEVERAL_REPLICAS, XLA_BACKENDS, row
from support.resuming import loss_of
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import variable_batch_size as vbs
import xla_replica
from variable_batch_size import checkpoint_files as files

# Steps of 1 to 9 minibatches, three epochs of 8 or 9 steps.
CASE = Case((4, 36, 8, 4, 12, 32, 20, 4), epochs=3, exact=True)


class Training:
    """A run with a scheduler, as a user writes it."""

    def __init__(
        self, folder: Path, case: Case = CASE, dropout: float = 0.0, **options
    ) -> None:
        self.replica = xla_replica.current()
        self.case = case
        model, self.inputs, self.targets = make(case)
        self.model = nn.Sequential(nn.Dropout(dropout), model).to(self.replica.device)
        self.replica.seed(5)
        self.sampler = vbs.CustomSampler(
            self.inputs,
            case.trace,
            minibatch_size=case.minibatch_size,
            on_end="cycle",
            verbose=False,
        )
        inner = torch.optim.SGD(self.model.parameters(), case.lr, momentum=0.5)
        self.optimizer = vbs.LinearRuleOptimizer(inner, self.sampler, ref_batchsize=16)
        scheduler = CosineAnnealingLR(inner, 30)
        self.optimizer.attach(scheduler)
        self.updates: list[int] = []
        self.optimizer.attach(lambda update: self.updates.append(update.step))
        parts = {"model": self.model, "scheduler": scheduler}
        parts |= options.pop("parts", {})
        self.checkpointer = vbs.Checkpointer(
            folder, self.optimizer, **{"every_updates": 4} | options, **parts
        )

    def train(self) -> list[torch.Tensor]:
        self.optimizer.attach(self.checkpointer)
        for epoch in range(self.sampler.epoch, self.case.epochs):
            self.sampler.set_epoch(epoch)
            self.optimizer.set_epoch(epoch)
            for rows in self.sampler:
                x, y = self.replica.send((self.inputs[rows], self.targets[rows]))
                loss_of(self.model, x, y).backward()
                self.optimizer.step()
        return self.replica.fetch([p.detach() for p in self.model.parameters()])


def train(rank: int, folder: Path, ask_at=None, asked=(), **options):
    """From the newest checkpoint to the end, or until asked to stop behind a step."""
    training = Training(folder, **options)
    restored = training.checkpointer.load()

    def ask(update: vbs.Update) -> None:
        if update.step == ask_at and rank in asked:
            xla_replica.request_stop("maintenance", 75)

    training.optimizer.attach(ask)
    weights = training.train()
    return weights, training.updates, restored and restored.num_updates


def train_case(rank: int, folder: Path, case: Case, ask_at: int):
    return train(rank, folder, ask_at, (rank,), case=case)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    weights, updates, _ = xla_replica.launch(train, (folder,), 1, "cpu")[0]
    return weights, updates


def asked_at(name: str, backend, asked: tuple[int, ...], steps: Iterable[int]) -> list:
    """A row for every step at which these ranks are asked to stop."""
    return [
        pytest.param(*backend.values, asked, n, marks=backend.marks, id=f"{name}-{n}")
        for n in steps
    ]


@pytest.mark.parametrize(
    ("backend", "asked", "ask_at"),
    [
        *asked_at("local", row("cpu", 1), (0,), (0, 6, 11)),
        *asked_at("gloo, one is asked", row("cpu", 3), (2,), (0, 6, 11)),
        *asked_at("xla", row("xla", 3), (1,), (0, 6)),
    ],
)
def test_replicas_stop_within_an_update_and_go_on(
    backend, asked, ask_at, undisturbed, tmp_path
):
    """Asked while update ``ask_at`` ends, they make one more and save it."""
    with pytest.raises(xla_replica.Stopped) as stopped:
        xla_replica.launch(
            train, (tmp_path, ask_at, asked), backend.num_replicas, backend.device
        )
    if backend.device == "xla" or backend.num_replicas == 1:  # they share a process
        assert (stopped.value.reason, stopped.value.code) == ("maintenance", 75)
    newest = files.saved_files(tmp_path)[0]
    assert newest.num_updates == ask_at + 2
    # On another number of replicas, without torch_xla.
    weights, updates, restored = xla_replica.launch(train, (tmp_path,), 1, "cpu")[0]
    assert restored == ask_at + 2
    assert updates == undisturbed[1][ask_at + 2 :]
    assert all(torch.equal(*pair) for pair in zip(weights, undisturbed[0]))


def test_a_run_that_has_ended_has_nothing_left(undisturbed, tmp_path):
    training = Training(tmp_path)
    training.train()
    training.checkpointer.save()
    again = Training(tmp_path)
    restored = again.checkpointer.load()
    assert restored.num_updates == len(undisturbed[1])
    assert restored.epoch == CASE.epochs  # the loop is over
    weights = again.train()
    assert again.updates == []
    assert all(torch.equal(*pair) for pair in zip(weights, undisturbed[0]))


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path):
    assert Training(tmp_path / "none").checkpointer.load() is None


def test_minibatches_of_an_unfinished_step_are_run_again(undisturbed, tmp_path):
    training = Training(tmp_path)
    minibatches = iter(training.sampler)
    for _ in range(1 + 9 + 1):  # two steps, and one minibatch of the third
        rows = next(minibatches)
        loss_of(
            training.model, training.inputs[rows], training.targets[rows]
        ).backward()
        training.optimizer.step()
    next(minibatches)  # handed out in advance
    training.checkpointer.num_updates = 2
    training.checkpointer.save()
    again = Training(tmp_path)
    again.checkpointer.load()
    weights = again.train()
    assert again.updates == undisturbed[1][2:]
    assert all(torch.equal(*pair) for pair in zip(weights, undisturbed[0]))


def dropped_out(rank: int, folder: Path, num_updates: int) -> list[torch.Tensor]:
    training = Training(folder, dropout=0.5, every_updates=num_updates)
    training.checkpointer.load()
    return training.train()


@pytest.mark.parametrize(
    "backend", [row("cpu", 1), *SEVERAL_REPLICAS, row("xla", 1, slow=True)]
)
def test_random_numbers_go_on(backend, tmp_path):
    """On as many replicas; a checkpoint behind update 14 is the last one here."""
    whole = backend.run(dropped_out, tmp_path, 14)
    assert [f.num_updates for f in files.saved_files(tmp_path)] == [14]
    resumed = backend.run(dropped_out, tmp_path, 14)
    for expected, received in zip(whole, resumed):
        for pair in zip(received, expected):
            torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-12)


def counted(rank: int, folder: Path):
    """Compilations and transfers of an epoch without a save."""
    training = Training(folder, every_updates=1000, every_minutes=None)
    replica, found = training.replica, []
    training.optimizer.attach(training.checkpointer)
    for epoch in range(3):
        with xla_replica.count(replica) as counts:
            training.sampler.set_epoch(epoch)
            training.optimizer.set_epoch(epoch)
            for rows in training.sampler:
                x, y = replica.send((training.inputs[rows], training.targets[rows]))
                loss_of(training.model, x, y).backward()
                training.optimizer.step()
        found.append((counts.compilations, counts.transfers, counts.fallbacks))
    return found


@pytest.mark.parametrize("backend", XLA_BACKENDS)
def test_updates_between_saves_read_nothing_and_compile_nothing(backend, tmp_path):
    for found in backend.run(counted, tmp_path):
        assert found[1:] == [(0, 0, {}), (0, 0, {})]


def saved(training: Training, num_updates: int, metric=None) -> None:
    training.checkpointer.num_updates = num_updates
    training.checkpointer.save(metric)


def test_the_best_one_is_kept(tmp_path, caplog):
    training = Training(tmp_path, keep=2, best="max")
    for number, metric in enumerate((50.0, 90.0, 70.0, float("nan"), 90.0), start=1):
        saved(training, number, metric)
    assert "not finite" in caplog.text
    assert [f.num_updates for f in files.saved_files(tmp_path)] == [5, 4]
    (best,) = files.saved_files(tmp_path, "best")
    assert best.num_updates == 2
    again = Training(tmp_path, keep=2, best="max")
    assert again.checkpointer.load().best == 90.0
    saved(again, 6, 89.0)
    assert files.saved_files(tmp_path, "best") == [best]
    saved(again, 7, 91.0)
    assert files.saved_files(tmp_path, "best")[0].num_updates == 7


def test_the_smallest_may_be_the_best(tmp_path):
    training = Training(tmp_path, best="min")
    for number, metric in enumerate((2.0, 1.0, 3.0), start=1):
        saved(training, number, metric)
    assert files.saved_files(tmp_path, "best")[0].num_updates == 2


def test_a_metric_needs_to_know_what_is_best(tmp_path):
    with pytest.raises(ValueError, match="best='max' or 'min'"):
        saved(Training(tmp_path), 1, 0.5)


def test_a_damaged_checkpoint_is_passed_over(undisturbed, tmp_path, caplog):
    training = Training(tmp_path)
    training.train()
    newest, before = files.saved_files(tmp_path)[:2]
    newest.path.write_bytes(newest.path.read_bytes()[:-100])
    weights, _updates, restored = train(0, tmp_path)
    assert restored == before.num_updates
    assert "damaged" in caplog.text
    assert all(torch.equal(*pair) for pair in zip(weights, undisturbed[0]))


OTHER_RUNS = {
    "trace": (
        {"case": Case((4, 36, 8), epochs=3, exact=True)},
        "the trace was '8 step",
    ),
    "minibatch": (
        {"case": Case(CASE.trace, exact=True, minibatch_size=2)},
        "minibatch_size was 4 and is 2",
    ),
    "samples": (
        {"case": Case(CASE.trace, exact=True, num_samples=160)},
        "the number of samples was 128 and is 160",
    ),
    "settings": ({"settings": {"width": 3}}, "width was None and is 3"),
    "parts": ({"parts": {"other": nn.Linear(1, 1)}}, "has the parts"),
}


@pytest.mark.parametrize("what", OTHER_RUNS)
def test_another_run_is_refused_and_nothing_is_touched(what, tmp_path):
    options, message = OTHER_RUNS[what]
    training = Training(tmp_path)
    training.train()
    other = Training(tmp_path, **options)
    with pytest.raises(ValueError, match=message):
        other.checkpointer.load()
    assert other.sampler.state_dict()["step"] == 0
    assert not other.optimizer.inner.state


def test_changes_can_be_allowed(tmp_path):
    """A trace whose future has changed: what is done is done."""
    planned = Case(CASE.trace * 4, epochs=3, exact=True)
    with pytest.raises(xla_replica.Stopped):
        xla_replica.launch(train_case, (tmp_path, planned, 12), 1, "cpu")
    changed = Case((*planned.trace[:14], *[64] * 8), epochs=3, exact=True)
    with pytest.raises(ValueError, match=r"the trace was '32 steps.*allow_changes"):
        Training(tmp_path, changed).checkpointer.load()
    other = Training(tmp_path, changed, settings={"width": 3})
    restored = other.checkpointer.load(allow_changes=True)
    assert restored.num_updates == 14
    other.train()
    end = changed.epochs
    assert other.updates == list(
        range(14, other.sampler.schedule.plan(end, 1).first_step)
    )


class Unsafe:
    def state_dict(self):
        return {"path": Path("/somewhere")}

    def load_state_dict(self, state):
        raise AssertionError


def test_a_state_that_would_not_load_is_an_error_when_it_is_saved(tmp_path):
    training = Training(tmp_path, parts={"unsafe": Unsafe()})
    with pytest.raises(TypeError, match="weights_only"):
        training.checkpointer.save()
    assert files.saved_files(tmp_path) == []


def apart(rank: int, folder: Path) -> None:
    training = Training(folder / str(rank))
    if training.replica.is_master:
        path = files.write(folder / "0", 3, {"version": 1})
        assert path.exists()
    training.checkpointer.load()


def test_hosts_that_do_not_share_the_folder_are_told(tmp_path):
    with pytest.raises(xla_replica.ReplicaError, match="all hosts must share") as error:
        xla_replica.launch(apart, (tmp_path,), 2, "cpu")
    assert isinstance(error.value.__cause__, vbs.CheckpointError)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": 0}, ValueError, "keep must be an integer >= 1, got 0"),
        ({"look_every": 0}, ValueError, "look_every"),
        ({"best": "highest"}, ValueError, "allowed are 'max', 'min'"),
        ({"parts": {"x": 3}}, TypeError, "x=3 has no state_dict"),
        ({"every_updates": -1}, ValueError, "every_updates"),
        ({"stop_on": ["SIGNAL"]}, ValueError, "SIGNAL"),
        ({"stop_poll": "http"}, TypeError, "stop_poll"),
    ],
)
def test_bad_arguments_are_named(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        Training(tmp_path, **options)


def test_what_the_wrapper_saves_is_not_saved_twice(tmp_path):
    training = Training(tmp_path)
    for part in (training.optimizer.inner, training.sampler):
        with pytest.raises(ValueError, match="leave it out"):
            vbs.Checkpointer(tmp_path, training.optimizer, part=part)
    with pytest.raises(TypeError, match="elastic wrapper"):
        vbs.Checkpointer(tmp_path, training.optimizer.inner)


def polled(rank: int, folder: Path) -> None:
    answers = iter([None, RuntimeError("no answer"), "maintenance of the host"])

    def poll():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    training = Training(folder, case=Case(CASE.trace, epochs=10_000, exact=True),
                        stop_poll=poll, poll_seconds=0.05)  # fmt: skip
    training.train()


def test_a_poll_can_ask_to_stop(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    with pytest.raises(xla_replica.Stopped, match="maintenance of the host"):
        xla_replica.launch(polled, (tmp_path,), 1, "cpu")
    assert "stop_poll failed" in caplog.text
    assert files.saved_files(tmp_path)


def epochs_of(training: Training, folder: Path) -> list[float]:
    """The usual loop: a scheduler by hand and a save at the end of each epoch."""
    inner = training.optimizer.inner
    by_epoch = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    checkpointer = vbs.Checkpointer(
        folder, training.optimizer, model=training.model, by_epoch=by_epoch
    )
    checkpointer.load()
    training.optimizer.attach(checkpointer)
    rates = []
    for epoch in range(training.sampler.epoch, CASE.epochs):
        training.sampler.set_epoch(epoch)
        training.optimizer.set_epoch(epoch)
        for rows in training.sampler:
            x, y = training.inputs[rows], training.targets[rows]
            loss_of(training.model, x, y).backward()
            training.optimizer.step()
        by_epoch.step()
        checkpointer.save()
        rates.append(inner.param_groups[0]["lr"])
        if epoch == 0 and folder.name == "parts":
            break
    return rates


def test_what_ends_an_epoch_is_not_repeated(tmp_path):
    def fresh() -> Training:
        training = Training(tmp_path / "unused")
        training.optimizer._attached._callbacks.clear()
        return training

    whole = epochs_of(fresh(), tmp_path / "whole")
    parts = tmp_path / "parts"
    first = epochs_of(fresh(), parts)
    parts.rename(tmp_path / "rest")
    assert first + epochs_of(fresh(), tmp_path / "rest") == whole


def test_an_attached_scheduler_is_saved_by_itself(tmp_path):
    def train_until(stop: int | None) -> list[float]:
        training = Training(tmp_path / "unused")
        rates: list[float] = []
        training.optimizer.attach(lambda update: rates.append(update.lr[0]))
        checkpointer = vbs.Checkpointer(
            tmp_path, training.optimizer, every_updates=5, model=training.model
        )
        checkpointer.load()
        training.checkpointer = checkpointer
        if stop is not None:

            def break_off(update: vbs.Update) -> None:
                if update.step == stop:
                    raise MemoryError

            training.optimizer.attach(break_off)
            with pytest.raises(MemoryError):
                training.train()
        else:
            training.train()
        return rates

    first = train_until(11)
    rest = train_until(None)
    whole = Training(tmp_path / "whole")
    rates: list[float] = []
    whole.optimizer.attach(lambda update: rates.append(update.lr[0]))
    whole.train()
    assert first[:10] + rest == rates


def test_a_scheduler_behind_the_checkpointer_is_refused(tmp_path):
    training = Training(tmp_path)
    training.optimizer.attach(training.checkpointer)
    late = CosineAnnealingLR(training.optimizer.inner, 30)
    with pytest.raises(ValueError, match="attach it before"):
        training.optimizer.attach(late)


def test_an_order_that_cannot_be_gone_on_with_is_an_error(tmp_path):
    def sampler(seed: int) -> vbs.CustomSampler:
        generator = torch.Generator().manual_seed(seed)
        order = torch.utils.data.RandomSampler(range(128), generator=generator)
        return vbs.CustomSampler(
            dataset_size=128, trace=16, minibatch_size=4, order=order, verbose=False
        )

    first = sampler(0)
    list(first)
    first.commit(0, 3)
    same, other = sampler(0), sampler(1)
    same.load_state_dict(first.state_dict())
    assert len(list(same)) == 32 - 3 * 4
    other.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="its order is another one"):
        list(other)


def test_a_place_is_not_before_the_restored_one():
    sampler = vbs.CustomSampler(
        dataset_size=128, trace=16, minibatch_size=4, verbose=False
    )
    sampler.commit(2, 3)
    again = vbs.CustomSampler(
        dataset_size=128, trace=16, minibatch_size=4, verbose=False
    )
    again.load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match=r"range\(sampler.epoch"):
        again.set_epoch(0)
    again.set_epoch(2)
    assert len(again) == 5 * 4
    again.set_epoch(3)
    assert len(again) == 32


def several_modules(rank: int, folder: Path) -> list[torch.Tensor]:
    training = Training(folder)
    norms = {name: nn.BatchNorm1d(2) for name in "ab"}
    for norm in norms.values():
        norm.running_mean.fill_(float(rank + 1))
    checkpointer = vbs.Checkpointer(
        folder, training.optimizer, model=training.model, **norms
    )
    training.optimizer._steps.num_minibatches_seen = 1
    checkpointer.save()
    return [norm.running_mean for norm in norms.values()]


def test_buffers_of_all_modules_are_averaged(tmp_path):
    for means in xla_replica.launch(several_modules, (tmp_path,), 2, "cpu"):
        for mean in means:
            torch.testing.assert_close(mean, torch.full((2,), 1.5))


def test_another_run_s_folder_is_not_written_to(tmp_path):
    training = Training(tmp_path)
    training.train()
    forgetful = Training(tmp_path)
    with pytest.raises(vbs.CheckpointError, match=r"call load\(\) before training"):
        forgetful.train()


def test_a_forgotten_model_is_noticed(tmp_path):
    training = Training(tmp_path)
    with pytest.raises(ValueError, match="pass model=model"):
        vbs.Checkpointer(tmp_path, training.optimizer)


@pytest.mark.parametrize(
    ("folder", "settings", "error", "message"),
    [
        ("gs://bucket/job", {}, ValueError, "mount the bucket"),
        ("job", {"data": Path("x")}, TypeError, r"settings\['data'\]"),
    ],
)
def test_what_a_file_could_not_hold_is_named(folder, settings, error, message):
    with pytest.raises(error, match=message):
        Training(folder, settings=settings)


def test_states_keep_their_kind(tmp_path):
    """A version that a module checks, and the Counter of MultiStepLR."""
    training = Training(tmp_path)
    milestones = torch.optim.lr_scheduler.MultiStepLR(training.optimizer.inner, [2, 2])
    checkpointer = vbs.Checkpointer(
        tmp_path, training.optimizer, model=training.model, milestones=milestones
    )
    parts = torch.load(checkpointer.save())["parts"]
    assert parts["model"]._metadata[""]["version"] == 1
    assert parts["milestones"]["milestones"].elements
    assert parts["milestones"]["milestones"] == {2: 2}


def test_the_best_one_can_be_loaded(tmp_path):
    training = Training(tmp_path, best="max")
    for number, metric in enumerate((1.0, 3.0, 2.0), start=1):
        saved(training, number, metric)
    again = Training(tmp_path, best="max").checkpointer
    assert again.load(best=True).num_updates == 2
    assert again.load().num_updates == 3
