"""examples/pool/score_pool.py: four ways, alike, and the scores of the whole model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import per_sample_grad as psg
from examples.pool import score_pool

SCRIPT = Path(__file__).parents[2] / "examples" / "pool" / "score_pool.py"


def run(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("layer", ["conv1", "conv2", "fc"])
def test_all_ways_find_the_same_norms(layer):
    found = [score_pool.measure(way, layer, 7, 3) for way in score_pool.WAYS]
    model, x, y = score_pool.problem(7)
    with psg.capture(model, [f"{layer}.weight"], method="materialized") as recorded:
        losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
    truth = recorded.backward(losses).norms()
    for one in found:
        np.testing.assert_allclose(one.norms, truth, rtol=1e-4)
        assert one.seconds > 0
        assert one.mebibytes >= 0


def test_the_table_has_times_memory_and_differences(tmp_path):
    output = tmp_path / "scores.csv"
    lines = run("--pool", "20", "--batch-size", "5", "--output", str(output))
    assert lines[0] == "gradient norms of conv2, 20 examples"
    assert [line[:18].strip() for line in lines[2:6]] == list(score_pool.WAYS)
    for line in lines[2:6]:
        seconds, times, mebibytes, difference = line[18:].split()
        assert float(seconds) > 0
        assert float(times.removesuffix("x")) > 0
        assert float(mebibytes) >= 0
        assert float(difference) <= 1e-5
    scores = pd.read_csv(output)["score"]
    highest = scores.sort_values(ascending=False, kind="stable").index[:5].tolist()
    assert lines[6] == f"highest grad_norm of the whole model: {highest}"


def test_the_help_teaches(capsys):
    with pytest.raises(SystemExit):
        score_pool.parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for taught in ("old one from a forum", "goes on", "--score egl", "same bits"):
        assert taught in text


def test_pools_that_say_nothing_are_refused(capsys):
    with pytest.raises(SystemExit):
        score_pool.parse(["--pool", "1"])
    assert "at least 2 examples" in capsys.readouterr().err
