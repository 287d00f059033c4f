"""Columns of numbers in CSV files, whose errors name file, line and column."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from variable_batch_size.traces.trace_csv import Source, TraceError, read_table
from xla_replica.common.later import pd


class Columns:
    """Columns of one CSV file, as ``(num_rows,)`` float64 with finite numbers.

    Args:
        source: A path, or a file that is open for reading.
        header: See `read_table`.

    Attributes:
        name: What errors call the file.
        header: The names of its columns.

    Raises:
        TraceError: See `read_table`.
    """

    def __init__(self, source: Source, header: Collection[str] = ()) -> None:
        self._table = read_table(source, header)
        self.name, self.header = self._table.name, self._table.header
        self._found: dict[str, tuple[str, np.ndarray]] = {}  # header and numbers

    def numbers(self, what: str, names: Collection[str] | None = None) -> np.ndarray:
        """Returns the numbers of a column.

        Args:
            what: What errors call it.
            names: Those of which it has one; default: it is the only column that
                nobody has asked for.

        Raises:
            TraceError: The file has no such column, several of them, no rows, or a cell
                that is not a finite number.
        """
        if names is None:
            known = {header for header, _ in self._found.values()}
            found = [column for column in self.header if column and column not in known]
        else:
            found = [column for column in self.header if column in names]
        if len(found) != 1:
            allowed = "one more" if names is None else " or ".join(names)
            raise TraceError(
                f"{self.name}: needs exactly one column {allowed} for {what}, found "
                f"{found or 'none'}; columns are {self.header}"
            )
        if not self._table.lines:
            raise TraceError(f"{self.name}: no rows after the header")
        cells = self._table.columns[self.header.index(found[0])]
        numbers = pd.to_numeric(np.array(cells, object), errors="coerce").astype(float)
        self._found[what] = found[0], numbers
        if not np.isfinite(numbers).all():
            row = int(np.argmin(np.isfinite(numbers)))
            place = self._place(row, found[0])
            raise TraceError(f"{place}: {cells[row]!r} is not a finite number")
        return numbers

    def refuse(self, what: str, bad: np.ndarray, why: str) -> None:
        """Raises TraceError for the first row of ``(num_rows,)`` bools that is bad."""
        if bad.any():
            row = int(np.argmax(bad))
            header, numbers = self._found[what]
            raise TraceError(f"{self._place(row, header)}: {numbers[row]:.16g} {why}")

    def check_increasing(self, what: str, why: str) -> None:
        """Raises TraceError where one of the numbers is not above the one before."""
        self.refuse(what, np.diff(self._found[what][1], prepend=-np.inf) <= 0, why)

    def _place(self, row: int, header: str) -> str:
        return f"{self.name}, line {self._table.lines[row]}, {header}"


def amount(text: str) -> int:
    """Returns the integer that a text says, where K, M, B and T are powers of 1000.

    >>> amount("250B"), amount("1.5M"), amount("64")
    (250000000000, 1500000, 64)

    Raises:
        ValueError: The text is not an integer.
    """
    factors = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
    text = text.strip()
    factor = factors.get(text[-1:].upper(), 1)
    digits = text if factor == 1 else text[:-1]
    if digits.isascii() and digits.lstrip("+-").isdigit():
        return int(digits) * factor
    number = float(digits) * factor if "_" not in digits else math.nan
    if not math.isfinite(number) or number != round(number):
        raise ValueError(f"{text!r} is not an integer such as 64, 500K, 2M or 250B")
    return round(number)
