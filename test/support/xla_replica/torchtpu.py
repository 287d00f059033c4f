"""TorchTPU without a TPU: OpenXLA's plugin for CPUs takes libtpu's place.

All above the plugin is TorchTPU itself. The plugin has no process group, so a process
is one replica, and is too old for `torch.compile` and for ``cumsum``.
"""

import importlib.util
import os
from pathlib import Path

PLUGIN = "xla_plugins.xla_cpu_pjrt"

# What a TPU VM's metadata would say; nobody is asked for it.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # Else the plugin's few threads may wait for each other for ever.
    "TORCH_TPU_LAUNCH_BLOCKING": "1",
    # The plugin, an older one, writes a line for every program that it compiles.
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

_library = []  # what is registered lasts as long as its library


def is_installed() -> bool:
    packages = ("torch_tpu", PLUGIN.partition(".")[0])
    return all(importlib.util.find_spec(name) is not None for name in packages)


def load() -> None:
    """Imports torch and TorchTPU, whose accelerator in this process is a ``tpu``."""
    plugin = importlib.util.find_spec(PLUGIN).origin
    library = Path(plugin).with_name("xla_cpu_pjrt.so")
    os.environ.update(_ENVIRONMENT, TPU_LIBRARY_PATH=str(library))
    from torch_tpu import _loader
    from torch_tpu._internal.utils import hardware

    hardware.get_tpu_device_count = lambda: 1  # where it looks at the PCI bus
    _loader.load()
    _replace_cumsum()


def _replace_cumsum() -> None:
    """Replaces TorchTPU's prefix sums, which it lowers to an operation for scans."""
    import torch

    def cumsum(values, dim, *, dtype=None):
        dtype = dtype or (values.dtype if values.is_floating_point() else torch.int64)
        moved = values.to(dtype).movedim(dim, -1)
        size = moved.shape[-1]
        before = torch.ones(size, size, dtype=dtype, device=values.device).tril()
        return (moved.unsqueeze(-2) * before).sum(-1, dtype=dtype).movedim(-1, dim)

    _library.append(torch.library.Library("aten", "IMPL"))
    _library[0].impl("cumsum", cumsum, "PrivateUse1")
