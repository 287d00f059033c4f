"""2:4 weights as torch's semi-structured tensors, where that is faster.

For inference on NVIDIA GPUs. Whether a 2:4 kernel is faster than the dense one depends
on the shape and the GPU, and often it is not; so every shape is measured, and one that
does not gain stays dense.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rigl_xla.layers.checks import holders
from rigl_xla.layers.weights import clean
from rigl_xla.report.positions import evaluating
from rigl_xla.semi_structured.kernels import TORCH, Kernels

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
    fast as the dense one and gives the same numbers for this layer's weights, and stays
    as it is otherwise.

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
    times: dict[Any, list[float]] = {}
    found = []
    for name, linear in linears.items():
        reason, num_rows = reasons[name], rows.get(name)
        if reason is not None:
            outcome = _Outcome(reason)
        elif num_rows is None:
            outcome = _Outcome("a forward pass does not call it")
        else:
            outcome = _try(linear, num_rows, times, min_speedup, kernels)
        shape = (linear.out_features, linear.in_features)
        found.append(
            Conversion(
                clean(name), shape, num_rows, outcome.dense_seconds,
                outcome.sparse_seconds, outcome.converted, outcome.reason,
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
    try:
        with evaluating(model):
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return rows


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """See `Conversion`."""

    reason: str
    dense_seconds: float | None = None
    sparse_seconds: float | None = None
    converted: bool = False


@torch.no_grad()
def _try(
    linear: nn.Linear,
    num_rows: int,
    times: dict[Any, list[float]],
    min_speedup: float,
    kernels: Kernels,
) -> _Outcome:
    """Converts a layer, in place, if that is right and faster.

    Every layer is compared with its dense kernel; ``times`` holds the seconds of every
    shape that has been measured, dense and sparse, and takes more.
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
        # All that torch and its libraries say of shapes, dtypes, operations (a
        # NotImplementedError is one) and memory; none has a type of its own.
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return _Outcome(f"torch refuses it: {said}")
    expected = F.linear(rows, weight)
    largest = expected.abs().max().clamp(min=torch.finfo(weight.dtype).tiny)
    apart = float((other - expected).abs().max() / largest)
    if not apart <= TOLERANCE:  # NaN too
        return _Outcome(
            f"the 2:4 kernel is wrong here, by {apart:.1%} of the largest output"
        )
    key = (weight.shape, weight.dtype, weight.device, num_rows)
    if key not in times:
        times[key] = kernels.seconds(
            [lambda: F.linear(rows, weight), lambda: F.linear(rows, sparse)]
        )
    dense_seconds, sparse_seconds = times[key]
    speedup = dense_seconds / sparse_seconds
    if speedup < min_speedup:
        reason = f"dense, because 2:4 is only {speedup:.2f} times as fast"
        return _Outcome(reason, dense_seconds, sparse_seconds)
    linear.weight = nn.Parameter(sparse, requires_grad=False)
    reason = f"converted, {speedup:.2f} times as fast"
    return _Outcome(reason, dense_seconds, sparse_seconds, converted=True)
