"""Says what the TPU's compiler makes of the packages' programs, without a TPU.

Runs cases of `cases.py` on emulated replicas, collects the distinct programs that every
replica gives to XLA, and compiles each for slices of several generations of TPUs. The
table has one row for every case and slice, of its slowest, largest and most costly
program; flops and bytes are the compiler's estimates.

It fails where the compiler refuses a program or makes more than --at-most MiB of code
of it, replicas run different programs, a number is written into a program, or an array
of float64 is computed; see `program_checks.py`.

    make tpu-compiler
    python tools/tpu/compile_programs.py --output tpu.json
    python tools/tpu/compile_programs.py --quick --slices v5e:2x4
    python tools/tpu/compile_programs.py --costs GPT-2 --num-replicas 2 \\
        --slices v5e:2x2 --keep costs

What --keep has, of a run that was interrupted, is not done again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

from tools.record import parser_with_output, save
from tools.tpu.cases import CASES, COSTS, EVERY, QUICK, TRACED
from tools.tpu.program_checks import (
    Program,
    distinct,
    problems,
    programs_by_case,
    wide_integers,
)

HERE = Path(__file__).resolve().parent
SLICES = ["v5e:2x4", "v6e:2x4", "v4:2x2x4"]
COMPILER = HERE.parents[1] / ".venv-tpu" / "bin" / "python"
By = Mapping[str, Any]


def programs_of(
    cases: Sequence[str], num_replicas: int, folder: Path, traces: bool
) -> tuple[dict[str, list[list[Program]]], dict[str, list[Program]]]:
    """Returns all programs by case and rank, and by case those of a last step.

    The folder keeps them, and what it has of the same cases is read.
    """
    log, done_cases = folder / "programs", folder / "cases.json"
    run = [num_replicas, traces, *cases]
    if not done_cases.exists() or json.loads(done_cases.read_text()) != run:
        for old in folder.glob("programs.*"):
            old.unlink()  # torch_xla appends
        _run_cases(cases, num_replicas, log, traces)
        done_cases.write_text(json.dumps(run))
    logs = [Path(f"{log}.{n}").read_text(encoding="utf-8") for n in range(num_replicas)]
    by_rank = [programs_by_case(text) for text in logs]
    by_case = {case: [found[case] for found in by_rank] for case in cases}
    return by_case, programs_by_case(logs[0], last_step=True)


def _run_cases(
    cases: Sequence[str], num_replicas: int, log: Path, traces: bool
) -> None:
    saving = {"XLA_SAVE_TENSORS_FILE": str(log), "XLA_SAVE_TENSORS_FMT": "hlo"}
    command = [sys.executable, HERE / "cases.py", "--num-replicas", str(num_replicas)]
    done = subprocess.run(
        [*command, *(["--trace"] if traces else []), *cases],
        env={**os.environ, **saving, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"the cases failed:\n{done.stderr[-2000:]}")


def compiled(
    programs: Sequence[Program],
    slices: Sequence[str],
    num_replicas: int,
    python: Path,
    folder: Path,
) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns what the TPU's compiler says, by a program's text and the slice.

    The folder keeps every row as it comes, and what it has is not compiled again.
    """
    kept = {
        (program.text, name): folder / _row_name(program.text, name, num_replicas)
        for program in programs
        for name in slices
    }
    left = {key: path for key, path in kept.items() if not path.exists()}
    with tqdm(total=len(kept), initial=len(kept) - len(left), disable=None) as bar:
        for name in slices:
            texts = [text for text, of_slice in left if of_slice == name]
            for text, row in _rows(texts, name, num_replicas, python, folder):
                kept[text, name].write_text(json.dumps(row))
                bar.update()
    return {
        (program.text, name): {
            **json.loads(kept[program.text, name].read_text()),
            "place": program.place,
        }
        for program in programs
        for name in slices
    }


def whole(
    last_steps: Mapping[str, Sequence[Program]],
    slices: Sequence[str],
    num_replicas: int,
    python: Path,
    folder: Path,
) -> dict[str, Sequence[Program]]:
    """Returns the steps of whose programs the folder has every row."""
    del python
    return {
        case: own
        for case, own in last_steps.items()
        if all(
            (folder / _row_name(program.text, slices[0], num_replicas)).exists()
            for program in own
        )
    }


