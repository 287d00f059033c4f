"""What members of a run must have in common beside the settings of their optimizer."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import pickle
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from variable_batch_size.data.seeded_dataset import SeededDataset
from xla_replica import Replica
from xla_replica.common.trees import map_tensors
from xla_replica.members.host_group import as_bytes

_NUM_SAMPLES = 3


def environment(replica: Replica) -> dict[str, Any]:
    """Returns what the bits of a gradient, and of an update, depend on."""
    return {
        "device": replica.device_model,
        "torch": str(torch.__version__),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
    }


def layers(modules: Mapping[str, nn.Module]) -> str:
    """Returns how many layers without parameters there are of each configuration."""
    found = nn.ModuleList(modules.values()).modules()
    found = [each for each in found if not (each._parameters or [*each.children()])]
    shown = Counter(re.sub(" at 0x[0-9a-f]+", "", repr(each)) for each in found)
    return ", ".join(f"{number} x {text}" for text, number in sorted(shown.items()))


def first_samples(dataset: Any) -> str | None:
    """Returns a digest of a dataset's first samples, as `SeededDataset` gives them.

    None if they cannot be compared, since two reads of them differ or fail.
    """
    is_seeded = isinstance(dataset, SeededDataset)
    inner, seed = (dataset.dataset, dataset.seed) if is_seeded else (dataset, 0)
    with contextlib.suppress(Exception):  # it fails again where samples are needed
        # Of a copy, so that a loader's workers share no file that is opened here.
        seeded = SeededDataset(copy.copy(inner), seed)
        reads = [[seeded[n] for n in range(_NUM_SAMPLES)] for _ in range(2)]
        first, second = (pickle.dumps(map_tensors(read, _content)) for read in reads)
        if first == second:
            return hashlib.sha256(first).hexdigest()[:16]
    return None


def _content(tensor: torch.Tensor) -> Any:
    return as_bytes(tensor.detach().contiguous()).numpy(), tensor.shape
