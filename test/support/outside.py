"""Packages of others, which only `make outside` installs."""

import importlib.util
import os
import warnings
from typing import Any

import pytest

from tools.outside.models import import_torchvision


def package(name: str) -> Any:
    """Returns a module, or skips without it; under `make outside` it must be there."""
    if importlib.util.find_spec(name.partition(".")[0]):
        import_torchvision()  # which many of them import
    if not os.environ.get("OUTSIDE"):
        return pytest.importorskip(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
