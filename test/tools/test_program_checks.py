"""What the checks of programs catch, from text and from emulated replicas."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from support.documents import ROOT, read
from support.xla_replica.replicas import needs_xla

import xla_replica
from tools.tpu import compile_programs, program_checks
from tools.tpu.cases import CASES, COSTS, EVERY, QUICK, write_mark
from tools.tpu.program_checks import (
    CASE_MARK,
    LAST_STEP_MARK,
    Program,
    problems,
    programs_by_case,
)

# Files of costs, by model.
RECORDED = {
    "transformer": "compile_costs",
    "GPT-2": "compile_costs-gpt2",
    "ResNet-50": "compile_costs-resnet50",
}
UPDATE = """\
HloModule IrToHlo.{id}, entry_computation_layout={{(f32[4]{{0}})->(f32[4]{{0}})}}

ENTRY %IrToHlo.{id} (p0.1: f32[4], p1.2: {dtype}) -> (f32[4]) {{
  %p0.1 = f32[4]{{0}} parameter(0), metadata={{op_type="xla__device_data"}}
  %p1.2 = {dtype}{{0}} parameter(1)
  %constant.3 = f32[] constant({number})
  %broadcast.4 = f32[4]{{0}} broadcast(f32[] %constant.3), dimensions={{}}
  %multiply.5 = f32[4]{{0}} multiply(f32[4]{{0}} %p0.1, f32[4]{{0}} %broadcast.4)
  %all-reduce.6 = f32[4]{{0}} all-reduce(f32[4]{{0}} %multiply.5), to_apply=%add
  %add.7 = s64[4]{{0}} add(s64[4]{{0}} %x, s64[4]{{0}} %x)
  ROOT %tuple.8 = (f32[4]{{0}}) tuple(f32[4]{{0}} %all-reduce.6)
}}

