"""Scores have the same bits for any batch size, part size and number of replicas."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from support.per_sample_grad.pool import BLOCK, Pool, Vectors, assert_same_bits, scores
from support.xla_replica.replicas import SEVERAL_REPLICAS, TORCHTPU, Backend, row
from torch import nn
from torch.utils.data import DataLoader, Subset

import per_sample_grad as psg
import xla_replica
from xla_replica import ReplicaError

COUNT = 41
ROWS = [
    ("grad_norm", "given"), ("grad_norm", "pseudo"), ("egl", "expected"),
    ("el2n", "given"), ("el2n", "pseudo"), ("loss", "given"), ("loss", "expected"),
]  # fmt: skip


def scored(model: nn.Module, pool=None, **options) -> np.ndarray:
    """Returns scores or, for a size in place of a score, rows of a projection."""
    if isinstance(options.get("score"), int):
        parameters = dict(model.named_parameters())
        options["score"] = psg.Projection(parameters, options["score"])
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
    """Returns losses that are -0.0 and NaN."""
    zeros = 0.0 * logits[:, 0].abs()
    return zeros * torch.where(targets > 1, torch.nan, -1.0)


def on_replicas(rank: int, batch_size: int, rows: list) -> list[np.ndarray]:
    replica = xla_replica.current()
    with replica.seeded(0):  # threads share a generator
        model = Vectors.model().to(replica.device)
    options, found = {"batch_size": batch_size, "part_size": BLOCK}, []
    for score, labels in rows:
        found.append(scored(model, score=score, labels=labels, **options))
    return [*found, scored(model, score="loss", loss=certain, part_size=BLOCK)]


@pytest.mark.parametrize(
    "backend", [row("cpu", 3), row("xla", 3, slow=True), *TORCHTPU]
)
def test_bits_do_not_depend_on_the_number_of_replicas(backend):
    rows = [ROWS[n] for n in (0, 1, 2, 3, 5)]
    alone = Backend(backend.device, 1).run(on_replicas, COUNT, rows)[0]
    assert np.isnan(alone[-1]).any()
    assert np.signbit(alone[-1][~np.isnan(alone[-1])]).all()
    for found in backend.run(on_replicas, 2 * BLOCK, rows):
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
    with replica.seeded(0):  # one thread at a time
        model = Vectors.model(rank).to(replica.device)
    replica.broadcast_([*model.parameters(), *model.buffers()])
    replica.barrier()  # so that emulated replicas, which are threads, draw together
    models = model, Vectors.model(0).to(replica.device)
    return [scored(each, part_size=BLOCK) for each in models]


@pytest.mark.parametrize("backend", SEVERAL_REPLICAS)
def test_other_weights_are_an_error_on_every_replica_and_have_a_remedy(
    backend, tmp_path
):
    for repaired, truth in backend.run(refused_and_repaired, str(tmp_path)):
        assert_same_bits(repaired, truth)
    assert not list(tmp_path.iterdir())
