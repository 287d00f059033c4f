"""Orders from a Gram matrix or a kernel of the samples, computed all at once.

Pure functions of a matrix ``(n, n)``, in float64 on the host. They take O(n^2) to
O(n^3) time: use them before a run or between epochs, for a few thousand samples. Orders
are int64 arrays ``(n,)``, permutations of the samples' indices.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from grab_xla.balancing.decisions import TIES
from grab_xla.balancing.reordering import check_permutation, reorder
from xla_replica.common.arguments import check_choice, check_integer


def offline_mean_balance(
    gram: Tensor,
    rounds: int = 16,
    order: Sequence[int] | np.ndarray | None = None,
    tie: str = "negative",
    centered: bool = False,
) -> np.ndarray:
    """Returns an order of vectors whose prefix sums are close to those of their mean.

    In every round each vector z_i, in the current order, gets the sign + if
    <a, z_i> < 0 and - otherwise, and is added to the accumulator a with that sign. The
    next order is the positive vectors, followed by the negative ones reversed (Lu, Guo
    & De Sa 2022, "GraB: Finding Provably Better Data Permutations than Random
    Reshuffling", with the greedy signs of their implementation). This only needs inner
    products.

    >>> offline_mean_balance(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), rounds=1)
    array([1, 0])

    Args:
        gram: Z Z^T, ``(n, n)``, for vectors Z ``(n, d)``.
        rounds: How often to go through all vectors.
        order: The first order. Default: 0, 1, ..., n - 1.
        tie: The sign at <a, z_i> = 0, such as that of the first vector of every round:
            ``"negative"`` puts it last, ``"positive"`` first.
        centered: Whether the vectors' mean is zero already and is not subtracted.

    Raises:
        ValueError: A product is not finite (the message names the samples), ``gram`` is
            not square, ``order`` is not a permutation, or an option is unknown.
        TypeError: ``gram`` does not have a floating dtype.
    """
    check_choice("tie", tie, TIES)
    check_integer("rounds", rounds, 1)
    matrix = _on_host(gram, "gram").numpy()
    if not centered:
        means = matrix.mean(0)
        matrix = matrix - means - matrix.mean(1)[:, None] + means.mean()
    first = range(len(matrix)) if order is None else order
    current = check_permutation("order", first, len(matrix))
    signs = np.empty(len(matrix), dtype=np.int8)
    for _ in range(rounds):
        products = np.zeros(len(matrix))  # <a, z_i> for every i
        for position, i in enumerate(current.tolist()):
            is_positive = products[i] < 0 or (products[i] == 0 and tie == "positive")
            signs[position] = 1 if is_positive else -1
            products += matrix[i] if is_positive else -matrix[i]
        current = reorder(current, signs)
    return current


def ntk_fixed_order(
    kernel: Tensor,
    rounds: int = 16,
    order: Sequence[int] | np.ndarray | None = None,
    tie: str = "negative",
) -> np.ndarray:
    """Returns the balanced order of a kernel's rows; see `offline_mean_balance`.

    Row i holds the similarities of sample i to all samples; rows are centred first.

    Args:
        kernel: K, ``(n, n)``. The Gram matrix of its rows is K K^T.
        rounds, order, tie: As there, with the same errors.
    """
    rows = _on_host(kernel, "kernel")
    rows = rows - rows.mean(0)
    return offline_mean_balance(rows @ rows.T, rounds, order, tie, centered=True)


def eigen_order(
    kernel: Tensor,
    largest: bool = False,
    descending: bool = True,
    absolute: bool = False,
) -> np.ndarray:
    """Returns the samples sorted by their entries in a kernel's extremal eigenvector.

    All eigenvectors are computed, in O(n^3). Of v and -v it takes the one whose largest
    entry by magnitude, the first of several, is positive; equal entries are sorted by
    index. So the order is a function of the kernel.

    Args:
        kernel: ``(n, n)``, symmetric.
        largest: Whether the eigenvalue is the largest or the smallest.
        descending: Whether the largest entry comes first.
        absolute: Whether to sort by magnitude.

    Raises:
        ValueError: An entry is not finite (the message names the samples), or the
            kernel is not square.
        TypeError: The kernel does not have a floating dtype.

    Warns:
        UserWarning: The entries differ by less than rounding changes them. This is true
            of the smallest eigenvalue of a centred kernel, whose eigenvector is
            constant, and wherever there are more samples than parameters.
    """
    matrix = _on_host(kernel, "kernel")
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    values, vector = values.numpy(), vectors[:, -1 if largest else 0].numpy()
    peaks = np.abs(vector) > (1 - 1e-6) * np.abs(vector).max()
    if vector[peaks.argmax()] < 0:
        vector = -vector
    if absolute:
        vector = np.abs(vector)
    # A change of the kernel by delta rotates an eigenvector by about delta / gap, where
    # gap is the distance to the next eigenvalue.
    nearest = values[::-1][:2] if largest else values[:2]
    gap = abs(nearest[-1] - nearest[0])
    delta = 10 * torch.finfo(kernel.dtype).eps * np.abs(values).max()
    spread = vector.max() - vector.min()
    if len(values) > 1 and spread * gap <= delta:
        warnings.warn(
            f"the order by the {'largest' if largest else 'smallest'} eigenvalue's "
            f"eigenvector is rounding noise: its entries differ by {spread:.1e}, and "
            f"the eigenvalue, {nearest[0]:.3g}, by {gap:.1e} from the next. The "
            "smallest eigenvector of a centred kernel, or of more samples than "
            "parameters, is not worth sorting by: use the largest, or another kernel",
            stacklevel=2,
        )
    rounded = np.round(vector, 12)  # Entries that differ by rounding become equal.
    return np.argsort(-rounded if descending else rounded, kind="stable")


def check_finite(rows: Tensor, what: str) -> None:
    """Raises ValueError with the indices of samples whose rows are not finite."""
    finite = rows.isfinite().all(1).cpu()
    if not finite.all():
        bad = (~finite).nonzero().flatten().tolist()
        more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
        raise ValueError(
            f"{what} must be finite, got others for samples {bad[:10]}{more} of "
            f"{len(rows)}"
        )


def _on_host(matrix: Tensor, what: str) -> Tensor:
    """Returns the checked matrix, ``(n, n)`` in float64 on the host."""
    if matrix.ndim != 2 or len(matrix) != matrix.shape[1] or not len(matrix):
        raise ValueError(
            f"{what} must have the shape (n, n) with n >= 1, got {tuple(matrix.shape)}"
        )
    if not matrix.is_floating_point():
        raise TypeError(f"{what} must have a floating dtype, got {matrix.dtype}")
    host = matrix.detach().cpu().double()
    # A bad vector affects a row and a column, but only its own square.
    check_finite(host.diagonal()[:, None], f"the diagonal of {what}")
    check_finite(host, what)
    return host
