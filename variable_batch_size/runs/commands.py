"""The command for reports, as `variable_batch_size.command_line` takes it."""

from __future__ import annotations

import argparse
from pathlib import Path

from variable_batch_size.runs.report import write_report


def run_report(args: argparse.Namespace) -> str:
    """Turns the logs of one or several runs into one HTML page that compares them.

    Needs plotly (the extra 'report'). The page holds everything it needs and opens
    without a network; its buttons choose between hours, samples and updates.

    example:
      vbs report runs/mnist-a runs/mnist-b --out report.html
    """
    return f"wrote {write_report(args.logs, args.out)}"


def add_report(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run_report`."""
    parser.add_argument(
        "logs", nargs="+", help="files of vbs.RunLog, or folders with a run.jsonl"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), help="default: %(default)s"
    )


COMMANDS = {"report": (add_report, run_report)}
