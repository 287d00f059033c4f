"""The command vbs: its examples run, its help teaches, its errors are messages."""

import io
import json
import re
import runpy
import shlex
import sys

import pandas as pd
import pytest
from support.documents import blocks
from support.xla_replica.replicas import of_torch_alone

from variable_batch_size.command_line import COMMANDS, MEMBERS, main
from variable_batch_size.traces.batch_trace import Trace

PAGES = [
    *([name] for name in COMMANDS),
    *([name, member] for name, members in MEMBERS.items() for member in members),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = "".join(f"{n},{64 + n % 3 * 32},{2 + n % 3}\n" for n in range(40))
    lines = [{"event": "start", "step": 0, "time": 9.5, "num_replicas": 1}]
    for n in range(30):
        update = {"step": n, "batch_size": 32, "samples": 32 * n + 32, "time": 9.5 + n}
        lines.append(update)
    texts = [json.dumps(line) + "\n" for line in lines]
    rows = [f"{n},{100.5 + 63 * n},{n % 7}\n" for n in range(1, 60)]
    files = {
        "trace.csv": f"step,batchsize,devices\n{trace}",
        "thresholds.csv": "samples,batchsize,devices\n0,64,2\n128,128,4\n",
        "log.csv": ",Time,GPUs\n" + "".join(rows),
        "begun.jsonl": texts[0],
        **{f"{place}run.jsonl": "".join(texts) for place in ("", "runs/a/", "runs/b/")},
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def vbs(folder, capsys, monkeypatch):
    """Runs a command that succeeds, and returns what it prints."""

    def run(words: str, given: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        capsys.readouterr()
        force = " --force" if "--out" in words else ""
        assert main(shlex.split(words + force)) == 0, words
        return capsys.readouterr().out

    return run


def examples(text: str) -> list[str]:
    lines = text.replace("\\\n", "").splitlines()
    return [line.strip() for line in lines if re.match(r" *vbs \w", line)]


@of_torch_alone
@pytest.mark.parametrize("page", PAGES, ids=" ".join)
def test_help_explains_every_option_and_has_examples_that_run(page, vbs, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*page, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "default: None" not in shown
    first, last = shown.split("\n\n")[1].splitlines()[0], shown.split()[-1]
    assert first.endswith("?") or len(page) > 1  # a command says what it answers
    assert examples(shown)[-1].endswith(last)
    options = shown.split("options:\n")[1]
    for option in re.findall(r"^  (--\S+(?: [A-Z{]\S*)?)", options, re.MULTILINE):
        assert options.split(f"  {option}")[1].split("\n  --")[0].strip(), option
    found = examples(shown)
    assert found, shown
    for example in found:
        assert shlex.split(example)[1 : 1 + len(page)] == page
        assert vbs(example.removeprefix("vbs ")).strip(), example


def test_the_commands_of_the_pages_run(vbs):
    on_page = [*blocks("docs/traces.md", "sh"), *blocks("docs/runs.md", "sh")]
    found = examples("".join(on_page))
    assert len(found) >= 10
    for example in found:
        vbs(example.removeprefix("vbs "))


@pytest.mark.parametrize(("words", "told"), [
    ("stats trace.csv", r"^largest minibatch size +32$"), ("--version", r"^vbs \S"),
])  # fmt: skip
def test_the_module_is_the_command(words, told, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vbs", *words.split()])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("variable_batch_size", run_name="__main__")
    assert caught.value.code == 0
    assert re.search(told, capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(("words", "message"), [
    ("check trace.csv --dataset-size 1K --minibatch-size 48 --num-replicas 2",
     "trace.csv, line 2: batch size 64 is not a multiple of --minibatch-size=48"),
    ("stats missing.csv", "No such file or directory: 'missing.csv'"),
    ("check 64 --dataset-size 1K --num-replicas 2",
     "the constant trace has no end: give --epochs=N"),
    ("check 64 --dataset-size many --num-replicas 2",
     "argument --dataset-size: 'many' is not an integer such as 64, 500K, 2M or 250B"),
    ("check trace.csv --dataset-size 1K --num-replicas 2 --epochs 99",
     "epochs of trace.csv must be an integer >= 1 and <= 4, got 99"),
    ("make ramp --steps 2 --first 8", "arguments are required: --last"),
    ("make ramp --steps 2 --first 0 --last 8", "first must be an integer >= 1"),
    ("make ramp --steps 3 --first 96 --last 160 --multiple-of 48",
     "last must be a multiple of 48, got 160"),
    ("make thresholds --rows 0:8 --total 9 --unit tokens",
     "--tokens-per-sample must be an integer >= 1, got None"),
    ("make thresholds --rows 0:8,1M:16 --total 9", "error: rows must be like"),
    ("make seesaw --first 8 --most 16 --total-samples 99 --schedule cosin",
     "one of 'constant', 'cosine', 'linear', got 'cosin'"),
    ("make thresholds --rows 5:8 --total 9", "rows must begin at 0 and increase"),
    ("make saw --steps 2", "invalid choice: 'saw'"),
    ("convert fixed log.csv --batch-size 8 --restart-seconds 3",
     "--restart-seconds needs a step time"),
    ("simulate 64 --dataset-size 1K --rule linear", "--ref-batchsize must be"),
    ("simulate 64 --dataset-size 1K --epochs 1 --price 3",
     "--price=3.0 needs a step time, got none"),
    ("simulate thresholds.csv --dataset-size 1K --epochs 1",
     "one for each of the 3 rows of thresholds.csv, got array([2., 4.])"),
    ("plot trace.csv --out a.xyz", "Format 'xyz' is not supported"),
    ("plot trace.csv --x hours", "--x='hours': trace.csv does not say the hours"),
    ("plot trace.csv --x days", "x must be one of 'updates', 'samples', 'hours'"),
    ("plot begun.jsonl", "begun.jsonl tells of no update; is it the log of a run?"),
    ("make constant --steps 1T --batch-size 8",
     "steps must be an integer >= 1 and <= 134"),
    ("make constant --steps 9 --batch-size 8 --out trace.csv",
     "--out trace.csv exists: --force replaces it"),
    ("convert proportional log.csv --samples-per-device 32 --out ./log.csv",
     "--out log.csv exists: --force replaces it"),
])  # fmt: skip
def test_what_cannot_be_done_is_a_message(words, message, folder, capsys):
    before = {path: path.read_bytes() for path in folder.glob("*.*")}
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(words))
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    # How the command is used is shown where it is misused, not where a file is wrong.
    misused = ("arguments are required", "invalid choice", "argument --")
    assert shown.startswith("usage") == any(each in message for each in misused)
    assert {path: path.read_bytes() for path in folder.glob("*.*")} == before


def test_a_trace_goes_from_one_command_to_the_next(folder, vbs):
    make = "make thresholds --rows '0:64 1K:128' --total 2K"
    told = "wrote made.csv: 24 steps, the first of 64 samples\n"
    assert vbs(f"{make} --out made.csv") == told
    printed = vbs(make)
    assert (folder / "made.csv").read_text() == printed
    assert re.search(r"^steps +24$", vbs("stats -", printed), re.MULTILINE)
    text = (folder / "trace.csv").read_text()  # devices are read from there, too
    vbs("simulate - --dataset-size 1K --out steps.csv", text)
    assert set(pd.read_csv("steps.csv")["devices"]) == {2, 3, 4}
    # Steps of 2 to 4 minibatches have as many devices.
    told = vbs("check - --dataset-size 1K", text)
    assert re.search(r"^substeps +119\nidle replica-substeps +0$", told, re.MULTILINE)


def test_a_converted_log_is_a_trace_that_all_commands_take(folder, vbs):
    vbs("convert proportional log.csv --samples-per-device 32 --out made.csv")
    table = pd.read_csv("made.csv")
    assert table.columns.tolist() == ["step", "batchsize", "devices", "start_seconds"]
    rows = [n for n in range(1, 60) if n % 7]  # with devices
    assert table["devices"].tolist() == [n % 7 for n in rows]
    assert table["start_seconds"].tolist() == [63 * (n - 1) for n in rows]
    assert (table["batchsize"] == 32 * table["devices"]).all()
    for words in ("check --dataset-size 2K", "stats", "plot"):
        vbs(f"{words} made.csv")
    assert (folder / "made.png").read_bytes().startswith(b"\x89PNG")
    options = "--dataset-size 2K --seconds-per-substep 0.5 --price 1 --out steps.csv"
    restarts = int((table["devices"].diff().fillna(0) != 0).sum())
    shown = vbs(f"simulate made.csv {options}")
    assert re.search(rf"^restarts +{restarts}$", shown, re.MULTILINE)
    steps = pd.read_csv("steps.csv")
    assert steps[["batchsize", "devices"]].equals(table[["batchsize", "devices"]])
    assert Trace("steps.csv").batch_sizes.tolist() == table["batchsize"].tolist()
    assert set(steps["seconds"]) == {0.5}


def test_a_picture_is_beside_its_file_and_replaces_none(folder, vbs, capsys):
    rows = ("run.jsonl trace.csv", "run.png"), ("runs/a", "runs/a/run.png")
    for words, name in (*rows, ("-", "trace.png")):
        given = "samples,batchsize\n0,64\n640,128\n"
        assert vbs(f"plot {words}", given) == f"wrote {name}\n"
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        vbs("plot run.jsonl")
    assert "--out run.png exists: --force replaces it" in capsys.readouterr().err


def test_numbers_are_shown(vbs):
    seconds = "--seconds-per-update 0.5 --seconds-per-substep 1"
    check = "check 100 --dataset-size 960 --epochs 1 --num-replicas 1 --pad-minibatches"
    shown = vbs(f"simulate 320 --dataset-size 960 --epochs 2 {seconds}") + vbs(check)
    lines = [re.split("  +", line) for line in shown.splitlines()]
    # Of 6 times 10.5 seconds.
    assert ["hours without restarts and compiling", "0.0175"] in lines
    assert ["samples of padding", "252"] in lines
    assert ["samples", "900"] in lines


def test_warnings_are_lines_and_not_hidden(capsys, monkeypatch):
    given = io.StringIO("step,batchsize\n0,64\n5,64\n")
    given.name = "<stdin>"
    monkeypatch.setattr(sys, "stdin", given)
    assert main(["stats", "-"]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: <stdin>, line 3, step: 5 should be 1")
