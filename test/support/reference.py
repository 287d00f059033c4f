"""Published packages that the tests fetch and compare ours with."""

import os
from typing import NoReturn

import pytest


def not_compared(package: str, error: str) -> NoReturn:
    """Skips tests that need a package that is not available; in CI they fail.

    A green run of CI then means that the comparison was made.
    """
    message = (
        f"NOT COMPARED with {package} bit for bit: it cannot be installed, which needs "
        f"a package index that has it. pip: {error[-300:]}"
    )
    if os.environ.get("CI"):
        pytest.fail(f"{message} (a skip where the environment has no CI)")
    pytest.skip(message)
