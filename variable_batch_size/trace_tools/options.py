"""Options of a command line as rows of a table, also those that a function takes."""

from __future__ import annotations

import argparse
import inspect
import re
import typing
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

REQUIRED: Any = inspect.Parameter.empty
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}
_AMOUNT = re.compile(r"([+-]?[0-9]*\.?[0-9]+(?:e[0-9]{1,2})?)([KMBT]?)", re.IGNORECASE)


class AmountError(ValueError, argparse.ArgumentTypeError):
    """A text that is not an amount; argparse shows the message as it is."""


class Option(NamedTuple):
    """An option of a command line, or an argument: a name without dashes.

    Attributes:
        flag: As people write it.
        kind: int, which takes an `amount`, float, str, Path, bool, or list: of texts.
        default: `REQUIRED`, or the value where it is not given.
        commands: Those that have it.
        help: What it is.
    """

    flag: str
    kind: type
    default: Any
    commands: str
    help: str

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Adds the option to a parser."""
        options: dict[str, Any] = {"help": self.help}
        if self.kind is list:
            options["nargs"] = "+"
        elif self.kind is bool:
            options["action"] = "store_true"
        elif self.flag.startswith("--"):
            options |= {"required": self.default is REQUIRED, "default": self.default}
            options["type"] = amount if self.kind is int else self.kind
            options["metavar"] = _METAVARS[self.kind]
            if self.default not in (None, "", REQUIRED):
                options["help"] += "; default: %(default)s"
        parser.add_argument(self.flag, **options)


def rows_of(function: Callable[..., Any], commands: str = "") -> list[Option]:
    """Returns an option for every keyword-only argument that one can give as text.

    Its type is the annotation, or the first one in it: int, float, str or bool. The
    section "Args:" of the docstring explains it.
    """
    doc = inspect.getdoc(function) or ""
    entries = r"^    (\w+): (.*(?:\n     .*)*)"
    explained = dict(re.findall(entries, doc.partition("\nArgs:")[2], re.MULTILINE))
    rows = []
    for name, each in inspect.signature(function, eval_str=True).parameters.items():
        kind = (*typing.get_args(each.annotation), each.annotation)[0]
        if each.kind is each.KEYWORD_ONLY and kind in (int, float, str, bool):
            text = " ".join(explained.get(name, "").split()).removesuffix(".")
            flag, text = "--" + name.replace("_", "-"), text.replace("%", "%%")
            rows.append(Option(flag, kind, each.default, commands, text))
    return rows


def amount(text: str) -> int:
    """Returns the integer that a text says, where K, M, B and T are powers of 1000.

    >>> amount("250B"), amount("1.5M"), amount("64")
    (250000000000, 1500000, 64)

    Raises:
        AmountError: The text is not an integer.
    """
    if found := _AMOUNT.fullmatch(text.strip()):
        number, power = Fraction(found[1]), "KMBT".find(found[2].upper() or " ") + 1
        if (number * 1000**power).denominator == 1:
            return int(number * 1000**power)
    raise AmountError(f"{text!r} is not an integer such as 64, 500K, 2M or 250B")
