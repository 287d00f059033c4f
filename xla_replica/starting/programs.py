"""Compiled programs that the next start of a run finds in a folder."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from xla_replica.backends.local import default_device

logger = logging.getLogger(__name__)

# TorchTPU reads it when it compiles for the first time.
_FOLDER_OF_PROGRAMS = "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"


def keep_programs(folder: str | Path) -> bool:
    """Has the runtime keep compiled programs in a folder; returns whether it does.

    TorchTPU does, and a start that finds them compiles nothing: call this before
    anything is computed on the device. A folder that the environment names
    (``TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT``) stays. The programs are machine code
    that is loaded without a check: nobody else may write to the folder. Elsewhere
    nothing happens; torch_xla 2.9 cannot load what it has kept.

    Args:
        folder: On each host, such as one beside the checkpoints.
    """
    if default_device().type != "tpu":
        return False
    if _FOLDER_OF_PROGRAMS in os.environ:
        return True
    if torch.tpu._get_cache_requests():
        logger.warning(
            "compiled programs are not kept in %s, since something has been computed "
            "on the TPU already: call xla_replica.keep_programs before that",
            folder,
        )
        return False
    os.environ[_FOLDER_OF_PROGRAMS] = str(Path(folder).absolute())
    return True