"""


def saved(number: str = "0.1", dtype: str = "f32[4]", program_id: int = 9) -> str:
    """Returns a program as torch_xla writes it, with its place and hash."""
    text = UPDATE.format(id=program_id, number=number, dtype=dtype)
    return (
        "[ScheduleSyncTensorsGraph]\nTensorsGraphInfo:\n"
        "  guard (/home/me/xla_replica/emulated/emulator.py:157)\n"
        "  sync (/lib/site-packages/torch_xla/torch_xla.py:87)\n"
        "  step (/home/me/training/train.py:12)\n"
        "  run (/lib/threading.py:982)\n\n"
        "Root Hashes: (0)\n\n## BEGIN_GRAPH\n"
        f"{text}\nGraph Hash: 5af1\n\n## END_GRAPH\n\n"
    )


def programs(*texts: str) -> list[Program]:
    return programs_by_case(f"\n{CASE_MARK}one\n{''.join(texts)}")["one"]


def test_a_log_is_read_by_case_and_last_step():
    log = (
        f"{saved('7')}\n{CASE_MARK}first\n{saved('1')}\n{LAST_STEP_MARK}\n{saved('2')}"
        f"\n{CASE_MARK}second, with two\n{saved('3')}{saved('4', program_id=77)}"
    )
    found = programs_by_case(log)
    assert [*found] == ["first", "second, with two"]
    assert [len(own) for own in found.values()] == [2, 2]
    [last] = programs_by_case(log, last_step=True)["first"]
    assert "constant(2)" in last.text
    assert programs_by_case(log, last_step=True)["second, with two"] == []
    assert last.place == "me/training/train.py:12"
    assert last.collectives == ["all-reduce f32[4]{0}"]
    assert "IrToHlo" not in last.text
    assert "metadata" not in last.text
    assert program_checks.wide_integers(last) == {"add s64[4]": 1}


def test_programs_that_are_right_have_no_problems():
    """They differ in their names; a single float64 is a Python number."""
    own = programs(saved(), saved(program_id=12), saved(dtype="f64[]"))
    assert problems({0: own, 1: own[::-1]}) == []


def test_a_number_written_into_a_program_is_caught():
    own = programs(saved("0.1"), saved("0.1"), saved("0.05"), saved("0.025"))
    [found] = problems({0: own, 1: own})
    assert "3 programs at me/training/train.py:12 differ only in numbers" in found
    assert "constant(0.05)" in found
    assert "Replica.scalar" in found


COMPARED = "pred[2,3]{1,0} compare(f64[2,3]{1,0} %a, f64[2,3]{1,0} %b)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("f64[2,3]{1,0} broadcast(%a)", None),
        ("f32[2]{0} convert(f64[2]{0} %a)", None),
        ("f64[2,3]{1,0} multiply(%a, %b)", "multiply of f64[2,3]"),
        ("f64[4]{0} parameter(1)", "a.py:1 has a parameter of f64[4]"),
        (COMPARED, "compare of f64[2,3]"),
        (COMPARED, "xla_replica.comparable"),
    ],
)
def test_an_array_of_float64_is_caught(text, said):
    found = problems({0: [Program(f"  %x.1 = {text}", "a.py:1")]})
    assert said in found[0] if said else not found


def test_a_different_program_on_one_replica_is_caught():
    usual, other = programs(saved()), programs(saved(dtype="f32[5]"))
    by_replica = dict(enumerate([usual, usual, other, usual]))
    most, one = problems(by_replica)
    assert "replicas [0, 1, 3] of 4" in most
    assert "replicas [2] of 4" in one
    [missing] = problems({0: usual, 1: []})
    assert "replicas [0] of 2" in missing


ROW = {"slice": "v5e:2x4", "place": "a.py:1", "seconds": 1.0, "CPU seconds": 1.0,
       "peak bytes": 2**20, "flops": 1e9, "bytes": 2e9}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "replica_1", "message"),
    [
        (ROW, saved(), None),
        (ROW, saved(dtype="f32[5]"), ": the program at me/training"),
        ({**ROW, "refused": "no"}, saved(), ": v5e:2x4 refuses a.py:1: no"),
        ({**ROW, "seconds": 9.0, "CPU seconds": 6.0}, saved(), "takes 9.0 s for a.py"),
        ({**ROW, "seconds": 9.0}, saved(), None),  # the machine did other work
    ],
)
def test_the_command_fails_where_something_is_wrong(
    monkeypatch, tmp_path, capsys, row, replica_1, message
):
    case, output = "broadcast of parameters", tmp_path / "found.json"
    by_rank = [programs(saved()), programs(replica_1)]
    last = {case: programs(saved())}
    made = {
        "programs_of": lambda *args: ({case: by_rank}, last),
        "compiled": lambda found, *args: {(p.text, "v5e:2x4"): row for p in found},
    }
    for name, stand_in in made.items():
        monkeypatch.setattr(compile_programs, name, stand_in)
    arguments = ["x", "--cases", case, "--slices", "v5e:2x4", "--python", __file__]
    monkeypatch.setattr("sys.argv", [*arguments, "--output", str(output)])
    if message is None:
        compile_programs.main()
        assert f"| {case} | 1 | {row['seconds']:.1f} | 1 |" in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit) as end:
            compile_programs.main()
        assert message in str(end.value.code)  # a text: status 1
    assert bool(json.loads(output.read_text())["wrong"]) == (message is not None)


def wrong_runs(rank: int) -> None:
    """Runs what is right, and three things that are wrong, without collectives."""
    replica = xla_replica.current()
    weights = replica.send(torch.ones(5))

    def run(name: str, *steps: Callable[[], torch.Tensor]) -> None:
        write_mark(f"{CASE_MARK}{name}")
        for step in steps:
            result = step()
            replica.sync()
            del result

    quarter, eighth = replica.scalar(0.25), replica.scalar(0.125)
    wide = replica.send(torch.ones(5, dtype=torch.float64))
    replica.sync()
    run("right", lambda: weights * quarter, lambda: weights * eighth)
    # torch_xla uploads Python numbers, but writes these ones into the program.
    run("baked", lambda: weights * 1.0, lambda: weights * 0.0)
    run("float64", lambda: wide * quarter)
    run("one replica", lambda: weights * (quarter[:, None] if rank else quarter))


@needs_xla
@pytest.mark.xla
def test_the_programs_of_replicas_are_checked(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(tmp_path / "log"))
    monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "hlo")
    xla_replica.launch(wrong_runs, (), 2, "xla")
    logs = [programs_by_case((tmp_path / f"log.{rank}").read_text()) for rank in (0, 1)]

    def found(name: str) -> list[str]:
        return problems({rank: log[name] for rank, log in enumerate(logs)})

    assert found("right") == []
    [baked] = found("baked")
    assert "differ only in numbers" in baked
    assert "test_program_checks.py" in baked
    assert any("parameter of f64[5]" in text for text in found("float64"))
    for rank, text in enumerate(found("one replica")):
        assert f"ran on replicas [{rank}] of 2" in text


def test_every_family_is_compiled():
    assert set(QUICK) < set(CASES)
    for family in ("plain", "elastic", "GraB", "topology", "per-sample", "pool"):
        assert any(name.startswith(family) for name in QUICK), family
    assert len(EVERY) == len(CASES) + sum(map(len, COSTS.values()))


def test_the_recorded_table_is_that_of_all_cases_and_of_the_page():
    record = json.loads((ROOT / "docs/benchmarks/compile_programs.json").read_text())
    assert set(record["cases"]) == set(CASES)
    page = read("docs/benchmarks/README.md")
    for case, by_slice in record["cases"].items():
        assert {"v5e", "v6e", "v4"} <= {name.split(":")[0] for name in by_slice}
        seconds = [f"{found['slowest, s']:.1f}" for found in by_slice.values()]
        programs = by_slice["v5e:2x4"]["programs"]
        assert f"| {case} | {programs} | {' | '.join(seconds)} | " in page
        for name, found in by_slice.items():
            assert found["refused"] == 0
            assert found["slowest, s"] <= 5, (case, name)


def test_the_recorded_costs_are_those_of_all_cases_and_of_the_page():
    folder, page = ROOT / "docs/benchmarks", read("docs/tpu.md")
    for model, file in RECORDED.items():
        record = json.loads((folder / f"{file}.json").read_text())
        names = {name.removeprefix(f"{model}, ") for name in record["last steps"]}
        assert names == COSTS[model].keys()
        shown = compile_programs.cost_table(record["last steps"]).splitlines()[2:]
        for line in shown:
            assert line.replace(f"{model}, ", "") in page
