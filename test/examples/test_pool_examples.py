"""The examples with an index of a pool: small runs, and what removal changes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.pool import batch_to_label, digits, influence, mislabelled, target_set

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


@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        (influence, "--seeds 0", "--seeds: '0' is not an integer of at least 1"),
        (influence, "--train 40 --remove 40", "--remove must be less than --train"),
        (influence, "--halves 1", "--halves at least 2"),
        (mislabelled, "--train 10 --wrong 0.04", "--wrong must leave a wrong label"),
        (mislabelled, "--steps 30 -1", "-1"),
        (mislabelled, "--train 5000", "5000 digits are needed, and there are 1797"),
        (target_set, "--pool 50", "--pool must be at least 20, and at least --budget"),
        (batch_to_label, "--pool 60", "--batch, times --rounds and one more, exceeds"),
    ],
)
def test_arguments_that_cannot_be_are_told(
    script, arguments, told, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", [script.__name__, *arguments.split()])
    with pytest.raises(SystemExit) as error:
        script.main()
    assert error.value.code != 0
    assert told in f"{capsys.readouterr().err}{error.value.code}"


def test_networks_that_are_trained_at_once_are_those_trained_alone():
    (data,) = digits.digits(0, 30)
    weights = digits.chosen(30, range(30), [1, 4, 9])
    together = digits.trained(weights, data, seed=1, steps=20)
    for number, model in enumerate(together):
        (alone,) = digits.trained(weights[number : number + 1], data, 1, steps=20)
        for one, other in zip(model.parameters(), alone.parameters()):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_the_area_under_the_curve_counts_pairs():
    values, wrong = np.array([3.0, 1.0, 2.0, 0.0]), np.array([True, False, False, True])
    assert mislabelled.area_under_curve(values, wrong) == 0.5
    assert mislabelled.area_under_curve(values, values > 1.5) == 1


@pytest.mark.slow
def test_removing_the_samples_that_the_index_names_changes_the_loss_more():
    options = argparse.Namespace(train=300, queries=10, halves=20, remove=10)
    found = [influence.measure(seed, options) for seed in range(5)]
    changes, scores = (
        {name: np.array([each[name][at] for each in found]) for name in found[0]}
        for at in (1, 0)
    )
    more = changes["index, preconditioned"] - changes["random"]
    assert more.mean() > 3 * more.std(ddof=1) / len(more) ** 0.5, more
    assert (
        changes["index, preconditioned"].mean() > changes["index, inner product"].mean()
    )
    assert scores["index, preconditioned"].mean() > 0.3
    assert abs(scores["random"].mean()) < 0.2


def test_a_single_seed_has_no_standard_error(capsys):
    for seeds, expected in ((1, 0), (3, 2)):
        digits.table("means", ["a", "b"], {"row": np.ones((seeds, 2))})
        assert capsys.readouterr().out.count("±") == expected
