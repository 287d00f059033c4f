"""Packages of others, which only `make outside` installs."""

import importlib
import os
import warnings
from typing import Any

import pytest


def package(name: str) -> Any:
    """Returns a module, or skips without it; under `make outside` it must be there."""
    if not os.environ.get("OUTSIDE"):
        return pytest.importorskip(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
