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

from xla_replica.common.differences import differences
from xla_replica.common.later import pd

VERSION = 1
# The events after which training goes on with the update of their step.
BEGINNINGS = ("start", "resume")
# What may be another when a run begins anew. Settings are for people: they may name the
# number of replicas, the device or a folder.
_MAY_DIFFER = ("versions", "num_replicas", "replica", "settings")


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
        self._header = {
            "format": VERSION,
            "versions": _versions(),
            **header,
            "settings": dict(settings or {}),
        }
        self._is_new = True

    def begin(self, step: int) -> None:
        """Writes the event of a run whose next update is number ``step``."""
        name = BEGINNINGS[step > 0]
        if step == 0:
            self._refuse_another_run()
        self.event(name, step, **self._header)

    def _refuse_another_run(self) -> None:
        """Raises ValueError if the file has a run that this one does not begin anew.

        A run that a kill has ended before its first checkpoint begins anew.
        """
        if not self.path.exists():
            return
        before = read_run(self.path)
        kept = {k: v for k, v in _plain(self._header).items() if k not in _MAY_DIFFER}
        has_ended = bool(before.events) and before.events[-1]["event"] == "stop"
        was = {**kept, **before.header}
        changed = "; ".join(differences(was, kept, {name: name for name in kept}))
        if has_ended or changed:
            why = "has ended" if has_ended else f"is not this one ({changed})"
            raise ValueError(
                f"{self.path} has another run, which {why}, and this one begins at "
                "step 0: give RunLog another path, or resume from a checkpoint"
            )

    def event(self, name: str, step: int, **values: Any) -> None:
        """Writes what happened before update ``step``."""
        now = round(time.time(), 3)
        self.write({"event": name, "step": step, "time": now, **values})

    def write(self, *lines: Mapping[str, Any]) -> None:
        """Appends lines, each of which has a ``step``.

        Numbers that are not finite become null.
        """
        texts = [json.dumps(_plain(line), allow_nan=False) + "\n" for line in lines]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if self._is_new and file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a line that a kill has cut off
                    texts.insert(0, "\n")
            file.write("".join(texts).encode())
        self._is_new = False


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
        begun = [event for event in self.events if event["event"] in BEGINNINGS]
        return begun[-1] if begun else {}


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
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    cut: int | None = None  # the number of a line that may have been cut off
    for number, text in enumerate(lines, 1):
        if not text:
            continue
        line = _parsed(text)
        event = None if line is None else line.get("event")
        if cut is not None and event is None:
            raise ValueError(
                f"{path}, line {cut}: {lines[cut - 1][:60]!r} is not a JSON object "
                "with a 'step'; is this a file that vbs.RunLog has written?"
            )
        cut = number if line is None else None
        if line is None:
            continue
        if line.get("format", VERSION) != VERSION:
            raise ValueError(
                f"{path}, line {number}: format {line['format']!r} is not {VERSION}"
            )
        if event is None:
            numbers = {k: math.nan if v is None else v for k, v in line.items()}
            rows.setdefault(line["step"], {}).update(numbers)
            continue
        if event in BEGINNINGS:
            lost = [step for step in rows if step >= line["step"]]
            line["num_lost"] = len(lost)
            for step in lost:
                del rows[step]
        events.append(line)
    table = pd.DataFrame([rows[step] for step in sorted(rows)])
    return Run(path, table if rows else pd.DataFrame({"step": []}), events)


def _parsed(text: str) -> dict[str, Any] | None:
    """Returns the object that a line holds; None if it does not hold one."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and type(line.get("step")) is int else None


def _plain(value: Any) -> Any:
    """Returns ``value`` as JSON knows it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    known = value is None or isinstance(value, (bool, int, float, str))
    return value if known else str(value)


def installed_version() -> str | None:
    """Returns the version of this library; of a bare checkout nothing is known."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("elastic-xla")
    return None


def _versions() -> dict[str, str]:
    """Returns the versions of Python, of this library and of torch's packages."""
    found = {"python": platform.python_version()}
    if version := installed_version():
        found["elastic-xla"] = version
    for name, module in sorted(sys.modules.items()):
        if name.startswith("torch") and "." not in name:
            found[name] = str(getattr(module, "__version__", "unknown"))
    return found
