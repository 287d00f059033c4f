"""What the examples say of themselves, and of arguments that cannot be."""

import sys

import pytest

from examples.ordering import causal_language_model as text
from examples.ordering import image_classification as images
from examples.pool import batch_to_label, influence, mislabelled, score_pool, target_set
from examples.sparse import rigl_imagenet

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("script", "arguments", "told"), [
    (images, "--help", "torchrun"),
    (text, "--help", "recursive-pair"),
    (rigl_imagenet, "--help", "--checkpoint saved"),
    (score_pool, "--help", "active learning"),
    (images, "--epochs 0", "--epochs must be at least 1, got 0"),
    (images, "--order best", "--order best: allowed are mean, pair"),
    (images, "--order recursive-pair --batch-size 24", "power of two"),
    (images, "--batch-size 15 --num-replicas 2", "15 is not a multiple"),
    (images, "--resume", "need --checkpoint DIR"),
    (images, "--minibatch-size 8", "--minibatch-size needs --trace FILE"),
    (images, "--trace nofile.csv", "--trace: "),
    (images, "--num-samples 3", "at least --batch-size, 16"),
    (images, "--width 9", "--width must be a multiple of 8, got 9"),
    (text, "--model gpt-neox", "not installed: pip install transformers"),
    (text, "--max-bytes 99", "has 99 bytes, but windows of 128 need more"),
    (text, "--num-heads 3", "--width 128 is not a multiple of --num-heads 3"),
    (rigl_imagenet, "", "give --data DIR, or --fake-data"),
    (rigl_imagenet, "--data nowhere", "--data nowhere has no folder train"),
    (score_pool, "--pool 0", "must be at least 1"),
    (influence, "--seeds 0", "--seeds: '0' is not an integer of at least 1"),
    (influence, "--train 40 --remove 40", "--remove must be less than --train"),
    (mislabelled, "--train 10 --wrong 0.04", "--wrong must leave a wrong label"),
    (mislabelled, "--train 5000", "5000 digits are needed, and there are 1797"),
    (target_set, "--pool 50", "--pool must be at least 20, and at least --budget"),
    (batch_to_label, "--pool 60", "--batch, times --rounds and one more, exceeds"),
])  # fmt: skip
def test_help_teaches_and_bad_arguments_say_so(
    script, arguments, told, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(sys, "argv", [script.__name__, *arguments.split()])
    with pytest.raises(SystemExit) as end:
        sys.exit(script.main())
    assert not list(tmp_path.iterdir())
    assert bool(end.value.code) == (arguments != "--help")
    said = capsys.readouterr()
    assert told in " ".join(f"{said.out} {said.err} {end.value.code}".split())
