"""RigL finds connections that a fixed topology does not have, on real digits."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tools.studies import rigl_digits

pytestmark = pytest.mark.usefixtures("one_thread")

# Points by which RigL is to beat a fixed topology, mean of 5 seeds.
GOALS = {0.98: 4, 0.99: 30}


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", GOALS)
def test_rigl_beats_a_static_topology(sparsity):
    pytest.importorskip("sklearn")
    found = {}
    for method in ("static", "rigl"):
        runs = [rigl_digits.accuracies(method, sparsity, seed) for seed in range(5)]
        found[method] = np.array(runs)
    assert rigl_digits.margin(found) >= GOALS[sparsity], found


def test_the_tool_measures_records_and_draws(tmp_path, capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    rigl_digits.main([
        "--quick", "--steps", "80", "--every", "20", "--sparsities", "0.9",
        "--image", str(tmp_path / "a.png"), "--output", str(tmp_path / "a.json"),
    ])  # fmt: skip
    record = json.loads((tmp_path / "a.json").read_text())
    for method in ("static", "rigl"):
        assert record["accuracy"]["0.9"][method] == [
            rigl_digits.accuracies(method, 0.9, seed, 80)[-1] for seed in (0, 1)
        ]
    assert record["versions"]["torch"]
    assert (tmp_path / "a.png").stat().st_size > 10_000
    text = capsys.readouterr().out
    assert "90% sparse: accuracy at the end" in text
    assert f"{record['rigl_over_static']['0.9']:.2f} points above" in text
    with pytest.raises(SystemExit):
        rigl_digits.main(["--steps", "100", "--every", "30"])
    assert "--steps 100 must be a multiple of --every" in capsys.readouterr().err
