"""examples/pool/score_pool.py: norms of a batch in one layer, and scores of a pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
def test_norms_of_a_batch_are_those_of_its_gradients(layer):
    model, pool = score_pool.make_problem(7)
    found = score_pool.layer_norms(model, layer, *pool[:])
    grads = psg.per_sample_grads(model, score_pool.losses_of, pool[:])
    truth = grads[f"{layer}.weight"].flatten(1).norm(dim=1)
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=0)


def test_the_script_prints_norms_and_the_highest_scores(tmp_path):
    output = tmp_path / "scores.csv"
    lines = run("--pool", "20", "--batch-size", "5", "--output", str(output))
    model, pool = score_pool.make_problem(20)
    norms = score_pool.layer_norms(model, "conv2", *pool[:5])
    assert lines[0].startswith("gradient norms in conv2, first 5 samples: ")
    low, _, high = lines[0].split()[-3:]
    assert [float(low), float(high)] == pytest.approx(
        [float(norms.min()), float(norms.max())], abs=2e-3
    )
    scores = pd.read_csv(output)["score"]
    highest = scores.sort_values(ascending=False, kind="stable").index[:5].tolist()
    assert lines[1] == f"highest grad_norm of the whole model: {highest}"
    assert lines[2] == f"index and score of every sample: {output}"


def test_the_help_teaches(capsys):
    with pytest.raises(SystemExit):
        score_pool.parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for taught in ("active learning", "continues", "--score egl", "same bits"):
        assert taught in text


def test_an_empty_pool_is_refused(capsys):
    with pytest.raises(SystemExit):
        score_pool.parse(["--pool", "0"])
    assert "must be at least 1" in capsys.readouterr().err
