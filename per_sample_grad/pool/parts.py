"""The parts of a pool that are computed already: files that survive a kill.

A part is an interval of indices, whatever the batch size and the number of replicas, in
a separate file that appears in one piece. Beside them lies a description of what was
computed: the parts of another model or score are an error.

A file of a part is that of ``np.save``, followed by a SHA-256 of that, the description
and the part's number. So neither a damaged part is accepted, nor one of another pool.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from xla_replica.common.differences import differences
from xla_replica.common.files import UNFINISHED, unfinished_name, write_whole

DESCRIPTION = "pool.json"
# Counts changes after which earlier folders cannot be continued.
FORMAT = 7
# How many differences a message has.
_FEW = 5
_ANOTHER = "Give another folder, or delete this one."
_CHECKSUM_BYTES = hashlib.sha256().digest_size


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts in a folder, and what they are of: names and values for JSON."""

    folder: Path
    description: dict[str, Any]

    def kept(self, num_parts: int) -> np.ndarray:
        """Returns which parts are in the folder: ``(num_parts,)`` bool."""
        return np.array([self._path(n).exists() for n in range(num_parts)], dtype=bool)

    def read(self, number: int) -> np.ndarray | None:
        """Returns a part's numbers; None: it is missing, or damaged."""
        path = self._path(number)
        if not path.exists():
            return None
        content = memoryview(path.read_bytes())
        rows, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if self._checksum(number, rows) == checksum:
            found: np.ndarray = np.load(io.BytesIO(rows), allow_pickle=False)
            return found
        warnings.warn(
            f"{path} is damaged: its content is not what was written; its samples are "
            "scored again",
            stacklevel=5,
        )
        return None

    def write(self, number: int, rows: np.ndarray) -> None:
        """Writes a part, ``(samples, *width)`` float32, once all of it is on the disk.

        Raises:
            OSError: It cannot be written; the message says what to do.
        """
        file = io.BytesIO()
        np.save(file, rows)
        content = file.getbuffer()
        self._write(self._path(number), content, self._checksum(number, content))

    def describe(self) -> None:
        """Writes what is computed, or checks that the folder is for the same."""
        path = self.folder / DESCRIPTION
        self.folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            self._write(path, self._text)
        # Read it also if it has just been written: maybe by another replica or job.
        try:
            saved, own = json.loads(path.read_bytes()), json.loads(self._text)
        except (ValueError, RecursionError, IsADirectoryError) as error:
            raise ValueError(f"{path} is damaged ({error}). {_ANOTHER}") from error
        saved = saved if isinstance(saved, dict) else {}
        if found := differences(saved, own, {name: name for name in {**own, **saved}}):
            more = f"; and {len(found) - _FEW} more" if len(found) > _FEW else ""
            raise ValueError(
                f"{self.folder} holds scores of something else: "
                f"{'; '.join(found[:_FEW])}{more}. {_ANOTHER}"
            )

    def clear_unfinished(self) -> None:
        """Deletes what killed runs were writing."""
        for path in self.folder.glob(f"*{UNFINISHED}"):
            path.unlink(missing_ok=True)

    @functools.cached_property
    def _text(self) -> bytes:
        return json.dumps({"format": FORMAT, **self.description}, indent=1).encode()

    def _checksum(self, number: int, rows: memoryview) -> bytes:
        found = hashlib.sha256(self._text + b"%d" % number)
        found.update(rows)
        return found.digest()

    def _write(self, path: Path, *pieces: bytes | memoryview) -> None:
        """Writes a file that appears in one piece; an OSError says what to do."""
        unfinished = unfinished_name(path)
        try:
            write_whole(unfinished, lambda file: file.writelines(pieces), path)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}. The parts that are finished are kept: call "
                "score_pool again with the same folder as soon as it can be written",
                str(path),
            ) from error

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}.npy"
