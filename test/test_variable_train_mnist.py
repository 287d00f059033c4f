"""The MNIST script from end to end, as a user starts it."""

from functools import partial
from pathlib import Path

import handwritten_digits
import numpy as np
import pandas as pd
import pytest
import torch
import variable_train_mnist
from support.scripts import run_script
from support.xla_replica.replicas import Backend, needs_xla
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import variable_batch_size as vbs

HERE = Path(__file__).resolve().parent
# Runs the script; returns its output.
run = partial(run_script, HERE / "variable_train_mnist.py", "--no-progress")
COMMON = ["--dataset=fake", "--num-replicas=1", "--device=cpu", "--no-progress"]


def trains(options: str) -> None:
    """Runs it here, on fake digits, and asserts that it ends well."""
    assert variable_train_mnist.main([*COMMON, *options.split()]) == 0


def check_output(folder: Path, text: str, num_batch_sizes: int) -> pd.DataFrame:
    history = pd.read_csv(folder / "history.csv")
    assert history["batch_size"].nunique() == num_batch_sizes
    assert history["step"].tolist() == list(range(len(history)))
    assert history[["accuracy", "loss"]].notna().any().all()
    assert (folder / "training.png").stat().st_size > 10_000
    assert list(folder.glob("events.out.tfevents.*"))
    assert f"{len(history)} updates with {num_batch_sizes} distinct batch" in text
    return history


def test_fake_digits_are_learnt_on_two_replicas(tmp_path):
    options = "--num-replicas 2 --device cpu --dataset fake --epochs 4"
    options += " --target-accuracy 80 --log-steps 2 --logdir log"
    text = run(*options.split(), cwd=tmp_path)
    history = check_output(tmp_path / "log", text, num_batch_sizes=7)
    # The linear rule: the learning rate is 0.05 at 128 samples.
    assert (history["lr"] / history["batch_size"]).round(9).nunique() == 1


def test_one_process_from_the_script_s_folder(tmp_path):
    """With another trace and rule; a missed target shows in the exit status."""
    trace = tmp_path / "trace.csv"
    trace.write_text("step,batchsize\n0,64\n1,128\n")
    options = f"--trace {trace} --rule root --on-end stop --epochs 3"
    options += f" --logdir {tmp_path / 'log'} --target-accuracy 99.9"
    text = run(*COMMON, *options.split(), cwd=HERE, status=1)
    history = check_output(tmp_path / "log", text, num_batch_sizes=2)
    assert len(history) == 2  # those of the trace
    assert history["lr"].tolist() == pytest.approx([0.05 / 2**0.5, 0.05])
    assert "misses 99.9 %" in text


@pytest.mark.parametrize("rule", ["linear-momentum", "adam-root", "power:0.75"])
def test_other_rules_train(tmp_path, rule, capsys):
    trains(f"--epochs 1 --max-grad-norm 1 --logdir {tmp_path} --rule {rule}")
    check_output(tmp_path, capsys.readouterr().out, num_batch_sizes=3)


def test_adascale_trains_for_so_many_iterations(tmp_path):
    """It trains whole epochs until the gains add up, and records what it measured."""
    trains(f"--rule adascale --log-steps 1 --iterations 12 --logdir {tmp_path}")
    history = pd.read_csv(tmp_path / "history.csv")
    assert history["progress"].iloc[-1] >= 12
    assert history[history["accuracy"].notna()].iloc[-2]["progress"] < 12
    gain, ratios = history["gain"], history["batch_size"] / 128
    for name, values, tolerance in (
        ("efficiency", gain / ratios, 1e-6),
        ("progress", gain.cumsum(), 1e-4),
        ("lr", 0.05 * gain, 1e-4),
    ):
        assert history[name].tolist() == pytest.approx(values.tolist(), rel=tolerance)


def test_a_complete_run_that_is_started_again_is_not_trained_further(tmp_path, capsys):
    texts = []
    for _ in range(2):
        trains(f"--rule adascale --log-steps 1 --iterations 6 --checkpoint {tmp_path}")
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_a_closed_loop_is_repeated_by_what_it_decided(tmp_path):
    common = "--log-steps 2 --epochs 2 --measure-noise --logdir"
    loop, again = tmp_path / "loop", tmp_path / "again"
    trains(f"{common} {loop} --trace 128 --closed-loop 32:512")
    trains(f"{common} {again} --trace {loop / 'decided.csv'}")
    first, second = (pd.read_csv(folder / "history.csv") for folder in (loop, again))
    columns = ["step", "batch_size", "lr", "loss", "accuracy", "noise_scale"]
    pd.testing.assert_frame_equal(first[columns], second[columns])
    assert first["batch_size"].nunique() > 1


