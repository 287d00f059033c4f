"""examples/sparse/rigl_imagenet.py learns, resumes, and runs wherever replicas do."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.scripts import run_script, words
from support.variable_batch_size.resuming import assert_equal
from support.xla_replica.replicas import needs_xla

import xla_replica
from examples.sparse import imagenet_data, rigl_imagenet
from variable_batch_size.checkpoint.files import saved_files

pytestmark = pytest.mark.usefixtures("one_thread")

# 24 updates of 16 images: a run of a second.
TINY = ("--fake-data", "--model", "small", "--width", 8, "--image-size", 16,
        "--num-classes", 4, "--num-samples", 96, "--epochs", 4, "--warmup-epochs", 1,
        "--batch-size", 16, "--minibatch-size", 8, "--ref-batchsize", 16, "--delta", 5,
        "--log-steps", 2, "--eval-batch-size", 4)  # fmt: skip


def run_here(folder: Path, *arguments: object, device: str = "cpu") -> list[Any]:
    """Runs one replica in this process; checkpoint and logs go to ``folder``."""
    kept = ("--checkpoint", folder, "--logdir", folder / "log", "--no-progress")
    first = ("--num-replicas", 1, "--device", device)
    return rigl_imagenet.main(words([*TINY, *kept, *first, *arguments]))


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def saved(folder: Path) -> dict[str, Any]:
    state = torch.load(saved_files(folder)[0].path, weights_only=True)
    monitor = state["parts"]["monitor"]
    monitor["rows"] = without_times(monitor["rows"])
    return {"optimizer": state["optimizer"], **state["parts"]}


MONITOR = rigl_imagenet.Monitor.__call__


def asks_to_stop(monitor: Any, update: Any) -> None:
    """Is told of an update; asks to stop, as by SIGTERM, within an epoch."""
    MONITOR(monitor, update)
    if update.step == 9:
        xla_replica.request_stop("test")


@pytest.mark.parametrize("arguments", [
    (),
    ("--trace", "16,32,8", "--method", "set", "--delta", 4, "--decay", "cosine",
     "--lr", 0.03),
], ids=["rigl", "set with a trace"])  # fmt: skip
def test_it_learns_and_a_run_in_three_parts_is_one_run(tmp_path, capsys, arguments):
    history = run_here(tmp_path / "whole", *arguments)
    assert [row["epoch"] for row in history] == [1, 2, 3, 4]
    assert history[-1]["train_loss"] < 0.8 * history[0]["train_loss"]
    assert saved(tmp_path / "whole")["pruner"]["num_updates"] >= 3
    (events,) = (tmp_path / "whole/log/train").glob("events.out.tfevents.*")
    for tag in (b"step/lr", b"rigl/exploration_rate", b"rigl/training_flops_ratio"):
        assert tag in events.read_bytes()
    # It is killed at the beginning of the second epoch.
    epoch = mock.Mock(wraps=rigl_imagenet.run_epoch)
    epoch.side_effect = [mock.DEFAULT, MemoryError]
    killed = mock.patch.object(rigl_imagenet, "run_epoch", epoch)
    with killed, pytest.raises(MemoryError):
        run_here(tmp_path / "parts", *arguments)
    told = r"another run: lr was 0\.\d+ and is 0\.2; spar"
    with pytest.raises(ValueError, match=told):
        run_here(tmp_path / "parts", *arguments, "--lr", 0.2, "--sparsity", 0.9)
    stopped = mock.patch.object(rigl_imagenet.Monitor, "__call__", asks_to_stop)
    with stopped, pytest.raises(xla_replica.Stopped):
        run_here(tmp_path / "parts", *arguments)
    more = run_here(tmp_path / "parts", *arguments)
    assert_equal(without_times(more), without_times(history))
    assert_equal(saved(tmp_path / "parts"), saved(tmp_path / "whole"))
    assert "all sparse layers" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("xla", marks=[pytest.mark.xla, needs_xla])]
)
def test_replicas_do_what_one_does(tmp_path, device):
    """One of two replicas is idle in every third step."""
    (tmp_path / "two").mkdir()
    traced = ("--trace", "8,32,16", "--epochs", 2, "--label-smoothing", 0.2)
    run_here(tmp_path / "one", *traced)
    line = (*TINY, *traced, "--checkpoint", tmp_path / "two", "--device", device)
    script, line = Path(rigl_imagenet.__file__), (*line, "--num-replicas", 2)
    text = run_script(script, *line, cwd=tmp_path / "two", timeout=600)
    two, one = (saved(tmp_path / folder) for folder in ("two", "one"))
    found, expected = (
        [row["train_loss"] for row in state["monitor"]["rows"]] for state in (two, one)
    )
    assert found == pytest.approx(expected, rel=0.02)
    assert two["pruner"]["step"] == one["pruner"]["step"]
    found, expected = (
        {name: layer["num_active"] for name, layer in s["pruner"]["layers"].items()}
        for s in (two, one)
    )
    assert found == expected
    assert "100%" in text  # the progress bar
    assert text.count("all sparse layers") == 1


def test_folders_of_images_augmented_by_seed_epoch_and_index_alone(tmp_path):
    pytest.importorskip("torchvision")
    from PIL import Image

    for part, number in (("train", 8), ("val", 3)):
        for label in ("cat", "dog"):
            (folder := tmp_path / part / label).mkdir(parents=True)
            pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), np.uint8)
            for index in range(number):
                Image.fromarray(pixels).save(folder / f"{index}.png")

    def image(seed: int | None, epoch: int, index: int = 0) -> torch.Tensor:
        data = imagenet_data.FolderImages(tmp_path / "train", 24, seed)
        data.epoch = epoch
        torch.rand(1)
        found, label = data[index]
        assert (found.dtype, found.shape, label) == (torch.uint8, (3, 24, 24), 0)
        return found

    assert torch.equal(image(0, 1), image(0, 1))
    for other in [image(1, 1), image(0, 2), image(0, 1, index=1)]:
        assert not torch.equal(image(0, 1), other)
    assert torch.equal(image(None, 0), image(None, 1, index=1))
    arguments = ["--data", tmp_path, "--model", "resnet18", "--image-size", 32,
                 "--batch-size", 8, "--minibatch-size", 8, "--epochs", 1, "--delta", 1,
                 "--distribution", "uniform", "--logdir", tmp_path / "log",
                 "--no-progress", "--num-replicas", 1, "--device", "cpu",
                 "--t-end-fraction", 1]  # fmt: skip
    (row,) = rigl_imagenet.main(words(arguments))
    assert np.isfinite(row["train_loss"])
    assert row["test_accuracy"] in [pytest.approx(100 * hits / 6) for hits in range(7)]


def test_parts_of_an_image():
    assert imagenet_data.middle(512, 256) == (144.0, 16.0, 368.0, 240.0)
    draws = map(imagenet_data.draw_for, range(300))
    boxes = [imagenet_data.random_part(80, 60, draw) for draw in draws]
    left, upper, right, lower = np.array(boxes).T
    assert min(left.min(), upper.min()) >= 0
    assert (right.max(), lower.max()) <= (80, 60)
    shapes = (right - left) / (lower - upper)
    assert 0.74 < shapes.min() < 1 < shapes.max() < 1.34
    areas = (right - left) * (lower - upper) / 4800
    assert areas.min() < 0.12
    assert areas.max() > 0.85


@pytest.mark.parametrize("decay", ["steps", "cosine"])
def test_the_learning_rate_rises_and_falls(decay):
    found = [rigl_imagenet.lr_factor(5, decay, 100, step) for step in range(101)]
    assert found[:5] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6])
    assert found[5] == 1
    expected = {"steps": [1, 0.1, 0.01, 0.001], "cosine": [0.851, 0.839, 0.227, 0.027]}
    picked = [found[step] for step in (29, 30, 70, 90)]
    assert picked == pytest.approx(expected[decay], abs=1e-3)
