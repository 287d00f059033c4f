"""The example scripts as users start, stop and resume them."""

import ast
import contextlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.documents import ROOT, read
from support.per_sample_grad import rules_kept
from support.scripts import run_script, words
from support.xla_replica.replicas import needs_xla, of_torch_alone
from support.xla_replica.torchrun import LAUNCHER

import per_sample_grad as psg
import xla_replica
from examples.common.image_models import MODELS, image_model
from examples.ordering import (
    causal_language_model,
    image_classification,
    image_data,
    ordered_training,
    text_data,
)
from examples.ordering.language_model import ByteGPT
from examples.ordering.training_options import ORDERS
from per_sample_grad.layers.registry import RULES

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPTS = {"images": image_classification, "text": causal_language_model}
IMAGES = ("--dataset", "digits", "--num-samples", 120)
slow = pytest.mark.slow


@pytest.fixture
def book(tmp_path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(400)))
    return path


@pytest.fixture
def tasks(book) -> dict[str, tuple]:
    """The arguments of each script for a run of a second."""
    text = ("--max-bytes", 6000, "--context", 24, "--width", 16, "--num-layers", 1,
            "--num-heads", 2, "--batch-size", 8, "--text", book)  # fmt: skip
    return {"images": IMAGES, "text": text}


def run_here(name: str, *arguments: object) -> int:
    first = ("--no-progress", "--num-replicas", 1, "--device", "cpu")
    return SCRIPTS[name].main(words([*first, *arguments]))


def run(name: str, *arguments: object, cwd: Path, command=(sys.executable,)) -> str:
    script = Path(SCRIPTS[name].__file__)
    return run_script(script, *arguments, cwd=cwd, command=command)


def history(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "history.csv").drop(columns="seconds")


def check_output(folder: Path, orders: list[str], epochs: int, seeds: int = 1) -> None:
    rows = history(folder)
    assert rows["order"].unique().tolist() == orders
    assert len(rows) == len(orders) * seeds * (epochs + 1)
    first, last = (rows[rows["epoch"] == epoch] for epoch in (0, epochs))
    assert (last["train_loss"].to_numpy() < first["train_loss"].to_numpy()).all()
    assert (folder / "orders.png").stat().st_size > 20_000
    saved = json.loads((folder / "results.json").read_text())
    assert len(saved["history"]) == len(rows)
    assert saved["settings"]["order"] == orders
    found = {path.parent.name for path in folder.glob("*/events.out.tfevents.*")}
    assert {f"{order}-seed{n}" for order in orders for n in range(seeds)} <= found


@pytest.mark.parametrize("name", ["images", pytest.param("text", marks=of_torch_alone)])
def test_orders_and_seeds_on_one_replica(tmp_path, tasks, name, capsys):
    orders = ["rr", "mean", "recursive-pair"]
    run_here(
        name, *tasks[name], "--order", "rr,mean", "--order", "recursive-pair",
        "--seeds", 2, "--epochs", 2, "--herding", "exact", "--logdir", tmp_path / "log",
        "--random-projection", "jl", "--pi-eps", 0.9, "--check-gradients",
    )  # fmt: skip
    check_output(tmp_path / "log", orders, epochs=2, seeds=2)
    text = capsys.readouterr().out
    assert "means over 2 seeds" in text
    assert "per-sample gradients are right" in text
    rows = history(tmp_path / "log")
    of_mean = rows[rows["order"] == "mean"]
    assert of_mean["herding"].notna().sum() == 4  # after every epoch
    # All orders of a seed begin with the same weights and the same first epoch's order.
    for epoch, most in ((0, 0), (1, 1e-5)):
        losses = rows[rows["epoch"] == epoch].groupby("seed")["train_loss"]
        assert (losses.max() - losses.min() <= most).all()


ON_TWO = ("--num-replicas", 2, "--device", "cpu")
EMULATED = ("--num-replicas", 2, "--device", "xla")


