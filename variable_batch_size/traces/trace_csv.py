"""Columns of a CSV file, or of values in memory, whose errors name row and column."""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from xla_replica.common.arguments import is_number

COLUMN = "batchsize"
STEP_COLUMN = "step"
Source: TypeAlias = "str | os.PathLike[str] | IO[Any]"


class TraceError(ValueError):
    """A trace that cannot be used; the message names the place and the remedy."""


class Table(NamedTuple):
    """Columns of equal length.

    Attributes:
        name: What errors call the source.
        header: The names of the columns.
        columns: The values of each, arrays or sequences. Those of a file are texts.
        lines: Of a file: the physical line of every row, from 1.
    """

    name: str
    header: list[str]
    columns: list[Any]
    lines: list[int] | None = None

    def column(self, header: str) -> Any:
        """Returns the values of the first column of this name."""
        return self.columns[self.header.index(header)]

    def place(self, row: int) -> str:
        """Returns where a row was read, for errors."""
        where = f"element {row}" if self.lines is None else f"line {self.lines[row]}"
        return f"{self.name}, {where}"

    def find(self, *names: str) -> str:
        """Returns which of these names a column has.

        Raises TraceError if none has one, or several have.
        """
        found = [header for header in self.header if header in names]
        if len(found) != 1:
            raise TraceError(
                f"{self.name}: needs exactly one column {' or '.join(names)}, found "
                f"{found or 'none'}; the header is {self.header}"
            )
        return found[0]

    def floats(self, header: str) -> np.ndarray:
        """Returns a column as float64, with NaN where a cell is not a number."""
        cells, is_file = self.column(header), self.lines is not None
        if len(cells) == 0:
            raise TraceError(f"{self.name}: no rows; at least one is needed")
        is_array = isinstance(cells, np.ndarray) and cells.ndim == 1
        if is_array and cells.dtype.kind in "iuf":
            return np.asarray(cells, float)
        return np.array([_number_in(cell, is_file) for cell in cells])

    def numbers(self, header: str) -> np.ndarray:
        """Returns a column as float64; raises TraceError unless all are finite."""
        found = self.floats(header)
        self.refuse(header, ~np.isfinite(found), "is not a finite number")
        return found

    def integers(self, header: str, least: int) -> np.ndarray:
        """Returns a column as int64; raises TraceError for one below ``least``."""
        found = self.floats(header)
        bad = ~((found >= least) & (found < 2**53) & (np.floor(found) == found))
        self.refuse(header, bad, f"must be an integer >= {least} and < 2**53")
        return found.astype(np.int64)

    def check_increasing(self, header: str, found: np.ndarray) -> None:
        """Raises TraceError unless each number is larger than the one before."""
        falls = np.diff(found, prepend=-np.inf) <= 0
        self.refuse(header, falls, "must be larger than in the row before")

    def refuse(self, header: str, bad: np.ndarray, why: str) -> None:
        """Raises TraceError for the first row of which ``bad`` is true."""
        if bad.any():
            row = int(np.argmax(bad))
            cell = np.array(self.column(header), dtype=object)[row]
            raise TraceError(f"{self.place(row)}, {header}: {cell!r} {why}")


def _number_in(cell: Any, is_text: bool) -> float:
    """Returns the number that a value is, or that a text says; else NaN."""
    if not is_text:
        return float(cell) if is_number(cell) else math.nan
    try:
        return float(cell) if cell.isascii() and "_" not in cell else math.nan
    except ValueError:
        return math.nan


def read_text(source: Source) -> tuple[str, str]:
    """Returns what errors call a file, a path or open for reading, and its text.

    Raises TraceError if it is not UTF-8 text.
    """
    given: Any = source
    is_path = isinstance(source, (str, os.PathLike))
    name = os.fspath(given) if is_path else getattr(source, "name", "trace")
    try:
        text = Path(given).read_bytes() if is_path else given.read()
        text = text.decode() if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: not UTF-8 text ({error})") from error
    return str(name), text.removeprefix("\ufeff")


def read_table(source: Source) -> Table:
    """Returns the cells of a CSV file, a path or open for reading; see `table_of`."""
    return table_of(*read_text(source))


def table_of(name: str, text: str, header: Sequence[str] = ()) -> Table:
    """Returns the cells of a CSV file of this name and text.

    Args:
        name: What errors call the file.
        text: What is in it.
        header: The names of its columns, if its first row does not have them.

    Raises TraceError if it is not CSV text, is empty, or has a row with more cells than
    there are columns.
    """
    lines = io.StringIO(text, newline=None)
    reader = csv.reader(lines, skipinitialspace=True, strict=True)
    header, rows, numbers, number = [*header], [], [], 1
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if header and len(cells) > len(header):
                raise TraceError(
                    f"{name}, line {number}: {len(cells)} cells under {len(header)} "
                    f"columns {header}; write no thousands separators"
                )
            if any(cells) and header:
                rows.append(cells)
                numbers.append(number)
            elif any(cells):
                header = cells
            number = reader.line_num + 1  # a quoted cell may hold several lines
    except csv.Error as error:
        raise TraceError(f"{name}: not CSV text ({error})") from error
    if not header:
        raise TraceError(f"{name}: no steps; the file is empty")
    columns = itertools.zip_longest(header, *rows, fillvalue="")
    return Table(name, header, [column[1:] for column in columns], numbers)
