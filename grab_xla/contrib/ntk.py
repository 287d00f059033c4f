"""The empirical neural tangent kernel of a model's loss, from per-sample gradients.

The kernel of n samples is K = F F^T, where row i of F, the features, is the gradient of
sample i's loss. `grab_xla.contrib.offline` makes orders of it. Everything
stays on the device
of the parameters, but for one look per block of gradients at whether they are finite.
The products take O(n^2 d): for before a run or between epochs, not for a training step.

On hardware that multiplies float32 matrices in lower precision by default, kernels are
as exact as that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import xla_replica
from grab_xla.contrib.offline import check_finite

Tensor = torch.Tensor
LossFn = Callable[[Any, Tensor], Tensor]


def per_sample_gradients(
    model: torch.nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    loss_fn: LossFn,
    dataset: Dataset[Any],
    batch_size: int = 128,
    dtype: torch.dtype = torch.float32,
    names: Sequence[str] | None = None,
) -> Tensor:
    """The gradient of every sample's loss, one row each, in the dataset's order.

    The model is called as always, with a batch, which here holds one sample; so the
    loss may be a mean or a sum. It must not draw random numbers nor change buffers:
    call `model.eval()` where there is dropout or BatchNorm. A progress bar shows where
    it takes more than two seconds.

    Args:
        model: Called through `torch.func.functional_call`; it is not changed.
        params: To differentiate by, such as ``dict(model.named_parameters())``.
        buffers: Such as ``dict(model.named_buffers())``.
        loss_fn: From (outputs, targets) of a batch to a number.
        dataset: Of pairs (input, target), each with the same shape in all samples.
        batch_size: Samples whose gradients are computed at a time.
        dtype: Of the computation: parameters, buffers, floating inputs and targets.
        names: The ``params`` whose gradients are wanted: all, if not given.

    Returns:
        ``(n, d)`` in ``dtype`` on the parameters' device; columns in the order of
        ``names``, each parameter flattened.

    Raises:
        ValueError: The dataset is empty, or a name is in no parameter's.
        TypeError: A sample is no pair.
    """
    names = list(params) if names is None else list(names)
    if not names or not set(names) <= params.keys():
        raise ValueError(f"names must be some of {list(params)}, got {names}")
    state = {
        name: _in_dtype(tensor.detach(), dtype)
        for name, tensor in {**buffers, **params}.items()
    }
    wanted = {name: state.pop(name) for name in names}
    device = wanted[names[0]].device

    def loss(by: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(model, {**state, **by}, (x.unsqueeze(0),))
        return loss_fn(outputs, y.unsqueeze(0))

    gradients_of = vmap(grad(loss), (None, 0, 0))
    rows = []
    for x, y in _pairs(dataset, batch_size):
        x, y = (_in_dtype(each, dtype).to(device) for each in (x, y))
        gradients = gradients_of(wanted, x, y)
        rows.append(torch.cat([gradients[n].flatten(1) for n in names], dim=1))
        if device.type not in ("cpu", "cuda"):
            xla_replica.current().sync()  # else all batches are one program
    return torch.cat(rows)


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _pairs(dataset: Dataset[Any], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    if not len(dataset):  # type: ignore[arg-type]
        raise ValueError("the dataset is empty: there is no gradient to compute")
    # A generator of its own: a loader draws a seed even where it does not shuffle.
    loader = DataLoader(dataset, batch_size, generator=torch.Generator())
    for batch in tqdm(loader, "gradients", leave=False, disable=None, delay=2):
        parts = batch if isinstance(batch, (list, tuple)) else [batch]
        if len(parts) != 2 or not all(isinstance(each, Tensor) for each in parts):
            raise TypeError(
                "samples must be pairs (input, target) that collate to two tensors; "
                f"they collate to {[type(each).__name__ for each in parts]}"
            )
        yield parts[0], parts[1]


def ntk_kernel(
    features: Tensor | Iterable[Tensor],
    centered: bool = True,
    chunk_size: int = 2**14,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The kernel F F^T of features; a symmetric matrix.

    Centring makes the constant vector an eigenvector of eigenvalue zero.

    Args:
        features: F, ``(n, d)``; or blocks of its columns ``(n, d_k)``, one at a time.
        centered: Subtract the mean of the rows first.
        chunk_size: Columns converted and multiplied at a time. Only rounding depends
            on it.
        dtype: Of the products and sums: float32 or float64. Defaults to float64 for
            such features, else float32.

    Returns:
        ``(n, n)`` on the features' device.

    Raises:
        ValueError: A feature is not finite (the message says of which samples), has
            another shape, or there is none.
        TypeError: ``dtype`` is another one.
    """
    if dtype not in (None, torch.float32, torch.float64):
        raise TypeError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    if isinstance(chunk_size, bool) or not chunk_size >= 1:
        raise ValueError(f"chunk_size must be >= 1, got {chunk_size!r}")
    kernel = None
    for block in [features] if isinstance(features, Tensor) else features:
        if block.ndim != 2 or (kernel is not None and len(block) != len(kernel)):
            rows = "n" if kernel is None else len(kernel)
            raise ValueError(
                f"features must have the shape ({rows}, d), got {tuple(block.shape)}"
            )
        if dtype is None:
            dtype = torch.float64 if block.dtype == torch.float64 else torch.float32
        for chunk in block.split(chunk_size, dim=1):
            chunk = chunk.to(dtype)
            check_finite(chunk, "features")
            if centered:
                chunk = chunk - chunk.mean(0)
            product = chunk @ chunk.T
            kernel = product if kernel is None else kernel + product
    if kernel is None:
        raise ValueError("features must be one or more blocks (n, d), got none")
    return (kernel + kernel.T) / 2  # a product need not be symmetric to the last bit


def empirical_ntk(
    model: torch.nn.Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    loss_fn: LossFn,
    dataset: Dataset[Any],
    batch_size: int = 128,
    dtype: torch.dtype = torch.float32,
    centered: bool = True,
    max_columns: int | None = None,
) -> Tensor:
    """The kernel of a model's per-sample gradients, ``(n, n)``: `ntk_kernel` of them.

    Args:
        model: This and what follows: see `per_sample_gradients`.
        centered: See `ntk_kernel`.
        max_columns: Hold gradients by at most so many weights at a time (or one whole
            parameter), instead of all ``(n, d)``. Every block runs the model again.

    Raises:
        ValueError: As `per_sample_gradients` and `ntk_kernel`.
    """
    blocks: list[list[str]] = []
    filled = 0
    for name, tensor in params.items():
        limit = float("inf") if max_columns is None else max_columns
        if not blocks or filled + tensor.numel() > limit:
            blocks.append([])
            filled = 0
        blocks[-1].append(name)
        filled += tensor.numel()
    return ntk_kernel(
        (
            per_sample_gradients(
                model, params, buffers, loss_fn, dataset, batch_size, dtype, names
            )
            for names in blocks
        ),
        centered,
    )
