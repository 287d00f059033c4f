"""Traces: the global batch size of every step, read and checked.

A trace file is CSV with a column ``batchsize`` and, usually, ``step``::

    step,batchsize
    0,1024
    1,2048

Spaces, a byte order mark, CRLF, blank lines, extra columns and their order do not
matter. A `TraceError` names file, line, column and value.
"""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Sequence
from typing import Any, TextIO, TypeAlias

import numpy as np
import pandas as pd

from variable_batch_size.traces import trace_csv
from variable_batch_size.traces.trace_csv import COLUMN, STEP_COLUMN, TraceError
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
        source: A CSV path or open file, a sequence, range, array or torch tensor of
            integers, a DataFrame, another trace, or one integer for a constant batch
            size.
        strict_steps: Raise TraceError, instead of a warning, where the ``step`` column
            does not count up by one.

    Attributes:
        batch_sizes: ``(num_steps,)`` int64, read-only, all positive.
        endless: True for a constant batch size, which has no last step.
        name: What errors call the source.

    Raises:
        TraceError: A batch size is not a positive integer, or there are none, or there
            is no ``batchsize`` column.
        TypeError: ``source`` is of another type, such as a bool.
        FileNotFoundError: The file does not exist.

    >>> Trace([64, 96, 96]).batch_sizes.tolist()
    [64, 96, 96]
    """

    def __init__(self, source: TraceSource, *, strict_steps: bool = False) -> None:
        if isinstance(source, Trace):
            vars(self).update(vars(source))
            if strict_steps and self._step_problem is not None:
                raise TraceError(self._step_problem)
            return
        self.endless = is_integer(source)
        self._lines: np.ndarray | None = None
        table: pd.DataFrame | None = None
        is_path = isinstance(source, (str, os.PathLike))
        if is_path or hasattr(source, "read"):
            name = os.fspath(source) if is_path else getattr(source, "name", "trace")
            self.name = str(name)
            table, self._lines = trace_csv.read_cells(source, self.name)
        elif isinstance(source, pd.DataFrame):
            self.name = "the DataFrame"
            table = trace_csv.named_columns(source, source.columns, self.name)
        elif self.endless:
            self.name, source = "the constant trace", [source]
        elif isinstance(source, (Sequence, np.ndarray, pd.Series)) and not isinstance(
            source, (bytes, bytearray)
        ):
            self.name = f"the {type(source).__name__}"
        elif hasattr(source, "tolist"):  # a torch tensor, on any device
            self.name, source = f"the {type(source).__name__}", source.tolist()
        else:
            raise TypeError(
                f"trace={source!r} of type {type(source).__name__}: allowed are a CSV "
                "path or text file, a sequence, range, array or tensor of integers, a "
                "DataFrame with a 'batchsize' column, or one integer"
            )
        self.batch_sizes = self._checked(source if table is None else table[COLUMN])
        if len(self.batch_sizes) == 0:
            raise TraceError(f"{self.name}: no steps; a trace needs at least one row")
        self.batch_sizes.setflags(write=False)
        self._step_problem: str | None = None
        if table is not None and STEP_COLUMN in table:
            self._check_steps(table[STEP_COLUMN], strict_steps)

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

    def _checked(self, values: Any) -> np.ndarray:
        """Returns ``values`` as int64; raises TraceError for the first bad one."""
        if isinstance(values, (np.ndarray, pd.Series, range)):
            array = np.asarray(values)
        else:
            array = np.asarray(values, dtype=object)  # keeps a bool what it is
        if array.ndim != 1:
            raise TraceError(
                f"{self.name}: needs one dimension, has shape {array.shape}"
            )
        if array.dtype.kind not in "iuf":
            sizes = [self._size(row, value) for row, value in enumerate(array)]
            return np.asarray(sizes, dtype=np.int64)
        good = np.isfinite(array) & (array > 0) & (array < 2**62)
        if array.dtype.kind == "f":
            good &= array == np.floor(array)
        if not good.all():
            row = int(np.argmin(good))
            self._size(row, array[row].item())
        return array.astype(np.int64)

    def _size(self, row: int, value: Any) -> int:
        """Returns the batch size that a number or a cell says, or raises TraceError."""
        where = f"{self.place(row)}, {COLUMN}"
        try:
            if isinstance(value, str) and self._lines is None:  # not from a file
                raise ValueError(f"{value!r} is not an integer")
            size = trace_csv.integer_in(value)
        except ValueError as error:
            raise TraceError(
                f"{where}: {error}; allowed are integers > 0, the number of samples in "
                "the step"
            ) from None
        if size <= 0:
            raise TraceError(
                f"{where}: {size} must be > 0; it is the number of samples in the step"
            )
        if size >= 2**62:
            raise TraceError(f"{where}: {value!r} is too large")
        return size

    def _check_steps(self, column: pd.Series, strict: bool) -> None:
        """Warns or raises TraceError where the steps do not count up by one."""
        numbers = pd.to_numeric(column, errors="coerce")
        steps = numbers.to_numpy(dtype=np.float64, na_value=np.nan)
        bad = np.diff(steps) != 1  # NaN, a cell that is not a number, is bad too
        if bad.any():
            row = int(np.argmax(bad)) + 1
            before, after = (
                str(int(step)) if np.isfinite(step) else "a cell that is not a number"
                for step in steps[row - 1 : row + 1]
            )
            self._step_problem = (
                f"{self.place(row)}, {STEP_COLUMN}: {after} follows {before}; steps "
                "should count up by one. Rows are used in the order of the file"
            )
            if strict:
                raise TraceError(self._step_problem)
            warnings.warn(self._step_problem, TraceWarning, stacklevel=3)
