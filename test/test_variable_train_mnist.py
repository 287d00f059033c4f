"""The MNIST script from end to end, as a user starts it."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import handwritten_digits
import pandas as pd
import pytest
import variable_train_mnist
from support.scripts import run_script
from support.xla_replica.replicas import HAS_XLA, needs_xla, of_torch_alone
from support.xla_replica.torchrun import LAUNCHER
from training_recorder import Recorder

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "variable_train_mnist.py"


def run(*arguments: object, command=(sys.executable,), cwd: Path) -> tuple[int, str]:
    """Runs the script; returns its exit status and output."""
    return run_script(SCRIPT, "--no-progress", *arguments, cwd=cwd, command=command)


def check_output(folder: Path, text: str, num_batch_sizes: int) -> pd.DataFrame:
    history = pd.read_csv(folder / "history.csv")
    assert history["batch_size"].nunique() == num_batch_sizes
    assert history["step"].tolist() == list(range(len(history)))
    assert history["accuracy"].notna().sum() >= 1
    assert history["loss"].notna().sum() >= 1
    assert (folder / "training.png").stat().st_size > 10_000
    assert list(folder.glob("events.out.tfevents.*"))
    assert f"{len(history)} updates with {num_batch_sizes} distinct batch" in text
    return history


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("xla", marks=needs_xla, id="xla"),
        pytest.param("cpu", marks=of_torch_alone, id="cpu"),
    ],
)
def test_fake_digits_are_learnt_on_two_replicas(tmp_path, device):
    status, text = run(
        "--dataset", "fake", "--num-replicas", 2, "--device", device, "--epochs", 4,
        "--logdir", tmp_path / "log", "--target-accuracy", 80, "--log-steps", 2,
        cwd=tmp_path,
    )  # fmt: skip
    assert status == 0, text
    history = check_output(tmp_path / "log", text, num_batch_sizes=7)
    # The linear rule: the learning rate is 0.05 at 128 samples.
    assert (history["lr"] / history["batch_size"]).round(9).nunique() == 1


@of_torch_alone
def test_under_torchrun(tmp_path):
    """Two gloo processes: one of them writes, and both exit with the same status."""
    status, text = run(
        "--dataset", "fake", "--epochs", 1, "--logdir", "log", "--device", "cpu",
        command=LAUNCHER,
        cwd=tmp_path,
    )  # fmt: skip
    assert status == 0, text
    check_output(tmp_path / "log", text, num_batch_sizes=3)
    assert text.count("distinct batch sizes") == 1


def test_one_process_from_the_script_s_folder(tmp_path):
    """With another trace and rule; a missed target shows in the exit status."""
    trace = tmp_path / "trace.csv"
    trace.write_text("step,batchsize\n0,64\n1,128\n")
    status, text = run(
        "--dataset", "fake", "--num-replicas", 1, "--trace", trace, "--rule", "root",
        "--on-end", "stop", "--epochs", 3, "--logdir", tmp_path / "log",
        "--target-accuracy", 99.9, "--device", "cpu",
        cwd=HERE,
    )  # fmt: skip
    assert status == 1, text
    history = check_output(tmp_path / "log", text, num_batch_sizes=2)
    assert len(history) == 2  # those of the trace
    assert history["lr"].tolist() == pytest.approx([0.05 / 2**0.5, 0.05])
    assert "misses 99.9 %" in text


@pytest.mark.parametrize("rule", ["linear-momentum", "adam-root", "power:0.75"])
def test_other_rules_train(tmp_path, rule, capsys):
    status = variable_train_mnist.main(
        ["--dataset", "fake", "--num-replicas", "1", "--rule", rule, "--epochs", "1",
         "--logdir", str(tmp_path / "log"), "--device", "cpu", "--max-grad-norm", "1",
         "--no-progress"]
    )  # fmt: skip
    assert status == 0
    check_output(tmp_path / "log", capsys.readouterr().out, num_batch_sizes=3)


def test_adascale_trains_for_so_many_iterations(tmp_path, capsys):
    """It trains whole epochs until the gains add up, and records what it measured."""
    arguments = [
        "--dataset", "fake", "--num-replicas", "1", "--rule", "adascale",
        "--iterations", "12", "--logdir", str(tmp_path / "log"), "--device", "cpu",
        "--no-progress", "--log-steps", "1",
    ]  # fmt: skip
    assert variable_train_mnist.main(arguments) == 0
    history = pd.read_csv(tmp_path / "log" / "history.csv")
    assert history["progress"].iloc[-1] >= 12
    before_last_epoch = history[history["accuracy"].notna()].iloc[-2]
    assert before_last_epoch["progress"] < 12
    ratios = history["batch_size"] / 128
    assert (history["gain"] <= ratios.clip(lower=1) * 1.000001).all()
    assert (history["gain"] >= ratios.clip(upper=1) * 0.999999).all()
    assert (history["gain"] / ratios).tolist() == pytest.approx(
        history["efficiency"].tolist()
    )
    assert history["progress"].tolist() == pytest.approx(
        history["gain"].cumsum().tolist(), rel=1e-4
    )
    assert history["lr"].tolist() == pytest.approx(
        (0.05 * history["gain"]).tolist(), rel=1e-4
    )


def test_a_complete_run_is_not_trained_further_when_it_is_started_again(
    tmp_path, capsys
):
    arguments = [
        "--dataset", "fake", "--num-replicas", "1", "--rule", "adascale",
        "--iterations", "6", "--checkpoint", str(tmp_path), "--device", "cpu",
        "--no-progress", "--log-steps", "1",
    ]  # fmt: skip
    texts = []
    for _ in range(2):
        assert variable_train_mnist.main(arguments) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


@pytest.mark.skipif(HAS_XLA, reason="tested in the other environment")
def test_a_closed_loop_is_repeated_by_what_it_decided(tmp_path, capsys):
    common = [
        "--dataset", "fake", "--num-replicas", "1", "--device", "cpu", "--no-progress",
        "--log-steps", "2", "--epochs", "2", "--measure-noise",
    ]  # fmt: skip
    loop, again = tmp_path / "loop", tmp_path / "again"
    decide = ["--trace", "128", "--closed-loop", "32:512", "--logdir", str(loop)]
    assert variable_train_mnist.main([*common, *decide]) == 0
    decided = str(loop / "decided.csv")
    repeat = ["--trace", decided, "--logdir", str(again)]
    assert variable_train_mnist.main([*common, *repeat]) == 0
    first, second = (pd.read_csv(folder / "history.csv") for folder in (loop, again))
    columns = ["step", "batch_size", "lr", "loss", "accuracy", "noise_scale"]
    pd.testing.assert_frame_equal(first[columns], second[columns])
    assert first["batch_size"].nunique() > 1


@pytest.mark.slow
@pytest.mark.skipif(not HAS_XLA, reason="torch_xla is not installed")
@pytest.mark.parametrize("rule", ["linear", "adascale"])
def test_digits_reach_97_percent_on_eight_replicas(tmp_path, rule):
    """What `make mnist` shows."""
    pytest.importorskip("sklearn")
    status, text = run(
        "--dataset", "digits", "--target-accuracy", 97, "--logdir", "log",
        "--rule", rule,
        cwd=tmp_path,
    )  # fmt: skip
    assert status == 0, text
    assert "on replica 0 of 8 on xla:0" in text
    history = check_output(tmp_path / "log", text, num_batch_sizes=17)
    assert history["accuracy"].dropna().iloc[-1] >= 97


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", 0], "--epochs must be at least 1, got 0"),
        (["--iterations", "nan"], "--iterations must be above 0, got nan"),
        (["--checkpoint-steps", 5], "--checkpoint-steps needs --checkpoint FOLDER"),
        (["--closed-loop", "512"], "smaller one first, such as 64:512, got '512'"),
        (["--closed-loop", "512:64"], "smaller one first, such as 64:512, got '512:"),
        (["--closed-loop", "64:512", "--on-end", "stop"], "leave out --on-end, got"),
        (["--dataset", "fake", "--lr", "nan"], "the reference learning rate must be"),
        (["--rule", "lars"], "--rule: rule='lars' is unknown; allowed are"),
        (["--trace", "nofile.csv", "--dataset", "fake"], "nofile.csv"),
        (["--batch-size", 48, "--dataset", "fake"], "not a multiple of minibatch_size"),
    ],
)
def test_bad_arguments_say_so(tmp_path, monkeypatch, arguments, message, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = [*map(str, arguments), "--num-replicas", "1", "--device", "cpu"]
    with pytest.raises((SystemExit, ValueError, OSError)) as caught:
        variable_train_mnist.main(arguments)
    assert message in f"{caught.value}{capsys.readouterr().err}"


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        variable_train_mnist.main(["--help"])
    text = capsys.readouterr().out
    for word in ("torchrun", "--trace", "--rule", "default: MNIST if it can be loaded"):
        assert word in text
    assert "{'" not in text  # a dict of Python is not for readers


def test_digits_replace_mnist_with_a_warning(monkeypatch, caplog):
    def offline(folder: str) -> handwritten_digits.Digits:
        raise RuntimeError("Error downloading\nno route to host")

    monkeypatch.setattr(handwritten_digits, "_mnist", offline)
    assert handwritten_digits.choose(None, "data") == "digits"
    assert len(caplog.records) == 1
    assert "(no route to host); using the 1797 real handwritten" in caplog.text
    assert handwritten_digits.choose("fake", "data") == "fake"


@pytest.mark.parametrize("name", ["digits", "fake"])
def test_datasets(name):
    data = handwritten_digits.load(name, "unused")
    for images, labels in (data[:2], data[2:]):
        assert images.dtype == data.train_images.dtype
        assert images.shape[1:] == (1, 8, 8)
        assert len(images) == len(labels)
        assert set(labels.tolist()) == set(range(10))
    assert data.train_images.max() > 200


def test_the_bar_shows_numbers_of_one_step(monkeypatch):
    """Not the present batch size beside the loss of the last logging step."""
    shown = []
    recorder = Recorder.__new__(Recorder)
    recorder._writer = types.SimpleNamespace(add_scalar=lambda *_: None)
    postfix = lambda numbers, refresh: shown.append(numbers)  # noqa: E731
    recorder._bar = types.SimpleNamespace(set_postfix=postfix)
    lines = [{"step": n, "batch_size": 32 * n, "lr": 0.1 * n} for n in (1, 2, 3)]
    recorder._show([lines[0], {**lines[1], "loss": 0.5}, lines[2]])
    assert shown == [{"step": 2, "batch": 64, "lr": "0.2000", "loss": "0.5000"}]
