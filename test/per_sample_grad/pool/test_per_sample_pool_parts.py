"""Scores have the same bits for any batches, parts and replicas, killed or not."""

import errno
import functools
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from support.per_sample_grad.pool import BLOCK, Pool, Vectors, assert_same_bits, scores
from support.variable_batch_size.checkpointed import full_disk
from support.xla_replica.replicas import TORCHTPU, Backend, of_torch_alone, on_xla, row
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import per_sample_grad as psg
import xla_replica
from per_sample_grad.pool import parts
from per_sample_grad.pool.blocks import compared_items, pool_digest
from xla_replica import ReplicaError
from xla_replica.common import files

COUNT = 41
ROWS = [
    ("grad_norm", "given"), ("grad_norm", "pseudo"), ("egl", "expected"),
    ("el2n", "given"), ("el2n", "pseudo"), ("loss", "given"), ("loss", "expected"),
]  # fmt: skip


def scored(model: nn.Module, pool=None, **options) -> np.ndarray:
    pool = Vectors(COUNT) if pool is None else pool
    return scores(model, pool, **{"block_size": BLOCK, **options})


@pytest.mark.parametrize(("score", "labels"), [*ROWS, (40, "given")])
def test_bits_do_not_depend_on_the_batch_size(score, labels):
    model = Vectors.model()
    kind = {"score": score, "labels": labels}
    truth = scored(model, **kind)
    for batch_size, part_size in [(1, 4096), (7, 16), (8, 8), (20, 4096), (1000, 1)]:
        loader = DataLoader(Vectors(COUNT), batch_size=batch_size, shuffle=True)
        found = scored(model, loader, part_size=part_size, **kind)
        assert_same_bits(found, truth)


@pytest.mark.parametrize("score", ["grad_norm", 40])
@pytest.mark.parametrize("kind", [Vectors, Pool])
def test_bits_depend_on_their_block_alone(kind, score):
    """Which block is compared, and what waits during a pass, is the same for all."""
    model, pool = kind.model(), kind(3 * BLOCK)
    whole = scored(model, pool, score=score)
    assert_same_bits(scored(model, pool, score=score, fallback="loop"), whole)
    for start in (0, BLOCK, 2 * BLOCK):
        block = Subset(pool, range(start, start + BLOCK))
        alone = scored(model, block, score=score)
        assert_same_bits(alone, whole[start : start + BLOCK])
    other = scored(model, pool, score=score, block_size=1)
    assert (other != whole).any() or kind is Pool  # or this would prove nothing
    np.testing.assert_allclose(other, whole, rtol=1e-3, atol=1e-5)


def test_blocks_are_collated_whatever_the_batches():
    """A collator that pads to the longest sample needs that."""
    seen = []

    def collate(samples):
        seen.append([float(x[0]) for x, _ in samples])
        return torch.utils.data.default_collate(samples)

    for batch_size in (1, 30):
        pool = DataLoader(Vectors(COUNT), batch_size=batch_size, collate_fn=collate)
        scored(Vectors.model(), pool, score="loss")
    half = len(seen) // 2
    assert {len(block) for block in seen} == {BLOCK}
    assert seen[:half] == seen[half:]
    assert set(seen[-1][1:]) == {seen[-1][0]}  # one sample, and copies of it


def announce(path: Path, number: int) -> None:
    (path / str(number)).touch(exist_ok=False)  # of a loading process that starts


def test_loading_processes_change_no_bit_and_start_once_for_all_parts(tmp_path):
    options = {"worker_init_fn": functools.partial(announce, tmp_path)}
    loader = DataLoader(Vectors(COUNT), batch_size=16, num_workers=2, **options)
    found = scored(Vectors.model(), loader, part_size=BLOCK)
    assert_same_bits(found, scored(Vectors.model()))
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


