"""Makes the process that imports it one of a host with TPU chips; see `tpu_like`.

torch_xla, and all above it, find what they find on a host with chips: its devices on
the PCI bus, its variables and, of the client in libtpu, which replica of how many this
is. XLA:CPU takes the client's place, but for collectives, which go through gloo.
"""

import datetime
import functools
import importlib.machinery
import multiprocessing
import os
import sys
import time
from types import ModuleType


class _Client:
    """What libtpu tells torch_xla, and does for it."""

    def __init__(self, torch_xla: ModuleType) -> None:
        self._torch_xla, self._c = torch_xla, torch_xla._XLAC
        self._torch = sys.modules["torch"]

    def install(self) -> None:
        # Python still reads TPU in its copy of the environment.
        os.putenv("PJRT_DEVICE", "CPU")
        self._c._xla_get_all_devices = self._meet
        self._c._xla_get_default_device_ordinal = lambda: self.rank
        self._c._xla_all_reduce_inplace = self._all_reduce
        self._c._xla_all_gather = self._all_gather
        self._c._xla_all_to_all = self._all_to_all

    def _meet(self) -> list[str]:
        """Returns all chips. All processes meet when they first ask for them."""
        self._group  # noqa: B018
        return [f"CPU:{n}" for n in range(self.size)]

    @property
    def size(self) -> int:
        """How many chips there are, by the variable that libtpu reads."""
        return self._torch_xla._internal.tpu.process_bounds_size()

    @property
    def rank(self) -> int:
        """The chip's number. It is not in the order of processes, as on a TPU."""
        return self.size - 1 - int(os.environ.get("CLOUD_TPU_TASK_ID", 0))

    @functools.cached_property
    def _group(self):
        """Connects the processes of this launch. Like libtpu, it waits for ever."""
        [number] = multiprocessing.current_process()._identity
        launch = number - int(os.environ["PJRT_LOCAL_PROCESS_RANK"])
        path = os.path.join(os.environ["TPU_LIKE_FOLDER"], f"launch-{launch}")
        store = self._torch.distributed.FileStore(path, self.size)
        patience = datetime.timedelta(days=1)
        group = self._torch.distributed.ProcessGroupGloo
        return group(store, self.rank, self.size, patience)

    def _read(self, tensors) -> list:
        """Returns values on the host, of all tensors in one transfer."""
        self._torch_xla.sync()
        return self._c._xla_get_cpu_tensors([tensor.detach() for tensor in tensors])

    @staticmethod
    def _wait(works) -> None:
        """Waits as a TPU's replica does when it next fetches, also for who has gone."""
        import xla_replica

        with xla_replica.current().waiting():
            for work in works:
                try:
                    work.wait()
                except RuntimeError:
                    time.sleep(86_400)

    def _all_reduce(self, kind, tensors, scale, groups, pin_layout) -> None:
        assert (kind, scale, groups) == ("sum", 1.0, [])
        values = self._read(tensors)
        self._wait([self._group.allreduce([value]) for value in values])
        with self._torch.no_grad():
            for tensor, value in zip(tensors, values):
                tensor.copy_(value.to(tensor.device))

    def _all_gather(self, tensor, dim, count, groups, *options):
        assert (dim, count, groups) == (0, self.size, [])
        [value] = self._read([tensor])
        parts = [self._torch.empty_like(value) for _ in range(count)]
        self._wait([self._group.allgather([parts], [value])])
        return self._torch.cat(parts).to(tensor.device)

    def _all_to_all(self, tensor, token, split, concat, count, groups, pin_layout):
        assert (split, concat, count, groups) == (0, 0, self.size, [])
        [value] = self._read([tensor])
        received = self._torch.empty_like(value)
        self._wait([self._group.alltoall_base(received, value, [], [])])
        return received.to(tensor.device), token


# By the modules that are changed when they have been imported, whoever imports them.
_CHANGES = {
    "torch_xla._internal.tpu": lambda tpu: vars(tpu).update(
        num_available_chips=lambda: int(os.environ["TPU_LIKE_CHIPS"])
    ),
    "torch_xla": lambda torch_xla: _Client(torch_xla).install(),
}


class _Finder:
    """Finds the modules of `_CHANGES`."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _CHANGES[name](module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
