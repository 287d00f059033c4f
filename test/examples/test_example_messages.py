"""What the examples say of themselves, and of arguments that cannot be."""

from __future__ import annotations

import sys

import pytest

from examples.ordering import causal_language_model as text
from examples.ordering import image_classification as images
from examples.pool import batch_to_label, influence, mislabelled, score_pool, target_set
from examples.sparse import rigl_imagenet

pytestmark = pytest.mark.usefixtures("one_thread")

ORDERING = (
    "torchrun", "--resume", "recursive-pair", "--num-replicas 2", "default:",
)  # fmt: skip
TAUGHT = {
    images: ORDERING,
    text: ORDERING,
    rigl_imagenet: ("torchrun", "--checkpoint saved", "--trace", "PJRT_DEVICE"),
    score_pool: ("active learning", "continues", "--score egl", "same bits"),
}


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs a script in an empty folder; returns its exit status and what it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)

    def run_script(script, arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", [script.__name__, *arguments.split()])
        try:
            status = script.main()
        except SystemExit as stopped:
            status = stopped.code
        assert not list(tmp_path.iterdir())
        said = capsys.readouterr()
        return status, " ".join(f"{said.out} {said.err} {status}".split())

    return run_script


@pytest.mark.parametrize("script", TAUGHT, ids=lambda script: script.__name__)
def test_help_teaches(script, run):
    _, said = run(script, "--help")
    assert all(word in said for word in TAUGHT[script])


@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        (images, "--epochs 0", "--epochs must be at least 1, got 0"),
        (images, "--order best", "--order best: allowed are mean, pair"),
        (images, "--order recursive-pair --batch-size 24", "power of two"),
        (images, "--order recursive --depth -1", "--order recursive: depth"),
        (images, "--batch-size 15 --num-replicas 2", "15 is not a multiple"),
        (images, "--resume", "need --checkpoint DIR"),
        (images, "--minibatch-size 8", "--minibatch-size needs --trace FILE"),
        (images, "--trace nofile.csv", "--trace: "),
        (text, "--model gpt-neox", "not installed: pip install transformers"),
        (images, "--num-samples 3", "at least --batch-size, 16"),
        (images, "--width 9", "--width must be a multiple of 8, got 9"),
        (text, "--text nofile.txt", "nofile.txt"),
        (text, "--max-bytes 99", "has 99 bytes, but windows of 128 need more"),
        (text, "--num-heads 3", "--width 128 is not a multiple of --num-heads 3"),
        (rigl_imagenet, "", "give --data DIR, or --fake-data"),
        (rigl_imagenet, "--data nowhere", "--data nowhere has no folder train"),
        (rigl_imagenet, "--fake-data --epochs 0", "--epochs must be at least 1, got 0"),
        (rigl_imagenet, "--fake-data --distribution best", "invalid choice: 'best'"),
        (score_pool, "--pool 0", "must be at least 1"),
        (influence, "--seeds 0", "--seeds: '0' is not an integer of at least 1"),
        (influence, "--train 40 --remove 40", "--remove must be less than --train"),
        (influence, "--halves 1", "--halves at least 2"),
        (mislabelled, "--train 10 --wrong 0.04", "--wrong must leave a wrong label"),
        (mislabelled, "--steps 30 -1", "-1"),
        (mislabelled, "--train 5000", "5000 digits are needed, and there are 1797"),
        (target_set, "--pool 50", "--pool must be at least 20, and at least --budget"),
        (batch_to_label, "--pool 60", "--batch, times --rounds and one more, exceeds"),
    ],
)
def test_bad_arguments_say_so(script, arguments, told, run):
    status, said = run(script, arguments)
    assert status == 2 or (isinstance(status, str) and status)
    assert told in said
