"""Traces: the global batch size of every step, read and checked.

A trace file is CSV with a column ``batchsize`` and, usually, ``step``::

    step,batchsize
    0,1024
    1,2048

Spaces, a byte order mark, CRLF, blank lines, extra columns and their order do not
matter. A batch size that is not a positive integer raises a `TraceError` that names
file, line, column and value.
"""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO, TypeAlias

import numpy as np
import pandas as pd

from variable_batch_size.traces.trace_csv import (
    COLUMN,
    STEP_COLUMN,
    TraceError,
    check_columns,
    number_of_cell,
    read_cells,
)
from xla_replica.common.arguments import is_integer


class TraceWarning(UserWarning):
    """A trace that can be used, but is probably not what was meant."""


TraceSource: TypeAlias = (
    "str | os.PathLike[str] | TextIO | int | Sequence[int] | np.ndarray | pd.DataFrame"
    " | Trace"
)


class Trace:
    """The global batch size of every step, in samples.

    Args:
        source: A CSV path or open file, a sequence, range or array of integers, a
            DataFrame, another trace, or one integer for a constant batch size.
        strict_steps: Raise TraceError, instead of a warning, where the ``step`` column
            does not count up by one.

    Attributes:
        batch_sizes: ``(num_steps,)`` int64, read-only, all positive.
        endless: True for a constant batch size, which has no last step.
        name: What errors call the source.

    Raises:
        TraceError: A batch size is not a positive integer, there are none, or there is
            no ``batchsize`` column.
        TypeError: ``source`` is of another type; a bool is not an integer here.
        FileNotFoundError: The file does not exist.

    >>> Trace([64, 96, 96]).batch_sizes.tolist()
    [64, 96, 96]
    """

    def __init__(self, source: TraceSource, *, strict_steps: bool = False) -> None:
        self.endless = False
        self._lines: np.ndarray | None = None
        steps: np.ndarray | None = None
        if isinstance(source, Trace):
            vars(self).update(vars(source))
            if strict_steps:
                self._report_steps(strict_steps)
            return
        if isinstance(source, (str, os.PathLike)):
            self.name = os.fspath(source)
            values, steps = self._read_csv(_text_of(source, self.name))
        elif hasattr(source, "read"):
            self.name = str(getattr(source, "name", "trace"))
            values, steps = self._read_csv(_text_of_file(source, self.name))
        elif isinstance(source, pd.DataFrame):
            self.name = "the DataFrame"
            values, steps = self._read_frame(source)
        elif is_integer(source):
            self.name, self.endless = "the constant trace", True
            values = self._checked([source])
        elif isinstance(
            source, (Sequence, range, np.ndarray, pd.Series)
        ) and not isinstance(source, (bytes, bytearray)):
            self.name = f"the {type(source).__name__}"
            values = self._checked(_flat(source, self.name))
        else:
            raise TypeError(
                f"trace={source!r} of type {type(source).__name__}: allowed are a CSV "
                "path or text file, a sequence, range or array of integers, a "
                "DataFrame with a 'batchsize' column, or one integer"
            )
        if len(values) == 0:
            raise TraceError(f"{self.name}: no steps; a trace needs at least one row")
        values.setflags(write=False)
        self.batch_sizes = values
        self._step_problem = self._problem_of(steps)
        self._report_steps(strict_steps)

    def __len__(self) -> int:
        return len(self.batch_sizes)

    def __repr__(self) -> str:
        head = ", ".join(str(size) for size in self.batch_sizes[:4])
        more = ", ..." if len(self) > 4 else ""
        length = "endless" if self.endless else f"{len(self)} steps"
        return f"Trace({self.name}: {length}: {head}{more})"

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of the batch sizes in hexadecimal, equal for equal traces."""
        sizes = np.ascontiguousarray(self.batch_sizes, dtype="<i8")
        return hashlib.sha256(sizes.tobytes()).hexdigest()

    def place(self, row: int) -> str:
        """Returns where row ``row`` (from 0) was read: the file and physical line."""
        if self._lines is not None:
            return f"{self.name}, line {self._lines[row]}"
        if self.endless:
            return self.name
        return f"{self.name}, element {row}"

    # --- sources --------------------------------------------------------------------

    def _read_csv(self, text: str) -> tuple[np.ndarray, np.ndarray | None]:
        cells, self._lines = read_cells(text, self.name)
        numbers = pd.to_numeric(cells[COLUMN], errors="coerce").to_numpy()
        if numbers.dtype.kind == "i":
            values = self._checked(numbers)
        else:  # slower, and says which cell is not an integer
            values = self._checked(cells[COLUMN].tolist(), number_of_cell)
        steps = cells.get(STEP_COLUMN)
        return values, None if steps is None else _numbers_or_nan(steps)

    def _read_frame(self, frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray | None]:
        columns = [str(column).strip() for column in frame.columns]
        check_columns(columns, self.name)
        values = self._checked(frame.iloc[:, columns.index(COLUMN)].to_numpy())
        if STEP_COLUMN not in columns:
            return values, None
        return values, _numbers_or_nan(frame.iloc[:, columns.index(STEP_COLUMN)])

    # --- checks ---------------------------------------------------------------------

    def _checked(
        self,
        values: Sequence[Any] | np.ndarray,
        number: Callable[[Any], int] | None = None,
    ) -> np.ndarray:
        """Returns ``values`` as int64, all positive.

        Args:
            values: Numbers, or what ``number`` takes.
            number: Returns the integer in a value, or raises ValueError.

        Raises:
            TraceError: A value is not a positive integer; names the first of them.
        """
        array = values if isinstance(values, np.ndarray) else None
        if array is None or array.dtype.kind not in "iuf":
            numbers = [self._number(row, v, number) for row, v in enumerate(values)]
            return np.asarray(numbers, dtype=np.int64)
        good = np.isfinite(array) & (array > 0) & (array < 2**62)
        if array.dtype.kind == "f":
            good &= array == np.floor(array)
        if not good.all():
            row = int(np.argmin(good))
            self._number(row, array[row].item(), number)
        return array.astype(np.int64)

    def _number(self, row: int, value: Any, number: Callable[[Any], int] | None) -> int:
        try:
            result = (number or _number_of_value)(value)
        except ValueError as error:
            raise TraceError(
                f"{self.place(row)}, {COLUMN}: {error}; allowed are integers > 0, the "
                "number of samples in the step"
            ) from None
        if result <= 0:
            raise TraceError(
                f"{self.place(row)}, {COLUMN}: {result} must be > 0; it is the number "
                "of samples in the step"
            )
        if result >= 2**62:
            raise TraceError(f"{self.place(row)}, {COLUMN}: {value!r} is too large")
        return result

    def _problem_of(self, steps: np.ndarray | None) -> str | None:
        """Returns what is wrong with the ``step`` column, if anything is."""
        if steps is None or len(steps) < 2:
            return None
        bad = np.diff(steps) != 1  # NaN, a cell that is not a number, is bad too
        if not bad.any():
            return None
        row = int(np.argmax(bad)) + 1
        return (
            f"{self.place(row)}, {STEP_COLUMN}: {_short(steps[row])} follows "
            f"{_short(steps[row - 1])}; steps should count up by one. Rows are used in "
            "the order of the file"
        )

    def _report_steps(self, strict: bool) -> None:
        if self._step_problem is None:
            return
        if strict:
            raise TraceError(self._step_problem)
        warnings.warn(self._step_problem, TraceWarning, stacklevel=3)


def _text_of(path: str | os.PathLike[str], name: str) -> str:
    with open(path, encoding="utf-8-sig", newline=None) as file:
        return _text_of_file(file, name)


def _text_of_file(file: Any, name: str) -> str:
    try:
        text = file.read()
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: not UTF-8 text ({error})") from error
    text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _flat(values: Iterable[Any], name: str) -> Sequence[Any] | np.ndarray:
    array = values.to_numpy() if isinstance(values, pd.Series) else values
    if isinstance(array, np.ndarray) and array.ndim != 1:
        raise TraceError(f"{name}: needs one dimension, has shape {array.shape}")
    if isinstance(array, range):
        return np.arange(array.start, array.stop, array.step, dtype=np.int64)
    return array  # type: ignore[return-value]


def _number_of_value(value: Any) -> int:
    if is_integer(value):
        return int(value)
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return int(value)
    raise ValueError(f"{value!r} is not an integer")


def _numbers_or_nan(values: pd.Series) -> np.ndarray:
    numbers = pd.to_numeric(values, errors="coerce")
    return numbers.to_numpy(dtype=np.float64, na_value=np.nan)


def _short(step: float) -> str:
    return str(int(step)) if np.isfinite(step) else "a cell that is not a number"
