"""The streaming example, stopped and gone on with on another number of replicas."""

from pathlib import Path

import pytest
import torch
from support.scripts import words

import variable_batch_size as vbs
from examples.streaming import parquet_text

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("one_thread")


def run(folder: Path, *arguments: object) -> None:
    parquet_text.main(
        words(["--data", folder / "texts", "--run", folder / "run", "--device", "cpu",
               "--length", 16, "--window", 2, *arguments])
    )  # fmt: skip


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_in_two_parts_is_one_run(tmp_path, capsys, monkeypatch, num_replicas):
    def files(folder: Path) -> None:
        write(folder, num_files=2, num_texts=1024)

    write = parquet_text.write_files
    monkeypatch.setattr(parquet_text, "write_files", files)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, "--epochs", 2)
    text = capsys.readouterr().out
    assert "replica 0 has read 16 row groups" in text  # 8 in each epoch
    assert len(text.splitlines()) == 12  # ten rows of the log
    run(parts, "--epochs", 1)
    run(parts, "--epochs", 2, "--num-replicas", num_replicas)
    runs = [folder / "run" for folder in (whole, parts)]
    states = (torch.load(max(run.glob("update-*.pt")))["parts"] for run in runs)
    torch.testing.assert_close(*(s["model"] for s in states), rtol=1e-5, atol=1e-5)
    logs = (vbs.read_run(run / "run.jsonl").updates["samples"] for run in runs)
    assert next(logs).tolist() == next(logs).tolist()