@pytest.mark.slow
@needs_xla
@pytest.mark.parametrize("rule", ["linear", "adascale"])
def test_digits_reach_97_percent_on_eight_replicas(tmp_path, rule):
    pytest.importorskip("sklearn")
    options = f"--dataset digits --target-accuracy 97 --logdir log --rule {rule}"
    text = run(*options.split(), cwd=tmp_path)  # fails if it misses the accuracy
    assert "on replica 0 of 8 on xla:0" in text
    check_output(tmp_path / "log", text, num_batch_sizes=17)


@pytest.mark.parametrize(("arguments", "message"), [
    ("--epochs 0", "--epochs must be at least 1, got 0"),
    ("--iterations nan", "--iterations must be above 0, got nan"),
    ("--checkpoint-steps 5", "--checkpoint-steps needs --checkpoint FOLDER"),
    ("--closed-loop 512:64", "smaller one first, such as 64:512, got '512:"),
    ("--closed-loop 64:512 --on-end stop", "leave out --on-end, got"),
    ("--rule lars", "--rule: rule must be one of 'adam-half-life',"),
    ("--trace nofile.csv", "nofile.csv"),
    ("--batch-size 48", "not a multiple of minibatch_size"),
])  # fmt: skip
def test_bad_arguments_say_so(tmp_path, monkeypatch, arguments, message, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((SystemExit, ValueError, OSError)) as caught:
        trains(arguments)
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
        assert (images.dtype, images.shape[1:]) == (torch.uint8, (1, 8, 8))
        assert len(images) == len(labels)
        assert set(labels.tolist()) == set(range(10))
        assert images.max() > 200


def test_the_bar_shows_numbers_of_one_step(monkeypatch, tmp_path):
    """Not the present batch size beside the loss of the last logging step."""
    shown = []
    monkeypatch.setattr(tqdm, "set_postfix", lambda *given, **_: shown.append(given[1]))
    trains(f"--epochs 1 --log-steps 2 --logdir {tmp_path}")
    table = pd.read_csv(tmp_path / "history.csv").dropna(subset="loss")
    table = table.rename(columns={"batch_size": "batch"})
    rows = table[["step", "batch", "lr", "loss"]].round(4).to_dict("records")
    assert [{name: float(row[name]) for name in row} for row in shown] == rows


def train_as_earlier(index: int, trace: str) -> tuple[list[bool], list[float]]:
    """Trains by torch_xla's own functions; returns what `step` returned, and losses."""
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as pl

    torch.manual_seed(1)
    images, labels, *_ = handwritten_digits.load("fake", "unused")
    dataset = TensorDataset(images.float() / 255, labels)
    sampler = vbs.CustomSampler(dataset, trace, minibatch_size=32)
    device = xm.xla_device()
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    inner = optim.SGD(model.to(device).parameters(), lr=0.05, momentum=0.5)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=128, log_steps=2)
    loader = pl.MpDeviceLoader(DataLoader(dataset, batch_sampler=sampler), device)
    losses, returned = [], []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data), target)
            loss.backward()
            returned.append(bool(optimizer.step()))
            xm.add_step_closure(lambda x: losses.append(x.item()), args=(loss,))
    return returned, losses


@needs_xla
@pytest.mark.xla
def test_a_script_for_the_earlier_implementation_trains(tmp_path):
    """Its batches are 1 to 6 minibatches, so that three replicas idle at times."""
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{n},{(32, 64, 192, 96)[n % 4]}\n" for n in range(120))
    trace.write_text(f"step,batchsize\n{rows}")
    returned, losses = zip(*Backend("xla", 3).run(train_as_earlier, str(trace)))
    assert all(np.mean(each[-9:]) < np.mean(each[:9]) / 2 for each in losses)
    assert all(map(any, returned))
    assert not all(returned[0])  # replica 0 accumulates in the largest batches
