"""Which connections an update drops and grows, and the patterns that masks keep.

Pure functions of tensors. What scores higher stays or grows. Among equal scores the
lower index wins, on every device, so replicas choose alike. What is not eligible gets a
score below all others, not zero: an active weight of zero is not an inactive one.

Axes: L layers of equal size, N weights of one of them, R rows of a structured layer, M
weights of a row.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Sequence

import numpy as np
import torch

from xla_replica import where_finite
from xla_replica.common.arguments import check_type
from xla_replica.device.selection import first, kth_largest

Shape = Sequence[int]
INELIGIBLE = float("-inf")
CONSTANT_FAN_IN = "constant-fan-in"


def top(scores_LN: torch.Tensor, counts_L: torch.Tensor) -> torch.Tensor:
    """Returns bool ``(L, N)``, True at the ``counts_L[l]`` highest scores of a layer.

    With NaN the result means nothing. Shapes do not depend on the counts, which stay
    on the device, so a changed count compiles nothing.

    >>> top(torch.tensor([[3.0, 1.0, 3.0, 3.0]]), torch.tensor([2]))
    tensor([[ True, False,  True, False]])
    """
    counts_L1 = counts_L.to(torch.int32).unsqueeze(1)
    # The largest number for a count of 0: none is above it, and none missing.
    threshold_L1 = kth_largest(scores_LN, counts_L1.clamp(min=1))
    above_LN = scores_LN > threshold_L1
    missing_L1 = counts_L1 - above_LN.sum(1, keepdim=True, dtype=torch.int32)
    return above_LN | first(scores_LN == threshold_L1, missing_L1)


def drop_and_grow(
    mask_LN: torch.Tensor,
    drop_LN: torch.Tensor,
    grow_LN: torch.Tensor | None,
    num_keep_L: torch.Tensor,
    num_grow_L: torch.Tensor,
    per_row: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns new masks: the best of the active ones, and the best of all others.

    What was just dropped may grow again, as in Evci et al. 2020, arXiv:1911.11134,
    Algorithm 1. The second mask tells which active ones were kept.

    Args:
        mask_LN: The connections that are active; with ``per_row`` the ``(R, M)`` of one
            layer.
        drop_LN, grow_LN: Scores; no second ones where nothing grows.
        num_keep_L, num_grow_L: Exact counts, at most as many as there are.
        per_row: How many connections every row of a structured layer has. They are
            dropped wherever in the layer they are weakest, and each row grows as many
            as it lacks. Rows are groups of M inputs for N:M sparsity, and all inputs of
            a neuron for constant fan-in.
    """
    active_LN = drop_LN.masked_fill(~mask_LN, INELIGIBLE)
    keep_LN = top(active_LN.reshape(len(num_keep_L), -1), num_keep_L)
    keep_LN = keep_LN.reshape(mask_LN.shape)
    if grow_LN is None:
        return keep_LN, keep_LN
    if per_row is not None:
        num_grow_L = per_row - keep_LN.sum(1)
    candidates_LN = grow_LN.masked_fill(keep_LN, INELIGIBLE)
    return keep_LN | top(candidates_LN, num_grow_L), keep_LN


