"""Fixtures that several test modules ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Beside a process per core, threads of torch's only wait for each other: a default run
# would take half as long again. It must be set before torch is loaded.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small operations on a busy machine: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
