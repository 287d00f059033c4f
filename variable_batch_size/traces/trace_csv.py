"""Columns of a CSV file, or of values in memory, whose errors name row and column."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from xla_replica.common.arguments import is_number
from xla_replica.common.later import is_pandas, pd

COLUMN = "batchsize"
STEP_COLUMN = "step"
# What the rows of a trace by threshold count, in place of steps.
THRESHOLDS = ("samples", "tokens")
Source: TypeAlias = "str | os.PathLike[str] | IO[Any]"


class TraceError(ValueError):
    """A trace that cannot be used; the message names the place and the remedy."""


class Table(NamedTuple):
    """Columns of equal length.

    Attributes:
        name: What errors call the source.
        header: The names of the columns.
        columns: The values of each. Those of a file are texts.
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

    def find(self, names: Collection[str], what: str) -> str:
        """Returns which of these names a column has.

        Raises TraceError if none has one, or several have.
        """
        found = [header for header in self.header if header in names]
        if len(found) != 1:
            raise TraceError(
                f"{self.name}: needs exactly one column {' or '.join(names)} for "
                f"{what}, found {found or 'none'}; the header is {self.header}"
            )
        return found[0]

    def floats(self, header: str) -> np.ndarray:
        """Returns a column as float64, with NaN where a cell is not a number."""
        numbers = pd.to_numeric(pd.Series(self.column(header)), errors="coerce")
        return np.asarray(numbers.to_numpy(float, na_value=np.nan))

    def numbers(self, header: str) -> np.ndarray:
        """Returns a column as float64; raises TraceError unless all are finite."""
        found = self.floats(header)
        if not len(found):
            raise TraceError(f"{self.name}: no rows after the header")
        self.refuse(header, ~np.isfinite(found), "is not a finite number")
        return found

    def integers(self, header: str, least: int, what: str) -> np.ndarray:
        """Returns a column as int64; raises TraceError for one below ``least``.

        A text counts as a number if it is a cell of a file.
        """
        values = self.column(header)
        if not (isinstance(values, (np.ndarray, range)) or is_pandas(values, "Series")):
            values = np.array(values, dtype=object)  # keeps a bool what it is
        array = np.asarray(values)
        if array.ndim != 1:
            raise TraceError(
                f"{self.name}: needs one dimension, has shape {array.shape}"
            )
        if array.dtype.kind not in "iu":
            found = [_integer_in(cell, self.lines is not None) for cell in array]
            array = np.array(found, dtype=object)
        bad = ~((array >= least) & (array < 2**62))
        self.refuse(header, bad, f"must be an integer >= {least} and < 2**62, {what}")
        return array.astype(np.int64)

    def check_increasing(self, header: str, numbers: np.ndarray) -> None:
        """Raises TraceError where one of a column's numbers is not above the last."""
        bad = np.append(False, np.diff(numbers) <= 0)
        self.refuse(header, bad, "must be larger than in the row before")

    def refuse(self, header: str, bad: np.ndarray, why: str) -> None:
        """Raises TraceError for the first row of which ``bad`` is true."""
        if bad.any():
            row = int(np.argmax(bad))
            cell = np.array(self.column(header), dtype=object)[row]
            raise TraceError(f"{self.place(row)}, {header}: {cell!r} {why}")


def _integer_in(value: Any, is_cell: bool) -> int:
    """Returns the integer that a value is, and -1 where it is not one from 0 on."""
    if is_cell and value.isascii() and "_" not in value:
        text = value
        for kind in (float, int):  # the exact one comes last
            with contextlib.suppress(ValueError):
                value = kind(text)
    if is_number(value) and value >= 0 and value // 1 == value:
        return int(value)
    return -1


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
    return table_of(*read_text(source), header)


def table_of(name: str, text: str, header: Collection[str] = ()) -> Table:
    """Returns the cells of a CSV file of this name and text; see `read_table`."""
    header = [*header]
    rows, lines = [], []
    reader = csv.reader(io.StringIO(text), skipinitialspace=True, strict=True)
    line = 1
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if header and len(cells) > len(header):
                raise TraceError(
                    f"{name}, line {line}: {len(cells)} cells under {len(header)} "
                    f"columns {header}; write no thousands separators"
                )
            if any(cells) and not header:
                header = cells
            elif any(cells):
                rows.append(cells + [""] * (len(header) - len(cells)))
                lines.append(line)
            line = reader.line_num + 1  # a quoted cell may hold several
    except csv.Error as error:
        raise TraceError(f"{name}: not CSV text ({error})") from error
    if not header:
        raise TraceError(f"{name}: no steps; the file is empty")
    columns = [[row[index] for row in rows] for index in range(len(header))]
    return Table(name, header, columns, lines)
