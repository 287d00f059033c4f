"""The text of a trace file: its header, and a fast parser for plain files."""

from __future__ import annotations

import csv
import io
import re

import numpy as np
import pandas as pd

COLUMN = "batchsize"
STEP_COLUMN = "step"
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)


class TraceError(ValueError):
    """A trace that cannot be used; the message names the place and the remedy."""


class Header:
    """Column names, the header's physical line, and where the rows begin."""

    def __init__(self, columns: list[str], line: int, offset: int) -> None:
        self.columns = columns
        self.line = line
        self.offset = offset


def read_header(text: str, name: str) -> Header:
    """The first line that is not blank; raises TraceError if it is no header."""
    stream = io.StringIO(text)
    line = 0
    while content := stream.readline():
        line += 1
        if content.strip():
            columns = [cell.strip() for cell in next(csv.reader([content.strip()]))]
            check_columns(columns, name)
            return Header(columns, line, stream.tell())
    raise TraceError(f"{name}: no steps; the file is empty")


def check_columns(columns: list[str], name: str) -> None:
    """Raises TraceError unless there is exactly one ``batchsize`` column."""
    if columns.count(COLUMN) == 1:
        return
    hint = ""
    if len(columns) == 2 and all(_INTEGER.fullmatch(cell) for cell in columns):
        hint = f". The file seems to lack its header '{STEP_COLUMN},{COLUMN}'"
    found = "one" if COLUMN not in columns else "several"
    raise TraceError(
        f"{name}: needs exactly one column '{COLUMN}', "
        f"found {'none' if found == 'one' else 'several'}; columns are {columns}{hint}"
    )


def parse_plain(text: str, header: Header) -> dict[str, np.ndarray] | None:
    """Numeric columns of a plain file, fast; None if anything is out of the ordinary.

    Ordinary means: no quotes, as many commas in every line as in the header, no blank
    line. Only then does a row's number tell its line.
    """
    body = text[header.offset :]
    num_rows = body.count("\n") + (not body.endswith("\n") and bool(body))
    num_commas = (len(header.columns) - 1) * num_rows
    if '"' in text or num_rows == 0 or body.count(",") != num_commas:
        return None
    wanted = [
        header.columns.index(c) for c in (COLUMN, STEP_COLUMN) if c in header.columns
    ]
    try:
        frame = pd.read_csv(
            io.StringIO(body),
            header=None,
            usecols=wanted,
            skip_blank_lines=False,
            skipinitialspace=True,
        )
    except (ValueError, pd.errors.ParserError):
        return None
    columns = {header.columns[i]: frame[i].to_numpy() for i in wanted}
    plain = all(column.dtype.kind == "i" for column in columns.values())
    return columns if plain and len(frame) == num_rows else None


def number_of_cell(cell: str) -> int:
    """An integer, also written as a float; raises ValueError on anything else."""
    if not cell:
        raise ValueError("missing batchsize: the cell is empty")
    if _INTEGER.fullmatch(cell):
        return int(cell)
    try:
        number = float(cell) if cell.isascii() and "_" not in cell else float("nan")
    except ValueError:
        number = float("nan")
    if not number.is_integer():  # nan and inf are not
        raise ValueError(f"{cell!r} is not an integer")
    return int(number)
