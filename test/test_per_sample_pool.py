"""Scores of a pool: the loop's, whatever the batches, the replicas and the kills."""

from __future__ import annotations

import copy
import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.pool import assert_same_bits
from support.replicas import Backend, needs_xla, row
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import per_sample_grad as psg
import xla_replica

COUNT, CLASSES = 23, 4


class Pool(Dataset):
    """Pairs drawn from their index; says which were asked for."""

    def __init__(self, count: int = COUNT, fail_at: int | None = None) -> None:
        self.count, self.fail_at = count, fail_at
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.fail_at:
            raise OSError("the disk is gone")
        self.asked.append(index)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2, 6, generator=generator), index % CLASSES


class Inputs(Pool):
    """Without targets."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index)[0]


def make_model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(),
            nn.Dropout(0.5), nn.Linear(12, CLASSES),
        )  # fmt: skip


def by_hand(model: nn.Module, score: str, labels: str) -> np.ndarray:
    """Sample by sample, in float64, with ``.grad``."""
    model = copy.deepcopy(model).double().eval()

    def grad_norm(x: torch.Tensor, target: torch.Tensor, params) -> torch.Tensor:
        loss = F.cross_entropy(model(x), target)
        grads = torch.autograd.grad(loss, list(params))
        return torch.cat([grad.flatten() for grad in grads]).norm()

    def one(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = model(x)
        if score == "loss":
            return F.cross_entropy(logits, target)
        if score == "el2n":
            return (logits.softmax(1)[0] - F.one_hot(target, CLASSES)[0]).norm()
        own = model[5] if score == "last_layer_grad_norm" else model
        return grad_norm(x, target, own.parameters())

    found = []
    for x, y in (Pool()[i] for i in range(COUNT)):
        x, target = x.double().unsqueeze(0), torch.tensor([y])
        chances = model(x).softmax(1)[0]
        if labels == "expected":
            classes = range(CLASSES)
            value = sum(chances[c] * one(x, torch.tensor([c])) for c in classes)
        else:
            pseudo = chances.argmax().unsqueeze(0)
            value = one(x, target if labels == "given" else pseudo)
        found.append(float(value.detach()))
    return np.array(found)


SCORES = ["grad_norm", "last_layer_grad_norm", "el2n", "loss", "grand"]


@pytest.mark.parametrize("labels", ["given", "pseudo", "expected"])
@pytest.mark.parametrize("score", SCORES)
def test_scores_equal_the_loop(score, labels):
    model = make_model().train()
    found = psg.score_pool(
        model, Pool(), score=score, labels=labels, batch_size=5, progress=False
    )
    np.testing.assert_allclose(found.scores, by_hand(model, score, labels), rtol=1e-4)
    assert model.training
    assert all(module.training for module in model.modules())


def test_expected_gradient_length_needs_no_labels():
    model = make_model()
    found = psg.score_pool(model, Inputs(), score="egl", batch_size=8, progress=False)
    expected = by_hand(model, "grad_norm", "expected")
    np.testing.assert_allclose(found.scores, expected, rtol=1e-4)
    with pytest.raises(ValueError, match="have no targets; give pairs"):
        psg.score_pool(model, Inputs(), batch_size=8, progress=False)


@pytest.mark.parametrize("block_size", [1, 4, 23, 64])
def test_blocks_of_any_size_score_alike(block_size):
    model = make_model()
    truth = by_hand(model, "grad_norm", "given")
    found = psg.score_pool(model, Pool(), block_size=block_size, progress=False)
    np.testing.assert_allclose(found.scores, truth, rtol=1e-4)


def test_several_models_are_averaged():
    models = [make_model(0), make_model(1)]
    found = psg.score_pool(models, Pool(), score="grand", batch_size=6, progress=False)
    truth = np.mean([by_hand(m, "grand", "given") for m in models], axis=0)
    np.testing.assert_allclose(found.scores, truth, rtol=1e-4)


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    model = make_model()
    options = {"block_size": 4, "part_size": 8, "folder": tmp_path, "progress": False}
    with pytest.raises(OSError, match="disk"):
        psg.score_pool(model, Pool(fail_at=18), **options)
    pool = Pool()
    found = psg.score_pool(model, pool, **options)
    identity = {0, COUNT // 2, COUNT - 1}
    assert set(pool.asked) == set(range(16, COUNT)) | identity
    whole = psg.score_pool(model, Pool(), block_size=4, progress=False)
    np.testing.assert_array_equal(found.scores, whole.scores)
    nothing = Pool()
    psg.score_pool(model, nothing, **options)
    assert set(nothing.asked) == identity
    assert not list(tmp_path.glob("*.tmp"))


def test_another_models_parts_are_an_error(tmp_path):
    options = {"batch_size": 4, "folder": tmp_path, "progress": False}
    psg.score_pool(make_model(), Pool(), **options)
    with pytest.raises(ValueError, match="model was"):
        psg.score_pool(make_model(1), Pool(), **options)
    with pytest.raises(ValueError, match="score was 'grad_norm' and is 'loss'"):
        psg.score_pool(make_model(), Pool(), score="loss", **options)
    with pytest.raises(ValueError, match="count was 23 and is 9"):
        psg.score_pool(make_model(), Pool(9), **options)
    with pytest.raises(ValueError, match="block_size was 64 and is 8"):
        psg.score_pool(make_model(), Pool(), block_size=8, **options)


class Shifted(Pool):
    """Another pool of the same length."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        inputs, target = super().__getitem__(index)
        return inputs + 1, target


