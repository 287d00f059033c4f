"""The benchmarks' report: goals are judged, and what is missed or failed is loud."""

import pytest
from support.documents import ROOT, read

from tools.record import row, versions
from tools.report import run_all as report
from tools.report.page import page, share_of_goal

FAST = row("fast", [1.0, 1.02, 1.1], at_most=1.05)
SLOW = row("slow", [2.0, 3.0, 4.0], "s", at_most=2.5)


def test_a_number_takes_a_share_of_its_goal():
    peer, none = row("peer", 6.0, at_least=3.0), row("none", 0, at_most=0)
    some, free = row("some", 1, at_most=0), row("no goal", 1.0)
    found = [share_of_goal(line) for line in (FAST, SLOW, peer, none, some, free)]
    assert found == [pytest.approx(1.02 / 1.05), 1.2, 0.5, 0, 2, None]
    assert free["quartiles"] == [None, None]


def test_what_is_missed_and_what_failed_is_on_the_first_lines():
    record = {"date": "2026-01-01", "command": "bench.py", "versions": versions()}
    records = {"a": record | {"rows": [FAST, SLOW]}}
    text = page({"a": "Steps", "c": ""}, records, {"b": "why"})
    first, _, rest = text.partition("`make bench`")
    assert "1 of 2 goals are met.\n\n- **missed**: slow" in first
    assert "**b failed**: why." in first
    assert "**c has no record yet**" in first
    assert "| fast | 1.02 | 1.00 to 1.10 | at most 1.05 | yes |" in rest
    assert "| slow | 3.00 s | 2.00 to 4.00 | at most 2.5 | **missed** |" in rest


def test_a_benchmark_without_a_record_has_failed(monkeypatch, tmp_path):
    for name in ("FOLDER", "LOGS"):
        monkeypatch.setattr(report, name, tmp_path)
    monkeypatch.setitem(report.RUNS, "absent", report.Run("", "none", "", ""))
    assert "make bench" in report.run("absent", "")
    monkeypatch.setattr(report, "python_of", lambda environment: "/bin/false")
    assert "exit status 1" in report.run("bench_step", "")


def test_the_page_is_that_of_the_records():
    found = report.records()
    assert read("docs/benchmarks/REPORT.md") == page(report.titles(), found, {})


def test_every_benchmark_is_in_the_report():
    scripts = {path.stem for path in (ROOT / "tools/benchmarks").glob("bench_*.py")}
    assert scripts <= {how.script or name for name, how in report.RUNS.items()}