@pytest.mark.parametrize(("name", "replicas"), [
    pytest.param("images", ON_TWO, marks=of_torch_alone),
    pytest.param("images", EMULATED, marks=[slow, needs_xla]),
    pytest.param("images", (), marks=slow),
    pytest.param("text", ON_TWO, marks=slow),
    # Its programs take half a minute to compile.
    pytest.param("text", EMULATED, marks=[slow, needs_xla]),
    pytest.param("text", (), marks=slow),
])  # fmt: skip
def test_two_replicas_do_what_one_does(tmp_path, tasks, name, replicas):
    arguments = (*tasks[name], "--order", "pair", "--epochs", 2)
    run_here(name, *arguments, "--logdir", tmp_path / "one")
    options = replicas or ("--device", "cpu")
    command = (sys.executable,) if replicas else LAUNCHER
    text = run(
        name, *arguments, *options, "--logdir", "two", cwd=tmp_path, command=command
    )
    check_output(tmp_path / "two", ["pair"], epochs=2)
    assert "100%" in text  # the progress bar
    assert text.count("means over 1 seeds") == 1
    both = map(history, (tmp_path / "one", tmp_path / "two"))
    pd.testing.assert_frame_equal(*both, rtol=1e-4)


@of_torch_alone
@pytest.mark.parametrize(
    ("name", "fidelity"), [("images", "group"), ("text", "projected")]
)
def test_other_fidelities_train_in_bfloat16(tmp_path, tasks, name, fidelity):
    run_here(
        name, *tasks[name], "--order", "rr,pair", "--epochs", 2, "--bf16",
        "--fidelity", fidelity, "--projection-size", 60, "--logdir", tmp_path / "log",
    )  # fmt: skip
    check_output(tmp_path / "log", ["rr", "pair"], epochs=2)


@pytest.mark.parametrize(("name", "replicas"), [
    pytest.param("images", (), marks=of_torch_alone),
    pytest.param("text", ("--device", "cpu"), marks=slow),
    pytest.param("images", ON_TWO, marks=slow),
    pytest.param("images", EMULATED, marks=[slow, needs_xla]),
])  # fmt: skip
def test_a_traced_run_in_two_parts_is_one_run(tmp_path, tasks, name, replicas):
    """It breaks off in the second epoch; the rest may run on other replicas."""
    (trace := tmp_path / "trace.csv").write_text(
        "step,batchsize\n0,8\n1,32\n2,16\n3,40\n4,24\n5,8\n"
    )
    orders = ["rr", "mean", "recursive-pair"]
    arguments = (
        *tasks[name], "--trace", trace, "--minibatch-size", 8, "--epochs", 3,
        "--order", ",".join(orders), "--log-steps", 2,
    )  # fmt: skip
    if "xla" not in replicas:  # It rounds to bfloat16 elsewhere than a CPU does.
        arguments += ("--bf16",)
    run_here(name, *arguments, "--logdir", tmp_path / "whole")
    check_output(tmp_path / "whole", orders, epochs=3)
    saved = ("--checkpoint", tmp_path / "saved", "--checkpoint-steps", 2)
    arguments = (*arguments, *saved, "--resume", "--logdir", tmp_path / "parts")
    with breaking_off(ordered_training.ElasticRun, "mean", step=3):
        assert run_here(name, *arguments) == 130
    if replicas:
        run(name, *arguments, *replicas, cwd=tmp_path)
    else:
        run_here(name, *arguments)
    both = map(history, (tmp_path / "whole", tmp_path / "parts"))
    pd.testing.assert_frame_equal(*both, rtol=1e-4)


@of_torch_alone
def test_a_run_of_all_orders_in_parts_is_one_run(tmp_path, capsys):
    """Another run, or one that does not say that it resumes, is refused.

    Epochs have 8 steps: after one, 5 more steps of some orders are done, 3 of them
    saved.
    """
    arguments = (*IMAGES, "--order", ",".join(ORDERS))
    run_here("images", *arguments, "--epochs", 3, "--logdir", tmp_path / "whole")
    check_output(tmp_path / "whole", list(ORDERS), epochs=3)
    arguments += ("--checkpoint", tmp_path / "saved", "--checkpoint-steps", 3)
    arguments += ("--logdir", tmp_path / "parts")
    run_here("images", *arguments, "--epochs", 1)
    arguments += ("--epochs", 3)
    with pytest.raises(SystemExit):
        run_here("images", *arguments)
    assert "-seed0.pt holds a run: add --resume" in capsys.readouterr().err
    arguments += ("--resume",)
    with pytest.raises(ValueError, match=r"another run: lr was 0\.1 and is 0\.2; mode"):
        run_here("images", *arguments, "--lr", 0.2, "--model", "lenet")
    for order in ("mean", "pair", "rr"):
        with breaking_off(ordered_training.Run, order, step=5):
            assert run_here("images", *arguments) == 130
        assert "interrupted; --resume continues what" in capsys.readouterr().err
        state = torch.load(tmp_path / "saved" / f"{order}-seed0.pt")
        assert (state["epoch"], state["step"]) == (1, 3)
    run_here("images", *arguments)
    both = map(history, (tmp_path / "whole", tmp_path / "parts"))
    pd.testing.assert_frame_equal(*both, rtol=1e-6)
    assert not list((tmp_path / "saved").glob("*.tmp"))


