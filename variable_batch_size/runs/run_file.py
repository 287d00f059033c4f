"""The file that a run is written to while it lasts, one JSON object per line.

A line with ``event`` says what happened: ``start`` and ``resume``, which hold the
versions and settings, ``checkpoint``, ``stop``, and whatever else is told. Every other
line tells of the update with the number ``step``, in one part or in several. A run that
is resumed appends to the file, and what was written of updates that it makes again does
not count any more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xla_replica.common.differences import check_same
from xla_replica.common.later import pd

VERSION = 1
# The events after which training goes on with the update of their step.
BEGINNINGS = ("start", "resume")
# What may be another when a run begins anew. Settings are for people: they may name the
# number of replicas, the device or a folder.
_MAY_DIFFER = {"versions", "num_replicas", "replica", "settings"}


class RunFile:
    """Appends what a run tells to its file; see `read_run` for reading it.

    Only one process may write: the primary replica's.

    Args:
        path: The file; its folder is made if it is missing.
        settings: Of the run, by name, for people; values that JSON does not know are
            written as texts.
        **header: What else the events ``start`` and ``resume`` tell.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Mapping[str, Any] | None = None,
        **header: Any,
    ) -> None:
        self.path = Path(path)
        own = {"format": VERSION, "versions": _versions(), **header}
        self._header = {**own, "settings": dict(settings or {})}

    def begin(self, step: int) -> None:
        """Writes the event of a run whose next update is number ``step``.

        Raises ValueError if it begins at step 0, and the file has a run of other
        settings, or one that has ended. A run that a kill has ended before its first
        checkpoint begins anew.
        """
        if step == 0 and self.path.exists():
            before = read_run(self.path)
            what = f"{self.path} has another run, and this one begins at step 0"
            remedy = "give RunLog another path, or resume from a checkpoint"
            own = {**before.header, **_plain(self._header)}
            called = {name: name for name in before.header if name not in _MAY_DIFFER}
            check_same(before.header, own, what, remedy, called)
            if before.events and before.events[-1]["event"] == "stop":
                raise ValueError(f"{what}; the other has ended. {remedy}")
        self.event(BEGINNINGS[step > 0], step, **self._header)

    def event(self, name: str, step: int, **values: Any) -> None:
        """Writes what happened before update ``step``."""
        now = round(time.time(), 3)
        self.write({"event": name, "step": step, "time": now, **values})

    def write(self, *lines: Mapping[str, Any]) -> None:
        """Appends lines, each of which has a ``step``.

        Numbers that are not finite become null.
        """
        text = "".join(f"{json.dumps(_plain(line))}\n" for line in lines)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a line that a kill has cut off
                    text = f"\n{text}"
            file.write(text.encode())


@dataclasses.dataclass(frozen=True)
class Run:
    """What `read_run` has read.

    Attributes:
        path: The file.
        updates: One row for every update, sorted by its column ``step``; a column for
            each number that was told, NaN where it was not.
        events: All of them, in the order in which they happened. Those of `BEGINNINGS`
            also have ``num_lost``: how many updates were made, told and then lost.
    """

    path: Path
    updates: pd.DataFrame
    events: list[dict[str, Any]]

    @property
    def header(self) -> dict[str, Any]:
        """The last event ``start`` or ``resume``; empty if the file lacks one."""
        return next((e for e in self.events[::-1] if e["event"] in BEGINNINGS), {})


def read_run(path: str | os.PathLike[str]) -> Run:
    """Returns what a run has written to its file, also while it goes on.

    A line that a kill has cut off is left out, as is what was told of updates that a
    resumed run has made again.

    Args:
        path: The file.

    Raises:
        ValueError: A line is not a JSON object of this format, and is not the last one
            of a run that was killed.
    """
    path = Path(path)
    rows: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    cut = ""  # the place of a line that may have been cut off
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, text in enumerate(lines, 1):
        if not text:
            continue
        line = _parsed(text)
        if cut and "event" not in line:
            raise ValueError(
                f"{cut} is not a JSON object with a 'step'; is this a file that "
                "vbs.RunLog has written?"
            )
        place = f"{path}, line {number}"
        cut = "" if line else f"{place}: {text[:60]!r}"
        if line.get("format", VERSION) != VERSION:
            raise ValueError(f"{place}: format {line['format']!r} is not {VERSION}")
        if line.get("event") in BEGINNINGS:
            lost = [step for step in rows if step >= line["step"]]
            line["num_lost"] = len([rows.pop(step) for step in lost])
        if "event" in line:
            events.append(line)
        elif line:
            numbers = {k: math.nan if v is None else v for k, v in line.items()}
            rows.setdefault(line["step"], {}).update(numbers)
    found = [rows[step] for step in sorted(rows)]
    return Run(path, pd.DataFrame(found, columns=None if rows else ["step"]), events)


def _parsed(text: str) -> dict[str, Any]:
    """Returns the object that a line holds, empty if it does not hold one."""
    with contextlib.suppress(ValueError):
        line = json.loads(text)
        if isinstance(line, dict) and type(line.get("step")) is int:
            return line
    return {}


def _plain(value: Any) -> Any:
    """Returns ``value`` as JSON knows it: null where a number is not finite."""

    def known(other: Any) -> Any:
        return other.item() if isinstance(other, np.generic) else str(other)

    text = json.dumps(value, default=known)
    return json.loads(text, parse_constant=lambda _: None)


def installed_version() -> str | None:
    """Returns the version of this library; of a bare checkout nothing is known."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("elastic-xla")
    return None


def _versions() -> dict[str, Any]:
    """Returns the versions of Python, of this library and of torch's packages."""
    own = {"python": platform.python_version(), "elastic-xla": installed_version()}
    names = sorted(n for n in sys.modules if n.startswith("torch") and "." not in n)
    return own | {n: getattr(sys.modules[n], "__version__", None) for n in names}
