"""What a pool holds, as a digest: all of it where that is cheap, and some items.

Cheap are what a dataset has as attributes (tensors, lists, dicts, objects, functions
such as transforms), and files that are listed there, by size and time.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from per_sample_grad.pool.fingerprint import digest, fingerprint

LEAST_ITEMS = 3
_PLAIN = (bool, int, float, str, bytes, type(None))


def compared_items(count: int) -> list[int]:
    """Returns the positions of the items that are compared, of a pool of so many.

    >>> compared_items(3), len(compared_items(10_000))
    ([0, 1, 2], 100)
    """
    number = min(count, max(LEAST_ITEMS, math.isqrt(count)))
    return np.linspace(0, count - 1, number).round().astype(int).tolist()


def pool_digest(dataset: Any, tag: str | None) -> str:
    """Returns a hash of what a dataset with a length holds.

    Raises TypeError if its items are others every time, unless ``tag`` stands for them.
    """
    found = hashlib.sha256()
    _add(dataset, found, tag)
    indices = compared_items(len(dataset))
    with torch.random.fork_rng(devices=[]):  # so that scoring draws the same numbers
        first, second = (
            # What cannot be described in an item is not compared.
            digest(repr(fingerprint({"item": [dataset[i] for i in indices]}, tag="")))
            for _ in range(2)
        )
    if first == second:
        found.update(first.encode())
    elif tag is None:
        raise TypeError(
            "the items of the pool are others every time that they are read, so nobody "
            "can tell whether another run has the same: leave random augmentation out, "
            "seed it by the sample, or pass tag=, a text of your own that stands for "
            "them: change the text whenever they change"
        )
    return found.hexdigest()[:16]


def _add(value: Any, found: Any, tag: str | None) -> None:
    """Adds what a dataset, or an attribute of one, holds, as far as that is cheap."""
    kind = type(value)
    if isinstance(value, np.memmap):
        _add_file(str(value.filename), found)
    elif kind in (list, tuple):
        _add_sequence(value, found, tag)
    elif isinstance(getattr(value, "_fingerprint", None), str):  # of datasets
        found.update(value._fingerprint.encode())
    elif isinstance(value, Dataset):
        found.update(kind.__qualname__.encode())
        for name, part in sorted(_attributes(value).items()):
            # What it keeps for itself may change, and so may notes of what was read.
            is_note = type(part) in (list, tuple) and len(part) != len(value)
            is_note = is_note and all(isinstance(each, _PLAIN) for each in part)
            if not (name.startswith("_") or is_note):
                found.update(name.encode())
                _add(part, found, tag)
    elif kind is dict:
        _add_sequence([*value.items()], found, tag)
    else:
        found.update(repr(fingerprint({"pool": value}, tag)).encode())


def _attributes(value: Any) -> dict[str, Any]:
    """Returns what an object holds, by name, in slots too."""
    found = {**vars(value)}
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        found |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    return found


def _add_sequence(values: Sequence[Any], found: Any, tag: str | None) -> None:
    """Adds the parts of a list; of paths, with the files' sizes and times."""
    paths = [each[0] if type(each) is tuple and each else each for each in values]
    if paths and isinstance(paths[0], str | os.PathLike) and os.path.isfile(paths[0]):
        for path in paths:
            _add_file(os.fspath(path), found)
    for each in values:
        if isinstance(each, _PLAIN):
            found.update(repr(each).encode())
        else:
            _add(each, found, tag)


def _add_file(path: str, found: Any) -> None:
    found.update(path.encode())
    if os.path.isfile(path):
        status = os.stat(path)
        found.update(f"{status.st_size} {status.st_mtime_ns}".encode())
