"""Runs every benchmark, and writes what all of them found into one page.

    python tools/report/run_all.py              # the short form
    python tools/report/run_all.py --full       # more rounds, and what takes hours
    python tools/report/run_all.py --only bench_step bench_ddp
    python tools/report/run_all.py --page-only  # of the records that are there

`make bench` makes the environments that it needs, and runs it. Benchmarks run in turn,
each in a process and in the environment that its row below names, on a machine that
should do nothing else. A benchmark leaves its record in docs/benchmarks/report/; the
page docs/benchmarks/REPORT.md has the newest one of each, with its date and commit, so
that the short form keeps what only the full one measures. A goal that is missed is in
bold and in the first paragraph; so is a benchmark that failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a bare checkout

from tools.record import ROOT
from tools.report.page import draw, page

FOLDER = ROOT / "docs/benchmarks/report"
PAGE = ROOT / "docs/benchmarks/REPORT.md"
LOGS = ROOT / "build/bench"


class Run(NamedTuple):
    """How a benchmark is run.

    Attributes:
        title: What it compares.
        environment: The environment, ``.venv-NAME``.
        short, full: Its arguments in either form; one without a short form is left out
            of it, unless ``--only`` names it.
        script: The name of its file, where that is not called like the record.
    """

    title: str
    environment: str
    short: str | None
    full: str
    script: str = ""


RUNS = {
    "bench_step": Run(
        "An elastic step beside a loop by hand, on XLA", "xla",
        "--num-replicas 1 8 --batch-sizes 16 --rounds 4",
        "--num-replicas 1 2 4 8 --rounds 24",
    ),
    "bench_scale": Run(
        "An update alone; samples and traces", "outside", "--rounds 100",
        "--rounds 2000",
    ),
    "bench_ddp": Run(
        "An elastic step beside DistributedDataParallel, two processes", "outside",
        "--substeps 1 2 4 --rounds 15",
        "--substeps 1 2 4 --rounds 60",
    ),
    "bench_fsdp2": Run(
        "An elastic step beside FSDP2, two processes", "outside",
        "--against FSDP2 --substeps 1 --rounds 10",
        "--against FSDP2 --substeps 1 4 --rounds 60", "bench_ddp",
    ),
    "bench_exact": Run("Exact sums", "torch", "--rounds 10", "--rounds 60"),
    "bench_live": Run(
        "Live members beside DDP, elastic replicas and torchft, two processes", "torch",
        "--models gpt cnn mlp --rounds 2", "--models gpt cnn mlp --rounds 5",
    ),
    "bench_sharded": Run(
        "Live members whose model FSDP2 shards, beside FSDP2, DDP and torchft", "torch",
        "--quick", "",
    ),
    "bench_changes": Run(
        "Live members that die and join", "torch",
        "--models 10MB 100MB --substeps 1 --rounds 1",
        "--models 10MB 100MB --substeps 1 --rounds 5", "bench_live",
    ),
    "bench_gates": Run(
        "Per-sample gradients and GraB, beside training", "outside",
        "--rounds 6", "--rounds 24",
    ),
    "bench_public": Run(
        "The same for public models of 5 to 11 million parameters", "outside",
        "--rounds 3 --cases gpt2 resnet18 vit_tiny",
        "--rounds 24 --cases gpt2 resnet18 vit_tiny", "bench_gates",
    ),
    "bench_per_sample": Run(
        "Norms, Gram matrices and gradients beside Opacus, TorchJD and vmap", "outside",
        "--models mlp cnn transformer --rounds 5",
        "--models mlp cnn transformer --rounds 24",
    ),
    "bench_vit_tiny": Run(
        "Norms of a ViT tiny beside Opacus and vmap", "outside",
        "--quantities norms --models vit_tiny --batch-size 16 --rounds 3",
        "--quantities norms --models vit_tiny --batch-size 16 --rounds 24",
        "bench_per_sample",
    ),
    "bench_grab": Run(
        "GraB's balance beside grab-sampler", "outside",
        "--types mean pair --sizes 1000 100000 --epochs 2", "",
    ),
    "bench_rigl": Run(
        "RigL on ResNet-50, beside dense training and rigl-torch", "xla",
        "--only-updates --update-rounds 2", "",
    ),
    "bench_start": Run("Starts", "xla", "--device xla", "--device xla"),
    "bench_checkpoint": Run(
        "Checkpoints", "xla", None, "--device xla --rounds 16 --num-replicas 1 2"
    ),
    "counts": Run(
        "Counts, which a test holds to these limits", "torch", "", "", "count_calls"
    ),
    "bench_commands": Run("What a newcomer runs", "xla", "", "--tests"),
}  # fmt: skip


def python_of(environment: str) -> str:
    """Returns the path of an environment's interpreter."""
    return str(ROOT / f".venv-{environment}/bin/python")


def run(name: str, arguments: str) -> str | None:
    """Runs a benchmark; returns None, or what to say of its failure.

    A benchmark that misses its goals may exit with a status other than 0; what counts
    is whether it wrote its record.
    """
    how, record, log = RUNS[name], FOLDER / f"{name}.json", LOGS / f"{name}.log"
    python = python_of(how.environment)
    if not Path(python).exists():
        return f"there is no {python}: make bench makes it"
    [script] = ROOT.glob(f"tools/*/{how.script or name}.py")
    unfinished = LOGS / record.name
    unfinished.unlink(missing_ok=True)
    with log.open("w") as output:
        command = [python, script, *arguments.split(), "--output", unfinished]
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output)
    if not unfinished.exists():
        return f"exit status {done.returncode}: see {log}"
    found = json.loads(unfinished.read_text())
    found["command"] = f"{script.name} {arguments}".strip()
    record.write_text(json.dumps(found, indent=1) + "\n")
    return None


def records() -> dict[str, dict[str, Any]]:
    """Returns the newest record of each benchmark that has one."""
    paths = {name: FOLDER / f"{name}.json" for name in RUNS}
    return {
        name: json.loads(path.read_text()) for name, path in paths.items()
        if path.exists()
    }  # fmt: skip


def titles() -> dict[str, str]:
    """Returns the title of each benchmark."""
    return {name: how.title for name, how in RUNS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--full", action="store_true", help="more rounds, and what is slow")
    add("--only", nargs="+", choices=RUNS, help="these alone; default: all")
    add("--page-only", action="store_true", help="run nothing, and write the page")
    args = parser.parse_args()
    for folder in (FOLDER, LOGS):
        folder.mkdir(parents=True, exist_ok=True)
    is_long = {name: args.full or how.short is None for name, how in RUNS.items()}
    usual = [name for name in RUNS if args.full or not is_long[name]]
    failed = {}
    for name in (bar := tqdm([] if args.page_only else args.only or usual)):
        bar.set_description(name)
        how = RUNS[name]
        if (why := run(name, how.full if is_long[name] else how.short)) is not None:
            failed[name] = why
            tqdm.write(f"{name} failed: {why}")
    found = records()
    draw(found)
    PAGE.write_text(page(titles(), found, failed), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} has the records of {len(found)} benchmarks")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
