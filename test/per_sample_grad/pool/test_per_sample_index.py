"""An index of a pool holds every sample's projection, and finds the similar ones."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.per_sample_grad.layer_cases import Apply
from support.per_sample_grad.pool import (
    BLOCK,
    CLASSES,
    Vectors,
    assert_same_bits,
    dense_model,
)
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import per_sample_grad as psg
from per_sample_grad.factors import projection as projections
from per_sample_grad.pool import gradient_index, parts
from per_sample_grad.pool.gradient_index import GradientIndex

COUNT, SIZE = 41, 60
OPTIONS = {"size": SIZE, "block_size": BLOCK, "part_size": 8, "progress": False}


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def by_hand(model: nn.Module, labels: str = "given") -> torch.Tensor:
    """Returns the projections of all gradients, which are formed in float64."""
    model = model.double()
    params = dict(model.named_parameters())
    projection = psg.Projection(params, SIZE, seed=3)
    x, y = default_collate([Vectors(COUNT)[i] for i in range(COUNT)])
    y = y if labels == "given" else model(x.double()).argmax(1)
    found = psg.per_sample_grads(model, loss_of, (x.double(), y))
    rows = [projection.of(name, [psg.Dense(found[name])], 2**30) for name in params]
    return torch.cat(rows, 1)


@pytest.mark.parametrize("labels", ["given", "pseudo"])
def test_rows_are_the_projections_of_the_samples_gradients(labels, tmp_path):
    truth = by_hand(dense_model(), labels).float().numpy()
    options = {**OPTIONS, "seed": 3, "labels": labels, "folder": tmp_path}
    index = psg.index_pool(dense_model(), Vectors(COUNT), **options)
    assert (len(index), index.size) == truth.shape
    np.testing.assert_allclose(index[:], truth, rtol=1e-4, atol=1e-5)
    rows = [40, 3, 3, -1]
    assert_same_bits(index[rows], index[:][rows])
    assert [*index.columns] == [name for name, _ in dense_model().named_parameters()]
    assert [*index.columns.values()][-1].stop == index.size
    assert f"{COUNT} samples, {index.size} numbers" in repr(index)
    assert_same_bits(psg.open_index(tmp_path)[:], index[:])
    assert_same_bits(np.load(tmp_path / "part-00000002.npy"), index[16:24])
    saved = json.loads((tmp_path / "pool.json").read_text())
    expected = {"count": COUNT, "size": SIZE, "seed": 3, "dtype": "float32"}
    assert {name: saved[name] for name in expected} == expected
    assert "model.0.weight" in saved
    in_memory = psg.index_pool(
        dense_model(), Vectors(COUNT), **options | {"folder": None}
    )
    assert_same_bits(in_memory[:], index[:])


def shared() -> nn.Module:
    """Returns a model whose layer is used twice, and one parameter never."""
    model = Apply(
        lambda m, x: m.last(m.twice(m.twice(m.first(x)).tanh())),
        first=nn.Linear(67, 9), twice=nn.Linear(9, 9), last=nn.Linear(9, CLASSES),
    )  # fmt: skip
    model.unused = nn.Parameter(torch.ones(3))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uses_of_one_parameter_are_added_and_what_is_unused_is_zero(dtype):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = shared()
    options = {
        **OPTIONS,
        "seed": 3,
        "split": lambda batch: (batch[0].to(dtype), batch[1]),
    }
    index = psg.index_pool(model.to(dtype), Vectors(COUNT), **options)
    assert (index[:][:, index.columns["unused"]] == 0).all()
    truth = by_hand(model).float().numpy()
    np.testing.assert_allclose(index[:], truth, rtol=1e-3, atol=1e-5)


def test_a_size_that_has_room_for_all_keeps_the_gradients():
    model = dense_model()
    total = sum(p.numel() for p in model.parameters())
    index = psg.index_pool(model, Vectors(COUNT), **OPTIONS | {"size": 10 * total})
    assert index.size == total
    norms = psg.score_pool(model, Vectors(COUNT), progress=False).scores
    np.testing.assert_allclose(np.sqrt(index.self_influence()), norms, rtol=1e-4)


def index_of(rows: np.ndarray, part_size: int, kept: tuple[tuple[int, int], ...]):
    """Returns an index of these rows, of parameters that keep so many numbers."""
    rows = rows.astype(np.float32)
    description = {"seed": 0, **{f"kept.{n}": k for n, k in enumerate(kept)}}

    def part(number: int) -> np.ndarray:
        return rows[number * part_size : (number + 1) * part_size]

    return GradientIndex(description, part_size, part, len(rows))


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("block_bytes", [1, 600, 2**24])
@pytest.mark.parametrize("part_size", [4, 64])
@pytest.mark.parametrize("by", ["inner_product", "cosine"])
def test_a_search_is_a_sort_of_all_products(by, part_size, block_bytes, monkeypatch):
    monkeypatch.setattr(gradient_index, "_BLOCK_BYTES", block_bytes)
    # Small integers: products are exact, and many are equal.
    rng = np.random.default_rng(1)
    rows, queries = rng.integers(-2, 3, (50, 6)), rng.integers(-2, 3, (7, 6))
    rows[[4, 30]], queries[2] = 0, 0
    truth = (queries @ rows.T).astype(np.float64)
    if by == "cosine":
        lengths = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(
            rows, axis=1
        )
        truth = np.divide(truth, lengths, out=np.zeros_like(truth), where=lengths > 0)
    index = index_of(rows, part_size, ((2, 3),))
    for top in (1, 9, 50):
        found = index.search(queries.astype(np.float32), top=top, by=by)
        assert found.indices.shape == found.values.shape == (7, top)
        assert (found.indices.dtype, found.values.dtype) == (np.int64, np.float32)
        best = -np.sort(-truth, axis=1)[:, :top]
        np.testing.assert_allclose(found.values, best, atol=1e-6)
        at = np.take_along_axis(truth, found.indices, 1)
        np.testing.assert_allclose(at, found.values, atol=1e-6)
        if by == "inner_product":  # ties are in the order of the pool
            order = np.argsort(-truth, axis=1, kind="stable")[:, :top]
            np.testing.assert_array_equal(found.indices, order)


def test_gram_is_that_of_the_rows():
    rows = drawn(20, 6)
    index = index_of(rows, 8, ((2, 3),))
    wanted = [3, 17, 3]
    np.testing.assert_allclose(
        index.gram(wanted), rows[wanted] @ rows[wanted].T, rtol=1e-5
    )


@pytest.mark.parametrize("by_parameter", [True, False])
def test_preconditioning_solves_with_the_damped_matrix(by_parameter):
    rows, queries = drawn(40, 10) * np.arange(1, 11), drawn(3, 10, seed=1)
    rows[:, 6:] = 0  # a parameter without a gradient
    index = index_of(rows, 16, ((2, 3), (1, 4)))
    found = index.preconditioner(damping=0.3, by_parameter=by_parameter)(queries)
    matrix = rows.astype(np.float64).T @ rows / 40
    blocks = [slice(0, 6)] if by_parameter else [slice(0, 10)]
    for block in blocks:
        own = matrix[block, block]
        own = own + 0.3 * np.trace(own) / len(own) * np.eye(len(own))
        truth = np.linalg.solve(own, queries[:, block].T.astype(np.float64)).T
        np.testing.assert_allclose(found[:, block], truth, rtol=1e-4)
    if by_parameter:
        assert (found[:, 6:] == 0).all()
    precondition = index.preconditioner(damping=0.3, by_parameter=by_parameter)
    found = index.self_influence(precondition)
    truth = [row @ precondition(row[None])[0] for row in rows.astype(np.float32)]
    np.testing.assert_allclose(found, truth, rtol=1e-4)
    np.testing.assert_array_equal(precondition(index), precondition(rows))
    with pytest.raises(ValueError, match=r"shape \(m, 10\), got \(3, 4\)"):
        precondition(queries[:, :4])
    with pytest.raises(TypeError, match="preconditioner: rows must be an array, a te"):
        precondition(queries.tolist())


def test_an_index_of_queries_searches_another_and_is_exported(tmp_path):
    model = dense_model()
    index = psg.index_pool(model, Vectors(COUNT), folder=tmp_path, **OPTIONS)
    few = torch.utils.data.Subset(Vectors(COUNT), [7, 30])
    found = index.search(psg.index_pool(model, few, **OPTIONS), top=1, by="cosine")
    assert found.indices.tolist() == [[7], [30]]
    np.testing.assert_allclose(found.values, 1, rtol=1e-5)
    asked = torch.from_numpy(index[[7]]).double()
    assert index.search(asked, top=1, by="cosine").indices.tolist() == [[7]]
    index.to_npy(tmp_path / "all.npy")
    assert_same_bits(np.load(tmp_path / "all.npy", mmap_mode="r"), index[:])
    assert not list(tmp_path.glob("*.tmp"))


def test_what_cannot_be_searched_for_is_an_error():
    rows = drawn(20, 6)
    index = index_of(rows, 8, ((2, 3),))
    for queries, error, told in [
        ([[0.0] * 6], TypeError, "must be an array, a tensor or an index, .* a list"),
        (torch.zeros(1, 6) * 1j, TypeError, "real numbers; got a torch.complex64 Te"),
        (drawn(1, 6) * 1j, TypeError, "queries must be real .* array of complex64"),
        (np.full((1, 6), None), TypeError, "real numbers, got an array of object"),
        (drawn(2, 5), ValueError, r"shape \(Q, 6\), got \(2, 5\)"),
        (drawn(6), ValueError, r"shape \(Q, 6\), got \(6,\)"),
        (drawn(2, 6) * np.nan, ValueError, "queries 0, 1 are not finite"),
        (np.full((1, 6), 3e38, np.float32), ValueError, "are beyond float32"),
        (np.sign(rows[:1]) * 3e38, ValueError, "are beyond float32"),  # infinite
    ]:
        with pytest.raises(error, match=told):
            index.search(queries)
    for options, error, told in [
        ({"top": 21}, ValueError, "top must be an integer >= 1 and <= 20, got 21"),
        ({"top": 2.0}, TypeError, "top must be"),
        ({"by": "dot"}, ValueError, "by must be one of 'inner_product', 'cosine'"),
        ({"skip_nan": 1}, TypeError, "skip_nan must be True or False"),
    ]:
        with pytest.raises(error, match=told):
            index.search(rows[:1], **options)
    with pytest.raises(ValueError, match="damping must be a finite number > 0"):
        index.preconditioner(damping=0.0)
    with pytest.raises(IndexError, match="out of bounds"):
        index[[20]]
    with pytest.raises(IndexError, match="by a slice or a sequence"):
        index[3]


def test_projections_that_are_not_finite_are_an_error_that_names_them():
    rows = drawn(20, 6)
    rows[[2, 11], 3] = np.nan, np.inf
    index = index_of(rows, 8, ((2, 3),))
    with pytest.raises(ValueError, match="of samples 2 are not finite"):
        index.search(rows[:1])
    with pytest.raises(ValueError, match="of samples 2 are not finite"):
        index.preconditioner()
    found = index.search(rows[:1], top=18, skip_nan=True)
    assert set(found.indices[0]) == set(range(20)) - {2, 11}
    with pytest.raises(ValueError, match="only 18 samples have finite projections"):
        index.search(rows[:1], top=19, skip_nan=True)
    others = index_of(np.delete(rows, [2, 11], 0), 8, ((2, 3),)).preconditioner()
    found = index.preconditioner(skip_nan=True)(rows[:1])
    np.testing.assert_allclose(found, others(rows[:1]), rtol=1e-5)
    index = index_of(rows * np.nan, 8, ((2, 3),))
    with pytest.raises(ValueError, match="none of the 20 projections is finite"):
        index.preconditioner(skip_nan=True)


class Broken(Vectors):
    """Some of its samples have inputs that are not finite."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x, y = super().__getitem__(index)
        return x * {18: torch.nan, 40: torch.inf}.get(index, 1.0), y


