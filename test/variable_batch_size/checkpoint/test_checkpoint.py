"""`Checkpointer`: a run that stops and is resumed ends as if it had not stopped."""

import functools
import itertools
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.variable_batch_size import checkpointed, elastic
from support.variable_batch_size.checkpointed import CASE, Part, Training, train
from support.variable_batch_size.elastic import Case
from support.xla_replica.replicas import SEVERAL_REPLICAS, TORCHTPU, XLA_BACKENDS, row
from torch import nn

import variable_batch_size as vbs
import xla_replica
from variable_batch_size.checkpoint import files
from variable_batch_size.checkpoint.save_and_stop import SaveTimes


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    [found] = xla_replica.launch(train, (tmp_path_factory.mktemp("run"),), 1, "cpu")
    return found


def ends_as(undisturbed, found, num_restored: int) -> None:
    """Asserts that a run that resumes so many updates ends as an undisturbed one."""
    weights, updates, restored = found
    assert restored == num_restored
    assert updates == undisturbed[1][restored:]
    assert all(map(torch.equal, weights, undisturbed[0]))


@pytest.mark.parametrize("ask_at", [0, 11])
@pytest.mark.parametrize("backend", [row("cpu", 1), *SEVERAL_REPLICAS, *TORCHTPU])
def test_replicas_stop_and_resume(backend, ask_at, undisturbed, tmp_path):
    """Where the last of several is asked in an update, all make one more and save.

    Where accelerators have processes, the others look at that one, and all save after
    the next; emulated replicas are asked together.
    """
    several = backend.num_replicas > 1
    made = ask_at + 1 + several * (1 if backend.device in ("cpu", "xla") else 2)
    often = functools.partial(train, look_every_seconds=1e-9)
    with pytest.raises(xla_replica.Stopped) as stopped:
        backend.run(often, tmp_path, ask_at, (backend.num_replicas - 1,))
    # Also if replica 0, which raises it, was not asked itself.
    assert (stopped.value.reason, stopped.value.code) == ("maintenance", 75)
    assert files.saved_files(tmp_path)[0].num_updates == made
    # The run is resumed on one replica, without torch_xla.
    [found] = xla_replica.launch(train, (tmp_path,), 1, "cpu")
    ends_as(undisturbed, found, made)


def like_a_gpu(rank: int, *args) -> None:
    xla_replica.Replica.is_host = property(lambda _: False)
    xla_replica.Replica.has_streams = property(lambda _: True)
    xla_replica.Replica.wait = lambda _: None
    xla_replica.Replica.rng_state = lambda _: torch.get_rng_state()
    xla_replica.Replica.set_rng_state = lambda _, state: torch.set_rng_state(state)
    xla_replica.Replica.loader = lambda _, loader: loader  # which would pin memory
    train(rank, *args, look_every_seconds=1e-9)


def test_one_preempted_node_of_two_is_saved_two_updates_after_its_vote(tmp_path):
    with pytest.raises(xla_replica.Stopped, match="maintenance"):
        xla_replica.launch(like_a_gpu, (tmp_path, 11, (1,)), 2, "cpu")
    assert files.saved_files(tmp_path)[0].num_updates == 14


def test_minibatches_of_an_unfinished_step_are_run_again(undisturbed, tmp_path):
    training = Training(tmp_path)
    training.optimizer.attach(training.checkpointer)
    minibatches = iter(training.sampler)
    for _ in range(1 + 9 + 1):  # two steps, and one minibatch of the third
        rows = next(minibatches)
        training.minibatch(training.inputs[rows], training.targets[rows])
    next(minibatches)  # one that a loader has prefetched
    training.checkpointer.save()
    ends_as(undisturbed, train(0, tmp_path), 2)


def dropped_out(rank: int, folder: Path) -> list[tuple[int, list[torch.Tensor]]]:
    found = []
    for _ in range(2):
        training = Training(folder, dropout=0.5, every_updates=14)
        training.checkpointer.load()
        begun = training.checkpointer.num_updates
        found.append((begun, [weight.clone() for weight in training.train()]))
    return found


