"""A run that is killed continues with another number of replicas: scores and rows."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.per_sample_grad.pool import (
    BLOCK,
    Vectors,
    assert_same_bits,
    dense_model,
    scores,
)
from support.xla_replica.replicas import Backend, needs_xla

import per_sample_grad as psg
import xla_replica
from per_sample_grad.pool.items import compared_items

COUNT, PART = 480, 2 * BLOCK
# The items that are read to describe the pool, besides being scored.
IDENTITY = {*compared_items(COUNT)}


def job(rank: int, folder: str, log: str, batch_size: int) -> np.ndarray:
    """Scores the pool on one replica, in a folder "rows" by projections.

    A sample takes a while, and the log has which were asked for.
    """

    def watch(index):
        with open(log, "ab", buffering=0) as file:
            file.write(b"%d\n" % index)
        time.sleep(2e-3)

    replica, pool = xla_replica.current(), Vectors(COUNT, watch=watch)
    with replica.seeded(0):
        model = dense_model().to(replica.device)
    options = {"batch_size": batch_size, "block_size": BLOCK, "part_size": PART}
    if Path(folder).name.startswith("rows"):
        options["score"] = psg.Projection(dict(model.named_parameters()), 64)
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
    """Runs the job in another process, and kills it while it is working."""
    code = "import sys, test_per_sample_pool_kill as t; "
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


@pytest.mark.parametrize(
    ("what", "device", "killings", "last"),
    [
        ("rows", "cpu", [1], 2),
        *(pytest.param(what, "cpu", [3, 1, 2], last, marks=pytest.mark.slow)
          for what, last in [("scores", 1), ("rows", 3)]),
        *(pytest.param(what, "xla", [2, 1], 3, marks=[
            pytest.mark.slow, pytest.mark.xla, needs_xla])
          for what in ("scores", "rows")),
    ],
)  # fmt: skip
def test_a_killed_run_loses_two_parts_at_most_and_no_bit(
    tmp_path, what, device, killings, last
):
    folder = tmp_path / what
    folder.mkdir()
    for number, replicas in enumerate(killings):
        log, before = tmp_path / f"log{number}", kept(folder)
        killed(folder, log, Backend(device, replicas))
        after, done = kept(folder), set(asked(log))
        assert before < after < set(range(COUNT))
        assert not done & before  # nothing is scored twice
        # One part was computed, one perhaps written. A lazy device also loads ahead:
        # two batches, and one in hand.
        ahead = 0 if device == "cpu" else 4 * 3 * BLOCK
        assert len(done - after) <= replicas * (2 * PART + ahead)
    log, before = tmp_path / "log", kept(folder)
    *_, found = Backend(device, last).run(job, str(folder), str(log), 1)
    assert asked(log) == dict.fromkeys(set(range(COUNT)) - before - IDENTITY, 1)
    paths = str(tmp_path / f"{what}-again"), str(tmp_path / "quiet")
    assert_same_bits(found, Backend(device, 1).run(job, *paths, 7)[0])
    assert not list(folder.glob("*.tmp"))


def test_a_damaged_part_is_set_aside_and_scored_again(tmp_path):
    def run(seed: int, folder: Path) -> np.ndarray:
        options = {"block_size": BLOCK, "part_size": 8, "folder": folder}
        return scores(dense_model(seed), Vectors(20), **options)

    other, path = tmp_path / "other", tmp_path / "scores" / "part-00000001.npy"
    other.mkdir()
    left = other / "part-00000000.0123.tmp"  # as by a run that was killed
    left.write_bytes(b"half")
    run(1, other)
    assert not left.exists()
    truth, aside = run(0, path.parent), path.with_suffix(".damaged")
    whole = path.read_bytes()
    flipped = [bytearray(whole) for _ in range(4)]
    for content, bit in zip(flipped, (0, 8 * 128 + 3, 8 * 150, 8 * len(whole) - 1)):
        content[bit // 8] ^= 1 << bit % 8
    next_to_it = path.with_name("part-00000000.npy").read_bytes()
    of_another_model = (other / path.name).read_bytes()
    cut = (b"", whole[:-1], whole[:64], bytes(len(whole)))
    for damaged in (*cut, next_to_it, of_another_model, *flipped, None):
        if damaged is None:  # a folder has taken its place
            path.unlink()
            aside.unlink()
            path.mkdir()
        else:
            path.write_bytes(damaged)
        with pytest.warns(UserWarning, match=r"part-00000001\.npy is damaged: .* aga"):
            assert_same_bits(run(0, path.parent), truth)
        assert path.read_bytes() == whole
        assert damaged is None or aside.read_bytes() == damaged
