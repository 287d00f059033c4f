"""The empirical neural tangent kernel of a model's loss, and orders from it.

Nothing else in `grab_xla` knows these balance types: they are in `BALANCE_TYPES` as
those of your own file would be.

The kernel of n samples is K = F F^T, where row i of F, the features, is the gradient of
sample i's loss. It takes O(n^2 d) time and holds n d numbers, and orders take O(n^2)
for every round, or O(n^3) by an eigenvector, in float64 on the host: use them before a
run or between epochs, for a few thousand samples. Where hardware multiplies float32
matrices in lower precision by default, kernels have that precision. Orders are int64
arrays ``(n,)``.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils.data import DataLoader, Dataset

import xla_replica
from grab_xla.balancers import BALANCE_TYPES, Ordering
from grab_xla.balancing.decisions import Decisions
from grab_xla.balancing.reordering import reorder
from per_sample_grad import per_sample_grads
from xla_replica.common.arguments import check_integer
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
) -> Tensor:
    """Returns the gradient of every sample's loss, in the dataset's order.

    The model must treat the samples of a batch separately and draw no random numbers:
    call `model.eval()` where there is dropout or BatchNorm.

    Args:
        model: Any module; a copy of it is run.
        params: Its parameters' values, such as ``dict(model.named_parameters())``.
        buffers: Its buffers' values, such as ``dict(model.named_buffers())``.
        loss_fn: Maps (outputs, targets) of a batch of one sample to a number, so the
            loss may be a mean or a sum.
        dataset: Pairs (input, target), with the same shapes in all samples.
        batch_size: How many gradients are computed at a time.
        dtype: The dtype of parameters, buffers, and floating inputs and targets.

    Returns:
        ``(n, d)`` in ``dtype`` on the parameters' device; columns in the order of
        ``params``, each parameter flattened.

    Raises:
        PerSampleError: The gradients would be wrong; see `per_sample_grad.capture`.
    """
    num_samples = len(dataset)  # type: ignore[arg-type]
    device = next(iter(params.values())).device
    copied = copy.deepcopy(model).to(device, dtype)
    own = dict(copied.named_buffers(remove_duplicate=False))
    own |= dict(copied.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in {**buffers, **params}.items():
            own[name].copy_(value).requires_grad_(name in params)

    def loss(outputs: Any, target: Tensor) -> Tensor:
        return loss_fn(*map_tensors((outputs, target), lambda t: t.unsqueeze(0)))

    def losses(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return vmap(loss)(model(x), y)

    rows, names = [], list(params)
    # Its own generator: a loader draws a seed even where it does not shuffle.
    for x, y in DataLoader(dataset, batch_size, generator=torch.Generator()):
        # The last batch is filled up: one shape is one program and one comparison.
        filled = torch.arange(min(batch_size, num_samples)).clamp(max=len(x) - 1)
        x, y = (
            each[filled].to(device, dtype if each.is_floating_point() else each.dtype)
            for each in (x, y)
        )
        grads = per_sample_grads(copied, losses, (x, y), params=names, fallback="loop")
        rows.append(torch.cat([grads[name].flatten(1) for name in names], dim=1))
        xla_replica.current().sync()  # Otherwise all batches are one program.
    return torch.cat(rows)[:num_samples]


def empirical_ntk(*given: Any, centered: bool = True, **named: Any) -> Tensor:
    """Returns the kernel of a model's per-sample gradients, symmetric, ``(n, n)``.

    Args:
        *given, **named: See `per_sample_gradients`, also for errors.
        centered: Whether to subtract the mean gradient first, which makes the constant
            vector an eigenvector of eigenvalue zero.

    Raises:
        ValueError: A gradient is not finite (the message names the samples).
    """
    features = per_sample_gradients(*given, **named)
    _check_finite(features, "gradients")
    rows = features.to(torch.promote_types(features.dtype, torch.float32))
    rows = rows - rows.mean(0) if centered else rows
    kernel = rows @ rows.T
    return (kernel + kernel.T) / 2  # The product may not be symmetric to the last bit.


def ntk_fixed_order(
    kernel: Tensor, rounds: int = 16, order: np.ndarray | None = None
) -> np.ndarray:
    """Returns the balanced order of a kernel's centred rows.

    Row i holds the similarities of sample i to all samples. In every round each row
    z_i, in the current order, gets the sign + if <a, z_i> < 0 and - otherwise, and is
    added to the accumulator a with that sign. The next order is the positive rows,
    followed by the negative ones reversed (Lu, Guo & De Sa 2022).

    >>> ntk_fixed_order(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), rounds=1)
    array([1, 0])

    Args:
        kernel: K, ``(n, n)``.
        rounds: How often to go through all rows.
        order: The first order. Default: 0, 1, ..., n - 1.

    Raises:
        ValueError: An entry is not finite (the message names the samples), or the
            kernel is not square.
    """
    check_integer("rounds", rounds, 1)
    rows = _on_host(kernel)
    centre = rows.mean(0, keepdim=True)
    order = np.arange(len(rows)) if order is None else order
    decide = Decisions(row_by_row=True)
    for _ in range(rounds):
        given = torch.zeros_like(centre), rows[torch.from_numpy(order)], centre
        order = reorder(order, decide.balance(*given).numpy())
    return order


def eigen_order(
    kernel: Tensor,
    largest: bool = False,
    descending: bool = True,
    absolute: bool = False,
) -> np.ndarray:
    """Returns the samples sorted by their entries in a kernel's extremal eigenvector.

    Of v and -v it takes the one whose largest entry by magnitude, the first of several,
    is positive; equal entries are sorted by index. So the order is a function of the
    kernel.

    Args:
        kernel: ``(n, n)``, symmetric.
        largest: Whether the eigenvalue is the largest or the smallest.
        descending: Whether the largest entry comes first.
        absolute: Whether to sort by magnitude.

    Raises:
        ValueError: As for `ntk_fixed_order`.

    Warns:
        UserWarning: The entries differ by less than rounding changes them. This is true
            of the smallest eigenvalue of a centred kernel, whose eigenvector is
            constant, and wherever there are more samples than parameters.
    """
    matrix = _on_host(kernel)
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    values, vector = values.numpy(), vectors[:, -1 if largest else 0].numpy()
    peaks = np.abs(vector) > (1 - 1e-6) * np.abs(vector).max()
    vector = vector * np.sign(vector[peaks.argmax()])
    if absolute:
        vector = np.abs(vector)
    # A change of the kernel by delta rotates an eigenvector by about delta / gap, where
    # gap is the distance to the next eigenvalue.
    gap = np.ptp(values[-2:] if largest else values[:2])
    delta = 10 * torch.finfo(kernel.dtype).eps * np.abs(values).max()
    spread = np.ptp(vector)
    if len(values) > 1 and spread * gap <= delta:
        warnings.warn(
            f"the order by the {'largest' if largest else 'smallest'} eigenvalue's "
            f"eigenvector is rounding noise: its entries differ by {spread:.1e}, and "
            f"the eigenvalue by {gap:.1e} from the next. Use the largest one",
            stacklevel=2,
        )
    rounded = np.round(vector, 12)  # Entries that differ by rounding become equal.
    return np.argsort(-rounded if descending else rounded, kind="stable")


def _check_finite(rows: Tensor, what: str) -> None:
    """Raises ValueError with the indices of samples whose rows are not finite."""
    if bad := (~rows.isfinite().all(1)).cpu().nonzero().flatten().tolist():
        more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
        raise ValueError(
            f"{what} must be finite, got others for samples {bad[:10]}{more} of "
            f"{len(rows)}"
        )


def _on_host(kernel: Tensor) -> Tensor:
    """Returns the checked kernel, ``(n, n)`` in float64 on the host."""
    shape = tuple(kernel.shape)
    if kernel.ndim != 2 or len(kernel) != kernel.shape[1] or not len(kernel):
        raise ValueError(f"kernel must have the shape (n, n) with n >= 1, got {shape}")
    host = kernel.detach().cpu().double()
    # A bad vector affects a row and a column, but only its own square.
    _check_finite(host.diagonal()[:, None], "the diagonal of kernel")
    _check_finite(host, "kernel")
    return host


@dataclasses.dataclass(frozen=True, kw_only=True)
class _KernelOrder(Ordering):
    """An order that needs the kernel of a data set.

    Attributes:
        dataset, batch_size: See `per_sample_gradients`.
        kernel_dtype: The dtype of gradients and kernel.
        centered_feature_map: Whether to subtract the mean gradient first.
    """

    dataset: Any = dataclasses.field(repr=False)
    batch_size: int = 128
    kernel_dtype: torch.dtype = torch.float32
    centered_feature_map: bool = True

    def kernel(self, *given: Any, **named: Any) -> Tensor:
        """Returns ``(n, n)`` for a model, its params and buffers, and a loss."""
        named |= {"dataset": self.dataset, "batch_size": self.batch_size}
        named |= {"dtype": self.kernel_dtype, "centered": self.centered_feature_map}
        return empirical_ntk(*given, **named)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NTKEigen(_KernelOrder):
    """Sorted by the kernel's extremal eigenvector, again at every `compute_order`.

    Attributes:
        largest_eig: Whether the eigenvalue is the largest or the smallest.
        descending_eig: Whether the largest entry comes first.
        abs_eig: Whether to sort by magnitude.
    """

    order_methods = ("compute_order",)

    largest_eig: bool = False
    descending_eig: bool = True
    abs_eig: bool = False

    def compute_order(self, *given: Any, **named: Any) -> np.ndarray:
        """Returns the order for (model, params, buffers, loss_fn).

        `per_sample_gradients` describes them.
        """
        kernel = self.kernel(*given, **named)
        return eigen_order(kernel, self.largest_eig, self.descending_eig, self.abs_eig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AtConstruction:
    """The model that a fixed order is computed from, once."""

    model: torch.nn.Module = dataclasses.field(repr=False)
    params: Mapping[str, Tensor] = dataclasses.field(repr=False)
    buffers: Mapping[str, Tensor] = dataclasses.field(repr=False)
    loss_fn: LossFn = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NTKFixedEigen(_AtConstruction, NTKEigen):
    """The order of `NTKEigen` at the first parameters, in every epoch."""

    def first_order(self, *of: Any) -> np.ndarray:
        return self.compute_order(self.model, self.params, self.buffers, self.loss_fn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NTKFixedBalance(_AtConstruction, _KernelOrder):
    """The balanced order of the kernel's rows at the first parameters, in every epoch.

    Attributes:
        num_rounds: How often the rows are balanced.
    """

    num_rounds: int = 16

    def first_order(self, *of: Any) -> np.ndarray:
        start = super().first_order(*of)
        kernel = self.kernel(self.model, self.params, self.buffers, self.loss_fn)
        return ntk_fixed_order(kernel, self.num_rounds, start)


BALANCE_TYPES["ntk-fixed"] = NTKFixedBalance
BALANCE_TYPES["ntk-eigen"] = NTKEigen
BALANCE_TYPES["ntk-fixed-eigen"] = NTKFixedEigen
