"""2:4 weights as torch's semi-structured tensors, where that is faster.

For inference on NVIDIA GPUs. Whether a 2:4 kernel is faster than the dense one depends
on the shape and the GPU, and often it is not; so every shape is measured, and one that
does not gain stays dense.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rigl_xla.layers.checks import pruner_of
from rigl_xla.layers.weights import check_model, clean
from rigl_xla.report.positions import evaluating
from xla_replica import traits
from xla_replica.common.arguments import check_number, check_type

# Of the largest output: 2:4 kernels add up in another order, in half precision.
TOLERANCE = 0.02
MIN_CAPABILITY = (8, 0)
DTYPES = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Where 2:4 kernels come from, and how they are timed.

    Attributes:
        refusal: Says why a weight cannot be converted; None if nothing is known
            against it.
        convert: Returns the semi-structured tensor of a weight; raises if it cannot.
        seconds: Returns the seconds of each function, timed in turns.
    """

    refusal: Callable[[torch.Tensor], str | None]
    convert: Callable[[torch.Tensor], torch.Tensor]
    seconds: Callable[[Sequence[Callable[[], Any]]], list[float]]


def refusal_of(
    device: torch.device, capability: tuple[int, int] | None, dtype: torch.dtype
) -> str | None:
    """Returns why there is no 2:4 kernel for such a weight; None if there may be one.

    ``capability`` is the compute capability of an NVIDIA GPU.
    """
    if traits(device).is_lazy:
        return (
            "a TPU has no units for 2:4 sparsity: its matrix units multiply zeros like "
            "everything else"
        )
    if device.type != "cuda":
        return (
            f"its weight is on the {device.type}, and torch's 2:4 kernels run on "
            "NVIDIA GPUs of compute capability 8.0 (Ampere) or later only; move the "
            "model there first"
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
    capability = None
    if weight.is_cuda and torch.version.cuda is not None:
        capability = torch.cuda.get_device_capability(weight.device)
    return refusal_of(weight.device, capability, weight.dtype)


def _convert(weight: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        # That it is a prototype; its results are measured and compared.
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse.to_sparse_semi_structured(weight.contiguous())


def _seconds(functions: Sequence[Callable[[], Any]]) -> list[float]:
    """Returns medians of 20 rounds of 10 calls, on the current CUDA stream."""
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


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What was done with one linear layer, and why.

    Attributes:
        name: The module's name.
        shape: ``(out, in)``.
        num_rows: Rows that a pass multiplies with the weight; None if not looked at.
        dense_seconds, sparse_seconds: Time of one multiplication; None if not measured.
        converted: Whether the weight is semi-structured now.
        reason: Why it is or is not, in words.
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
    """What `to_semi_structured` did with ``layers``: all linear ones, in order."""

    layers: tuple[Conversion, ...]

    @property
    def num_converted(self) -> int:
        """Layers whose weights are semi-structured now."""
        return sum(layer.converted for layer in self.layers)

    def __str__(self) -> str:
        """A line for every layer; layers that were not measured together, by reason."""
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


def to_semi_structured(
    model: nn.Module,
    *inputs: Any,
    min_speedup: float = 1.05,
    kernels: Kernels = TORCH,
) -> SemiStructuredReport:
    """Makes the 2:4 weights of linear layers semi-structured where that is faster.

    For inference: a converted weight is no longer trained. Every shape is measured,
    with as many rows as a pass over ``inputs`` has; a layer is converted if the 2:4
    kernel is ``min_speedup`` times as fast as the dense one and gives the same numbers
    for its weights, up to the order of additions.

    Args:
        model: Trained with ``structure='2:4'``, in float16 or bfloat16, on its GPU;
            ``close()`` its pruner first.
        inputs: The arguments of a call, with batches of the size that counts.
        min_speedup: How much faster a converted layer must be.
        kernels: Another source of kernels and times.

    Returns:
        A report, to be printed, of what was done with every linear layer, and why.

    Raises:
        ValueError: A pruner still holds the weights, no inputs are given, or
            ``min_speedup`` is not positive.
        TypeError: An argument is of another type.
    """
    check_model(model)
    check_number("min_speedup", min_speedup, above=0)
    check_type("kernels", kernels, Kernels, "Kernels")
    if not inputs:
        raise ValueError(
            "to_semi_structured needs inputs: how long a multiplication takes depends "
            "on the batch, so give what the model will be called with"
        )
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    held = [n for n, m in linears.items() if pruner_of(m.weight) is not None]
    if held:
        raise ValueError(
            f"{held[0]!r} is kept sparse by a RigLScheduler, whose masks would no "
            "longer fit its weight: close() that first"
        )
    reasons = {n: _why_not(model, m, kernels) for n, m in linears.items()}
    rows = _rows_of(model, linears, inputs) if None in reasons.values() else {}
    times: dict[Any, list[float]] = {}
    found = []
    for name, linear in linears.items():
        reason, num_rows = reasons[name], rows.get(name)
        shape = (linear.out_features, linear.in_features)
        conversion = functools.partial(Conversion, clean(name), shape, num_rows)
        if reason is None and num_rows is None:
            reason = "a forward pass does not call it"
        if reason is None:
            done = _try(conversion, linear, num_rows, times, min_speedup, kernels)
        else:
            done = conversion(None, None, False, reason)
        found.append(done)
    return SemiStructuredReport(tuple(found))


def _why_not(model: nn.Module, linear: nn.Linear, kernels: Kernels) -> str | None:
    """Returns what is known against converting a layer before anything is measured."""
    weight = linear.weight.detach()
    refusal = kernels.refusal(weight)
    if refusal is not None:
        return refusal
    if type(linear) is not nn.Linear:
        kind = type(linear).__name__
        return f"it is a {kind}, whose weight others may use in other ways"
    places = [
        module
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is linear.weight
    ]
    if len(places) > 1:
        return f"its weight is shared by {len(places)} modules"
    if weight.shape[1] % 4:
        return f"its {weight.shape[1]} inputs are not a multiple of four"
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
    """Returns how many rows each layer multiplies in its largest call of a pass."""
    rows: dict[str, int] = {}

    def watch(name: str, module: nn.Module, args: Any) -> None:
        found = args[0].numel() // args[0].shape[-1]
        rows[name] = max(found, rows.get(name, 0))

    with contextlib.ExitStack() as hooks, evaluating(model):
        for name, linear in linears.items():
            hook = functools.partial(watch, name)
            hooks.enter_context(linear.register_forward_pre_hook(hook))
        model(*inputs)
    return rows


@torch.no_grad()
def _try(
    conversion: Callable[..., Conversion],
    linear: nn.Linear,
    num_rows: int,
    times: dict[Any, list[float]],
    min_speedup: float,
    kernels: Kernels,
) -> Conversion:
    """Converts a layer, in place, if that is right and faster; returns what was done.

    ``times`` collects the seconds, dense and sparse, of every shape measured.
    """
    weight = linear.weight.detach()
    rows = torch.randn(num_rows, weight.shape[1], device=weight.device)
    rows = rows.to(weight.dtype)
    try:
        sparse = kernels.convert(weight)
        other = F.linear(rows, sparse)
    except torch.AcceleratorError:
        raise  # the device has failed, whatever the layer is
    except RuntimeError as error:
        # Torch and its libraries raise this type, or a subclass, for shapes, dtypes,
        # operations and memory that they do not support.
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return conversion(None, None, False, f"torch refuses it: {said}")
    expected = F.linear(rows, weight)
    largest = expected.abs().max().clamp(min=torch.finfo(weight.dtype).tiny)
    apart = float((other - expected).abs().max() / largest)
    if not apart <= TOLERANCE:  # NaN too
        reason = f"the 2:4 kernel is wrong here, by {apart:.1%} of the largest output"
        return conversion(None, None, False, reason)
    key = (weight.shape, weight.dtype, weight.device, num_rows)
    if key not in times:
        times[key] = kernels.seconds(
            [lambda: F.linear(rows, weight), lambda: F.linear(rows, sparse)]
        )
    dense_seconds, sparse_seconds = times[key]
    speedup = dense_seconds / sparse_seconds
    if speedup < min_speedup:
        reason = f"dense, because 2:4 is only {speedup:.2f} times as fast"
        return conversion(dense_seconds, sparse_seconds, False, reason)
    linear.weight = nn.Parameter(sparse, requires_grad=False)
    reason = f"converted, {speedup:.2f} times as fast"
    return conversion(dense_seconds, sparse_seconds, True, reason)
