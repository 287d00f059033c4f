"""2:4 weights as torch's semi-structured tensors, where that is faster.

For inference on NVIDIA GPUs. Whether a 2:4 kernel is faster than the dense one depends
on the shape and the GPU, and often it is not; so every shape is measured, and one that
does not gain stays dense.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rigl_xla.layers import clean, holders

MIN_CAPABILITY = (8, 0)
DTYPES = (torch.float16, torch.bfloat16)
# Of the largest output: 2:4 kernels add up in another order, in half precision.
TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What was done with one linear layer, and why.

    Attributes:
        name: Of the module.
        shape: ``(out, in)``.
        num_rows: Rows that a pass multiplies with the weight; None if not looked at.
        dense_seconds, sparse_seconds: Of one multiplication; None if not measured.
        converted: Whether the weight is semi-structured now.
        reason: In words.
    """

    name: str
    shape: tuple[int, int]
    num_rows: int | None
    dense_seconds: float | None
    sparse_seconds: float | None
    converted: bool
    reason: str

    @property
    def speedup(self) -> float | None:
        """Dense over sparse seconds; None if not measured."""
        if self.dense_seconds is None or self.sparse_seconds is None:
            return None
        return self.dense_seconds / self.sparse_seconds


@dataclasses.dataclass(frozen=True)
class SemiStructuredReport:
    """What `to_semi_structured` did.

    Attributes:
        layers: Every linear layer, in order of registration.
    """

    layers: tuple[Conversion, ...]

    @property
    def num_converted(self) -> int:
        """Layers whose weights are semi-structured now."""
        return sum(layer.converted for layer in self.layers)

    def __str__(self) -> str:
        """A line for every layer; layers without a measurement together, by reason."""
        if not self.layers:
            return "nothing was converted: the model has no linear layers"
        lines = [f"{self.num_converted} of {len(self.layers)} linear layers converted"]
        others: dict[str, list[str]] = collections.defaultdict(list)
        for layer in self.layers:
            if layer.dense_seconds is None or layer.sparse_seconds is None:
                others[layer.reason].append(layer.name)
                continue
            lines.append(
                f"  {layer.name} {layer.shape[0]} x {layer.shape[1]}, {layer.num_rows} "
                f"rows: dense {1e6 * layer.dense_seconds:.1f} us, 2:4 "
                f"{1e6 * layer.sparse_seconds:.1f} us; {layer.reason}"
            )
        for reason, names in others.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  {', '.join(names[:3])}{more}: dense, because {reason}")
        return "\n".join(lines)


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


def to_semi_structured(
    model: nn.Module,
    *inputs: Any,
    min_speedup: float = 1.05,
    kernels: Kernels = TORCH,
) -> SemiStructuredReport:
    """Makes the 2:4 weights of linear layers semi-structured where that is faster.

    For inference: a converted weight is no longer trained, and its module computes what
    it did, in another order. Every shape is measured, with as many rows as a pass over
    ``inputs`` has; a layer is converted if the 2:4 kernel is ``min_speedup`` times as
    fast as the dense one and gives the same numbers, and stays as it is otherwise.

    Args:
        model: Trained with ``structure='2:4'``, in float16 or bfloat16, on its GPU;
            ``close()`` its pruner first.
        inputs: What it will be called with: batches of the size that counts.
        min_speedup: What a conversion must gain at least.
        kernels: Another source of kernels and times.

    Returns:
        What was done with every linear layer, and why. ``print`` it.

    Raises:
        ValueError: A pruner holds the weights, or there are no inputs.
    """
    if not inputs:
        raise ValueError(
            "to_semi_structured needs inputs: how long a multiplication takes depends "
            "on the batch, so give what the model will be called with"
        )
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    held = [n for n, m in linears.items() if m.weight in holders]
    if held:
        raise ValueError(
            f"{held[0]!r} is kept sparse by a RigLScheduler, whose masks would no "
            "longer fit its weight: close() that first"
        )
    reasons = {n: _why_not(model, m, kernels) for n, m in linears.items()}
    rows: dict[str, int] = {}
    if None in reasons.values():
        rows = _rows_of(model, linears, inputs)
    measured: dict[Any, _Measured] = {}
    found = []
    for name, linear in linears.items():
        shape = (linear.out_features, linear.in_features)
        reason, num_rows = reasons[name], rows.get(name)
        if reason is None and num_rows is None:
            reason = "a forward pass does not call it"
        if reason is not None:
            found.append(
                Conversion(clean(name), shape, num_rows, None, None, False, reason)
            )
            continue
        assert num_rows is not None
        key = (shape, linear.weight.dtype, linear.weight.device, num_rows)
        if key not in measured:
            measured[key] = _measure(linear.weight.detach(), num_rows, kernels)
        result = measured[key]
        converted, reason = _decide(result, min_speedup)
        if converted:
            sparse = kernels.convert(linear.weight.detach())
            linear.weight = nn.Parameter(sparse, requires_grad=False)
        found.append(
            Conversion(
                clean(name), shape, num_rows, result.dense, result.sparse, converted,
                reason,
            )
        )  # fmt: skip
    return SemiStructuredReport(tuple(found))