@pytest.mark.parametrize(
    "backend", [row("cpu", 1), *SEVERAL_REPLICAS, row("xla", 1, slow=True), *TORCHTPU]
)
def test_random_numbers_are_resumed(backend, tmp_path):
    """On the same number of replicas; the last checkpoint is that of update 14."""
    for (begun, expected), (resumed, received) in backend.run(dropped_out, tmp_path):
        assert (begun, resumed) == (0, 14)
        torch.testing.assert_close(received, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", [*XLA_BACKENDS, *TORCHTPU])
def test_updates_read_only_where_a_replica_looks_and_compile_nothing(backend, tmp_path):
    """The epochs have 9, 8 and 8 updates."""
    several = backend.num_replicas if backend.num_replicas > 1 else 0
    looks = [{"every_updates": 1000, "look_every_seconds": n} for n in (1e9, 1e-9)]
    for rare, often in backend.run(checkpointed.counted, tmp_path, looks):
        assert often == [(0, n * several, 0) for n in (9, 8, 8)]
        assert not any(reads for _, reads, _ in rare)
        assert [each[::2] for each in rare][1:] == [(0, 0), (0, 0)]


def test_a_damaged_one_is_passed_over_and_then_replaced(undisturbed, tmp_path, caplog):
    """One file is kept, and it is not the damaged one, whose updates come again."""
    Training(tmp_path).train()
    newest, before = files.saved_files(tmp_path)[:2]
    newest.path.write_bytes(newest.path.read_bytes()[:-100])
    found = train(0, tmp_path, every_updates=1, keep=1)
    ends_as(undisturbed, found, before.num_updates)
    assert "damaged" in caplog.text
    [last] = files.saved_files(tmp_path)
    assert last.is_whole()


def test_changes_can_be_allowed(tmp_path):
    """A trace whose later steps have changed: the steps that are done stay done."""
    Training(tmp_path, Case(CASE.trace * 4, epochs=3, exact=True)).train_until(14)
    changed = Case((*CASE.trace * 2, *[64] * 8), epochs=3, exact=True)
    with pytest.raises(ValueError, match=r"trace was '32 steps.*allow_changes"):
        Training(tmp_path, changed).checkpointer.load()
    other = Training(tmp_path, changed, settings={"width": 3})
    other.checkpointer.load(allow_changes=True)
    assert other.checkpointer.num_updates == 12
    other.train()
    end = other.sampler.schedule.plan(changed.epochs, 1).first_step
    assert other.steps == [*range(12, end)]


@pytest.mark.parametrize(("best", "sign"), [("max", 1), ("min", -1)])
def test_the_best_one_is_kept_and_can_be_loaded(best, sign, tmp_path):
    def names(*measured: float | None) -> list[str]:
        """Saves after one update for each metric; returns what the folder has."""
        training = Training(tmp_path, keep=2, best=best, every_updates=1000)
        training.checkpointer.load()
        metrics = list(measured)

        def save(update: vbs.Update) -> None:
            metric = metrics.pop(0)
            training.checkpointer.save(metric and sign * metric)
            if not metrics:
                raise elastic.Killed

        training.optimizer.attach(training.checkpointer)
        training.optimizer.attach(save)
        with pytest.raises(elastic.Killed):
            training.epoch(0)
        return sorted(path.name[:-36] for path in tmp_path.iterdir())

    found = names(50.0, 90.0, 70.0, float("nan"), 90.0)
    assert found == ["best-00000002", "update-00000004", "update-00000005"]
    assert names(89.0) == ["best-00000002", "update-00000005", "update-00000006"]
    assert names(91.0, None) == ["best-00000007", "update-00000008"]
    again = Training(tmp_path, best=best).checkpointer
    assert again.load(best=True).name.startswith("best-00000007")
    assert again.best_metric == sign * 91.0
    assert again.load().name.startswith("update-00000008")


def several_modules(rank: int, folder: Path) -> torch.Tensor:
    norms = {name: nn.BatchNorm1d(2) for name in "ab"}
    for norm in norms.values():
        norm.running_mean.fill_(float(rank + 1))
    training = Training(folder, Case((8,), exact=True), parts=norms)
    training.optimizer.attach(training.checkpointer)
    rows = next(iter(training.sampler))  # one minibatch on each replica
    training.minibatch(training.inputs[rows], training.targets[rows])
    training.checkpointer.save()
    return torch.stack([norm.running_mean for norm in norms.values()])


def test_buffers_of_all_modules_are_averaged(tmp_path):
    for means in xla_replica.launch(several_modules, (tmp_path,), 2, "cpu"):
        assert means.tolist() == [[1.5, 1.5]] * 2


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_nothing_of_the_file_is_used_after_loading(tmp_path):
    """Pages of a file that another host deletes are gone."""
    Training(tmp_path, parts={"keeper": Part(torch.ones(1000))}).train()
    keeper = Part()
    restored = Training(tmp_path, parts={"keeper": keeper}).checkpointer.load()
    assert restored.name not in Path("/proc/self/maps").read_text()
    assert keeper.value.sum() == 1000


def saves(takes, num_updates, *every, begun=0) -> list[tuple[int, float]]:
    """Returns the updates to save after, with their times."""
    now, found = 0.0, []
    times = SaveTimes(xla_replica.current(), *every, clock=lambda: now)
    times.saved(begun)
    for number in range(begun + 1, num_updates + 1):
        now += takes(number)
        if times.due(number):
            found.append((number, now))
            times.saved(number)
    return found


def test_updates_are_counted_from_the_beginning_of_training():
    for begun, expected in ((0, [10, 20, 30]), (14, [20, 30])):
        found = saves(lambda number: 1.0, 35, 10, None, begun=begun)
        assert [number for number, _ in found] == expected


@pytest.mark.parametrize("takes", [
    lambda number: 0.05,
    lambda number: 30.0 if number < 3 else 0.05,  # the first ones compile
    lambda number: 0.01 if number % 400 < 200 else 0.2,  # the batch size changes
    lambda number: 100.0,  # an update takes longer than the interval
])  # fmt: skip
def test_minutes_are_met_with_few_looks(takes, monkeypatch):
    looks, here = [], xla_replica.current()
    gather = mock.Mock(side_effect=lambda late: looks.append(late) or [late])
    monkeypatch.setattr(type(here), "all_gather_object", gather)
    found = saves(takes, 20_000, None, 1)
    instants = [0.0, *(now for _, now in found)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(instants)]
    longest = max(takes(number) for number in range(1, 1000))
    assert found
    assert all(60 <= gap <= 60 + max(20, longest) for gap in gaps)
    assert len(looks) <= 70 * (len(found) + 1)


def on_replicas(rank: int) -> list[int]:
    # The clock of replica 1 runs three times as fast.
    found = saves(lambda number: 0.1 * (1 + 2 * (rank == 1)), 2000, None, 0.5)
    return [number for number, _ in found]


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_replicas_save_after_the_same_updates_whatever_their_clocks_say(backend):
    first, *others = backend.run(on_replicas)
    assert first
    assert others == [first] * len(others)