@pytest.mark.filterwarnings("ignore:autograd's gradients of .* are not finite")
def test_projections_that_are_not_finite_are_found_before_they_are_kept(tmp_path):
    options = {**OPTIONS, "folder": tmp_path}
    with pytest.raises(ValueError, match=r"samples 18 are not finite.*keep_nan=True"):
        psg.index_pool(dense_model(), Broken(COUNT), **options)
    kept = psg.index_pool(dense_model(), Broken(COUNT), keep_nan=True, **options)
    assert np.flatnonzero(np.isnan(kept[:]).any(axis=1)).tolist() == [18, 40]
    whole = psg.index_pool(dense_model(), Vectors(COUNT), **OPTIONS)
    others = np.delete(np.arange(COUNT), [18, 40])
    assert_same_bits(kept[others], whole[others])
    assert kept.search(whole[[3]], top=39, skip_nan=True).indices.shape == (1, 39)


def test_bad_arguments_are_errors():
    pool = Vectors(3)
    for changed, error, told in [
        ({"model": [dense_model()]}, TypeError, "Module, got a list; index several"),
        ({"labels": "expected"}, ValueError, "labels must be one of 'given', 'pseudo'"),
        ({"size": 0}, ValueError, "size must be an integer >= 1"),
        ({"size": 3}, ValueError, "size must be at least 6, a number for each"),
        ({"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
        ({"score": "loss"}, TypeError, "index_pool: unknown option score; allowed"),
        ({"loader": Vectors(0)}, ValueError, "the pool has no samples"),
        ({"loader": iter(())}, TypeError, "has no length"),
        ({"part_size": 0}, ValueError, "part_size must be"),
        ({"tag": 1}, TypeError, "tag must be a text"),
        ({"folder": 1}, TypeError, "folder must be the path of a folder, got 1"),
        ({"folder": __file__}, NotADirectoryError, "folder= is a file, or below one"),
        ({"folder": f"{__file__}/a"}, NotADirectoryError, "give the path of a folder"),
        ({"autocast": "bf16"}, TypeError, "autocast must be a torch.dtype, .*'bf16'"),
        ({"params": ["nothing"]}, ValueError, "nothing are not trainable"),
    ]:
        job = {"model": dense_model(), "loader": pool, **OPTIONS, **changed}
        with pytest.raises(error, match=told):
            psg.index_pool(job.pop("model"), job.pop("loader"), **job)
    wrong = TensorDataset(torch.zeros(3, 67), torch.full((3,), CLASSES))
    with pytest.raises(ValueError, match="the label of sample 0 is 4"):
        psg.index_pool(dense_model(), wrong, **OPTIONS)


@pytest.mark.parametrize(
    ("changed", "told", "may_be_searched"),
    [
        ({"seed": 1}, "seed was 0 and is 1", False),
        ({"size": 30}, "size was 60 and is 30; kept.0.weight was", False),
        ({"model": dense_model(1)}, r"model\.0\.weight was", False),
        ({"params": ["0.weight"]}, r"kept\.0\.\w+ was", False),
        ({"labels": "pseudo"}, "labels was 'given' and is 'pseudo'", True),
        ({"loader": Vectors(40)}, "count was 41 and is 40", True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_jobs_folder_and_queries_are_an_error(
    finished, changed, told, may_be_searched
):
    job = {"model": dense_model(), "loader": Vectors(COUNT), **OPTIONS, **changed}
    arguments = job.pop("model"), job.pop("loader")
    with pytest.raises(
        ValueError, match=f"holds projections of something else: .*{told}"
    ):
        psg.index_pool(*arguments, **job, folder=finished)
    index, other = psg.open_index(finished), psg.index_pool(*arguments, **job)
    if may_be_searched:
        assert len(index.search(other).indices) == len(other)
    else:
        with pytest.raises(ValueError, match=f"another model or projec.*{told}"):
            index.search(other)


@pytest.fixture(scope="module")
def one_index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    psg.index_pool(dense_model(), Vectors(COUNT), folder=folder, **OPTIONS)
    return folder


@pytest.fixture
def finished(one_index, tmp_path):
    """Returns a copy of a finished index's folder."""
    return shutil.copytree(one_index, tmp_path / "copy")


def test_folders_of_scores_and_of_projections_are_told_apart(finished, tmp_path):
    options = {"block_size": BLOCK, "part_size": 8, "progress": False}
    told = "holds projections of index_pool, not the scores of score_pool"
    with pytest.raises(ValueError, match=told):
        psg.score_pool(dense_model(), Vectors(COUNT), folder=finished, **options)
    scores = tmp_path / "scores"
    psg.score_pool(dense_model(), Vectors(COUNT), folder=scores, **options)
    told = "holds scores of score_pool, not the projections of index_pool"
    with pytest.raises(ValueError, match=told):
        psg.index_pool(dense_model(), Vectors(COUNT), folder=scores, **OPTIONS)
    with pytest.raises(ValueError, match=f"{told}. Give the folder of an index"):
        psg.open_index(scores)


def test_opening_says_what_is_wrong(finished, tmp_path):
    truth = psg.open_index(finished)[:]
    with pytest.raises(FileNotFoundError, match="no index in this folder") as error:
        psg.open_index(tmp_path / "nothing")
    assert error.value.filename == str(tmp_path / "nothing")
    with pytest.raises(TypeError, match="folder must be the path of a folder, got No"):
        psg.open_index(None)
    part, other = (finished / f"part-0000000{n}.npy" for n in (1, 4))
    whole = part.read_bytes()
    part.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"1 of 6 parts are missing \(1\)\. Call"
    ):
        psg.open_index(finished)
    flipped = bytearray(whole)
    flipped[300] ^= 1
    for damaged in (b"", whole[:-1], whole + b"0", flipped, other.read_bytes()):
        part.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"1 of 6 parts are damaged \(1\): their"):
            psg.open_index(finished)
    # Only the checksum tells these two.
    part.write_bytes(flipped)
    psg.open_index(finished, verify=False)
    with pytest.warns(UserWarning, match=r"is damaged: .* samples are projected again"):
        again = psg.index_pool(
            dense_model(), Vectors(COUNT), folder=finished, **OPTIONS
        )
    assert part.read_bytes() == whole
    assert_same_bits(again[:], truth)
    saved = json.loads((finished / "pool.json").read_text())
    del saved["index version"]
    (finished / "pool.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="else: index version was None and is 4"):
        psg.index_pool(dense_model(), Vectors(COUNT), folder=finished, **OPTIONS)
    for text, told in (("{", "is damaged"), ('{"format": 2}', "format is 2, and this")):
        (finished / "pool.json").write_text(text)
        with pytest.raises(ValueError, match=f"{told}.*Give the folder of an index"):
            psg.open_index(finished)


def test_the_projection_is_the_map_of_its_version():
    """Another map needs another `VERSION`: indices of earlier runs would be mixed."""
    shapes = {"w": (40, 30), "deep": (16, 8, 3, 3), "bias": (40,)}
    projection, found = psg.Projection(shapes, 200, seed=5), []
    for name, shape in shapes.items():
        numbers = torch.arange(math.prod(shape), dtype=torch.float64) ** 2 % 19
        found += projection.of(name, [psg.Dense(numbers.reshape(1, *shape))], 2**30)
    rows = torch.cat(found)
    told = [projections.VERSION, len(rows), *map(int, rows[:: len(rows) // 6])]
    assert told[:6] == [3, 180, -11, -9, -26, -16]


def test_an_index_of_the_format_before_can_be_opened(tmp_path, monkeypatch):
    options = {"folder": tmp_path, **OPTIONS}
    with monkeypatch.context() as patched:
        patched.setattr(parts, "FORMAT", 3)
        index = psg.index_pool(dense_model(), Vectors(COUNT), **options)
    opened = psg.open_index(tmp_path)
    assert_same_bits(opened[:], index[:])
    assert opened.search(index[[7]], top=1, by="cosine").indices.tolist() == [[7]]
    with pytest.raises(ValueError, match="format is 3, and this version reads format"):
        psg.index_pool(dense_model(), Vectors(COUNT), **options)