def _row_name(text: str, slice_name: str, num_replicas: int) -> str:
    described = json.dumps([text, slice_name, num_replicas]).encode()
    return f"{hashlib.sha256(described).hexdigest()[:24]}.json"


def _rows(
    texts: Sequence[str], slice_name: str, num_replicas: int, python: Path, folder: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields programs and what the compiler says of them, which runs beside this."""
    if not texts:
        return
    paths = [folder / f"{number:04}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts):
        path.write_text(text, encoding="utf-8")
    command = [python, HERE / "compiler.py", *paths, "--slices", slice_name]
    command += ["--num-replicas", str(num_replicas)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            row = json.loads(line)
            yield texts[int(row["program"])], row
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command[:2]))} failed: run it by hand")


def summary(programs: Sequence[Program], rows: Sequence[By]) -> dict[str, Any]:
    """Returns the worst of a case's programs on one slice."""
    whole = [row for row in rows if "refused" not in row]

    def most(name: str) -> float:
        return max((row[name] or 0 for row in whole), default=0)

    slowest = max(whole, key=lambda row: row["seconds"], default={"place": None})
    return {
        "programs": len(rows),
        "refused": len(rows) - len(whole),
        "slowest, s": most("seconds"),
        "slowest at": slowest["place"],
        "code, MiB": most("code bytes") / 2**20,
        "peak, MiB": most("peak bytes") / 2**20,
        "Mflop": most("flops") / 1e6,
        "MB": most("bytes") / 1e6,
        "64-bit operations": max(sum(wide_integers(p).values()) for p in programs),
        "collectives": max(len(p.collectives) for p in programs),
    }


def complaints(case: str, rows: Sequence[By], at_most: float) -> list[str]:
    """Returns which programs are refused, or have more MiB of code than at most.

    An unrolled loop shows in its code; how long it takes to compile depends on the day.
    """
    found = []
    for row in rows:
        if "refused" in row:
            found.append(f"{case}: {row['slice']} refuses {row['place']}: "
                         f"{row['refused']}")  # fmt: skip
        elif (code_mib := row["code bytes"] / 2**20) > at_most:
            found.append(f"{case}: {row['slice']} makes {code_mib:.1f} MiB of code for "
                         f"{row['place']}, more than {at_most:g} MiB")  # fmt: skip
    return found


def table(cases: Mapping[str, Mapping[str, By]], slices: Sequence[str]) -> str:
    """Returns the results in Markdown: seconds by slice, the rest of the first."""
    names = ["code, MiB", "peak, MiB", "Mflop", "MB"]
    names += ["64-bit operations", "collectives"]
    heads = ["case", "programs", *(f"{name.split(':')[0]}, s" for name in slices)]
    lines = [" | ".join([*heads, *names]), "|".join(["---"] * (len(heads + names)))]
    for case, by_slice in cases.items():
        first = by_slice[slices[0]]
        seconds = [f"{by_slice[name]['slowest, s']:.1f}" for name in slices]
        rest = [f"{first[name]:.0f}" for name in names]
        lines.append(" | ".join([case, str(first["programs"]), *seconds, *rest]))
    return "\n".join(f"| {line} |" for line in lines)


def costs(steps: Mapping[str, Sequence[By]]) -> dict[str, dict[str, Any]]:
    """Returns flops and bytes of all programs of a step, and the largest's memory.

    Where the compiler refuses a program of a step, it is what it says.
    """
    found: dict[str, dict[str, Any]] = {}
    for case, rows in steps.items():
        refusals = [row["refused"] for row in rows if "refused" in row]
        found[case] = {"refused": refusals[0]} if refusals else {
            "Gflop": sum(row["flops"] or 0 for row in rows) / 1e9,
            "GB": sum(row["bytes"] or 0 for row in rows) / 1e9,
            "peak, MiB": max(row["peak bytes"] for row in rows) / 2**20,
        }  # fmt: skip
    return found


def cost_table(steps: Mapping[str, By]) -> str:
    """Returns costs in Markdown, and their ratios to those of the first step."""
    first = next(iter(steps.values()))
    lines = [" | ".join(["last step of", *first, *["beside the first"] * len(first)])]
    lines.append("|".join(["---"] * (2 * len(first) + 1)))
    for case, cost in steps.items():
        if "refused" in cost:
            lines.append(" | ".join([case, *["refused"] * (2 * len(first))]))
            continue
        shown = [f"{value:.3g}" for value in cost.values()]
        ratios = [f"{cost[name] / first[name]:.2f}" for name in first]
        lines.append(" | ".join([case, *shown, *ratios]))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    parser = parser_with_output(__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--cases",
        nargs="+",
        choices=[*EVERY],
        metavar="CASE",
        help="rows of cases.py, by name (default: all but those of --costs)",
    )
    which.add_argument("--quick", action="store_true", help="one case of each family")
    which.add_argument("--costs", choices=[*COSTS], help="costs of a larger model")
    parser.add_argument("--trace", action="store_true",
                        help="write programs without running them")  # fmt: skip
    parser.add_argument(
        "--slices",
        nargs="+",
        default=SLICES,
        help=f"generation and topology of slices (default: {' '.join(SLICES)})",
    )
    parser.add_argument("--num-replicas", type=int, default=8, help="default: 8")
    parser.add_argument("--at-most", type=float, default=8.0, metavar="MIB",
                        help="code of one program; default: 8")  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="FOLDER",
                        help="programs and what the compiler says of each")  # fmt: skip
    parser.add_argument("--kept", action="store_true",
                        help="compile nothing, tell what is kept")  # fmt: skip
    parser.add_argument("--python", type=Path, default=COMPILER, help="JAX and libtpu")
    args = parser.parse_args()
    if not args.python.exists():
        parser.error(f"{args.python} does not exist: make tpu-compiler")
    names = args.cases or list(QUICK if args.quick else CASES)
    if args.costs:
        names = [f"{args.costs}, {name}" for name in COSTS[args.costs]]
    traces = args.trace or args.costs in TRACED
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        by_case, last_steps = programs_of(names, args.num_replicas, folder, traces)
        how = (args.slices, args.num_replicas, args.python, folder)
        if args.kept:
            last_steps = whole(last_steps, *how)
        if args.costs:
            result, wrong = told_costs(last_steps, *how), []
        else:
            result, wrong = told_cases(by_case, args.at_most, *how)
    save(args.output, {"replicas": args.num_replicas, **result})
    if wrong:
        sys.exit("\n".join(wrong))


