"""Options of a command line from the keywords of a function, and texts from numbers."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from variable_batch_size.trace_tools.columns import amount


def whole(text: str) -> int:
    """Returns the integer of an option, which argparse explains where it is not one."""
    try:
        return amount(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an integer such as 64, 500K, 2M or 250B"
        ) from None


def add_keywords(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """Adds an option for each keyword of the function, explained by its docstring.

    Keywords are integers, floats or texts, as annotated.
    """
    told = _told(inspect.getdoc(function) or "")
    for name, keyword in _keywords(function).items():
        required = keyword.default is keyword.empty
        default = "" if required or keyword.default == "" else "; default: %(default)s"
        parser.add_argument(
            "--" + name.replace("_", "-"),
            required=required,
            default=None if required else keyword.default,
            type={int: whole}.get(keyword.annotation, keyword.annotation),
            metavar={int: "N", float: "X"}.get(keyword.annotation, "TEXT"),
            help=told.get(name, "").rstrip(".") + default,
        )


def keywords_of(
    arguments: argparse.Namespace, function: Callable[..., Any]
) -> dict[str, Any]:
    """Returns what `add_keywords` has parsed, as keywords of the function."""
    return {name: getattr(arguments, name) for name in _keywords(function)}


def listed(numbers: Mapping[str, Any]) -> str:
    """Returns numbers as a table of two columns, one line each."""
    width = max(map(len, numbers))
    return "\n".join(f"{name:<{width}}  {_text(n)}" for name, n in numbers.items())


def summary_line(function: Callable[..., Any]) -> str:
    """Returns the first sentence of a function's docstring."""
    return (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")


def _keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    signature = inspect.signature(function, eval_str=True)
    return {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def _told(doc: str) -> dict[str, str]:
    """Returns what the section "Args:" of a docstring says, by name."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
    entries = re.findall(
        r"^    (\w+): (.*(?:\n     .*)*)", section[1] if section else "", re.MULTILINE
    )
    return {name: " ".join(text.split()).replace("%", "%%") for name, text in entries}


def _text(number: Any) -> str:
    return f"{number:.6g}" if isinstance(number, float) else f"{number}"
