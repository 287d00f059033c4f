"""tools/benchmarks/bench_rigl.py measures what it says, in turns and in time."""

from __future__ import annotations

import pytest
import torch
from support.rigl_xla.resnet import RESNET50_WEIGHTS

from rigl_xla import RigLScheduler
from tools.benchmarks import bench_rigl

pytestmark = pytest.mark.usefixtures("one_thread")


class Clock:
    """Time that passes when a function says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_kinds_take_turns_and_the_time_is_kept():
    clock, calls = Clock(), []

    def function(name: str, seconds: float):
        def run() -> float:
            calls.append(name)
            clock.now += seconds
            return seconds

        return run

    functions = {"dense": function("dense", 10.0), "sparse": function("sparse", 11.0)}
    found = bench_rigl.in_turns(functions, 10, 1.5, "steps", clock)
    assert calls == ["dense", "sparse", "sparse", "dense", "dense", "sparse",
                     "sparse", "dense"]  # fmt: skip
    assert found == {"dense": [10.0] * 4, "sparse": [11.0] * 4}  # 84 of 90 seconds
    assert len(bench_rigl.in_turns(functions, 3, 0.0, "steps", clock)["dense"]) == 1


def test_a_disturbed_round_does_not_count():
    seconds = {"sparse": [1.1, 2.2, 9.0, 4.4, 1.1], "dense": [1.0, 2.0, 3.0, 4.0, 1.0]}
    found = bench_rigl.ratio_of(seconds, "sparse", "dense")
    assert found["ratio"] == pytest.approx(1.1)
    assert found["quartiles"] == pytest.approx([1.1, 1.1])
    assert found["seconds"] == {"sparse": 2.2, "dense": 2.0}
    assert found["rounds"] == 5


@pytest.mark.slow
def test_both_parts_run_on_resnet50():
    steps = bench_rigl.ordinary_steps(1, 1, side=32, batch_size=2)
    assert steps["rounds"] == 1
    assert 0.2 < steps["ratio"] < 50
    updates = bench_rigl.topology_updates(RigLScheduler, 1, 1)  # against itself
    assert 0.2 < updates["ratio"] < 5
    sizes = [torch.Size(shape).numel() for shape in RESNET50_WEIGHTS.values()]
    assert updates["weights"] == sum(sizes)


def test_bad_arguments_say_so(capsys):
    for arguments, message in [
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--only-steps", "--only-updates"], "leave nothing to do"),
    ]:
        with pytest.raises(SystemExit):
            bench_rigl.arguments(arguments)
        assert message in capsys.readouterr().err
