"""Compiles dumped XLA programs with the TPU's own compiler, without a TPU.

libtpu compiles for a slice that it is told about. This runs in an environment of its
own (``make tpu-compiler``): a JAX that fits the libtpu of torch_xla. It prints one line
of JSON for every program and slice.

    .venv-tpu/bin/python tools/tpu/compiler.py dump/*before_optimizations.txt
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from pathlib import Path
from typing import Any

# What libtpu would ask the machine it runs on; and which slice that is.
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}

import numpy as np

_WIDE = re.compile(r"= (?:s64|u64|f64)\[[0-9,]+\]\S* (?!parameter|constant)([a-z-]+)\(")
_COLLECTIVE = re.compile(r"= (\S+|\([^)]*\)) (all-reduce|all-gather|all-to-all|"
                         r"reduce-scatter|collective-permute)\(")  # fmt: skip


def compiled_for(text: str, slice_name: str, num_replicas: int) -> tuple[Any, float]:
    """Returns the executable of a program, and the seconds of compiling."""
    # Here: only this environment has JAX, and --help works in every one.
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(slice_name, "tpu")
    devices = topology.devices[:num_replicas]
    module = xla_client._xla.hlo_module_from_text(text)
    computation = xla_client.XlaComputation(module.as_serialized_hlo_module_proto())
    mlir = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = num_replicas, 1
    numbers = np.array([device.id for device in devices]).reshape(num_replicas, 1)
    options.device_assignment = xla_client.DeviceAssignment.create(numbers)
    devices_of = xla_client.DeviceList(tuple(devices))
    since = time.perf_counter()
    found = devices[0].client.compile(
        mlir if isinstance(mlir, bytes) else mlir.encode(), devices_of, options
    )
    return found, time.perf_counter() - since


def described(path: Path, slice_name: str, num_replicas: int) -> dict[str, Any]:
    """Returns what the compiler says of a program, or why it refuses it."""
    text = path.read_text()
    row: dict[str, Any] = {
        "program": path.name.split(".")[0],
        "slice": slice_name,
        "instructions": sum(" = " in line for line in text.splitlines()),
        "64-bit operations": len(_WIDE.findall(text)),
        "collectives": [f"{kind} {shape}" for shape, kind in _COLLECTIVE.findall(text)],
    }
    try:
        executable, seconds = compiled_for(text, slice_name, num_replicas)
    except Exception as error:  # JAX's own kinds, whatever they are
        return {**row, "refused": str(error)[:500]}
    memory, costs = executable.get_compiled_memory_stats(), executable.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    return {
        **row,
        "seconds": seconds,
        "code bytes": memory.generated_code_size_in_bytes,
        "peak bytes": memory.peak_memory_in_bytes
        or memory.temp_size_in_bytes + memory.argument_size_in_bytes,
        "flops": costs.get("flops"),
        "bytes": costs.get("bytes accessed"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "programs", nargs="+", type=Path, help="files that torch_xla has dumped"
    )
    parser.add_argument(
        "--slices",
        nargs="+",
        default=["v5e:2x4", "v6e:2x4"],
        help="generation and topology of slices (default: v5e:2x4 v6e:2x4)",
    )
    parser.add_argument("--num-replicas", type=int, default=8, help="default: 8")
    args = parser.parse_args()
    for slice_name in args.slices:
        for path in args.programs:
            row = described(path, slice_name, args.num_replicas)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