@contextlib.contextmanager
def breaking_off(run_class: type, order: str, step: int) -> Iterator[None]:
    """Here an update raises, as on Ctrl-C, amid an order's second epoch."""
    update = run_class._update

    def interrupted(run, inputs, targets) -> None:
        if run.order == order and (run.epoch, run.step) == (1, step):
            raise KeyboardInterrupt
        update(run, inputs, targets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_class, "_update", interrupted)
        yield


def test_digits_stand_in_and_a_line_says_so(monkeypatch, caplog):
    def offline(name: str, folder: str) -> None:
        raise RuntimeError("Error downloading\nno route to host")

    monkeypatch.setattr(image_data, "_torchvision", offline)
    assert image_data.choose("cifar10", "data") == "digits"
    assert caplog.messages == [
        "cifar10 is not available (no route to host); using the 1797 digits of "
        "scikit-learn"
    ]


def test_the_repository_stands_in_and_a_line_says_so(monkeypatch, caplog, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    files = text_data.choose(None, "wikitext-103", str(tmp_path), 1000)
    assert len(caplog.messages) == 1
    assert "wikitext-103 is not available" in caplog.text
    assert files == text_data.choose(None, None, str(tmp_path), 1000)
    assert {"README.md", "test_examples.py"} < {Path(file).name for file in files}


def test_a_corpus_is_fetched_once(monkeypatch, tmp_path):
    asked = []

    def load_dataset(*name, **options):
        asked.append((name, options))
        return ({"text": f"document {n}\n"} for n in range(1000))

    datasets = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    for _ in range(2):
        (file,) = text_data.choose(None, "openwebtext", str(tmp_path), 100)
    assert Path(file).read_text().startswith("document 0\ndocument 1\n")
    assert 100 <= Path(file).stat().st_size < 120
    assert len(asked) == 1


def test_windows_follow_one_another(book):
    splits = text_data.load((str(book),), context=10, max_bytes=1000)
    text = book.read_bytes()
    inputs, targets = splits.train[:]
    assert bytes(inputs.flatten().tolist()) == text[: inputs.numel()]
    assert bytes(targets.flatten().tolist()) == text[1 : inputs.numel() + 1]
    assert len(splits.train) == 89
    assert bytes(splits.test[0][0].tolist()) == text[900:910]


def models() -> dict[str, tuple]:
    torch.manual_seed(0)
    labels, rows = torch.randint(10, (4,)), {}
    for name in MODELS:
        size = (3, 32) if name == "lenet" else (1, 8)
        images = torch.randint(256, (4, size[0], size[1], size[1]), dtype=torch.uint8)
        rows[name] = (image_model(name, *size, width=8), images, labels)
    windows = torch.randint(256, (4, 13), dtype=torch.uint8)
    for tied in (True, False):
        model = ByteGPT(12, width=16, num_layers=2, num_heads=2, tied=tied)
        rows[f"gpt, tied: {tied}"] = (model, windows[:, :-1], windows[:, 1:])
    return rows


def check_all_models(rank: int) -> None:
    for given in models().values():
        device = xla_replica.current().device
        ordered_training.check_gradients(*(each.to(device) for each in given))


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("xla", marks=[slow, needs_xla])]
)
def test_gradients_of_all_models_are_right(device):
    xla_replica.launch(check_all_models, (), 1, device)


@rules_kept()
def test_wrong_gradients_are_found():
    rule = RULES[torch.nn.Linear]
    psg.register_rule(torch.nn.Linear)(lambda call, grad: rule(call, 2 * grad))
    with pytest.raises(RuntimeError, match=r"2\.weight +WRONG"):
        ordered_training.check_gradients(*models()["logistic"])


def test_the_page_tells_scripts_from_their_parts():
    page = read("examples/README.md")
    scripts, parts = page.split("The other modules")
    for path in sorted((ROOT / "examples").glob("*/*.py")):
        name = str(path.relative_to(ROOT / "examples"))
        text = path.read_text(encoding="utf-8")
        summary = ast.get_docstring(ast.parse(text)).split("\n")[0]
        section = scripts if "__main__" in text else parts
        assert f"| [{name}]({name}) | {summary} |" in section
