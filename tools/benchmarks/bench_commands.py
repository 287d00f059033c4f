"""Times what a newcomer runs, after the set-up: training on digits, and the tests.

python tools/benchmarks/bench_commands.py
python tools/benchmarks/bench_commands.py --tests --output result.json
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

from tools.record import ROOT, parser_with_output, row, save

# By the command: the most seconds that it may take.
COMMANDS = {"make mnist": 15.0, "make live": 60.0}
TESTS = {"make test": 480.0, "make test ENV=torch": 480.0}


def main() -> None:
    parser = parser_with_output(__doc__)
    parser.add_argument(
        "--tests", action="store_true", help="time the default tests, too (20 min)"
    )
    args = parser.parse_args()
    rows = []
    for command, goal in (COMMANDS | (TESTS if args.tests else {})).items():
        began = time.perf_counter()
        done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        print(f"{command}: {seconds:.1f} s, at most {goal:.0f}", flush=True)
        if done.returncode:
            sys.exit(f"{command} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        rows.append(row(command, seconds, "s", at_most=goal))
    save(args.output, {"rows": rows})


if __name__ == "__main__":
    main()
