"""torch's 2:4 kernels: where there are any, and how they are timed."""

from __future__ import annotations

import dataclasses
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

MIN_CAPABILITY = (8, 0)
DTYPES = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Where 2:4 kernels come from, and how they are timed.

    Attributes:
        refusal: Why a weight cannot be converted; None if nothing is known against it.
        convert: The semi-structured tensor. Raises if it cannot.
        seconds: Of each function, timed in turns.
    """

    refusal: Callable[[torch.Tensor], str | None]
    convert: Callable[[torch.Tensor], torch.Tensor]
    seconds: Callable[[Sequence[Callable[[], Any]]], list[float]]


def refusal_of(
    device: str, capability: tuple[int, int] | None, dtype: torch.dtype
) -> str | None:
    """Why there is no 2:4 kernel for such a weight; None if there may be one.

    Args:
        device: Type of device that holds the weight.
        capability: Compute capability, of an NVIDIA GPU.
        dtype: Of the weight.
    """
    if device in ("xla", "tpu"):
        return (
            "a TPU has no units for 2:4 sparsity: its matrix units multiply zeros like "
            "everything else"
        )
    if device != "cuda":
        return (
            f"its weight is on the {device}, and torch's 2:4 kernels run on NVIDIA "
            "GPUs of compute capability 8.0 (Ampere) or later only; move the model "
            "there first"
        )
    if capability is None or capability < MIN_CAPABILITY:
        got = "none" if capability is None else ".".join(map(str, capability))
        return (
            f"2:4 kernels need an NVIDIA GPU of compute capability 8.0 (Ampere) or "
            f"later, and this one has {got}"
        )
    if dtype not in DTYPES:
        return (
            f"its weight is {dtype}, and 2:4 kernels multiply float16 and bfloat16; "
            "convert the model first, model.bfloat16() or model.half()"
        )
    return None


def _refusal(weight: torch.Tensor) -> str | None:
    device = weight.device
    capability = None
    if device.type == "cuda" and torch.version.cuda is not None:
        capability = torch.cuda.get_device_capability(device)
    return refusal_of(device.type, capability, weight.dtype)


def _convert(weight: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        # That it is a prototype; what it gives is measured and compared.
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse.to_sparse_semi_structured(weight.contiguous())


def _seconds(functions: Sequence[Callable[[], Any]]) -> list[float]:
    """Medians of 20 rounds of 10 calls, on the current CUDA stream."""
    found: list[list[float]] = [[] for _ in functions]
    for turn in range(23):
        for times, function in zip(found, functions):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                function()
            end.record()
            end.synchronize()
            if turn >= 3:  # the first ones choose algorithms
                times.append(start.elapsed_time(end) / 1e3 / 10)
    return [statistics.median(times) for times in found]


TORCH = Kernels(_refusal, _convert, _seconds)
