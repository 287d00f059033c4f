"""A CSV file as rows of cells, with the line that each row is on."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from xla_replica.common.arguments import is_integer

COLUMN = "batchsize"
STEP_COLUMN = "step"
# What the rows of a trace by threshold count, in place of steps.
THRESHOLDS = ("samples", "tokens")
Source: TypeAlias = "str | os.PathLike[str] | IO[Any]"
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)


class TraceError(ValueError):
    """A trace that cannot be used; the message names the place and the remedy."""


class Table(NamedTuple):
    """The cells of a CSV file.

    Attributes:
        name: What errors call the file.
        header: The names of the columns.
        columns: The cells of each, as texts; rows without text are left out.
        lines: The physical line of every row, from 1.
    """

    name: str
    header: list[str]
    columns: list[list[str]]
    lines: list[int]


def read_text(source: Source) -> tuple[str, str]:
    """Returns what errors call a file, a path or open for reading, and its text.

    Lines end in a newline alone. Raises TraceError if it is not UTF-8 text.
    """
    given: Any = source
    is_path = isinstance(source, (str, os.PathLike))
    name = os.fspath(given) if is_path else getattr(source, "name", "trace")
    try:
        text = Path(given).read_bytes() if is_path else given.read()
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: not UTF-8 text ({error})") from error
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    return str(name), text


def read_table(source: Source, header: Collection[str] = ()) -> Table:
    """Returns the cells of a CSV file, a path or a file that is open for reading.

    Args:
        source: The file.
        header: The names of its columns, if its first row does not have them.

    Raises TraceError if it is not UTF-8 or CSV text, is empty, or has a row with more
    cells than there are columns.
    """
    name, text = read_text(source)
    header = [*header]
    rows, lines = [], []
    reader = csv.reader(io.StringIO(text), skipinitialspace=True, strict=True)
    line = 1
    try:
        for cells in reader:
            if header and len(cells) > len(header):
                raise TraceError(
                    f"{name}, line {line}: {len(cells)} cells under {len(header)} "
                    f"columns {header}; write no thousands separators"
                )
            if any(cell.strip() for cell in cells):
                if not header:
                    header = [cell.strip() for cell in cells]
                else:
                    rows.append(cells + [""] * (len(header) - len(cells)))
                    lines.append(line)
            line = reader.line_num + 1  # a quoted cell may hold several
    except csv.Error as error:
        raise TraceError(f"{name}: not CSV text ({error})") from error
    if not header:
        raise TraceError(f"{name}: no steps; the file is empty")
    columns = [[row[index] for row in rows] for index in range(len(header))]
    return Table(name, header, columns, lines)


def check_header(columns: list[str], name: str) -> str | None:
    """Returns the column that says what a trace's rows count, if there is one.

    That is the column ``step`` or, without one, ``samples`` or ``tokens``. Raises
    TraceError unless there is one column ``batchsize``, and one unit at most.

    Args:
        columns: The header, in small letters.
        name: What errors call the trace.
    """
    if columns.count(COLUMN) != 1:
        hint = ""
        if len(columns) == 2 and all(_INTEGER.fullmatch(cell) for cell in columns):
            hint = f". The file seems to lack its header '{STEP_COLUMN},{COLUMN}'"
        found = "several" if COLUMN in columns else "none"
        raise TraceError(
            f"{name}: needs exactly one column '{COLUMN}', found {found}; columns are "
            f"{columns}{hint}"
        )
    if STEP_COLUMN in columns:
        return STEP_COLUMN
    units = [column for column in columns if column in THRESHOLDS]
    if len(units) > 1:
        raise TraceError(
            f"{name}: rows count one unit, 'samples' or 'tokens', but columns are "
            f"{columns}"
        )
    return units[0] if units else None


def integer_in(value: Any, column: str = COLUMN) -> int:
    """Returns the integer in a number or a cell; raises ValueError if it is not one."""
    if is_integer(value):
        return int(value)
    number = value
    if isinstance(value, str):
        value = value.strip()
        if not value:
            raise ValueError(f"missing {column}: the cell is empty")
        if _INTEGER.fullmatch(value):
            return int(value)
        with contextlib.suppress(ValueError):
            number = float(value) if value.isascii() and "_" not in value else None
    if isinstance(number, (float, np.floating)) and float(number).is_integer():
        return int(number)
    raise ValueError(f"{value!r} is not an integer")
