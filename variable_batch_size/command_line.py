"""The command ``vbs``, also ``python -m variable_batch_size``."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from variable_batch_size.runs.run_file import installed_version
from variable_batch_size.trace_tools.commands import COMMANDS, MEMBERS, OPTIONS
from variable_batch_size.trace_tools.options import Option, rows_of
from variable_batch_size.traces.batch_trace import TraceWarning


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
    version = installed_version() or "of a checkout that is not installed"
    parser.add_argument("--version", action="version", version=f"vbs {version}")
    choices = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run in COMMANDS.items():
        rows = [row for row in OPTIONS if name in row.commands.split()]
        command = _add_parser(choices, name, run, [] if name in MEMBERS else rows)
        if name in MEMBERS:
            inner = command.add_subparsers(dest="member", required=True)
            for member, function in MEMBERS[name].items():
                _add_parser(inner, member, function, [*rows_of(function), *rows])
    args = parser.parse_args(arguments)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", TraceWarning)
            output = COMMANDS[args.command](args)
    except (TypeError, ValueError, OSError, ModuleNotFoundError) as error:
        message = _in_options(str(error), vars(args))
        parser.exit(2, f"vbs {args.command}: error: {message}\n")
    for warning in caught:
        sys.stderr.write(f"warning: {warning.message}\n")
    sys.stdout.write(f"{output}\n")
    return 0


def _add_parser(
    choices: Any, name: str, function: Callable[..., Any], rows: Iterable[Option]
) -> argparse.ArgumentParser:
    """Returns a parser whose help is a docstring, which ends with examples."""
    text = (inspect.getdoc(function) or "").split("\nArgs:")[0]
    told, mark, examples = text.partition("\nexample")
    parser: argparse.ArgumentParser = choices.add_parser(
        name,
        help=text.split("\n\n")[0].replace("\n", " "),
        description=told,
        epilog=(mark + examples).strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",  # two functions may have an option of one name
    )
    for row in rows:
        row.add_to(parser)
    return parser


def _in_options(message: str, options: Mapping[str, Any]) -> str:
    """Returns a message of the library in the words of the command line."""
    named = (name if "_" in name else f"{name}(?==)" for name in options)
    return re.sub(
        rf"(?<![-\w])({'|'.join(named)})\b(=True\b)?",
        lambda found: "--" + found[1].replace("_", "-"),
        message.replace("num_epochs", "epochs"),
    )
