"""Folders of sharded tensors, in the format of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from xla_replica.common.files import sha256
from xla_replica.common.trees import NamedTensors, Tensors
from xla_replica.device.sharded import is_sharded

if TYPE_CHECKING:
    from xla_replica.backends.replica import Replica

# What the description of a folder consists of, which is pickled.
_DCP = "torch.distributed.checkpoint"
_MODULES = f"{_DCP}.metadata", f"{_DCP}.filesystem"
_OTHERS = """
    torch.Size torch.device torch.serialization._get_layout collections.OrderedDict
    pathlib.Path pathlib.PosixPath pathlib.WindowsPath
    pathlib._local.Path pathlib._local.PosixPath pathlib._local.WindowsPath
"""


def write_parts(
    replica: Replica, folder: Path, tensors: NamedTensors
) -> dict[str, str]:
    """Writes this process's parts of tensors; every process calls it.

    Args:
        replica: The process's, of all that share the tensors.
        folder: The folder.
        tensors: By name, the same on every process.

    Returns:
        The SHA-256 of every file in the folder, by name.

    Raises:
        OSError: On every process if one of them could not write.
    """
    from torch.distributed import checkpoint

    with _os_errors():
        checkpoint.save(dict(tensors), checkpoint_id=folder)
    # Of all files, each of which one process reads once more, while it is at hand.
    names = replica.choose(lambda: sorted(file.name for file in folder.iterdir()))
    own = names[replica.rank :: replica.num_replicas]
    parts = replica.all_gather_object({name: sha256(folder / name) for name in own})
    return {name: digest for part in parts for name, digest in part.items()}


def read_parts(
    folder: Path, wanted: NamedTensors, like: Tensors
) -> dict[str, torch.Tensor]:
    """Returns tensors that `write_parts` wrote on any number of processes.

    Every process calls it. Nothing that the files hold is run.

    Args:
        folder: The folder.
        wanted: By name, tensors whose shapes and dtypes tell what is there.
        like: Parameters. A tensor is sharded as the parameter of its shape is; others
            are whole on every process.

    Raises:
        OSError: A file is missing, cannot be read, or does not hold what is wanted.
    """
    from torch.distributed import checkpoint

    models = {tuple(p.shape): p.detach() for p in like if is_sharded(p)}
    tensors = {name: _empty(tensor, models) for name, tensor in wanted.items()}
    with _os_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        checkpoint.load(tensors, storage_reader=_reader(folder))
    return tensors


def _empty(wanted: torch.Tensor, models: Mapping[tuple[int, ...], Any]) -> torch.Tensor:
    """Returns a tensor to read into."""
    model = models.get(tuple(wanted.shape))
    if model is not None:
        return torch.empty_like(model, dtype=wanted.dtype)
    tensor = torch.empty(wanted.shape, dtype=wanted.dtype)
    if not models:
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = next(iter(models.values())).device_mesh
    tensor = tensor.to(mesh.device_type)
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _reader(folder: Path) -> Any:
    """Returns DCP's reader of a folder, which runs nothing that it finds there."""
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with (folder / ".metadata").open("rb") as file:
                return _Unpickler(file).load()

    return Reader(folder)


class _Unpickler(pickle.Unpickler):
    """Reads the description of a folder, and refuses all classes but its own."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = isinstance(getattr(torch, name, None), torch.dtype)
        is_other = f"{module}.{name}" in _OTHERS.split()
        is_known = is_other or (module == "torch" and is_dtype)
        if is_known or (module in _MODULES and "." not in name):
            found = super().find_class(module, name)
            # Not what the module imports, such as os.
            if is_known or getattr(found, "__module__", None) == module:
                return found
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Turns DCP's exception, which is not an Exception, into an OSError."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = "; ".join(f"process {r}: {f[0]!r}" for r, f in error.failures.items())
        raise OSError(f"torch.distributed.checkpoint: {causes}") from error
