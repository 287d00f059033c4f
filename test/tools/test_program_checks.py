"""What the checks of programs catch, from text and from emulated replicas."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.documents import read
from support.xla_replica.replicas import on_xla
from torch import nn

import xla_replica
from tools.benchmarks import bench_start
from tools.tpu import cases, compile_programs, program_checks
from tools.tpu.cases import CASES, COSTS, EVERY, QUICK, write_mark
from tools.tpu.program_checks import CASE_MARK, Program, problems, programs_by_case
from tools.tpu.tracing import scatter_add, tracing

# Of a start; three are a minibatch, an update, and the update that makes the momentum.
PROGRAMS = {"linear": 3, "adascale": 3, "GraB": 7, "RigL": 7}
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
    last_step = program_checks.LAST_STEP_MARK
    log = (
        f"{saved('7')}\n{CASE_MARK}first\n{saved('1')}\n{last_step}\n{saved('2')}"
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


COMPARED = "pred[2,3]{1,0} compare(f64[2,3]{1,0} %a, f64[2,3]{1,0} %b)"


@pytest.mark.parametrize(("text", "said"), [
    ("f64[2,3]{1,0} broadcast(%a)", None),
    ("f32[2]{0} convert(f64[2]{0} %a)", None),
    ("f64[2,3]{1,0} multiply(%a, %b)", "multiply of f64[2,3]"),
    ("f64[4]{0} parameter(1)", "a.py:1 has a parameter of f64[4]"),
    (COMPARED, "compare of f64[2,3]"),
    (COMPARED, "xla_replica.comparable"),
])  # fmt: skip
def test_an_array_of_float64_is_caught(text, said):
    found = problems({0: [Program(f"  %x.1 = {text}", "a.py:1")]})
    assert said in found[0] if said else not found


ROW = {"slice": "v5e:2x4", "place": "a.py:1", "seconds": 1.0, "code bytes": 2**20,
       "peak bytes": 2**20, "flops": 1e9, "bytes": 2e9}  # fmt: skip


@pytest.mark.parametrize(("row", "replica_1", "message"), [
    (ROW, saved(), None),
    (ROW, saved(dtype="f32[5]"), ": the program at me/training"),
    ({**ROW, "refused": "no"}, saved(), ": v5e:2x4 refuses a.py:1: no"),
    ({**ROW, "code bytes": 9 * 2**20}, saved(), "makes 9.0 MiB of code for a.py"),
    ({**ROW, "seconds": 9.0}, saved(), None),  # the machine did other work
])  # fmt: skip
def test_the_command_fails_where_something_is_wrong(
    monkeypatch, tmp_path, capsys, row, replica_1, message
):
    first, case = cases = ["plain step", "broadcast of parameters"]
    output = tmp_path / "found.json"
    plain = programs(saved("7"))
    by_rank = [programs(saved()), programs(replica_1)]

    def compiled(found, *args):
        rows = {plain[0].text: ROW}
        return {(each.text, "v5e:2x4"): rows.get(each.text, row) for each in found}

    monkeypatch.setattr(compile_programs, "compiled", compiled)
    made = {first: [plain, plain], case: by_rank}, {case: programs(saved())}
    monkeypatch.setattr(compile_programs, "programs_of", lambda *args: made)
    arguments = ["x", "--cases", *cases, "--slices", "v5e:2x4", "--python", __file__]
    monkeypatch.setattr("sys.argv", [*arguments, "--output", str(output)])
    if message is None:
        compile_programs.main()
        assert f"| {case} | 1 | {row['seconds']} | 1 | 1 |" in capsys.readouterr().out
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


@pytest.fixture
def logs_of(monkeypatch, tmp_path):
    def write(function: Callable) -> tuple[list[str], list]:
        path = tmp_path / function.__name__
        monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(path))
        monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "hlo")
        results = xla_replica.launch(function, (), 2, "xla")
        return [Path(f"{path}.{rank}").read_text() for rank in (0, 1)], results

    return write


@on_xla
def test_the_programs_of_replicas_are_checked(logs_of):
    logs = [*map(programs_by_case, logs_of(wrong_runs)[0])]

    def found(name: str) -> list[str]:
        return problems({rank: log[name] for rank, log in enumerate(logs)})

    assert found("right") == []
    [baked] = found("baked")
    assert re.match("2 programs at .*test_program_checks.py:.* only in numbers", baked)
    assert "Replica.scalar" in baked
    assert any("parameter of f64[5]" in text for text in found("float64"))
    for rank, text in enumerate(found("one replica")):
        assert f"ran on replicas [{rank}] of 2" in text


def run_elastic(rank: int) -> None:
    xla_replica.current().sync()
    write_mark(CASE_MARK + "adascale")
    layers = nn.Flatten(), nn.Linear(5, 10)
    work = cases.Work(lambda: nn.Sequential(*layers), (1, 5), 3)
    cases.elastic("adascale", "sgd", work)


def run_traced(rank: int) -> list[float]:
    """Sums bfloat16, too, and returns what a replica reads of it."""
    with tracing(write_mark):
        run_elastic(rank)
        replica = xla_replica.current()
        values = torch.full((4,), float(rank), dtype=torch.bfloat16)
        values = values.to(replica.device)
        write_mark(CASE_MARK + "narrow")
        replica.all_reduce_([values])
        assert not values.float().cpu().any()
        return replica.fetch([values])[0].tolist()


@on_xla
def test_programs_that_are_written_without_being_run_are_those_that_run(logs_of):
    [_, run], _ = logs_of(run_elastic)
    [_, traced], fetched = logs_of(run_traced)
    expected, found = (
        [one.text.strip() for one in programs_by_case(log, last_step=True)["adascale"]]
        for log in (run, traced)
    )
    assert len(expected) == 2
    assert expected == found
    [program] = programs_by_case(traced)["narrow"]
    [collective] = program.collectives
    assert collective.startswith("all-reduce (bf16[4]{")
    assert fetched == [[0.0] * 4] * 2


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_dense_scatter_is_torchs(dim):
    size = [3, 4, 2]
    index, values = torch.randint(0, 7, size), torch.randn(size)
    size[dim] = 7
    tensor = torch.randn(size)
    found = scatter_add(tensor, dim, index, values)
    torch.testing.assert_close(found, tensor.scatter_add(dim, index, values))


def all_starts(rank: int) -> dict[str, int]:
    return {kind: bench_start.start(rank, kind, 0.0)[1] for kind in bench_start.KINDS}


@on_xla
def test_a_start_compiles_few_programs():
    """Its cache on disk cannot be loaded, so every start compiles all of them."""
    assert xla_replica.launch(all_starts, (), 2, "xla")[0] == PROGRAMS


def test_the_page_says_how_many_programs_a_start_compiles():
    record = json.loads(read("docs/benchmarks/report/bench_start.json"))
    for kind, number in PROGRAMS.items():
        assert record[kind]["programs"] == [number, number]
        assert f"| {kind} | {number} |" in read("docs/tpu.md")


def test_every_family_is_compiled():
    assert set(QUICK) < set(CASES)
    for family in ("plain", "elastic", "GraB", "topology", "per-sample", "pool"):
        assert any(name.startswith(family) for name in QUICK), family
    assert len(EVERY) == len(CASES) + sum(map(len, COSTS.values()))


def test_the_recorded_table_is_that_of_all_cases_and_of_the_page():
    record = json.loads(read("docs/benchmarks/compile_programs.json"))
    assert set(record["cases"]) == set(CASES)
    page = read("docs/benchmarks/README.md")
    for case, by_slice in record["cases"].items():
        assert {"v5e", "v6e", "v4"} <= {name.split(":")[0] for name in by_slice}
        seconds = [f"{found['slowest, s']:.1f}" for found in by_slice.values()]
        programs = by_slice["v5e:2x4"]["programs"]
        assert f"| {case} | {programs} | {' | '.join(seconds)} | " in page
        for name, found in by_slice.items():
            assert found["refused"] == 0
            assert found["code, MiB"] <= 8, (case, name)


def test_the_recorded_costs_are_those_of_all_cases_and_of_the_page():
    files = {"transformer": "", "GPT-2": "-gpt2", "ResNet-50": "-resnet50"}
    for model, end in files.items():
        record = json.loads(read(f"docs/benchmarks/compile_costs{end}.json"))
        steps = record["last steps"]
        names = {name.removeprefix(f"{model}, ") for name in steps}
        assert names == COSTS[model].keys()
        for line in compile_programs.cost_table(steps).splitlines()[2:]:
            assert line.replace(f"{model}, ", "") in read("docs/tpu.md")
