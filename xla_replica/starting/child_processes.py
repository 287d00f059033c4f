"""Child processes: they end with their parent, and what they died of."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading


def die_with_parent() -> None:
    """From now on this child process ends when its parent does, however that ends."""
    threading.Thread(target=_wait_and_die, name="die-with-parent", daemon=True).start()


def _wait_and_die() -> None:
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def cause_of_death(exit_code: int) -> str:
    """A ``Process.exitcode`` in words."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit status {exit_code}"