def is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Returns bool ``(1,)``: whether no number is NaN or infinite."""
    return where_finite(tensor).all().reshape(1)


def are_finite(scores_LN: torch.Tensor, eligible_LN: torch.Tensor) -> torch.Tensor:
    """Returns bool ``(L, 1)``: whether no eligible score is NaN or infinite."""
    return (where_finite(scores_LN) | ~eligible_LN).all(1, keepdim=True)


def has_preference(scores_LN: torch.Tensor) -> torch.Tensor:
    """Returns bool ``(L, 1)``: whether a layer's finite scores differ at all.

    Those of a layer that took no part in the loss are all zero and say nothing.
    """
    others_LN = ~where_finite(scores_LN)
    high_L1 = scores_LN.masked_fill(others_LN, -math.inf).amax(1, keepdim=True)
    low_L1 = scores_LN.masked_fill(others_LN, math.inf).amin(1, keepdim=True)
    return high_L1 > low_L1


def generator(seed: int, name: str, update: int) -> torch.Generator:
    """Returns a CPU generator by its arguments alone, so the same on every replica.

    ``update`` is the number of the topology update; 0 for the initial mask.
    """
    key = f"{seed}/{update}/{name}".encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
    return torch.Generator().manual_seed(number)


def random_scores(
    seed: int, name: str, update: int, shape: Sequence[int]
) -> torch.Tensor:
    """Returns float32 of a shape on the CPU, uniform on [0, 1); see `generator`."""
    return torch.rand(shape, generator=generator(seed, name, update))


def random_mask(seed: int, name: str, size: int, num_active: int) -> torch.Tensor:
    """Returns bool ``(size,)`` on the CPU with ``num_active`` True, at random."""
    order = torch.randperm(size, generator=generator(seed, name, 0))
    mask = torch.zeros(size, dtype=torch.bool)
    mask[order[:num_active]] = True
    return mask


@dataclasses.dataclass(frozen=True)
class RowPattern:
    """How a weight is cut into rows with equally many active connections.

    Attributes:
        shape: The weight's shape.
        width: Connections in a row.
        per_row: How many of them are active.
        along_channels: Whether a row lies along the input channels alone, where matrix
            units multiply, as for N:M; or along the kernel too, for constant fan-in.
        transposed: See `outputs_first`.
    """

    shape: tuple[int, ...]
    width: int
    per_row: int
    along_channels: bool
    transposed: int | None = None

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``(rows, width)`` of a tensor of the weight's size."""
        return self._rows_last(tensor.reshape(self.shape)).reshape(-1, self.width)

    def join(self, rows_RM: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that `cut` was given, of the weight's shape."""
        shape = self._rows_last(torch.empty(self.shape, device="meta")).shape
        tensor = rows_RM.reshape(shape)
        if self.along_channels:
            tensor = tensor.movedim(-1, 1)
        return outputs_first(tensor, self.transposed)

    def best_mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns a mask of the ``per_row`` highest of the weight's scores by row."""
        scores_RM = self.cut(scores)
        counts = torch.full((len(scores_RM),), self.per_row, device=scores.device)
        return self.join(top(scores_RM, counts))

    def _rows_last(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = outputs_first(tensor, self.transposed)
        return tensor.movedim(1, -1) if self.along_channels else tensor


def n_of_m(structure: str | None) -> tuple[int, int] | None:
    """Returns ``(N, M)`` of ``'N:M'``; None for constant fan-in, and without a pattern.

    >>> n_of_m("2:4")
    (2, 4)
    """
    if structure is None or structure == CONSTANT_FAN_IN:
        return None
    check_type("structure", structure, str, "a text like '2:4'")
    match = re.fullmatch(r"(\d+):(\d+)", structure)
    if not match or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(
            f"structure must be {CONSTANT_FAN_IN!r}, or 'N:M' with 0 < N < M like "
            f"'2:4', got {structure!r}"
        )
    return int(match[1]), int(match[2])


def outputs_first(tensor: torch.Tensor, transposed: int | None) -> torch.Tensor:
    """Returns ``(out, in / groups, *kernel)`` of a weight, and from there the weight.

    ``transposed`` is the number of groups of a transposed convolution, whose weight is
    ``(in, out / groups, *kernel)``; None for all others, which have outputs first.
    """
    if transposed is None:
        return tensor
    return tensor.unflatten(0, (transposed, -1)).transpose(1, 2).flatten(0, 1)


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Returns a mask on the CPU as uint8, one bit per weight."""
    return torch.from_numpy(np.packbits(mask.numpy().reshape(-1)))


def unpack(packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns the bool mask on the CPU that `pack` was given.

    Raises:
        ValueError, TypeError: There is not one bit for each number of the shape.
    """
    size = torch.Size(shape).numel()
    check_type("a packed mask", packed, torch.Tensor, "a tensor")
    if packed.dtype != torch.uint8 or packed.shape != ((size + 7) // 8,):
        raise ValueError(
            f"a packed mask of shape {tuple(shape)} must be {(size + 7) // 8} uint8, "
            f"got {packed.dtype} of shape {tuple(packed.shape)}"
        )
    bits = np.unpackbits(packed.cpu().numpy(), count=size)
    return torch.from_numpy(bits.astype(np.bool_)).reshape(tuple(shape))
