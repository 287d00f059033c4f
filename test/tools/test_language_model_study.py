"""The study of a language model compares its ways at equal samples."""

from __future__ import annotations

import json

import pytest
from support.documents import ROOT, read

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from tools.studies import language_model_study as study

pytestmark = pytest.mark.usefixtures("one_thread")


def run(folder, *options):
    """Returns what a quick study saves, whose runs are made once."""
    paths = ("--output", f"{folder}/a.json", "--folder", str(folder))
    study.main(["--quick", "--jobs", "1", *paths, *options])
    return json.loads((folder / "a.json").read_text())


def test_ways_see_equal_samples_and_are_made_once(tmp_path):
    ways = run(tmp_path, "--no-live")["ways"]
    assert {way["samples"] for way in ways.values()} == {128}
    assert [ways[name]["updates"] for name in ("constant", "larger")] == [16, 4]
    assert 4 < ways["ramp"]["updates"] < ways["seesaw"]["updates"] < 16
    # 16 updates of 1 s and a window for each of 8 replicas; 4 of four windows.
    hours = [ways[name]["costs"]["1"]["hours"] for name in ("constant", "larger")]
    assert hours == pytest.approx([16 * 2 / 3600, 4 * 5 / 3600])
    assert ways["constant"]["difference"] == {"mean": 0, "low": 0, "high": 0}
    assert run(tmp_path, "--no-live")["ways"] == ways
    run(tmp_path, "--plot-only", "--image", f"{tmp_path}/a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("low", "high", "saved", "said"),
    [
        (-0.01, 0.01, 0.2, "helps"),
        (0.001, 0.01, 0.2, "helps, costs loss"),
        (0.001, 0.03, 0.2, "costs loss"),
        (-0.01, 0.03, 0.2, "cannot say"),
        (-0.01, 0.01, 0.05, ""),
    ],
)
def test_what_is_said_of_a_way(low, high, saved, said):
    assert study.verdict({"low": low, "high": high}, saved) == said


def test_the_page_has_the_figures_of_the_record(capsys):
    record = ROOT / "docs/benchmarks/language_model_study.json"
    study.tell(json.loads(record.read_text())["ways"])
    page = read("docs/study.md")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert all(line.strip() in page for line in lines)


@pytest.mark.slow
def test_the_replay_has_the_bits_of_live_members(tmp_path):
    pytest.importorskip("torchft")
    live = run(tmp_path)["live"]
    assert live["replayed"]
    assert max(live["members"]) > 1
