"""grab-sampler 0.1.3 from PyPI, installed by the test or benchmark that compares.

It cannot be a requirement: it declares torch_sparse, which has no wheels, imports
torchopt without declaring it, and calls a constructor that newer torch does not have.
The compared code uses none of these three, so stand-ins replace them.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.references.published import fetch

VERSION = "0.1.3"
STAND_INS = ("torch_sparse", "torchopt", "torchopt.typing", "absl", "overrides")


def install(folder: Path) -> str | None:
    """Installs it into ``folder``; returns an error's text, or None."""
    return fetch(folder, f"grab-sampler=={VERSION}")


@contextlib.contextmanager
def imported(folder: Path) -> Iterator[Any]:
    """Yields the package ``grabsampler`` that `install` put into ``folder``."""
    stand_ins = {name: _stand_in(name) for name in STAND_INS}
    before = {name: sys.modules.get(name) for name in STAND_INS}
    sys.path.insert(0, str(folder))
    sys.modules.update(stand_ins)
    try:
        package = importlib.import_module("grabsampler")
        package.GraBSampler.__bases__[0].__init__ = _accept_a_data_source
        yield package
    finally:
        sys.path.remove(str(folder))
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        for name in [name for name in sys.modules if name.startswith("grabsampler")]:
            del sys.modules[name]


def _stand_in(name: str) -> types.ModuleType:
    module: Any = types.ModuleType(name)
    if name == "overrides":
        # Decorators, used with and without parentheses.
        module.overrides = lambda fn=None: fn if fn else lambda inner: inner
        module.final = lambda fn: fn
    elif name == "absl":
        module.logging = types.SimpleNamespace(
            debug=lambda *args: None, info=lambda *args: None
        )
    else:
        module.SparseTensor = module.OptState = object
        module.__path__ = []
    return module


def _accept_a_data_source(self: object, data_source: object = None) -> None:
    """Does what the constructor of torch's Sampler did before 2.10: nothing."""
    del self, data_source