def certain(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Losses that are -0.0 and NaN."""
    zeros = 0.0 * logits[:, 0].abs()
    return zeros * torch.where(targets > 1, torch.nan, -1.0)


def on_replicas(rank: int, batch_size: int, *rows: dict) -> list[np.ndarray]:
    model, options = Vectors.on_device(), {"batch_size": batch_size, "part_size": BLOCK}
    return [scored(model, **options, **each) for each in rows]


@pytest.mark.parametrize(
    "backend", [row("cpu", 3), row("xla", 3, slow=True), *TORCHTPU]
)
def test_bits_do_not_depend_on_the_number_of_replicas(backend):
    rows = [{"score": ROWS[n][0], "labels": ROWS[n][1]} for n in (0, 1, 2, 3, 5)]
    rows += [{"score": "loss", "loss": certain}]
    alone = Backend(backend.device, 1).run(on_replicas, COUNT, *rows)[0]
    assert np.isnan(alone[-1]).any()
    assert np.signbit(alone[-1][~np.isnan(alone[-1])]).all()
    for found in backend.run(on_replicas, 2 * BLOCK, *rows):
        for one, truth in zip(found, alone, strict=True):
            assert_same_bits(one, truth)


def refused_and_repaired(rank: int, folder: str) -> list[np.ndarray]:
    """Returns scores after the remedy, and of the model that all build."""
    replica = xla_replica.current()
    for name, kept in [("1.running_mean", None), ("0.3.bias", folder)]:
        with replica.seeded(0):
            model = nn.Sequential(Vectors.model(), nn.BatchNorm1d(4))
        if rank == 2:
            model.state_dict()[name][2] += 1e-7
        model.to(replica.device)
        told = rf"to score with \(of 1 tensors\): replica 0 has {{'{name}': .*"
        told += r"1 of 3 differ from replica 0 \(rank 2\)\. .*Build the model once, bef"
        with pytest.raises(ReplicaError, match=told):
            scored(model, folder=kept, part_size=BLOCK)
    model = Vectors.on_device(rank)
    replica.broadcast_([*model.parameters(), *model.buffers()])
    return [scored(each, part_size=BLOCK) for each in (model, Vectors.on_device())]


@pytest.mark.parametrize("backend", [row("cpu", 3), row("xla", 3)])
def test_other_weights_are_an_error_everywhere_and_have_a_remedy(backend, tmp_path):
    for repaired, truth in backend.run(refused_and_repaired, str(tmp_path)):
        assert_same_bits(repaired, truth)
    assert not list(tmp_path.iterdir())


# --- parts that are kept in a folder --------------------------------------------------


def test_a_run_that_failed_continues_where_it_was(tmp_path, capsys):
    def failing(index: int) -> None:
        if index == 18:
            raise OSError("the disk is gone")

    options = {"part_size": 8, "folder": tmp_path, "progress": True}
    with pytest.raises(OSError, match="disk"):
        scores(pool=Pool(watch=failing), **options)
    assert f"16/{Pool.size}" in capsys.readouterr().err
    for missing in (range(16, Pool.size), ()):
        pool = Pool()
        np.testing.assert_array_equal(scores(pool=pool, **options), scores())
        assert set(pool.asked) == {*missing, *compared_items(Pool.size)}
        shown = capsys.readouterr().err
        assert f"{Pool.size}/{Pool.size}" in shown
        assert (f"16/{Pool.size}" in shown) == bool(missing)
    assert not list(tmp_path.glob("*.tmp"))


ANOTHER = {
    " params was": {"params": ["5.weight"]},
    " loss was": {"loss": lambda logits, targets: logits.sum(1)},
    " score function was": {"score": lambda factors: factors.norms()},
    " forward was": {"forward": lambda model, inputs: model(inputs)},
    " split was": {"split": lambda batch: (batch[0], batch[1])},
    " collate was": {"loader": DataLoader(Pool(), collate_fn=lambda batch: batch)},
    "score function was .*Projection of 79 numbers .*seed 1": {
        "score": psg.Projection(dict(Pool.model().named_parameters()), 20, seed=1)
    },
    " options": {"fallback": "loop"},
    " pool was": {"loader": Pool(change=lambda x: x + 1)},
    r" model\.6": {"model": Pool.model().requires_grad_(False).append(nn.Linear(4, 4))},
    r"else: model\.0\.weight was": {"model": Pool.model(1)},
    r"; and \d+ more\. Give another folder": {"model": nn.Sequential(Pool.model())},
    "score was 'grad_norm' and is 'loss'": {"score": "loss"},
    "count was 23 and is 9": {"loader": Pool(9)},
    "block_size was 64 and is 8": {"block_size": 8},
}


@pytest.mark.parametrize("told", ANOTHER)
def test_another_jobs_parts_are_an_error(tmp_path, told):
    job = {"model": Pool.model(), "loader": Pool(), "folder": tmp_path}
    psg.score_pool(**job)
    with pytest.raises(ValueError, match=told):
        psg.score_pool(**{**job, **ANOTHER[told]})


@pytest.mark.parametrize(("text", "told"), [
    ('{"score": "grad_norm", "count": 23}', "else: format was None and is 7; .* Give"),
    ('{"score": "loss", "format": 6}', "else: format was 6 and is 7; "),
    ("[]", "else: format was None and is 7; "),
    ("[" * 200_000, r"pool\.json is damaged .*Give another"),
    ('{"format": 7,', r"pool\.json is damaged .*Give another"),
], ids=range(5))  # fmt: skip
def test_a_folder_of_another_format_is_an_error(text, told, tmp_path):
    (tmp_path / "pool.json").write_text(text)
    with pytest.raises(ValueError, match=told):
        scores(folder=tmp_path)


@pytest.mark.parametrize("room", [0, 10, 130, 8 * 4 + 130])
def test_a_full_disk_names_the_path_and_what_is_kept(tmp_path, monkeypatch, room):
    opened = []

    def filled(*arguments):
        opened.append(arguments)
        third = len(opened) == 3  # after the description and a part
        with full_disk(room) if third else nullcontext():
            return files.write_whole(*arguments)

    monkeypatch.setattr(parts, "write_whole", filled)
    told = "The parts that are finished are kept"
    with pytest.raises(OSError, match=told) as full:
        scores(part_size=8, folder=tmp_path)
    assert full.value.errno == errno.EFBIG
    assert full.value.filename == str(tmp_path / "part-00000001.npy")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"pool.json", "part-00000000.npy"}
    pool = Pool()
    scores(pool=pool, part_size=8, folder=tmp_path)
    assert set(pool.asked) == {*range(8, Pool.size), *compared_items(Pool.size)}


def test_a_pool_that_is_drawn_at_random_continues_too(tmp_path):
    options = {"pool": Pool(change=torch.rand_like), "folder": tmp_path}
    with pytest.raises(TypeError, match="others every time that they are read"):
        scores(**options)
    first, again = (scores(tag="noise of one", **options) for _ in range(2))
    np.testing.assert_array_equal(first, again)


class Files(Pool):
    """A pool of files, whose samples are what is in them."""

    def __init__(self, folder: Path, **options: Callable) -> None:
        self.paths = sorted(map(str, folder.iterdir()))
        super().__init__(len(self.paths), **options)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.change(torch.tensor(float(Path(self.paths[index]).read_text())))


def tensors(corrected: bool = False, exchanged: bool = False) -> TensorDataset:
    x, y = torch.cos(torch.arange(1600.0)).view(400, 4), torch.arange(400) % 3
    if corrected:
        y[[7, 100, 333]] = 0
    if exchanged:
        x[[3, 5]] = x[[5, 3]]
    return TensorDataset(x, y)


class Slots:
    __slots__ = ("labels",)

    def __init__(self, labels):
        self.labels = labels


class Held(Slots, torch.utils.data.Dataset):
    """A pool whose items do not show what it holds, in a slot."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return index


def test_another_pool_is_told_from_the_one_that_was_scored(tmp_path):
    """Though few of its items differ, and none of those that are looked at."""
    for number in range(400):
        (tmp_path / f"{number:03}.txt").write_text(str(number / 400))
    kept = [i for i in range(400) if i != 7]
    pools = {
        "tensors": tensors(),
        "corrected": tensors(corrected=True),
        "order": tensors(exchanged=True),
        "subset": Subset(tensors(), kept),
        "other subset": Subset(tensors(), [*kept[:6], kept[7], kept[6], *kept[8:]]),
        "list": [(row, int(y)) for row, y in tensors()],
        "corrected list": [(row, int(y)) for row, y in tensors(corrected=True)],
        "files": Files(tmp_path),
        "transformed": Files(tmp_path, change=lambda x: x + (x == 7 / 400)),
    }
    for right in (1, 2):  # labels wherever a dataset may hold them
        labels = {**dict.fromkeys(range(400), 0), 7: right}
        held = {"dict": labels, "set": {*range(399), 500 + right}, "number": right}
        held |= {"object": types.SimpleNamespace(y=labels), "slots": Slots(labels)}
        pools |= {f"{name} {right}": Held(value) for name, value in held.items()}
    digests = {name: pool_digest(pool, None) for name, pool in pools.items()}
    assert len({*digests.values()}) == len(digests)
    assert pool_digest(tensors(), None) == digests["tensors"]
    assert pool_digest(Files(tmp_path), None) == digests["files"]
    (tmp_path / "007.txt").write_text("0.5")
    assert pool_digest(Files(tmp_path), None) != digests["files"]
    lock = threading.Lock()
    unknown = Files(tmp_path, change=lambda x: x if lock else None)
    with pytest.raises(TypeError, match=r"^pool\.change\.lock is a .*Pass tag="):
        pool_digest(unknown, None)


@pytest.mark.parametrize(
    "backend", [row("cpu", 2, slow=True), row("xla", 2), *TORCHTPU]
)
def test_replicas_continue_where_another_number_stopped(backend, tmp_path):
    one, kept = Backend(backend.device, 1), {"folder": str(tmp_path)}
    [[alone]] = one.run(on_replicas, BLOCK, {})
    for [found] in backend.run(on_replicas, BLOCK, kept):
        assert_same_bits(found, alone)
    (tmp_path / "part-00000003.npy").unlink()  # and one replica goes on with it
    assert_same_bits(one.run(on_replicas, BLOCK, kept)[0][0], alone)


def counted(rank: int) -> None:
    model = Pool.on_device()
    for labels in ("given", "expected"):
        scores(model, Pool(16), labels=labels, part_size=8)
        with xla_replica.count() as counts:
            scores(model, labels=labels, part_size=8)
        found = counts.compilations, counts.transfers, counts.fallbacks
        assert found == (0, 3, {})


@on_xla
def test_a_short_last_batch_compiles_nothing_and_a_part_takes_one_transfer():
    Backend("xla", 1).run(counted)


@pytest.mark.parametrize("score", [
    "el2n", *(pytest.param(s, marks=pytest.mark.slow) for s in ("grad_norm", "egl")),
])  # fmt: skip
def test_no_tensor_outlives_its_part(score, tmp_path):
    alive = []

    def watch(index):
        if index % 32 == 0:  # a part begins
            gc.collect()
            kinds = map(type, gc.get_objects())
            alive.append(sum(issubclass(kind, torch.Tensor) for kind in kinds))

    pool = Pool(10 * 32, watch=watch)
    gc.collect()
    gc.freeze()  # what is alive now would take long to count
    try:
        scores(pool=pool, score=score, block_size=8, part_size=32, folder=tmp_path)
    finally:
        gc.unfreeze()
    # Without the first parts' and the description's.
    assert len({*alive[-8:]}) == 1, alive


# --- runs that are killed -------------------------------------------------------------

MANY, PART = 480, 2 * BLOCK
# The items that are read to describe the pool, besides being scored.
IDENTITY = {*compared_items(MANY)}


def job(rank: int, folder: str, log: str, batch_size: int) -> np.ndarray:
    """Scores the pool slowly into "rows"; the log has which samples were asked for."""

    def watch(index):
        with open(log, "ab", buffering=0) as file:
            file.write(b"%d\n" % index)
        time.sleep(2e-3)

    model, pool = Vectors.on_device(), Vectors(MANY, watch=watch)
    options = {"batch_size": batch_size, "block_size": BLOCK, "part_size": PART}
    if Path(folder).name.startswith("rows"):
        options["score"] = 64
    return scores(model, pool, folder=folder, **options)


def asked(log: Path) -> Counter[int]:
    """Returns how often each index was asked for, except by the description."""
    lines = log.read_text().split() if log.exists() else []
    return Counter(i for i in map(int, lines) if i not in IDENTITY)


def kept(folder: Path) -> set[int]:
    """Returns the samples of the parts in a folder; asserts that each is complete."""
    found: set[int] = set()
    for path in folder.glob("part-*.npy"):
        first, rows = int(path.stem.split("-")[1]) * PART, np.load(path)
        assert len(rows) == PART
        assert rows.reshape(PART, -1).any(axis=1).all()
        found.update(range(first, first + PART))
    return found


def killed(folder: Path, log: Path, backend: Backend) -> None:
    code = "import sys, test_per_sample_pool_parts as t; "
    code += "from support.xla_replica.replicas import Backend; "
    code += "device, number, *args = sys.argv[1:]; "
    code += "Backend(device, int(number)).run(t.job, *args, 3 * t.BLOCK)"
    arguments = map(str, (backend.device, backend.num_replicas, folder, log))
    before, end = kept(folder), time.monotonic() + 120
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        while kept(folder) == before:
            assert process.poll() is None, "the job ended before it kept a part"
            assert time.monotonic() < end
            time.sleep(1e-3)
        end = time.monotonic() + random.uniform(0.0, 0.1)
        while time.monotonic() < end:
            kept(folder)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, "the job ended before it was killed"


@pytest.mark.parametrize(("what", "device", "killings", "last"), [
    pytest.param("rows", "cpu", [1], 2, marks=of_torch_alone),
    *(pytest.param(what, "cpu", [3, 1, 2], last, marks=pytest.mark.slow)
      for what, last in [("scores", 1), ("rows", 3)]),
    *(pytest.param(what, "xla", [2, 1], 3, marks=row("xla", 2, slow=True).marks)
      for what in ("scores", "rows")),
])  # fmt: skip
def test_a_kill_loses_a_part_at_most_and_no_bit(tmp_path, what, device, killings, last):
    folder = tmp_path / what
    folder.mkdir()
    for number, replicas in enumerate(killings):
        log, before = tmp_path / f"log{number}", kept(folder)
        killed(folder, log, Backend(device, replicas))
        after, done = kept(folder), set(asked(log))
        assert before < after < set(range(MANY))
        assert not done & before  # nothing is scored twice
        # One part was computed. A lazy device also loads ahead: two batches, and one in
        # hand.
        ahead = 0 if device == "cpu" else 4 * 3 * BLOCK
        assert len(done - after) <= replicas * (PART + ahead)
    log, before = tmp_path / "log", kept(folder)
    *_, found = Backend(device, last).run(job, str(folder), str(log), 1)
    assert asked(log) == dict.fromkeys(set(range(MANY)) - before - IDENTITY, 1)
    paths = str(tmp_path / f"{what}-again"), str(tmp_path / "quiet")
    assert_same_bits(found, Backend(device, 1).run(job, *paths, 7)[0])
    assert not list(folder.glob("*.tmp"))


def test_a_damaged_part_is_scored_again(tmp_path):
    def run(seed: int, folder: Path) -> np.ndarray:
        options = {"block_size": BLOCK, "part_size": 8, "folder": folder}
        return scores(Vectors.model(seed), Vectors(20), **options)

    other, path = tmp_path / "other", tmp_path / "scores" / "part-00000001.npy"
    other.mkdir()
    left = other / "part-00000000.0123.tmp"  # as by a run that was killed
    left.write_bytes(b"half")
    run(1, other)
    assert not left.exists()
    truth = run(0, path.parent)
    whole = path.read_bytes()
    flipped = [bytearray(whole) for _ in range(4)]
    for content, bit in zip(flipped, (0, 8 * 128 + 3, 8 * 150, 8 * len(whole) - 1)):
        content[bit // 8] ^= 1 << bit % 8
    next_to_it = path.with_name("part-00000000.npy").read_bytes()
    of_another_model = (other / path.name).read_bytes()
    cut = (b"", whole[:-1], whole[:64], bytes(len(whole)))
    for damaged in (*cut, next_to_it, of_another_model, *flipped):
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match=r"part-00000001\.npy is damaged: .* aga"):
            assert_same_bits(run(0, path.parent), truth)
        assert path.read_bytes() == whole