def _why_not(model: nn.Module, linear: nn.Linear, kernels: Kernels) -> str | None:
    """What is known against converting a layer before anything is measured."""
    weight = linear.weight.detach()
    refusal = kernels.refusal(weight)
    if refusal is not None:
        return refusal
    if type(linear) is not nn.Linear:
        return (
            f"it is a {type(linear).__name__}, whose weight others may use in ways of "
            "their own"
        )
    places = [
        module
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is linear.weight
    ]
    if len(places) > 1:
        return f"its weight is shared by {len(places)} modules"
    if weight.shape[1] % 4:
        return f"its {weight.shape[1]} inputs are no multiple of four"
    full = (weight.reshape(-1, 4) != 0).sum(1) > 2
    if bool(full.any()):
        return (
            f"it is not 2:4: {int(full.sum())} of {len(full)} groups of four inputs "
            "have more than two weights that are not zero"
        )
    return None


@torch.no_grad()
def _rows_of(
    model: nn.Module, linears: dict[str, nn.Linear], inputs: Sequence[Any]
) -> dict[str, int]:
    """Rows that each layer multiplies in its largest call of a pass."""
    rows: dict[str, int] = {}
    handles = []
    for name, linear in linears.items():

        def watch(module: nn.Module, args: Any, name: str = name) -> None:
            found = args[0].numel() // args[0].shape[-1]
            rows[name] = max(found, rows.get(name, 0))

        handles.append(linear.register_forward_pre_hook(watch))
    training = {module: module.training for module in model.modules()}
    # Encoder layers have a fast path that calls nothing that could be watched.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    try:
        model(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in training.items():
            module.training = mode
        for handle in handles:
            handle.remove()
    return rows


@dataclasses.dataclass(frozen=True)
class _Measured:
    """Seconds of both kernels, and how far they are apart; or why there is none."""

    dense: float | None = None
    sparse: float | None = None
    error: float = 0.0
    refusal: str | None = None


@torch.no_grad()
def _measure(weight: torch.Tensor, num_rows: int, kernels: Kernels) -> _Measured:
    rows = torch.randn(num_rows, weight.shape[1], device=weight.device)
    rows = rows.to(weight.dtype)
    try:
        sparse = kernels.convert(weight)
        other = F.linear(rows, sparse)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return _Measured(refusal=f"torch refuses it: {said}")
    expected = F.linear(rows, weight)
    apart = (other - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    dense_seconds, sparse_seconds = kernels.seconds(
        [lambda: F.linear(rows, weight), lambda: F.linear(rows, sparse)]
    )
    return _Measured(dense_seconds, sparse_seconds, float(apart))


def _decide(measured: _Measured, min_speedup: float) -> tuple[bool, str]:
    """Whether to convert, and why."""
    if measured.refusal is not None:
        return False, measured.refusal
    assert measured.dense is not None
    assert measured.sparse is not None
    if not measured.error <= TOLERANCE:  # NaN too
        return False, (
            f"dense, because the 2:4 kernel is wrong here, by {measured.error:.1%} of "
            "the largest output"
        )
    speedup = measured.dense / measured.sparse
    if speedup < min_speedup:
        return False, f"dense, because 2:4 is only {speedup:.2f} times as fast"
    return True, f"converted, {speedup:.2f} times as fast"
