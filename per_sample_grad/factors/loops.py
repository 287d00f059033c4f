"""When compiled loops are faster than torch, and products with a matrix by them.

They run on a CPU with Numba. Numbers are float32 or float64.
"""

from __future__ import annotations

import torch

from xla_replica import traits
from xla_replica.common.compiling import has_numba

# So many threads of torch take longer than the loops, which have one (measured).
_MOST_THREADS = 2


def available(like: torch.Tensor) -> bool:
    """Returns whether loops can read this tensor, and take less time than torch."""
    if not (has_numba() and traits(like).is_host):
        return False
    floats = like.dtype == torch.float32 or like.dtype == torch.float64
    return floats and torch.get_num_threads() <= _MOST_THREADS


def sums_with_matrices(
    left: torch.Tensor, right: torch.Tensor, matrix: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """Returns ``Σ_ij left_ri m_ij m'_ij right_rj``, ``(R,)``.

    The product of the matrices is formed some rows at a time: new memory takes a CPU
    longer than the sums.

    Args:
        left, right: ``(R, p)`` and ``(R, q)``.
        matrix, other: ``(p, q)``.
    """
    from per_sample_grad.factors import compiled_products

    found = left.new_empty(len(left))
    given = [each.contiguous().numpy() for each in (left, right, matrix, other)]
    compiled_products.sums_with_matrices(*given, found.numpy())
    return found
