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
from typing import Any, TypeAlias

import numpy as np

from variable_batch_size.traces import trace_csv
from variable_batch_size.traces.trace_csv import COLUMN, STEP_COLUMN, Table, TraceError
from xla_replica.common.arguments import check_integer, is_integer
from xla_replica.common.later import is_pandas, pd

# What the rows of a trace by threshold count, in place of steps.
THRESHOLDS = ("samples", "tokens")
# Of a trace by threshold: more would be a gigabyte of rows, and a wrong unit.
MOST_STEPS = 2**27


class TraceWarning(UserWarning):
    """A trace that can be used, but is probably not what was meant."""


TraceSource: TypeAlias = (
    "trace_csv.Source | int | Sequence[int] | np.ndarray | pd.DataFrame | Trace"
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
        if isinstance(source, Trace):
            vars(self).update(vars(source))
            return
        table = _table_of(source)
        header = [str(name).strip().lower() for name in table.header]
        table = table._replace(header=header)
        self._rows = table._replace(columns=[])
        self._first_steps: np.ndarray | None = None  # of every row, of thresholds
        self.name, self.endless = table.name, is_integer(source)
        self.batch_sizes = table.integers(table.find(COLUMN), 1)
        if STEP_COLUMN in table.header:
            self._check_steps(table)
        elif {*THRESHOLDS} & {*table.header}:
            self._unroll(table, tokens_per_sample)
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
        elif self.endless:
            return self.name
        return self._rows.place(step)

    def _unroll(self, table: Table, tokens_per_sample: int | None) -> None:
        """Replaces the rows' batch sizes by those of the steps that they stand for."""
        unit = table.find(*THRESHOLDS)
        first = table.integers(unit, 0)
        table.refuse(unit, first[:1] != 0, "must be 0, as a batch size begins there")
        table.check_increasing(unit, first)
        if unit == "tokens" and tokens_per_sample is None:
            raise TraceError(f"{self.name}: the column tokens needs tokens_per_sample")
        per_sample = tokens_per_sample if unit == "tokens" else 1
        check_integer("tokens_per_sample", per_sample, least=1)
        counts, used = [], 0
        for size, end in zip(self.batch_sizes.tolist(), first[1:].tolist()):
            counts.append(max(0, -(-(end - used) // (size * per_sample))))
            used += counts[-1] * size * per_sample
            if counts[-1] == 0:
                place = table.place(len(counts) - 1)
                _warn(
                    f"{place}, {COLUMN}: {size} is not used, because no step begins "
                    f"between this row's {unit} and the next one's"
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

    def _check_steps(self, table: Table) -> None:
        """Looks at columns that may mean something else than one step per row.

        Raises TraceError if one beside ``step`` may be meant as thresholds: it begins
        at 0 and increases. Warns where steps do not count up by one from 0 or 1.
        """
        for unit in (name for name in THRESHOLDS if name in table.header):
            found = table.floats(unit)
            if len(found) > 1 and found[0] == 0 and (np.diff(found) > 0).all():
                raise TraceError(
                    f"{self.name}: leave out {STEP_COLUMN!r} if rows hold from so many "
                    f"{unit} on, else {unit!r}"
                )
        steps = table.floats(STEP_COLUMN)
        expected = np.arange(len(steps)) + (steps[0] == 1)
        if (steps != expected).any():
            row = int(np.argmax(steps != expected))
            cell = [*table.column(STEP_COLUMN)][row]
            _warn(
                f"{table.place(row)}, {STEP_COLUMN}: {cell} should be {expected[row]}. "
                "Rows are used in the order of the file, from the first step on"
            )


def _warn(message: str) -> None:
    """Warns the caller of `Trace`."""
    warnings.warn(message, TraceWarning, stacklevel=4)


def _table_of(source: TraceSource) -> Table:
    """Returns the columns of a file or DataFrame, or one with a trace's batch sizes."""
    given: Any = source
    if isinstance(source, Table):
        return source
    if isinstance(source, (str, os.PathLike)) or hasattr(source, "read"):
        return trace_csv.read_table(given)
    name = f"the {type(source).__name__}"
    if is_pandas(source, "DataFrame"):
        columns = [np.asarray(column) for _, column in given.items()]
        return Table(name, [*given.columns], columns)
    if is_integer(source):
        return Table("the constant trace", [COLUMN], [[source]])
    if is_pandas(source, "Series") or (isinstance(source, np.ndarray) and source.ndim):
        return Table(name, [COLUMN], [np.asarray(source)])
    if hasattr(source, "tolist"):  # a torch tensor, on any device
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)):
        raise TypeError(
            f"trace={source!r} of type {type(source).__name__}: allowed are a CSV path "
            "or file, a DataFrame, or integers: one, a sequence, array or tensor"
        )
    return Table(name, [COLUMN], [given])
