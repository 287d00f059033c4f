"""The examples with the rows of a pool: small runs, and what removal changes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.scripts import run_script

import per_sample_grad as psg
from examples.pool import (
    batch_to_label,
    digits,
    influence,
    mislabelled,
    score_pool,
    target_set,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {
    influence: {"train": 40, "queries": 2, "halves": 4, "remove": 4},
    mislabelled: {"train": 200, "wrong": 0.1, "steps": [30]},
    target_set: {"pool": 100, "target": 5, "budget": 20},
    batch_to_label: {"pool": 60, "batch": 10, "rounds": 1},
}


@pytest.mark.parametrize("script", SMALL, ids=lambda script: script.__name__)
def test_an_example_measures_every_way(script, capsys):
    rows = script.measure(0, argparse.Namespace(**SMALL[script]))
    assert "random" in rows
    assert len({len(row) for row in rows.values()}) == 1
    assert np.isfinite([*rows.values()]).all()
    digits.table("title", ["column"], {name: np.array([r]) for name, r in rows.items()})
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 1
    path = Path(script.__file__)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 120
    assert "known against it" in script.__doc__


def test_networks_that_are_trained_at_once_are_those_trained_alone():
    (data,) = digits.digits(0, 30)
    weights = digits.chosen(30, range(30), [1, 4, 9])
    together = digits.trained(weights, data, seed=1, steps=20)
    for number, model in enumerate(together):
        (alone,) = digits.trained(weights[number : number + 1], data, 1, steps=20)
        both = (each.state_dict() for each in (model, alone))
        torch.testing.assert_close(*both, rtol=1e-3, atol=1e-4)


def test_the_area_under_the_curve_counts_pairs():
    values, wrong = np.array([3.0, 1.0, 2.0, 0.0]), np.array([True, False, False, True])
    assert mislabelled.area_under_curve(values, wrong) == 0.5
    assert mislabelled.area_under_curve(values, values > 1.5) == 1


@pytest.mark.slow
def test_removing_the_samples_that_the_gradients_name_changes_the_loss_more():
    options = argparse.Namespace(train=300, queries=10, halves=20, remove=10)
    found = [influence.measure(seed, options) for seed in range(5)]
    changes, scores = (
        {name: np.array([each[name][at] for each in found]) for name in found[0]}
        for at in (1, 0)
    )
    best = "gradients, preconditioned"
    more = changes[best] - changes["random"]
    assert more.mean() > 3 * more.std(ddof=1) / len(more) ** 0.5, more
    assert changes[best].mean() > changes["gradients, inner product"].mean()
    assert scores[best].mean() > 0.3
    assert abs(scores["random"].mean()) < 0.2


def test_a_single_seed_has_no_standard_error(capsys):
    for seeds, expected in ((1, 0), (3, 2)):
        digits.table("means", ["a", "b"], {"row": np.ones((seeds, 2))})
        assert capsys.readouterr().out.count("±") == expected


@pytest.mark.parametrize("layer", ["conv1", "conv2", "fc"])
def test_norms_of_a_batch_are_those_of_its_gradients(layer):
    model, pool = score_pool.make_problem(7)
    grads = psg.per_sample_grads(model, score_pool.losses_of, pool[:])
    truth = grads[f"{layer}.weight"].flatten(1).norm(dim=1)
    found = score_pool.layer_norms(model, layer, *pool[:])
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=0)


def test_the_script_prints_norms_and_the_highest_scores(tmp_path):
    output = tmp_path / "scores.csv"
    arguments = ("--pool", 20, "--batch-size", 5, "--output", output)
    status, text = run_script(score_pool.__file__, *arguments, cwd=tmp_path)
    assert status == 0, text
    # The progress bar is beside them.
    lines = re.findall(r"(?:gradient norms|highest|index and score) .*", text)
    model, pool = score_pool.make_problem(20)
    norms = score_pool.layer_norms(model, "conv2", *pool[:5])
    assert lines[0].startswith("gradient norms in conv2, first 5 samples: ")
    low, _, high = lines[0].split()[-3:]
    assert float(low) == pytest.approx(float(norms.min()), abs=2e-3)
    assert float(high) == pytest.approx(float(norms.max()), abs=2e-3)
    scores = pd.read_csv(output)["score"]
    highest = scores.sort_values(ascending=False, kind="stable").index[:5].tolist()
    assert lines[1] == f"highest grad_norm of the whole model: {highest}"
    assert lines[2] == f"index and score of every sample: {output}"
