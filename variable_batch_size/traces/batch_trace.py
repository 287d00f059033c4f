"""Traces: the global batch size of every step, read and checked.

A trace file is CSV with a column ``batchsize`` and, usually, ``step``::

    step,batchsize
    0,1024
    1,2048

or a column ``samples`` or ``tokens``, which says from how many of them on a batch size
holds::

    samples,batchsize
    0,1024
    500000,2048

Spaces, a byte order mark, CRLF, blank lines, capitals in the header, extra columns and
their order do not matter. A `TraceError` names file, line, column and value.
"""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Sequence
from typing import Any, TextIO, TypeAlias

import numpy as np

from variable_batch_size.traces import trace_csv
from variable_batch_size.traces.trace_csv import COLUMN, STEP_COLUMN, TraceError
from xla_replica.common.arguments import check_integer, is_integer
from xla_replica.common.later import is_pandas, pd

# Of a trace by threshold: more would be a gigabyte of rows, and a wrong unit.
MOST_STEPS = 2**27


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
        tokens_per_sample: How many tokens every sample has. A source with a column
            ``tokens`` needs it.

    A row by threshold, of a file or DataFrame with a column ``samples`` or ``tokens``
    and without ``step``, holds for every step that begins when the steps before it have
    used at least so many. The first one is 0, the last one holds without end.

    Attributes:
        batch_sizes: ``(num_steps,)`` int64, read-only, all positive. Of thresholds: up
            to the first step of the last row.
        endless: Whether the last batch size is repeated without end: that of a constant
            trace or of thresholds.
        name: What errors call the source.

    Raises:
        TraceError: A batch size is not a positive integer, or there are none, or there
            is no ``batchsize`` column; thresholds do not begin at 0 or do not increase.
        TypeError: ``source`` is of another type, such as a bool.
        FileNotFoundError: The file does not exist.

    >>> Trace([64, 96, 96]).batch_sizes.tolist()
    [64, 96, 96]
    >>> Trace(pd.DataFrame({"samples": [0, 100], "batchsize": [64, 96]})).batch_sizes
    array([64, 64, 96])
    """

    def __init__(
        self, source: TraceSource, *, tokens_per_sample: int | None = None
    ) -> None:
        if tokens_per_sample is not None:
            check_integer("tokens_per_sample", tokens_per_sample, least=1)
        if isinstance(source, Trace):
            vars(self).update(vars(source))
            return
        self.endless = is_integer(source)
        self._lines: Sequence[int] | None = None
        self._first_steps: np.ndarray | None = None  # of every row, of thresholds
        given: Any = source
        values = given
        header: list[str] | None = None
        columns: list[Any]
        if isinstance(source, (str, os.PathLike)) or hasattr(source, "read"):
            self.name, header, columns, self._lines = trace_csv.read_table(given)
        elif is_pandas(source, "DataFrame"):
            self.name, header = "the DataFrame", [*given.columns]
            columns = [given.iloc[:, index] for index in range(len(header))]
        elif self.endless:
            self.name, values = "the constant trace", [source]
        elif (
            isinstance(source, (Sequence, np.ndarray)) or is_pandas(source, "Series")
        ) and not isinstance(source, (bytes, bytearray)):
            self.name = f"the {type(source).__name__}"
        elif hasattr(source, "tolist"):  # a torch tensor, on any device
            self.name, values = f"the {type(source).__name__}", source.tolist()
        else:
            raise TypeError(
                f"trace={source!r} of type {type(source).__name__}: allowed are a CSV "
                "path or text file, a sequence, range, array or tensor of integers, a "
                "DataFrame with a 'batchsize' column, or one integer"
            )
        unit = None
        if header is not None:
            names = [str(cell).strip().lower() for cell in header]
            unit = trace_csv.check_header(names, self.name)
            cells = dict(zip(names[::-1], columns[::-1]))  # of equal names the first
            values = cells[COLUMN]
        self.batch_sizes = self._checked(values)
        if len(self.batch_sizes) == 0:
            raise TraceError(f"{self.name}: no steps; a trace needs at least one row")
        if unit == STEP_COLUMN:
            self._check_steps(cells[unit])
            for name in trace_csv.THRESHOLDS:
                if name in cells:
                    self._check_counted(cells[name], name)
        elif unit is not None:
            self._unroll(cells[unit], unit, tokens_per_sample)
        self.batch_sizes.setflags(write=False)

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

    def place(self, step: int) -> str:
        """Returns where the batch size of a step (from 0) was read: file and line."""
        if self._first_steps is not None:
            step = int(np.searchsorted(self._first_steps, step, side="right")) - 1
        return self._place_of_row(step)

    def _place_of_row(self, row: int) -> str:
        if self._lines is not None:
            return f"{self.name}, line {self._lines[row]}"
        if self.endless and self._first_steps is None:
            return self.name
        return f"{self.name}, element {row}"

    def _checked(self, values: Any, column: str = COLUMN) -> np.ndarray:
        """Returns ``values`` as int64; raises TraceError for the first bad one."""
        if isinstance(values, (np.ndarray, range)) or is_pandas(values, "Series"):
            array = np.asarray(values)
        else:
            array = np.asarray(values, dtype=object)  # keeps a bool what it is
        if array.ndim != 1:
            raise TraceError(
                f"{self.name}: needs one dimension, has shape {array.shape}"
            )
        if array.dtype.kind not in "iuf":
            sizes = [self._size(row, value, column) for row, value in enumerate(array)]
            return np.asarray(sizes, dtype=np.int64)
        least = int(column == COLUMN)
        good = np.isfinite(array) & (array >= least) & (array < 2**62)
        if array.dtype.kind == "f":
            good &= array == np.floor(array)
        if not good.all():
            row = int(np.argmin(good))
            self._size(row, array[row].item(), column)
        return array.astype(np.int64)

    def _size(self, row: int, value: Any, column: str) -> int:
        """Returns the number that a cell of the column says, or raises TraceError."""
        allowed, meaning = "> 0", "the number of samples in the step"
        if column != COLUMN:
            allowed, meaning = ">= 0", f"the {column} after which the row holds"
        try:
            if isinstance(value, str) and self._lines is None:  # not from a file
                raise ValueError(f"{value!r} is not an integer")
            size = trace_csv.integer_in(value, column)
            if int(column == COLUMN) <= size < 2**62:
                return size
            problem = f"{size} must be {allowed}; it is {meaning}"
            if size >= 2**62:
                problem = f"{value!r} is too large"
        except ValueError as error:
            problem = f"{error}; allowed are integers {allowed}, {meaning}"
        raise TraceError(f"{self._place_of_row(row)}, {column}: {problem}")

    def _unroll(self, column: Any, unit: str, tokens_per_sample: int | None) -> None:
        """Replaces the rows' batch sizes by those of the steps that they stand for."""
        starts = self._checked(column, unit).tolist()
        for row, before in enumerate([-1, *starts[:-1]]):
            where = f"{self._place_of_row(row)}, {unit}: {starts[row]}"
            if row == 0 and starts[0] != 0:
                raise TraceError(f"{where} must be 0: a batch size is needed from then")
            if starts[row] <= before:
                raise TraceError(f"{where} must be > {before}, that of the row before")
        if unit == "tokens":
            if tokens_per_sample is None:
                raise TraceError(
                    f"{self.name}: the column 'tokens' needs tokens_per_sample, the "
                    "number of tokens in a sample"
                )
            starts = [-(-start // tokens_per_sample) for start in starts]
        sizes, used = self.batch_sizes.tolist(), 0
        counts = []
        for row, (size, end) in enumerate(zip(sizes, starts[1:])):
            counts.append(max(0, -(-(end - used) // size)))
            used += counts[-1] * size
            if counts[-1] == 0:
                warnings.warn(
                    f"{self._place_of_row(row)}, {COLUMN}: {size} is not used, because "
                    f"no step begins between this row's {unit} and the next one's",
                    TraceWarning,
                    stacklevel=3,
                )
        counts.append(1)
        if sum(counts) > MOST_STEPS:
            raise TraceError(
                f"{self.name}: {sum(counts)} steps lead to the last row, more than "
                f"{MOST_STEPS}; is the column {unit!r} in another unit?"
            )
        self._first_steps = np.cumsum([0, *counts[:-1]])
        self.batch_sizes = np.repeat(self.batch_sizes, counts)
        self.endless = True

    def _check_counted(self, column: Any, unit: str) -> None:
        """Raises TraceError if a column beside ``step`` may be meant as thresholds.

        It begins at 0 and increases, and does not count what was used before each step.
        """
        found = pd.to_numeric(pd.Series(column), errors="coerce").to_numpy(float)
        if found[0] != 0 or not (np.diff(found) > 0).all():
            return
        used = np.cumsum(self.batch_sizes.astype(float)) - self.batch_sizes
        times = found[-1] / max(used[-1], 1.0) if unit == "tokens" else 1.0
        if not np.allclose(found, times * used, rtol=1e-9, atol=0):
            raise TraceError(
                f"{self.name}: there are columns {STEP_COLUMN!r} and {unit!r}, and "
                f"{unit!r} is not what the steps before each row have used: leave out "
                f"{STEP_COLUMN!r} if every row holds from so many {unit} on, and "
                f"{unit!r} if every row is one step"
            )

    def _check_steps(self, column: Any) -> None:
        """Warns where the steps do not count up by one from 0 or 1."""
        numbers = pd.to_numeric(pd.Series(column), errors="coerce")
        steps = numbers.to_numpy(float, na_value=np.nan)

        def told(row: int) -> str:
            number = np.isfinite(steps[row])
            return str(int(steps[row])) if number else "a cell that is not a number"

        bad = np.diff(steps) != 1  # NaN, a cell that is not a number, is bad too
        if bad.any():
            row = int(np.argmax(bad)) + 1
            problem = (
                f"{told(row)} follows {told(row - 1)}; steps should count up by one"
            )
        elif steps[0] not in (0, 1):
            row, problem = 0, f"the first step is {told(0)}; it should be 0 or 1"
        else:
            return
        warnings.warn(
            f"{self.place(row)}, {STEP_COLUMN}: {problem}. Rows are used in the order "
            "of the file, from the beginning of training on",
            TraceWarning,
            stacklevel=3,
        )
