"""Norms and sums of single layers by compiled loops, on a CPU with Numba.

They are used where `loops.available` says so. Numbers are float32 or float64.
"""

from __future__ import annotations

import math

import torch

from per_sample_grad.factors.forms import Lookup
from per_sample_grad.layers.patches import Unfolding

# Of fewer positions torch forms a convolution's gradients in less time (measured).
_FEWEST_POSITIONS = 512


def squares_by_positions(
    left: torch.Tensor, right: torch.Tensor, with_bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns squared norms of ``Σ_t u_t z_tᵀ``, and what positions add alone.

    Args:
        left, right: ``(B, T, p)`` and ``(B, T, q)``, contiguous.
        with_bias: Whether z ends with 1.
    """
    from per_sample_grad.factors import compiled_norms

    squares, terms = left.new_empty(2, len(left))
    compiled_norms.square_sums_of_products(
        left.numpy(), right.numpy(), int(with_bias), squares.numpy(), terms.numpy()
    )
    return squares, terms


def has_loop(unfolding: Unfolding) -> bool:
    """Returns whether a loop is the fastest way to the gradients of a convolution."""
    around = any(width for pair in unfolding.widths for width in pair)
    ones = (1, 1)
    return (
        tuple(unfolding.kernel) == (3, 3)
        and tuple(unfolding.stride) == tuple(unfolding.dilation) == ones
        and unfolding.groups == 1
        and (unfolding.mode == "zeros" or not around)
        and math.prod(unfolding.positions) >= _FEWEST_POSITIONS
    )


def elements_of_convolution(unfolding: Unfolding, channels: int) -> int:
    """Returns how many numbers `squares_of_convolution` has besides its arguments."""
    tall, wide = unfolding.positions
    return 16 * (channels + 4) * (tall + 2) * (wide + 4) // 4


def squares_of_convolution(
    inputs: torch.Tensor, gradient: torch.Tensor, unfolding: Unfolding, with_bias: bool
) -> torch.Tensor:
    """Returns squared norms of weights, and biases, of a convolution that has a loop.

    Args:
        inputs, gradient: ``(B, C, H, W)`` and ``(B, p, P, Q)``.
        unfolding: What the kernel sees.
        with_bias: Whether somebody wants the biases.
    """
    from per_sample_grad.factors import compiled_norms

    squares = gradient.new_empty(len(gradient))
    (above, _), (before, _) = unfolding.widths
    compiled_norms.square_sums_of_convolution(
        inputs.contiguous().numpy(), gradient.contiguous().numpy(), (above, before),
        with_bias, squares.numpy(),
    )  # fmt: skip
    return squares


def squares_of_table(use: Lookup, num_rows: int) -> torch.Tensor:
    """Returns squared norms of what a use adds to a table, ``(B,)``."""
    from per_sample_grad.factors import compiled_norms

    values = use.values.contiguous()
    squares = values.new_empty(len(values))
    compiled_norms.square_sums_of_table(
        use.index.contiguous().numpy(), values.numpy(), num_rows, squares.numpy()
    )
    return squares


def of_layer_norm(
    inputs: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients ``(B, q)`` of a LayerNorm's weight and bias.

    Args:
        inputs, gradient: ``(B, T, q)``.
        mean, scale: ``(B, T)``: the mean of each row, and 1 / its deviation.
    """
    from per_sample_grad.factors import compiled_norms

    found = gradient.new_empty(2, len(gradient), gradient.shape[2])
    given = [each.contiguous().numpy() for each in (inputs, gradient, mean, scale)]
    compiled_norms.add_up_layer_norm(*given, *found.numpy())
    of_weight, of_bias = found
    return of_weight, of_bias
