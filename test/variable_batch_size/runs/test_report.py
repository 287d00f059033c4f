"""The page about runs, seen in a browser without a network."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from support.browser import IN_CI, shown
from support.xla_replica.replicas import HAS_XLA

import variable_batch_size as vbs
from variable_batch_size import command_line
from variable_batch_size.runs import report

COLORS = [(0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)]  # of the first two runs
if importlib.util.find_spec("plotly") is None and not IN_CI:
    pytest.skip("plotly is not installed", allow_module_level=True)


def write_log(path: Path, num_updates: int, noise: bool, resumed_at: int = 0) -> Path:
    """Writes the log of a run whose numbers are known."""
    file = vbs.RunFile(
        path,
        {"lr": 0.1, "name": path.parent.name},
        num_replicas=4,
        rule="adascale" if noise else "linear",
    )

    def lines(first: int, last: int) -> None:
        for step in range(first, last):
            size = 64 * (1 + step % 5)
            line = {
                "step": step, "epoch": 0, "batch_size": size, "samples": 200 * step,
                "lr": size / 1000, "seconds": 0.5, "idle_seconds": 0.25,
                "time": 1000.0 + step,
            }  # fmt: skip
            if step % 5 == 0:
                line |= {"loss": 2 / (1 + step), "accuracy": min(99, 5.0 * step)}
                line |= {"gain": 1.5, "noise_scale": 300.0 + step} if noise else {}
            file.write(line)

    def event(name: str, step: int) -> None:
        file.write({"event": name, "step": step, "time": 1000.0 + step})

    file.begin(0)
    lines(0, num_updates)
    event("checkpoint", resumed_at)
    if resumed_at:
        again = vbs.RunFile(path, {}, num_replicas=2)
        again.begin(resumed_at)
        lines(resumed_at, num_updates)
    event("stop", num_updates)
    # `begin` takes the time of the clock; here the run began with its first update.
    text = re.sub(r'"time": \d{9,}\.\d+', '"time": 1000.0', path.read_text())
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_log(folder / "first run" / "run.jsonl", 60, noise=True, resumed_at=30)
    write_log(folder / "second" / "run.jsonl", 45, noise=False)
    logs = [str(folder / "first run"), str(folder / "second" / "run.jsonl")]
    out = folder / "report.html"
    assert command_line.main(["report", *logs, "--out", str(out)]) == 0
    return out


# Once: the page does not depend on the environment.
@pytest.mark.skipif(HAS_XLA, reason="the other environment looks at the page")
def test_two_runs_are_drawn_in_a_browser_without_a_network(page):
    """All panels and names are there, and both lines have points in the picture."""
    from matplotlib import image

    picture = page.with_suffix(".png")
    elements = shown(
        page.as_uri(), page.parent / "profile", "--window-size=1200,1900",
        "--virtual-time-budget=8000", f"--screenshot={picture}",
    )  # fmt: skip
    drawn = set(re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", elements))
    assert {"first run", "second", "events", "loss", "gain", "accuracy (%)"} <= drawn
    assert {"batch size", "learning rate", "noise scale", "idle time"} <= drawn
    assert {"seconds", "samples", "updates"} <= drawn  # the buttons
    pixels = np.round(image.imread(picture)[:, :, :3] * 255).astype(int)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    for color in COLORS:
        rows, _ = np.nonzero((abs(pixels - color) < 3).all(2))
        assert len(rows) > 1000
        assert rows.max() - rows.min() > 600  # in all panels


def test_the_page_explains_its_symbols_suits_a_phone_and_fetches_nothing(page):
    text = page.read_text(encoding="utf-8")
    assert "Events: ▶ start, ▷ resume, | checkpoint, ✕ stop" in text
    assert 'content="width=device-width' in text
    assert 'content="light dark"' in text
    assert "step %{customdata[0]}, epoch %{customdata[1]}" in text
    assert "(log)" in text
    outside_of_scripts = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "http" not in outside_of_scripts
    assert not re.search(r"<script[^>]*\bsrc=", text)
    assert "<link" not in outside_of_scripts


def test_the_tables_say_what_came_out(page):
    runs = {
        name: vbs.read_run(page.parent / name / "run.jsonl")
        for name in ("first run", "second")
    }
    table = report.summary(runs).T.to_dict()
    first, second = table["first run"], table["second"]
    assert first["updates"] == 60
    assert first["resumed"] == 1
    assert first["updates made again"] == 30
    assert first["replicas"] == "4 → 2"
    assert second["replicas"] == "4"
    assert second["samples"] == 200 * 44
    assert second["best accuracy (%)"] == 99
    assert second["last loss"] == pytest.approx(2 / 41)
    assert second["idle (%)"] == pytest.approx(100 * 0.25 / (4 * 0.5))
    # Half of the updates were made by two replicas.
    expected = 60 * 0.25 / (30 * 4 * 0.5 + 30 * 2 * 0.5)
    assert first["idle (%)"] == pytest.approx(100 * expected)
    text = page.read_text(encoding="utf-8")
    assert "<th>first run</th>" in text
    assert "<td>linear</td>" in text


def test_a_log_of_another_program_needs_no_more_than_steps(tmp_path):
    """As the examples write it, without an optimizer of ours."""
    log = tmp_path / "run.jsonl"
    file = vbs.RunFile(log)
    file.begin(0)
    file.write({"step": 0, "loss": 1.0, "time": 5.0})
    vbs.write_report([log], tmp_path / "page" / "report.html")
    assert "learning rate" not in (tmp_path / "page" / "report.html").read_text()


def test_members_that_come_and_go_are_told(tmp_path):
    """A live run's log begins with the member that writes it, alone."""
    file = vbs.RunFile(tmp_path / "run.jsonl", num_replicas=1)
    file.begin(0)
    for step in range(12):
        if step % 4 == 0:
            generation = 1 + step // 4
            num_replicas = (3, 2, 4)[step // 4]
            file.event(
                "members", step, generation=generation, num_replicas=num_replicas
            )
        idle = 0.25 * num_replicas
        file.write({"step": step, "batch_size": 8, "seconds": 1, "idle_seconds": idle})
    [row] = report.summary({"live": vbs.read_run(file.path)}).T.to_dict().values()
    assert row["replicas"] == "3 → 2 → 4"
    assert row["generations"] == 3
    assert row["idle (%)"] == pytest.approx(25)
    page = vbs.write_report([file.path], tmp_path / "report.html").read_text("utf-8")
    assert "Events: ▶ start, ▲ more members, ▼ fewer members<" in page
    assert re.search("generation: 2[^:]*br[^:]*num_replicas: 2", page)


def test_names_are_escaped_and_long_runs_thinned(tmp_path):
    log = write_log(tmp_path / "<b>" / "run.jsonl", 9000, noise=False)
    path = vbs.write_report([log], tmp_path / "report.html")
    assert "<b>" not in re.sub(r"<script.*?</script>", "", path.read_text(), flags=16)
    assert path.stat().st_size < 7e6


@pytest.mark.parametrize(
    ("logs", "message"),
    [(["a", "a"], "a run is given twice"), (["b"], "No such file"), ([], "needs the")],
)
def test_wrong_logs_say_so(tmp_path, monkeypatch, logs, message):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "a" / "run.jsonl", 2, noise=False)
    with pytest.raises((ValueError, OSError), match=message):
        vbs.write_report(logs, tmp_path / "report.html")
