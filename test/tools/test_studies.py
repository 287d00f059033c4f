"""The studies in tools/ find, on a small scale, what the pages say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.documents import ROOT, read
from support.scripts import run_script, words
from support.xla_replica.replicas import of_torch_alone

pytest.importorskip("sklearn")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from tools.studies import convex_problems, exact_study, rigl_digits
from tools.studies import language_model_study as lm_study

pytestmark = pytest.mark.usefixtures("one_thread")


def run(tool: str, folder: Path, *options: str, draws: bool = True) -> dict[str, Any]:
    image, output = folder / "made" / "image.png", folder / "made" / "output.json"
    options += ("--image", str(image)) if draws else ()
    script = ROOT / "tools" / "studies" / tool
    run_script(script, *options, "--output", output, cwd=folder)
    return saved_by(output, image if draws else None)


def saved_by(output: Path, image: Path | None) -> dict[str, Any]:
    assert image is None or image.read_bytes().startswith(b"\x89PNG")
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
    problems = run("convex_study.py", tmp_path)["problems"]
    assert set(problems) == {"breast_cancer", "diabetes", "digits"}
    for problem in problems.values():
        assert min(problem["rr_over"].values()) > 5
        assert all(distance > 0 for distance in problem["distance"].values())


@pytest.mark.parametrize("name", ["breast_cancer", "diabetes"])
def test_gradients_and_minimum_of_the_problems(name):
    """Gradients are autograd's, and another optimizer finds no lower value."""
    problem = convex_problems.make_problem(*convex_problems.PROBLEMS[name], multiple=16)
    generator = torch.Generator().manual_seed(0)
    shape = problem.initial().shape
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)
    mean = problem.gradients(weights, torch.arange(len(problem.features))).mean(0)
    torch.testing.assert_close(mean, torch.func.grad(problem.value)(weights))
    weights = problem.initial().requires_grad_()
    options = {"tolerance_change": 1e-15, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS([weights], max_iter=500, **options)

    def closure():
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


def study(folder: Path, *options: object) -> dict[str, Any]:
    """Returns what a quick study of language models saves, whose runs are made once."""
    paths = ("--output", folder / "a.json", "--folder", folder)
    lm_study.main(words(["--quick", "--jobs", 1, *paths, *options]))
    return json.loads((folder / "a.json").read_text())


def test_ways_of_a_language_model_see_equal_samples_and_are_made_once(tmp_path):
    ways = study(tmp_path, "--no-live")["ways"]
    assert {way["samples"] for way in ways.values()} == {128}
    assert [ways[name]["updates"] for name in ("constant", "larger")] == [16, 4]
    assert 4 < ways["ramp"]["updates"] < ways["seesaw"]["updates"] < 16
    # 16 updates of 1 s and a window for each of 8 replicas; 4 of four windows.
    hours = [ways[name]["costs"]["1"]["hours"] for name in ("constant", "larger")]
    assert hours == pytest.approx([16 * 2 / 3600, 4 * 5 / 3600])
    assert ways["constant"]["difference"] == {"mean": 0, "low": 0, "high": 0}
    assert study(tmp_path, "--no-live")["ways"] == ways
    study(tmp_path, "--plot-only", "--image", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_the_figures_of_the_study_of_a_language_model(capsys):
    record = json.loads(read("docs/benchmarks/language_model_study.json"))
    lm_study.tell(record["ways"])
    page, lines = read("docs/study.md"), capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert all(line.strip() in page for line in lines)


@pytest.mark.slow
def test_the_replay_has_the_bits_of_live_members(tmp_path):
    pytest.importorskip("torchft")
    live = study(tmp_path)["live"]
    assert live["replayed"]
    assert max(live["members"]) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("sparsity", "points"), [(0.98, 4), (0.99, 30)])
def test_rigl_beats_a_static_topology(sparsity, points):
    found = {}
    for method in ("static", "rigl"):
        runs = [rigl_digits.accuracies(method, sparsity, seed) for seed in range(5)]
        found[method] = np.array(runs)
    assert rigl_digits.margin(found) >= points, found


def test_the_study_of_rigl_measures_records_and_draws(tmp_path, capsys):
    image, output = tmp_path / "a.png", tmp_path / "a.json"
    rigl_digits.main([
        "--quick", "--steps", "80", "--every", "20", "--sparsities", "0.9",
        "--image", str(image), "--output", str(output),
    ])  # fmt: skip
    record = saved_by(output, image)
    for method in ("static", "rigl"):
        ends = [rigl_digits.accuracies(method, 0.9, n, 80)[-1] for n in (0, 1)]
        assert record["accuracy"]["0.9"][method] == ends
    text = capsys.readouterr().out
    assert "90% sparse: accuracy at the end" in text
    assert f"{record['rigl_over_static']['0.9']:.2f} points above" in text
    with pytest.raises(SystemExit):
        rigl_digits.main(["--steps", "100", "--every", "30"])
    assert "--steps 100 must be a multiple of --every" in capsys.readouterr().err


@pytest.mark.parametrize(("tool", "option"), [("models", "models"), ("rigl", "runs")])
def test_what_is_drawn_is_right_or_refused(tool, option, tmp_path):
    saved = run(f"drawn_{tool}.py", tmp_path, f"--{option}", "3", draws=False)
    assert saved["drawn"]
    assert saved["outcomes"]["right"]
    assert not saved["outcomes"].get("wrong")


def test_exact_sums_change_a_training_by_rounding_and_small_numbers_are_zero(tmp_path):
    exact_study.main(words(["--quick", "--jobs", 1, "--output", tmp_path / "a.json"]))
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["exact"]["losses"] == pytest.approx(found["float"]["losses"], abs=1e-3)
    assert found["float"]["losses"][0] != found["float"]["losses"][1]
    first, *_, last = found["adam"]
    expected = {"exponent": 0, "zero": 0, "m": 1, "v": 1, "moved": 1}
    assert first == pytest.approx(expected, abs=1e-3)
    assert last == {"exponent": -28, "zero": 1, "m": 0, "v": 0, "moved": 0}


@pytest.mark.slow
@of_torch_alone
def test_sharded_members_that_are_killed_and_join_end_with_the_hash_of_one(tmp_path):
    pytest.importorskip("torchft")
    saved = run("sharded_live.py", tmp_path, "exact", "--quick", draws=False)
    hashes = {line["hash"] for line in saved["runs"]}
    assert hashes == {saved["one process"]} != {saved["one process, by autocast"]}
