"""A trace file as columns of cells, with the line that each row is on."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

from xla_replica.common.arguments import is_integer

COLUMN = "batchsize"
STEP_COLUMN = "step"
# What the rows of a trace by threshold count, in place of steps.
THRESHOLDS = ("samples", "tokens")
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
_TOO_MANY_CELLS = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")


class TraceError(ValueError):
    """A trace that cannot be used; the message names the place and the remedy."""


# From a table, its header and its name to the columns to read, the required one first.
Choose = Callable[[pd.DataFrame, Iterable[Any], str], pd.DataFrame]


def read_cells(
    source: str | os.PathLike[str] | IO[Any], name: str, choose: Choose | None = None
) -> tuple[pd.DataFrame, np.ndarray]:
    """Returns the cells of a CSV file, without blank rows, and the line of each row.

    The columns are those that ``choose`` picks, by default `named_columns`: as integers
    if all cells of a column are, else as texts. Lines are physical ones and count from
    1.
    """
    is_path = isinstance(source, (str, os.PathLike))
    try:
        text = Path(source).read_bytes() if is_path else source.read()
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: not UTF-8 text ({error})") from error
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    body = text.lstrip()
    first_line = 1 + text[: len(text) - len(body)].count("\n")
    if not body:
        raise TraceError(f"{name}: no steps; the file is empty")
    try:
        rows = _rows(body)
    except pd.errors.ParserError as error:
        raise TraceError(name + _explained(error, body, first_line)) from error
    cells = (choose or named_columns)(rows, rows.iloc[0], name)
    lines = first_line + np.arange(len(rows))
    if '"' in body:  # a quoted cell may hold several lines
        lines += np.cumsum(_num_newlines(rows))
    is_row = (cells.iloc[:, 0] != "").to_numpy(copy=True)
    is_row[~is_row] = (rows[~is_row] != "").any(axis=1)  # a row without a batch size
    is_row[0] = False
    cells = cells[is_row]
    numbers = {name: pd.to_numeric(cells[name], errors="coerce") for name in cells}
    # Texts remain where they say which cell is not an integer.
    whole = {
        name: column for name, column in numbers.items() if column.dtype.kind == "i"
    }
    return cells.assign(**whole), lines[is_row]


def named_columns(
    table: pd.DataFrame, header: Iterable[Any], name: str
) -> pd.DataFrame:
    """Returns the column ``batchsize`` of a table and what its rows count, if it says.

    That is the column ``step`` or, without one, ``samples`` or ``tokens``. Names may be
    in capitals.
    """
    columns = [str(cell).strip().lower() for cell in header]
    if columns.count(COLUMN) != 1:
        hint = ""
        if len(columns) == 2 and all(_INTEGER.fullmatch(cell) for cell in columns):
            hint = f". The file seems to lack its header '{STEP_COLUMN},{COLUMN}'"
        found = "several" if COLUMN in columns else "none"
        raise TraceError(
            f"{name}: needs exactly one column '{COLUMN}', found {found}; columns are "
            f"{columns}{hint}"
        )
    wanted = [column for column in (STEP_COLUMN, *THRESHOLDS) if column in columns]
    if STEP_COLUMN in wanted:
        wanted = [STEP_COLUMN]
    elif sum(map(columns.count, THRESHOLDS)) > 1:
        raise TraceError(
            f"{name}: rows count one unit, 'samples' or 'tokens', but columns are "
            f"{columns}"
        )
    wanted = [COLUMN, *wanted]
    return table.iloc[:, [columns.index(c) for c in wanted]].set_axis(wanted, axis=1)


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


def _rows(body: str, limit: int | None = None) -> pd.DataFrame:
    """Returns every row, blank ones too, as texts; the header is the first."""
    return pd.read_csv(
        io.StringIO(body),
        header=None,
        nrows=limit,
        dtype=str,
        keep_default_na=False,
        skip_blank_lines=False,
        skipinitialspace=True,
    )


def _num_newlines(rows: pd.DataFrame) -> np.ndarray:
    """Returns ``(num_rows,)`` int64: newlines inside the cells of every row."""
    return sum(rows[column].str.count("\n").to_numpy(np.int64) for column in rows)


def _explained(error: Exception, body: str, first_line: int) -> str:
    """Returns what follows the file's name in the message for a row of wrong length."""
    found = _TOO_MANY_CELLS.search(str(error))
    if found is None:
        return f": not CSV text ({error})"
    num_columns, row, num_cells = map(int, found.groups())
    above = _rows(body, row - 1)
    line = first_line + row - 1 + int(_num_newlines(above).sum())
    columns = [cell.strip() for cell in above.iloc[0]]
    return (
        f", line {line}: {num_cells} cells under {num_columns} columns {columns}; "
        "write numbers without thousands separators"
    )
