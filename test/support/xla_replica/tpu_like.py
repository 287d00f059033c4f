"""Hosts with TPU chips, whose processes compute by XLA:CPU; see `tpu_host`.

Starting takes seconds, as on a TPU, so functions are sent to replicas that are there
already: see `run`. Scripts are started in `environment`.
"""

import atexit
import contextlib
import functools
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import xla_replica
from xla_replica.starting import child_process


def environment(num_chips: int, folder: Any, host=0, num_hosts=1) -> dict[str, str]:
    """Returns the variables of a process on a host of a slice of v5e.

    By them Python imports `tpu_host` before all else, also in spawned processes, which
    meet in the folder: a new one, the same on all hosts.
    """
    Path(folder, "sitecustomize.py").write_text("import support.xla_replica.tpu_host")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]),
        "TPU_LIKE_FOLDER": str(folder),
        "TPU_LIKE_CHIPS": str(num_chips),
        "PJRT_DEVICE": "TPU",
        # What GKE sets; elsewhere a metadata server has the same.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": f"v5litepod-{num_chips * num_hosts}",
        "TPU_HOST_BOUNDS": f"{num_hosts},1,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": f"1,{num_chips},1",
        "TPU_WORKER_ID": str(host),
        "TPU_WORKER_HOSTNAMES": ",".join(["localhost"] * num_hosts),
        "OMP_NUM_THREADS": "1",
    }


class _Host:
    """A process with replicas, one on each chip, that wait for work until one fails."""

    def __init__(self, num_chips: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tpu_like")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.xla_replica.tpu_like", self._folder.name],
            env=environment(num_chips, self._folder.name),
        )
        atexit.register(self.end)
        with connection.Listener(self._path("socket")) as listener:
            channels = {}
            while len(channels) < num_chips:
                channel = listener.accept()
                channels[channel.recv()] = channel
        self._channels = [channels[rank] for rank in range(num_chips)]

    def _path(self, name: str) -> str:
        return os.path.join(self._folder.name, name)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        """Returns ``fn(rank, *args)`` of every replica, or raises as `launch`."""
        task = pickle.dumps((fn, args))  # `send` would share tensors' memory
        for channel in self._channels:
            channel.send_bytes(task)
        try:  # where one ends, all end
            found = [pickle.loads(each.recv_bytes()) for each in self._channels]
        except (EOFError, ConnectionResetError):
            self._process.wait()
            raise pickle.loads(Path(self._path("error")).read_bytes()) from None
        return child_process.values(found)

    def end(self) -> None:
        atexit.unregister(self.end)
        for channel in self._channels:
            channel.close()
        self._process.wait()
        self._folder.cleanup()


_host = functools.cache(_Host)


def run(num_replicas: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """Returns or raises as `launch` on a host with ``num_replicas`` chips."""
    try:
        return _host(num_replicas).run(fn, args)
    except BaseException:  # also Stopped: a request to stop holds in its process
        _host(num_replicas).end()
        _host.cache_clear()
        raise


def _serve(rank: int, address: str) -> None:
    """Runs what comes, as the replica that this is."""
    with connection.Client(address) as channel, contextlib.suppress(EOFError):
        channel.send(rank)
        while True:
            fn, args = pickle.loads(channel.recv_bytes())
            result = child_process.run_replica(xla_replica.current(), fn, args)
            channel.send_bytes(child_process.dump(result, "not to be pickled"))


def _main(folder: str) -> None:
    try:
        xla_replica.launch(_serve, (os.path.join(folder, "socket"),))
    except BaseException as error:
        Path(folder, "error").write_bytes(pickle.dumps(error))


if __name__ == "__main__":
    _main(sys.argv[1])