def other_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"params": ["5.weight"]}, "params"),
        ({"loss": other_loss}, "loss"),
        ({"fallback": "loop"}, "options"),
        ({"loader": Shifted()}, "pool"),
        (
            {"model": make_model().requires_grad_(False).append(nn.Linear(4, 4))},
            "model",
        ),
    ],
    ids=["params", "loss", "options", "pool", "model"],
)
def test_another_jobs_parts_are_an_error(tmp_path, changed, key):
    job = {"model": make_model(), "loader": Pool(), "batch_size": 4}
    job |= {"folder": tmp_path, "progress": False}
    psg.score_pool(**job)
    with pytest.raises(ValueError, match=f"{key} was"):
        psg.score_pool(**{**job, **changed})


def test_frozen_parameters_are_another_job(tmp_path):
    model = make_model()
    options = {"batch_size": 4, "folder": tmp_path, "progress": False}
    psg.score_pool(model, Pool(), **options)
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match="params was"):
        psg.score_pool(model, Pool(), **options)


class Drawn(Pool):
    """Augmented at random."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        inputs, target = super().__getitem__(index)
        return inputs + torch.randn(inputs.shape), target


def test_a_pool_that_is_drawn_at_random_goes_on_too(tmp_path):
    options = {"batch_size": 4, "folder": tmp_path, "progress": False}
    first = psg.score_pool(make_model(), Drawn(), **options)
    again = psg.score_pool(make_model(), Drawn(), **options)
    np.testing.assert_array_equal(first.scores, again.scores)


class Headed(nn.Module):
    """Whose last parameters no module with a rule has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 5)
        self.head = nn.Parameter(torch.randn(5, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.flatten(1)) @ self.head


def test_the_last_layer_is_not_guessed():
    options = {"score": "last_layer_grad_norm", "batch_size": 4, "progress": False}
    with pytest.raises(ValueError, match=r"accounts for head.*last_layer="):
        psg.score_pool(Headed(), Pool(), **options)
    psg.score_pool(Headed(), Pool(), last_layer="body", **options)
    with pytest.raises(ValueError, match="name the layer with last_layer="):
        psg.score_pool(make_model(), Pool(), params=["5.weight"], **options)


@pytest.mark.parametrize("score", ["loss", "grad_norm"])
@pytest.mark.parametrize("labels", ["given", "expected"])
def test_a_mean_is_no_loss_of_samples(score, labels):
    with pytest.raises(ValueError, match=r"shape \(\) for a block of 4"):
        psg.score_pool(
            make_model(), Pool(), score=score, labels=labels, loss=F.cross_entropy,
            block_size=4, progress=False,
        )  # fmt: skip


class Singles(Pool):
    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (super().__getitem__(index)[0],)


def test_given_labels_must_be_there():
    with pytest.raises(ValueError, match="have no targets; give pairs"):
        psg.score_pool(make_model(), Singles(), batch_size=4, progress=False)


def scored(rank: int, folder: str | None) -> np.ndarray:
    replica = xla_replica.current()
    with replica.seeded(0):  # threads share a generator
        model = make_model().to(replica.device)
    options = {"block_size": 4, "part_size": 4, "progress": False}
    return psg.score_pool(model, Pool(), folder=folder, **options).scores


@pytest.mark.parametrize("backend", [row("xla", 3)])
def test_replicas_go_on_where_another_number_has_stopped(backend, tmp_path):
    alone = Backend(backend.device, 1).run(scored, None)[0]
    np.testing.assert_allclose(
        alone, by_hand(make_model(), "grad_norm", "given"), rtol=1e-4
    )
    for found in backend.run(scored, str(tmp_path)):
        np.testing.assert_array_equal(found, alone)
    # And goes on with what another number of replicas has kept.
    (tmp_path / "part-00000003.npy").unlink()
    again = Backend(backend.device, 1).run(scored, str(tmp_path))[0]
    np.testing.assert_array_equal(again, alone)


def counted(rank: int) -> list[tuple[int, int, dict[str, int]]]:
    replica = xla_replica.current()
    model = make_model().to(replica.device)
    found = []
    for labels in ("given", "expected"):
        options = {"labels": labels, "block_size": 4, "part_size": 8}
        options |= {"progress": False}
        psg.score_pool(model, Pool(16), **options)
        with xla_replica.count() as counts:
            psg.score_pool(model, Pool(), **options)
        found.append((counts.compilations, counts.transfers, counts.fallbacks))
    return found


@needs_xla
@pytest.mark.xla
def test_a_short_last_batch_compiles_nothing_and_a_part_takes_one_transfer():
    assert Backend("xla", 1).run(counted) == [[(0, 3, {}), (0, 3, {})]]


def test_a_bar_shows_what_is_done(tmp_path, capsys):
    options = {"block_size": 4, "part_size": 8, "folder": tmp_path}
    with pytest.raises(OSError, match="disk"):
        psg.score_pool(make_model(), Pool(fail_at=18), **options)
    assert f"16/{COUNT}" in capsys.readouterr().err
    psg.score_pool(make_model(), Pool(), **options)
    shown = capsys.readouterr().err
    assert f"16/{COUNT}" in shown  # where it goes on
    assert f"{COUNT}/{COUNT}" in shown


def test_mixed_precision_stays_close():
    model = make_model()
    found = psg.score_pool(
        model, Pool(), batch_size=8, autocast=torch.bfloat16, progress=False
    )
    truth = by_hand(model, "grad_norm", "given")
    assert np.linalg.norm(found.scores - truth) <= 2e-2 * np.linalg.norm(truth)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


def test_options_are_checked():
    model = make_model()
    with pytest.raises(ValueError, match="score='no'; allowed are grad_norm"):
        psg.score_pool(model, Pool(), score="no", batch_size=2)
    with pytest.raises(ValueError, match="labels='no'; allowed are given"):
        psg.score_pool(model, Pool(), labels="no", batch_size=2)
    with pytest.raises(ValueError, match="batch_size=0; give a positive number"):
        psg.score_pool(model, Pool(), batch_size=0)
    with pytest.raises(ValueError, match="block_size=-1; give a positive number"):
        psg.score_pool(model, Pool(), block_size=-1)
    with pytest.raises(ValueError, match="batch_size=None does not collate"):
        psg.score_pool(model, DataLoader(Pool(), batch_size=None))
    with pytest.raises(ValueError, match="part_size=0 samples; give at least 1"):
        psg.score_pool(model, Pool(), batch_size=2, part_size=0)
    with pytest.raises(TypeError, match="no length"):
        psg.score_pool(model, Stream(), batch_size=2)


class Counting(Pool):
    """Counts the tensors that are alive when a part begins."""

    def __init__(self, count: int, part_size: int) -> None:
        super().__init__(count)
        self.part_size = part_size
        self.alive: list[int] = []

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index % self.part_size == 0:
            gc.collect()
            kinds = (type(value) for value in gc.get_objects())
            self.alive.append(sum(issubclass(kind, torch.Tensor) for kind in kinds))
        return super().__getitem__(index)


@pytest.mark.parametrize("score", ["grad_norm", "egl", "el2n"])
def test_no_tensor_outlives_its_part(score, tmp_path):
    options = {"score": score, "block_size": 8, "part_size": 32, "progress": False}
    pool = Counting(20 * 32, 32)
    psg.score_pool(make_model(), pool, folder=tmp_path, **options)
    counts = pool.alive[-18:]  # without the first, and those that describe the pool
    assert len(set(counts)) == 1, counts


class Numbers(Dataset):
    """A pool of any size that takes no memory."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((8,), (index % 97) / 97.0), index % CLASSES


LARGE = 100_000


def of_numbers(rank: int, batch_size: int, folder: str | None, count: int = LARGE):
    """Scores of a large pool."""
    replica = xla_replica.current()
    with replica.seeded(0):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    options = {"batch_size": batch_size, "folder": folder, "progress": False}
    return psg.score_pool(model.to(replica.device), Numbers(count), **options)


def grown_by_a_large_pool(folder: str) -> int:
    """KiB beyond what a small one took; checks the scores."""
    of_numbers(0, 500, None, LARGE // 10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = of_numbers(0, 500, folder)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    # The pool repeats itself, and so do its scores.
    assert len(found) == LARGE
    period = 97 * CLASSES
    np.testing.assert_allclose(
        found.scores[:-period], found.scores[period:], rtol=1e-5, atol=1e-7
    )
    return grown


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, int]:
    """A folder of scores, and how much memory they took.

    In a process of its own: the high-water mark is the process's.
    """
    folder = tmp_path_factory.mktemp("large")
    code = "import sys, test_per_sample_pool as t; "
    code += "print(t.grown_by_a_large_pool(sys.argv[1]))"
    run = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stderr
    return folder, int(run.stdout.split()[-1])


@pytest.mark.slow
def test_a_hundred_thousand_take_no_more_memory_than_ten(large):
    # KiB: 352 for the scores, and what a process drifts by
    assert large[1] < 4 * 1024


def large_scores(rank: int, batch_size: int, folder: str) -> np.ndarray:
    return of_numbers(rank, batch_size, folder).scores


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_half_of_a_hundred_thousand_is_scored_again_with_the_same_bits(
    large, num_replicas
):
    """In other batches, and maybe by other replicas, than the parts that are there."""
    parts = sorted(large[0].glob("part-*.npy"))
    truth = np.concatenate([np.load(path) for path in parts])
    assert truth.shape == (LARGE,)
    for path in parts[::2]:
        path.unlink()
    kept = {path: path.stat().st_mtime_ns for path in parts[1::2]}
    assert len(kept) > 10
    backend = Backend("cpu", num_replicas)
    for found in backend.run(large_scores, 1000, str(large[0]), timeout=300.0):
        assert_same_bits(found, truth)
    assert sorted(large[0].glob("part-*.npy")) == parts
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
