"""The replica backends under test; a new one is one more row."""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import xla_replica
from support.xla_replica import slices, torchtpu, tpu_like

HAS_XLA = importlib.util.find_spec("torch_xla") is not None
needs_xla = pytest.mark.skipif(not HAS_XLA, reason="torch_xla is not installed")


def on_gpu(test):
    found = torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(not found, reason="no GPU")(test))


needs_torchtpu = pytest.mark.skipif(not torchtpu.is_installed(), reason="no TorchTPU")

# Of what takes long and is a matter of torch alone, as processes that meet by gloo.
of_torch_alone = pytest.mark.slow if HAS_XLA else pytest.mark.skipif(False, reason="")

TIMEOUT = 60.0  # enough for a loaded machine, and short for a test that hangs


class Backend(NamedTuple):
    """A device, as `xla_replica.launch` takes it, and a number of replicas.

    "cuda" and "tpu" are the accelerators of their environments, "tpu-like" is a host of
    `tpu_like`, and "slices" are two members of a live run, one of them one replica.
    """

    device: str
    num_replicas: int

    def run(self, fn: Callable[..., Any], *args: Any, timeout=TIMEOUT) -> list[Any]:
        """Returns ``fn(rank, *args)`` of every replica; ``fn`` must be top-level."""
        if self.device == "tpu-like":
            return tpu_like.run(self.num_replicas, fn, args)
        if self.device == "slices":
            return slices.run((self.num_replicas - 1, 1), fn, args)
        device = "accelerator" if self.device in ("cuda", "tpu") else self.device
        return xla_replica.launch(fn, args, self.num_replicas, device, timeout=timeout)


def slow(*values: Any):
    return pytest.param(*values, marks=pytest.mark.slow)


def on_xla(test):
    return needs_xla(pytest.mark.xla(test))


def on_chips(test):
    return on_xla(pytest.mark.slow(pytest.mark.tpu_like(test)))


MARKS = {
    "cpu": [],
    "xla": [needs_xla, pytest.mark.xla],
    "cuda": [pytest.mark.gpu],
    "tpu": [pytest.mark.torchtpu],
    "tpu-like": [needs_xla, pytest.mark.xla, pytest.mark.slow, pytest.mark.tpu_like],
    "slices": [of_torch_alone],
}


def row(device: str, num_replicas: int, slow: bool = False):
    """Returns a backend as a parameter of a test, with ``slow`` for slow runs only."""
    marks = [*MARKS[device], *([pytest.mark.slow] if slow else [])]
    if is_gloo := device == "cpu" and num_replicas > 1:
        marks += [of_torch_alone]
    name, backend = "gloo" if is_gloo else device, Backend(device, num_replicas)
    return pytest.param(backend, marks=marks, id=f"{name}-{num_replicas}")


def backends(device: str, *default: int, slow: tuple[int, ...] = ()) -> list[Any]:
    """Returns rows of a device, by numbers of replicas; some for slow runs only."""
    return [row(device, n, n in slow) for n in (*default, *slow)]


SLICES = row("slices", 3)
# Processes, as on a TPU; `make tpu-like` runs all tests that have such a row.
TPU_LIKE = row("tpu-like", 2)
FOUR_TPU_LIKE = row("tpu-like", 4)
# Where `make gpu` finds GPUs, the families run on one and on two.
GPUS = [row("cuda", n) for n in (1, 2) if n <= torch.cuda.device_count()]
# Where there is TorchTPU, over a CPU, they run on one replica.
TORCHTPU = [row("tpu", 1)] if torchtpu.is_installed() else []
# One replica whose operations are compiled, and the marks of tests that need one.
COMPILED = Backend("tpu" if TORCHTPU else "xla", 1)
IS_COMPILED = MARKS[COMPILED.device]
OTHERS = [*backends("xla", 2, slow=(1, 3, 5, 8)), *GPUS, *TORCHTPU]
BACKENDS = [*backends("cpu", 1, 2, 3, slow=(5, 8)), *OTHERS]
# For families whose programs take long to compile.
FEW_BACKENDS = [*backends("cpu", 1, 3, slow=(8,)), *OTHERS]
XLA_BACKENDS = backends("xla", 2, slow=(1, 8))
ONE_XLA_BACKEND = [*backends("xla", 1, slow=(8,)), *TORCHTPU]
SLOW_XLA_BACKENDS = [*backends("xla", slow=(1, 8)), *TORCHTPU]
SEVERAL_REPLICAS = [row("cpu", 3), row("xla", 3)]
