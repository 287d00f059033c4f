"""Functions of scripts that a replica's process cannot import.

A process that Python starts imports the script, ``__main__``, and finds the functions
there. That of a notebook, of ``python -c`` and of standard input is not a file; and one
that calls `launch` outside of ``if __name__ == "__main__":`` would call it once more.
Of these, functions and classes are sent themselves, by cloudpickle.
"""

from __future__ import annotations

import ast
import functools
import io
import pickle
import sys
from pathlib import Path
from typing import Any


def is_imported() -> bool:
    """Returns whether processes that are started now import this process's script."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:  # python -m
        return True
    path = getattr(main, "__file__", None)
    return path is not None and Path(path).is_file() and not _calls_unguarded()


def _calls_unguarded() -> bool:
    """Returns whether the script is at a line that runs whenever it is imported."""
    main, frame = vars(sys.modules["__main__"]), sys._getframe()
    while frame is not None:
        if frame.f_globals is main and frame.f_code.co_name == "<module>":
            return frame.f_lineno not in _guarded_lines(main["__file__"])
        frame = frame.f_back
    return False


@functools.cache
def _guarded_lines(path: str) -> frozenset[int]:
    """Returns the lines within ``if __name__ == ...`` of a script."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(Path(path).read_bytes())):
        if isinstance(node, ast.If) and any(
            isinstance(each, ast.Name) and each.id == "__name__"
            for each in ast.walk(node.test)
        ):
            lines.update(range(node.lineno, node.end_lineno + 1))
    return frozenset(lines)


def by_value(pickler: type[pickle.Pickler], value: Any) -> bytes:
    """Returns ``value`` as bytes, with the functions and classes of the script.

    ``pickler`` writes all else. Raises TypeError if cloudpickle is not installed.
    """
    try:
        import cloudpickle
    except ImportError as error:
        raise TypeError(
            "launch: replicas run in other processes, which cannot import this script "
            "(a notebook, python -c, standard input, or a call of launch outside of "
            '`if __name__ == "__main__":`): put the function into a file, and call '
            'launch there under `if __name__ == "__main__":`; or pip install '
            "'elastic-xla[notebook]', and it is sent to them as it is"
        ) from error

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            found = pickler.reducer_override(self, obj)
            return super().reducer_override(obj) if found is NotImplemented else found

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()
