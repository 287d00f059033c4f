"""The picture of runs: what its lines say, and that it needs no display."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colors, figure, image
from support.scripts import python
from support.xla_replica.replicas import of_torch_alone

import variable_batch_size as vbs

UPDATES, PAUSE = 40, 5000.0  # seconds


def write_log(path: Path, resumed_at: tuple[int, ...] = (), **columns) -> Path:
    """Writes the log of a run whose numbers are known, a second for each update."""
    starts, time = [0, *resumed_at], 1000.0
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], UPDATES])):
        file = vbs.RunFile(path, num_replicas=4 - number)
        file.begin(start)
        for step in range(start, min(end + 3, UPDATES)):  # three are lost
            time += 1
            file.write({
                "step": step, "batch_size": 64, "samples": 64 * (step + 1), "lr": 0.1,
                "seconds": 1.0, "time": time,
                **{name: column[step] for name, column in columns.items()},
            })  # fmt: skip
        time += PAUSE
    return path


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Draws a run or several; returns the panels, by their labels."""
    found: list[figure.Figure] = []
    save = figure.Figure.savefig

    def keep(self, *arguments, **options):
        found.append(self)
        save(self, *arguments, **options)

    def drawn(runs, name="a.png", x="updates"):
        if isinstance(runs, Path):
            runs = {"a": vbs.read_run(runs)}
        vbs.draw_runs(runs, tmp_path / name, x)
        return {axis.get_ylabel(): axis for axis in found.pop().axes}

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    return drawn


def lines(axis) -> list[np.ndarray]:
    """Returns ``(n, 2)`` points of the lines of a panel, without those of marks."""
    found = [line.get_xydata() for line in axis.lines]
    return [points for points in found if len(points) > 2]


def told(axis) -> np.ndarray:
    """Returns the points of the only line that are not in a gap."""
    [points] = lines(axis)
    return points[~np.isnan(points[:, 1])]


@pytest.mark.parametrize("x", ["updates", "samples", "hours"])
def test_an_update_is_from_where_it_begins_to_where_it_ends(x, tmp_path, draw):
    """Also after a resumption; hours do not count the pause, nor what was lost."""
    sizes = [32 * (1 + step % 3) for step in range(UPDATES)]
    ends = [*itertools.accumulate(sizes)]
    log = write_log(
        tmp_path / "run.jsonl", (10, 20), batch_size=sizes, samples=ends,
        loss=[1 / (1 + step) if step % 2 else None for step in range(UPDATES)],
    )  # fmt: skip
    panels = draw(log, x=x)
    starts, updates = [0, 10, 20], np.arange(UPDATES + 1)
    edges = {"updates": updates, "samples": [0, *ends], "hours": updates / 3600}
    edges = np.array(edges[x])
    [points] = lines(panels["batch size\n(samples)"])
    assert points[:, 0] == pytest.approx(np.insert(edges[1:], starts, edges[starts]))
    gaps = np.isnan(points[:, 1])
    assert points[gaps, 0] == pytest.approx(edges[starts])
    assert points[~gaps, 1].tolist() == sizes
    assert panels["batch size\n(samples)"].lines[0].get_drawstyle() == "steps-pre"
    assert told(panels["loss"])[:, 0] == pytest.approx(edges[2::2])
    assert told(panels["replicas"])[:, 1].tolist() == [4] * 10 + [3] * 10 + [2] * 20
    marks = [line for line in panels["loss"].lines if len(line.get_xdata()) == 2]
    assert [line.get_xdata()[0] for line in marks] == pytest.approx(edges[[10, 20]])


def test_of_resumptions_at_falling_steps_only_the_last_counts(tmp_path, draw):
    panel = draw(write_log(tmp_path / "run.jsonl", (20, 10)))["replicas"]
    assert told(panel)[:, 1].tolist() == [4] * 10 + [2] * 30
    assert np.isnan(lines(panel)[0][[0, 11], 1]).all()


def test_members_that_come_and_go_are_steps(tmp_path, draw):
    """A live run's log begins with the member that writes it, alone."""
    file = vbs.RunFile(tmp_path / "run.jsonl", num_replicas=1)
    file.begin(0)
    for step in range(12):
        if step % 4 == 0:
            file.event("members", step, num_replicas=(3, 2, 4)[step // 4])
        file.write({"step": step, "loss": 1.0})
    panels = draw(file.path)
    assert list(panels) == ["loss", "replicas"]  # those of which there are numbers
    assert told(panels["replicas"])[:, 1].tolist() == [3] * 4 + [2] * 4 + [4] * 4


def test_axes_are_logarithmic_where_that_is_legible(tmp_path, draw):
    doubling = [64 * 2 ** (step // 8) for step in range(UPDATES)]
    decaying = [0.1 * (1 - step / UPDATES) ** 4 for step in range(UPDATES)]
    columns = {"batch_size": doubling, "lr": decaying, "loss": decaying}
    panels = draw(write_log(tmp_path / "a", **columns))
    scales = [axis.get_yscale() for axis in panels.values()]
    assert scales == ["log", "linear", "log", "linear"]
    assert panels["learning rate"].get_ylim()[0] == 0


@of_torch_alone
def test_runs_differ_in_colour_and_in_style_and_are_named(tmp_path, draw):
    """At 1200 pixels; every line has points in the picture."""
    logs = {}
    for number in range(6):
        log = write_log(tmp_path / str(number), lr=[0.1 * (1 + number)] * UPDATES)
        logs[f"runs/{number}"] = vbs.read_run(log)
    for ending in ("png", "pdf", "svg"):
        panels = draw(logs, f"a.{ending}")
        assert (tmp_path / f"a.{ending}").stat().st_size > 5000
    text = (tmp_path / "a.svg").read_text()
    for name in (*logs, "learning rate", "replicas", "updates"):
        assert f"<!-- {name} -->" in text
    assert "resumed" not in text
    drawn = panels["learning rate"].lines
    looks = {line.get_color(): str(line._dash_pattern) for line in drawn}
    assert len(looks) == len(set(looks.values())) == 6
    pixels = image.imread(tmp_path / "a.png")[:, :, :3]
    assert pixels.shape[1] == 1200
    for color in looks:
        near = (abs(pixels - colors.to_rgb(color)) < 0.01).all(2)
        assert near.sum() > 200, color


@of_torch_alone
def test_it_needs_no_display_and_matplotlib_only_when_it_draws(tmp_path):
    """And without matplotlib one sentence says what to install."""
    log = write_log(tmp_path / "run.jsonl")
    code = (
        "import sys, variable_batch_size as vbs\n"
        "assert not {'matplotlib', 'pandas'} & set(sys.modules)\n"
        "from variable_batch_size.command_line import main\n"
        "assert not main(['plot', sys.argv[1]])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "sys.modules['matplotlib'] = None\n"
        "main(['plot', sys.argv[1], '--out', sys.argv[2]])\n"
    )
    done = python("-c", code, log, tmp_path / "b.png", status=2)
    told = "error: a picture needs matplotlib: pip install 'elastic-xla[plot]'\n"
    assert done.stderr.endswith(told)
