"""Columns of numbers in CSV files, whose errors name file, line and column."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import IO, Any

import numpy as np
import pandas as pd

from variable_batch_size.traces.trace_csv import TraceError, read_cells

Source = str | os.PathLike[str] | IO[Any]


class Columns:
    """Columns of one CSV file, as ``(num_rows,)`` float64 with finite numbers.

    Args:
        source: A path, or a file that is open for reading.
        wanted: From what a column is to its possible names; ``"*"`` in place of the
            names is the only column that nothing else wants. Other columns do not
            matter.

    Attributes:
        numbers: From what a column is to its numbers.

    Raises:
        TraceError: The file has no rows, or not exactly one column of some kind; or a
            cell is not a finite number.
    """

    def __init__(self, source: Source, wanted: dict[str, Iterable[str]]) -> None:
        is_path = isinstance(source, (str, os.PathLike))
        self.name = str(os.fspath(source) if is_path else source.name)
        self._headers: dict[str, str] = {}
        cells, self._lines = read_cells(source, self.name, self._chooser(wanted))
        if len(cells) == 0:
            raise TraceError(f"{self.name}: no rows after the header")
        self.numbers = {what: self._numbers(what, cells[what]) for what in cells}

    def place(self, row: int, what: str) -> str:
        """Returns where a cell is, for errors: file, physical line and column."""
        return f"{self.name}, line {self._lines[row]}, {self._headers[what]}"

    def refuse(self, what: str, bad: np.ndarray, why: str) -> None:
        """Raises TraceError for the first row of ``(num_rows,)`` bools that is bad."""
        if bad.any():
            row = int(np.argmax(bad))
            number = self.numbers[what][row]
            raise TraceError(f"{self.place(row, what)}: {number:.16g} {why}")

    def _chooser(self, wanted: dict[str, Iterable[str]]) -> Callable[..., pd.DataFrame]:
        def choose(
            table: pd.DataFrame, header: Iterable[Any], name: str
        ) -> pd.DataFrame:
            columns = [str(cell).strip() for cell in header]
            named = {each for names in wanted.values() for each in names}
            for what, names in wanted.items():
                found = [c for c in columns if c in names]
                if names == "*":
                    found = [c for c in columns if c and c not in named]
                if len(found) != 1:
                    allowed = "one more" if names == "*" else " or ".join(names)
                    raise TraceError(
                        f"{name}: needs exactly one column {allowed} for {what}, found "
                        f"{found or 'none'}; columns are {columns}"
                    )
                self._headers[what] = found[0]
            indices = [columns.index(header) for header in self._headers.values()]
            return table.iloc[:, indices].set_axis([*self._headers], axis=1)

        return choose

    def _numbers(self, what: str, cells: pd.Series) -> np.ndarray:
        numbers = pd.to_numeric(cells, errors="coerce").to_numpy(np.float64)
        if not np.isfinite(numbers).all():
            row = int(np.argmin(np.isfinite(numbers)))
            raise TraceError(
                f"{self.place(row, what)}: {cells.iloc[row]!r} is not a finite number"
            )
        return numbers


def optional_column(source: Source, name: str) -> np.ndarray | None:
    """Returns the numbers of a column of a CSV file, or None if it has no such one.

    A file that is open for reading is read from its beginning.
    """
    if not isinstance(source, (str, os.PathLike)):
        source.seek(0)
    header = pd.read_csv(source, nrows=0, skipinitialspace=True).columns
    if name not in {str(column).strip() for column in header}:
        return None
    if not isinstance(source, (str, os.PathLike)):
        source.seek(0)
    return Columns(source, {name: (name,)}).numbers[name]


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
