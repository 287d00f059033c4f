"""Says what the TPU's compiler makes of the packages' programs, without a TPU.

Runs every case of `cases.py` on emulated replicas, collects the distinct programs that
XLA was given, and compiles each for slices of several generations of TPUs. The table
has one row for every case and slice, of its slowest, largest and most costly program;
flops and bytes are the compiler's estimates.

    make tpu-compiler
    python tools/tpu/compile_programs.py --output tpu.json
    python tools/tpu/compile_programs.py --cases "elastic step, linear" --slices v5e:2x4
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

from tools.record import parser_with_output, save
from tools.tpu.cases import CASES

HERE = Path(__file__).resolve().parent
SLICES = ["v5e:2x4", "v6e:2x4", "v4:2x2x4"]
COMPILER = HERE.parents[1] / ".venv-tpu" / "bin" / "python"


def programs_of(case: str, num_replicas: int, folder: Path) -> list[Path]:
    """Returns the programs that a case gives to XLA, each once."""
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    done = subprocess.run(
        [sys.executable, HERE / "cases.py", "--replicas", str(num_replicas), case],
        env={**os.environ, "XLA_FLAGS": flags, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr[-2000:]}")
    distinct = {
        path.read_text().split("\n", 1)[1]: path
        for path in sorted(folder.glob("*before_optimizations.txt"))
    }
    return list(distinct.values())


def compiled(
    programs: list[Path], slices: list[str], num_replicas: int, python: Path
) -> list[dict[str, Any]]:
    """Returns what the TPU's compiler says of every program and slice."""
    command = [python, HERE / "compiler.py", *programs, "--slices", *slices]
    command += ["--replicas", str(num_replicas)]
    told = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).stdout
    return [json.loads(line) for line in told.splitlines()]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the worst of a case's programs on one slice."""
    whole = [row for row in rows if "refused" not in row]

    def most(name: str) -> float:
        return max((row[name] or 0 for row in whole), default=0)

    return {
        "programs": len(rows),
        "refused": len(rows) - len(whole),
        "slowest, s": most("seconds"),
        "peak, MiB": most("peak bytes") / 2**20,
        "Mflop": most("flops") / 1e6,
        "MB": most("bytes") / 1e6,
        "64-bit operations": most("64-bit operations"),
        "collectives": max((len(row["collectives"]) for row in rows), default=0),
    }


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE"
    )
    parser.add_argument("--slices", nargs="+", default=SLICES)
    parser.add_argument("--replicas", type=int, default=8, help="default: 8")
    parser.add_argument("--python", type=Path, default=COMPILER, help="JAX and libtpu")
    args = parser.parse_args()
    if not args.python.exists():
        parser.error(f"{args.python} does not exist: make tpu-compiler")
    result: dict[str, Any] = {"replicas": args.replicas, "cases": {}}
    for case in tqdm(args.cases, desc="cases", disable=None):
        with tempfile.TemporaryDirectory() as folder:
            programs = programs_of(case, args.replicas, Path(folder))
            rows = compiled(programs, args.slices, args.replicas, args.python)
        result["cases"][case] = {}
        for slice_name in args.slices:
            found = summary([row for row in rows if row["slice"] == slice_name])
            result["cases"][case][slice_name] = found
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
            tqdm.write(f"{case}, {slice_name}: {numbers}")
        result["cases"][case]["refusals"] = [r for r in rows if "refused" in r]
    save(args.output, result)


if __name__ == "__main__":
    main()