def told_cases(
    by_case: Mapping[str, Sequence[Sequence[Program]]],
    at_most: float,
    slices: Sequence[str],
    num_replicas: int,
    python: Path,
    folder: Path,
) -> tuple[dict[str, Any], list[str]]:
    """Prints the table of cases; returns it, and what is wrong."""
    every = distinct(p for ranks in by_case.values() for own in ranks for p in own)
    told = compiled(every, slices, num_replicas, python, folder)
    cases: dict[str, Any] = {}
    wrong: list[str] = []
    for case, by_rank in by_case.items():
        programs = distinct(program for own in by_rank for program in own)
        wrong += [f"{case}: {text}" for text in problems(dict(enumerate(by_rank)))]
        cases[case] = {}
        for name in slices:
            rows = [told[program.text, name] for program in programs]
            cases[case][name] = summary(programs, rows)
            wrong += complaints(case, rows, at_most)
    print(table(cases, slices))
    return {"cases": cases, "wrong": wrong}, wrong


def told_costs(
    last_steps: Mapping[str, Sequence[Program]],
    slices: Sequence[str],
    num_replicas: int,
    python: Path,
    folder: Path,
) -> dict[str, Any]:
    """Prints and returns what last steps cost on the first of the slices."""
    programs = distinct(p for own in last_steps.values() for p in own)
    told = compiled(programs, slices[:1], num_replicas, python, folder)
    steps = {
        case: [told[program.text, slices[0]] for program in own]
        for case, own in last_steps.items()
        if own
    }
    found = costs(steps)
    print(cost_table(found))
    return {"slice": slices[0], "last steps": found}


if __name__ == "__main__":
    main()
