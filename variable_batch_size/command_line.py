"""The command ``vbs``, also ``python -m variable_batch_size``."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence

from variable_batch_size.runs import commands as run_commands
from variable_batch_size.trace_tools import commands
from variable_batch_size.trace_tools.options import summary_line
from variable_batch_size.traces.batch_trace import TraceWarning

# By name: what adds the options, and what runs and returns the output. The docstring of
# the second one is the help.
COMMANDS: dict[
    str,
    tuple[
        Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], str]
    ],
] = {**commands.COMMANDS, **run_commands.COMMANDS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, writes what it returns, and returns the exit status.

    An argument or a file that cannot be used ends the process with status 2 and a
    message.
    """
    parser = argparse.ArgumentParser(
        prog="vbs",
        description="Tools for training with a batch size that follows a trace.",
        epilog="vbs COMMAND --help shows a command's options and examples.",
    )
    choices = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add, run) in COMMANDS.items():
        add(
            choices.add_parser(
                name,
                help=summary_line(run),
                description=inspect.getdoc(run),
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    args = parser.parse_args(arguments)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", TraceWarning)
            _check_out(args)
            output = COMMANDS[args.command][1](args)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        choices.choices[args.command].error(str(error))
    for warning in caught:
        sys.stderr.write(f"warning: {warning.message}\n")
    sys.stdout.write(f"{output}\n")
    return 0


def _check_out(args: argparse.Namespace) -> None:
    """Raises ValueError if the output would replace a file that is read."""
    out = getattr(args, "out", None)
    if out is None or not os.path.isfile(out):
        return
    given = [value for name, value in vars(args).items() if name != "out"]
    read = [
        each for value in given for each in (value if type(value) is list else [value])
    ]
    paths = [each for each in read if isinstance(each, (str, os.PathLike))]
    if any(os.path.isfile(path) and os.path.samefile(path, out) for path in paths):
        raise ValueError(
            f"--out {out} is the file that is read, which would be lost: give it "
            "another name"
        )
