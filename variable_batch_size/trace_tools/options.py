"""Options of a command line from the parameters of a function; lists of numbers."""

from __future__ import annotations

import argparse
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from variable_batch_size.trace_tools.columns import amount

_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}


def whole(text: str) -> int:
    """Returns the integer of an option, which argparse explains where it is not one."""
    try:
        return amount(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an integer such as 64, 500K, 2M or 250B"
        ) from None


def add_parser(
    choices: Any, name: str, function: Callable[..., Any]
) -> argparse.ArgumentParser:
    """Adds a parser whose help is the function's docstring, without its arguments."""
    text = inspect.getdoc(function) or ""
    return choices.add_parser(
        name,
        help=text.split("\n\n")[0].replace("\n", " "),
        description=text.split("\nArgs:")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_options(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """Adds the function's parameters, explained by its docstring.

    Keywords become options, of the type with which they are annotated: int, float, str,
    Path or bool, or one of these or None. Other parameters become arguments. Where
    ``out`` is one of them there is also ``--force``, and where the function returns
    numbers by name ``--json``.
    """
    explained = _explained(inspect.getdoc(function) or "")
    parameters = _parameters(function)
    for name, parameter in parameters.items():
        kind, default = _type_of(parameter), parameter.default
        option, text = "--" + name.replace("_", "-"), explained.get(name, "")
        if parameter.kind is not parameter.KEYWORD_ONLY:
            parser.add_argument(name, nargs="+" if kind is list else None, help=text)
        elif kind is bool:
            parser.add_argument(option, action="store_true", help=text)
        else:
            required = default is parameter.empty
            if not required and default not in (None, ""):
                text += "; default: %(default)s"
            parser.add_argument(
                option,
                required=required,
                default=None if required else default,
                type=whole if kind is int else kind,
                metavar=_METAVARS[kind],
                help=text,
            )
    if "out" in parameters:
        parser.add_argument(
            "--force", action="store_true", help="replace the file that --out names"
        )
    if "Mapping" in str(function.__annotations__.get("return")):
        parser.add_argument(
            "--json", action="store_true", help="print numbers as JSON, for programs"
        )


def options_of(
    arguments: argparse.Namespace, function: Callable[..., Any]
) -> dict[str, Any]:
    """Returns what `add_options` has parsed, as keywords of the function."""
    return {name: getattr(arguments, name) for name in _parameters(function)}


def listed(numbers: Mapping[str, Any]) -> str:
    """Returns numbers as a table of two columns, one line each."""
    width = max(map(len, numbers))
    return "\n".join(f"{name:<{width}}  {_text(n)}" for name, n in numbers.items())


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters that can be given by name."""
    signature = inspect.signature(function, eval_str=True)
    return {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }


def _type_of(parameter: inspect.Parameter) -> Any:
    """Returns the type of a parameter's values; ``X | None`` and ``X[Y]`` are X."""
    annotation = parameter.annotation
    if type(None) in typing.get_args(annotation):
        annotation = typing.get_args(annotation)[0]
    return typing.get_origin(annotation) or annotation


def _explained(doc: str) -> dict[str, str]:
    """Returns what the section "Args:" of a docstring says, by name."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
    entries = re.findall(
        r"^    (\w+): (.*(?:\n     .*)*)", section[1] if section else "", re.MULTILINE
    )
    return {
        name: " ".join(text.split()).replace("%", "%%").removesuffix(".")
        for name, text in entries
    }


def _text(number: Any) -> str:
    return f"{number:.6g}" if isinstance(number, float) else f"{number}"
