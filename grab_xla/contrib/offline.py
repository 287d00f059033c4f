"""Orders computed all at once from a Gram matrix or a kernel of the samples.

Pure functions of a matrix ``(n, n)``; the arithmetic is float64 on the host. They take
O(n^2) to O(n^3), which is for before a run or between epochs and for a few thousand
samples, not for a training step.

Orders are int64 arrays ``(n,)``: a permutation of the samples' indices.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch

Tensor = torch.Tensor

# Which sign a sample gets whose inner product with the accumulator is exactly zero.
TIES = {"negative": -1, "positive": 1}


def offline_mean_balance(
    gram: Tensor,
    rounds: int = 16,
    order: Sequence[int] | np.ndarray | None = None,
    tie: str = "negative",
    centered: bool = False,
) -> np.ndarray:
    """An order of vectors whose prefix sums stay near their mean's.

    In every round each vector z_i, in the order so far, gets the sign + if
    <a, z_i> < 0 and else -, and is added to the accumulator a with it. The next order
    is that of the +, followed by the reverse of that of the - (Lu, Guo & De Sa 2022,
    "GraB: Finding Provably Better Data Permutations than Random Reshuffling", with the
    greedy signs of their implementation). Inner products are all that this needs.

    >>> offline_mean_balance(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), rounds=1)
    array([1, 0])

    Args:
        gram: Z Z^T, ``(n, n)``, for vectors Z ``(n, d)``.
        rounds: How often to go through all vectors.
        order: Where to begin; by default 0, 1, ..., n - 1.
        tie: The sign at <a, z_i> = 0, as for the first vector of every round:
            ``"negative"`` puts it last, ``"positive"`` first.
        centered: The vectors' mean is zero already: do not subtract it.

    Raises:
        ValueError: A product is not finite (the message says of which samples),
            ``gram`` is not square, ``order`` no permutation, or an option unknown.
        TypeError: ``gram`` has no floating dtype.
    """
    if tie not in TIES:
        raise ValueError(f"tie={tie!r} is unknown; allowed are {sorted(TIES)}")
    if isinstance(rounds, bool) or not rounds >= 1:
        raise ValueError(f"rounds must be >= 1, got {rounds!r}")
    matrix = _on_host(gram, "gram").numpy()
    if not centered:
        means = matrix.mean(0)
        matrix = matrix - means - matrix.mean(1)[:, None] + means.mean()
    current = _permutation(order, len(matrix))
    for _ in range(rounds):
        current = _balanced(matrix, current, TIES[tie])
    return current


def _balanced(gram: np.ndarray, order: np.ndarray, tie: int) -> np.ndarray:
    products = np.zeros(len(gram))  # <a, z_i> for every i
    positive, negative = [], []
    for i in order.tolist():
        if products[i] < 0 or (products[i] == 0 and tie > 0):
            products += gram[i]
            positive.append(i)
        else:
            products -= gram[i]
            negative.append(i)
    return np.array(positive + negative[::-1], dtype=np.int64)


def ntk_fixed_order(
    kernel: Tensor,
    rounds: int = 16,
    order: Sequence[int] | np.ndarray | None = None,
    tie: str = "negative",
) -> np.ndarray:
    """The order of a kernel's rows after balancing them: see `offline_mean_balance`.

    Row i says how like every other sample sample i is; rows are centred first.

    Args:
        kernel: K, ``(n, n)``. The Gram matrix of its rows is K K^T.
        rounds: This and what follows: see `offline_mean_balance`.

    Raises:
        ValueError, TypeError: As `offline_mean_balance`.
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
    """Samples sorted by their entries in a kernel's extremal eigenvector.

    All eigenvectors are computed: O(n^3). Of v and -v it takes the one whose largest
    entry by magnitude, the first of several, is positive; equal entries stay in the
    order of their indices. So the order is a function of the kernel.

    Args:
        kernel: ``(n, n)``, symmetric.
        largest: Of the largest eigenvalue; else of the smallest.
        descending: The largest entry first.
        absolute: Sort by magnitude.

    Raises:
        ValueError: An entry is not finite (the message says of which samples), or the
            kernel is not square.
        TypeError: It has no floating dtype.

    Warns:
        UserWarning: The entries differ by less than rounding changes them. So it is
            for the smallest eigenvalue of a centred kernel, whose eigenvector is
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
    _warn_if_noise(values, vector, torch.finfo(kernel.dtype).eps, largest)
    rounded = np.round(vector, 12)  # what is equal but for rounding becomes equal
    return np.argsort(-rounded if descending else rounded, kind="stable")


def _warn_if_noise(
    values: np.ndarray, vector: np.ndarray, eps: float, largest: bool
) -> None:
    """Warns where a rounding of the kernel would make another order.

    A change of the kernel by delta turns an eigenvector by about delta / gap, where gap
    is the distance to the next eigenvalue.
    """
    if len(values) < 2:
        return
    nearest = values[::-1][:2] if largest else values[:2]
    gap = abs(nearest[1] - nearest[0])
    delta = 10 * eps * np.abs(values).max()
    spread = vector.max() - vector.min()
    if spread * gap <= delta:
        warnings.warn(
            f"the order by the {'largest' if largest else 'smallest'} eigenvalue's "
            f"eigenvector is rounding noise: its entries differ by {spread:.1e}, and "
            f"the eigenvalue, {nearest[0]:.3g}, by {gap:.1e} from the next. A centred "
            "kernel, and one of more samples than parameters, has no smallest "
            "eigenvector worth sorting by: use the largest, or another kernel",
            stacklevel=3,
        )


def check_finite(rows: Tensor, what: str) -> None:
    """Raises ValueError, with the numbers of the samples, unless all is finite.

    Args:
        rows: ``(n, d)``, a sample each.
        what: Their name in the message.
    """
    finite = rows.isfinite().all(1).cpu()
    if not finite.all():
        bad = (~finite).nonzero().flatten().tolist()
        more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
        raise ValueError(
            f"{what} must be finite; not so for samples {bad[:10]}{more} of {len(rows)}"
        )


def _on_host(matrix: Tensor, what: str) -> Tensor:
    """``(n, n)`` in float64 on the host, checked."""
    if matrix.ndim != 2 or len(matrix) != matrix.shape[1] or not len(matrix):
        raise ValueError(
            f"{what} must have the shape (n, n) with n >= 1, got {tuple(matrix.shape)}"
        )
    if not matrix.is_floating_point():
        raise TypeError(f"{what} must have a floating dtype, got {matrix.dtype}")
    host = matrix.detach().cpu().double()
    # One bad vector spoils a row and a column, but only its own square.
    check_finite(host.diagonal()[:, None], f"the diagonal of {what}")
    check_finite(host, what)
    return host


def _permutation(order: Sequence[int] | np.ndarray | None, n: int) -> np.ndarray:
    if order is None:
        return np.arange(n)
    array = np.asarray(order)
    if array.dtype.kind not in "iu" or not np.array_equal(np.sort(array), np.arange(n)):
        raise ValueError(
            f"order must be a permutation of the {n} indices from 0, got an array of "
            f"shape {array.shape} and dtype {array.dtype}"
        )
    return array.astype(np.int64)
