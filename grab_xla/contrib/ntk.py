"""The empirical neural tangent kernel of a model's loss, from per-sample gradients.

The kernel of n samples is K = F F^T, where row i of F, the features, is the gradient of
sample i's loss. `grab_xla.contrib.offline` computes orders from it. The device of the
parameters is read once per block of gradients, to see whether they are finite, and once
for `per_sample_grad`'s comparison with autograd. The products take O(n^2 d) time: use
them before a run or between epochs. Where hardware multiplies float32 matrices in lower
precision by default, kernels have that precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import xla_replica
from grab_xla.contrib.offline import check_finite
from per_sample_grad import per_sample_grads
from xla_replica.common.arguments import check_choice, check_integer
from xla_replica.common.trees import map_tensors

LossFn = Callable[[Any, Tensor], Tensor]


@torch.enable_grad()
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
    """Returns the gradient of every sample's loss, in the dataset's order.

    The model must treat the samples of a batch separately and draw no random numbers:
    call `model.eval()` where there is dropout or BatchNorm. A progress bar appears
    after two seconds.

    Args:
        model: Any module; a copy of it is run.
        params: Its parameters' values, such as ``dict(model.named_parameters())``.
        buffers: Its buffers' values, such as ``dict(model.named_buffers())``.
        loss_fn: Maps (outputs, targets) of a batch of one sample to a number, so the
            loss may be a mean or a sum.
        dataset: Pairs (input, target), with the same shapes in all samples.
        batch_size: How many gradients are computed at a time.
        dtype: The dtype of parameters, buffers, and floating inputs and targets.
        names: The ``params`` to differentiate by. Default: all.

    Returns:
        ``(n, d)`` in ``dtype`` on the parameters' device; columns in the order of
        ``names``, each parameter flattened.

    Raises:
        ValueError: The dataset is empty, or a name is not in ``params``.
        TypeError: A sample is not a pair.
        PerSampleError: The gradients would be wrong; see `per_sample_grad.capture`.
    """
    names = list(params) if names is None else list(names)
    if not names or not set(names) <= params.keys():
        raise ValueError(f"names must be some of {list(params)}, got {names}")
    device, num_samples = params[names[0]].device, len(dataset)  # type: ignore[arg-type]
    if not num_samples:
        raise ValueError("the dataset is empty: there is no gradient to compute")
    copied = _copied(model, {**buffers, **params}, names, dtype).to(device)

    def loss(outputs: Any, target: Tensor) -> Tensor:
        return loss_fn(*map_tensors((outputs, target), lambda t: t.unsqueeze(0)))

    def losses(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return vmap(loss)(model(x), y)

    rows = []
    for x, y in _pairs(dataset, batch_size):
        # The last batch is filled up: one shape is one program and one comparison.
        filled = torch.arange(min(batch_size, num_samples)).clamp(max=len(x) - 1)
        x, y = (
            each[filled].to(device, dtype if each.is_floating_point() else each.dtype)
            for each in (x, y)
        )
        gradients = per_sample_grads(
            copied, losses, (x, y), params=names, fallback="batched"
        )
        rows.append(torch.cat([gradients[n].flatten(1) for n in names], dim=1))
        if xla_replica.traits(device).is_lazy:
            xla_replica.current().sync()  # Otherwise all batches are one program.
    return torch.cat(rows)[:num_samples]


def _copied(
    model: torch.nn.Module,
    tensors: Mapping[str, Tensor],
    names: Sequence[str],
    dtype: torch.dtype,
) -> torch.nn.Module:
    """Returns a copy with these values, of which only ``names`` require gradients."""
    copied = copy.deepcopy(model).to(dtype)
    own = dict(copied.named_buffers(remove_duplicate=False))
    own |= dict(copied.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value)
    wanted = {id(own[name]) for name in names}
    for parameter in copied.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
    return copied


def _pairs(dataset: Dataset[Any], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    # Its own generator: a loader draws a seed even where it does not shuffle.
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
    """Returns the kernel F F^T, symmetric, ``(n, n)`` on the features' device.

    Args:
        features: F, ``(n, d)``; or an iterator over blocks of its columns ``(n, d_k)``.
        centered: Whether to subtract the mean of the rows first, which makes the
            constant vector an eigenvector of eigenvalue zero.
        chunk_size: How many columns are multiplied at a time; it only affects rounding.
        dtype: float32 or float64, for products and sums. Default: float64 for float64
            features, otherwise float32.

    Raises:
        ValueError: A feature is not finite (the message names the samples), a block
            has another shape, there is no block, or ``dtype`` is not allowed.
    """
    check_choice("dtype", dtype, (None, torch.float32, torch.float64))
    check_integer("chunk_size", chunk_size, 1)
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
    return (kernel + kernel.T) / 2  # The product may not be symmetric to the last bit.


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
    """Returns the kernel of a model's per-sample gradients, ``(n, n)``.

    Args:
        model, params, buffers, loss_fn, dataset, batch_size, dtype: See
            `per_sample_gradients`.
        centered: See `ntk_kernel`.
        max_columns: The largest number of weights (or one whole parameter) whose
            gradients are held at a time, instead of all ``(n, d)``. Every block runs
            the model again.

    Raises:
        ValueError, TypeError, PerSampleError: See those functions.
    """
    blocks: list[list[str]] = []
    filled, limit = 0, float("inf") if max_columns is None else max_columns
    for name, tensor in params.items():
        if not blocks or filled + tensor.numel() > limit:
            blocks.append([])
            filled = 0
        blocks[-1].append(name)
        filled += tensor.numel()
    given = (model, params, buffers, loss_fn, dataset, batch_size, dtype)
    features = (per_sample_gradients(*given, names) for names in blocks)
    return ntk_kernel(features, centered)
