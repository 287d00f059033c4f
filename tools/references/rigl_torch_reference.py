"""rigl-torch 0.5.2 from PyPI, installed by the test or benchmark that compares.

It is not a requirement, because only the comparison needs it. It declares torchvision,
to ask whether modules are torchvision's residual blocks; no compared module is one, so
a stand-in is enough.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.references.published import fetch

VERSION = "0.5.2"


def install(folder: Path) -> str | None:
    """Installs it into ``folder``; returns an error's text, or None."""
    return fetch(folder, f"rigl-torch=={VERSION}")


@contextlib.contextmanager
def imported(folder: Path) -> Iterator[Any]:
    """Yields the class ``RigLScheduler`` of the package in ``folder``."""
    stands_in = importlib.util.find_spec("torchvision") is None
    if stands_in:
        sys.modules["torchvision"] = _torchvision()
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("rigl_torch.RigL").RigLScheduler
    finally:
        sys.path.remove(str(folder))
        if stands_in:
            del sys.modules["torchvision"]
        for name in [name for name in sys.modules if name.startswith("rigl_torch.")]:
            del sys.modules[name]
        sys.modules.pop("rigl_torch", None)


def _torchvision() -> types.ModuleType:
    blocks = {name: type(name, (), {}) for name in ("BasicBlock", "Bottleneck")}
    module: Any = types.ModuleType("torchvision")
    module.models = types.SimpleNamespace(resnet=types.SimpleNamespace(**blocks))
    return module
