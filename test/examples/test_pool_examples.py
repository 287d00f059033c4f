"""The examples with gradients of samples: of a pool, and by rules of one's own."""

import argparse
import re

import numpy as np
import pandas as pd
import pytest
import torch
from support.documents import ROOT, read
from support.per_sample_grad import rules_kept
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
    told = capsys.readouterr().out
    assert len(told.splitlines()) == len(rows) + 1
    assert "±" not in told  # of a single seed
    assert read(script.__file__).count("\n") <= 120
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


def test_the_script_prints_norms_and_the_highest_scores(tmp_path):
    output = tmp_path / "scores.csv"
    arguments = ("--pool", 20, "--batch-size", 5, "--output", output)
    text = run_script(score_pool.__file__, *arguments, cwd=tmp_path)
    # The progress bar is beside them.
    lines = re.findall(r"(?:gradient norms|highest|index and score) .*", text)
    model, pool = score_pool.make_problem(20)
    grads = psg.per_sample_grads(model, score_pool.losses_of, pool[:5])
    norms = grads["conv2.weight"].flatten(1).norm(dim=1)
    said, low, high = re.fullmatch("(.*): (.*) to (.*)", lines[0]).groups()
    assert said == "gradient norms in conv2, first 5 samples"
    found, expected = [float(low), float(high)], [norms.min(), norms.max()]
    assert found == pytest.approx([*map(float, expected)], abs=2e-3)
    scores = pd.read_csv(output)["score"]
    highest = scores.sort_values(ascending=False, kind="stable").index[:5].tolist()
    assert lines[1] == f"highest grad_norm of the whole model: {highest}"
    assert lines[2] == f"index and score of every sample: {output}"


def test_rules_of_computed_weights_agree_with_a_loop_of_autograd(tmp_path):
    script = ROOT / "examples/layer_rules/computed_weights.py"
    output = run_script(script, "--samples", 5, "--width", 12, cwd=tmp_path)
    found = re.findall(r"^(\w+): norms differ .* by (\S+) of", output, re.MULTILINE)
    assert [name for name, _ in found] == ["masked", "normalised"]
    assert all(float(error) < 1e-9 for _, error in found)


@rules_kept()
def test_layers_of_computed_weights_are_covered_by_their_rules_alone():
    from examples.layer_rules import computed_weights as example

    layers = [example.MaskedLinear(4, 5, density=0.5), example.NormedLinear(5, 3)]
    model = torch.nn.Sequential(*layers).double()
    x, y = torch.randn(6, 2, 4, dtype=torch.float64), torch.arange(6) % 3
    report = psg.coverage(model, example.losses_of, (x, y))
    assert report.complete
    for said in ("0.weight  ok", "MaskedLinear '0'", "NormedLinear '1'"):
        assert said in str(report)
