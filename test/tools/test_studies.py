"""The studies in tools/ find, on a small scale, what the pages say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.documents import ROOT
from support.scripts import run_script
from support.xla_replica.replicas import of_torch_alone

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

PNG = b"\x89PNG"


def run(tool: str, folder: Path, *options: str, draws: bool = True) -> dict[str, Any]:
    """Runs a tool; returns what it saved, and checks the image that it drew."""
    image, output = folder / "made" / "image.png", folder / "made" / "output.json"
    options += ("--image", str(image)) if draws else ()
    script = ROOT / "tools" / "studies" / tool
    status, text = run_script(script, *options, "--output", output, cwd=folder)
    assert status == 0, text
    assert not draws or image.read_bytes().startswith(PNG)
    saved = json.loads(output.read_text(encoding="utf-8"))
    assert saved["versions"]["torch"]
    assert saved["date"]
    return saved


@of_torch_alone
def test_herding_hardly_grows_but_for_random_orders(tmp_path):
    saved = run("herding_study.py", tmp_path, "--quick", "--seeds", "0", "1")
    slopes = saved["slope"]
    assert 0.4 < slopes["rr"] < 0.6
    for balance_type in ("mean", "pair"):  # halved by every epoch, to begin with
        assert slopes[balance_type] < 0.15
        first, second, *_, last = saved["herding_by_epoch_of_largest"][balance_type]
        assert second < 0.75 * first
        assert last < first / 4


@pytest.mark.slow
def test_balanced_orders_settle_five_times_closer_to_the_minimum(tmp_path):
    saved = run("convex_study.py", tmp_path, "--quick")
    (problem,) = saved["problems"].values()
    assert min(problem["rr_over"].values()) > 5
    assert all(distance > 0 for distance in problem["distance"].values())


@pytest.mark.slow
def test_equal_weights_order_better_than_those_of_updates(tmp_path):
    saved = run("weights_study.py", tmp_path, "--quick", draws=False)
    (rules,) = saved["distance"].values()
    distances = rules["constant"]
    assert distances["mean"] < distances["rr"] / 2
    assert distances["mean, weighted"] > 2 * distances["mean"]
    assert distances["pair, weighted"] > 2 * distances["pair"]


@pytest.mark.slow
def test_they_do_on_every_data_set(tmp_path):
    problems = run("convex_study.py", tmp_path)["problems"]
    assert set(problems) == {"breast_cancer", "diabetes", "digits"}
    for problem in problems.values():
        assert min(problem["rr_over"].values()) > 5


def test_gradients_and_minimum_of_the_problems(monkeypatch):
    """Gradients are autograd's, and another optimizer finds no lower value."""
    import torch

    from tools.studies import convex_problems

    for name in ("breast_cancer", "diabetes"):
        row = convex_problems.PROBLEMS[name]
        problem = convex_problems.make_problem(*row, multiple=16)
        generator = torch.Generator().manual_seed(0)
        shape = problem.initial().shape
        weights = torch.randn(shape, generator=generator, dtype=torch.float64)
        everything = torch.arange(len(problem.features))
        mean = problem.gradients(weights, everything).mean(0)
        torch.testing.assert_close(mean, torch.func.grad(problem.value)(weights))
        weights = problem.initial().requires_grad_()
        options = {"tolerance_change": 1e-15, "line_search_fn": "strong_wolfe"}
        optimizer = torch.optim.LBFGS([weights], max_iter=500, **options)

        def closure(problem=problem, weights=weights, optimizer=optimizer):
            optimizer.zero_grad()
            value = problem.value(weights)
            value.backward()
            return value

        optimizer.step(closure)
        found = problem.value(weights).item()
        assert found == pytest.approx(problem.minimum(), abs=1e-9)
        assert problem.minimum() <= found + 1e-12


@pytest.mark.slow
def test_seesaw_saves_a_third_of_the_updates(tmp_path):
    saved = run("seesaw_study.py", tmp_path, "--quick", draws=False)
    ways = saved["ways"]
    assert 0.3 < saved["fewer_updates"] < 0.4
    samples = [ways[way]["samples"]["mean"] for way in ("cosine", "halved", "seesaw")]
    assert max(samples) - min(samples) <= 256
    losses = {way: numbers["test_loss"]["mean"] for way, numbers in ways.items()}
    assert losses["seesaw"] < 1.1 * min(losses.values())
