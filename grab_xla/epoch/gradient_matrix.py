"""Per-sample gradients as rows of one matrix, which is formed in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from grab_xla.epoch.row_copies import flattened
from xla_replica import traits, where_finite

# How many numbers are formed at once: 4 and 64 MiB in float32. Smaller pieces would
# take notable time in calls.
PIECE_ON_HOST, PIECE_ON_DEVICE = 2**20, 2**24


class GradientMatrix:
    """Turns a dict of per-sample gradients into ``(B, d)``, parameter after parameter.

    A whole copy of the gradients is made only where the balance needs it. Of the
    parameters it keeps only the shapes; ``num_columns`` is d. ``remark`` ends the error
    about wrong shapes.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        remark: str = "",
    ) -> None:
        self._remark = remark
        self._shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self._dtype, self._device = dtype, device
        self.num_columns = sum(p.numel() for p in parameters.values())

    def pieces(
        self,
        per_sample_grads: Mapping[str, Tensor],
        batched: bool = True,
        multiple: int | None = 1,
        copies: int = 1,
    ) -> Iterator[list[Tensor]]:
        """Yields some rows after the others, each time as a list of their columns.

        The columns of R rows are detached parts of shape ``(R, numel)``, one for every
        parameter. All rows come at once on a lazy backend, where every piece would be a
        part of the program.

        Args:
            per_sample_grads: Gradients that `count` accepts: ``(B, *shape)``, or
                ``shape`` for one sample if not ``batched``.
            multiple: R is a multiple of it, but for the last rows. None means all rows.
            copies: How many numbers the caller forms for each one of a piece.
        """
        grads = [per_sample_grads[name].detach() for name in self._shapes]
        grads = grads if batched else [grad.unsqueeze(0) for grad in grads]
        kind = traits(self._device)
        if multiple is None or kind.is_lazy:
            yield [self._columns(grad) for grad in grads]
            return
        numbers = PIECE_ON_HOST if kind.is_host else PIECE_ON_DEVICE
        size = max(1, numbers // (copies * multiple * self.num_columns)) * multiple
        for first in range(0, len(grads[0]), size):
            yield [self._columns(grad[first : first + size]) for grad in grads]

    def _columns(self, grad: Tensor) -> Tensor:
        return flattened(grad).to(device=self._device, dtype=self._dtype)

    def count(self, grads: Mapping[str, Tensor], batched: bool = True) -> int:
        """Returns how many samples these are the gradients of, after checking them."""
        if not isinstance(grads, Mapping):
            raise TypeError(
                "step() takes a dict from parameter names to per-sample gradients, "
                f"got {type(grads).__name__}"
            )
        if grads.keys() != self._shapes.keys():
            missing = sorted(self._shapes.keys() - grads.keys())
            unknown = sorted(grads.keys() - self._shapes.keys())
            raise ValueError(
                "step() needs the gradients of exactly the parameters that the sampler "
                f"was built with; missing {missing[:5]}, unknown {unknown[:5]}"
            )
        sizes = set()
        for name, shape in self._shapes.items():
            received = tuple(grads[name].shape)
            if received[batched:] != shape or len(received) != len(shape) + batched:
                wanted = f"(B, {str(shape)[1:]}" if batched else str(shape)
                raise ValueError(
                    f"step(): the gradient of {name!r} has shape {received}; a "
                    f"parameter of shape {shape} needs {wanted}{self._remark}"
                )
            sizes.add(received[0] if batched else 1)
        if len(sizes) > 1:
            raise ValueError(
                "step(): parameters have gradients of different numbers of samples: "
                f"{sorted(sizes)}"
            )
        return sizes.pop()


def normalized(rows_BD: Tensor) -> Tensor:
    """Returns rows of norm one; zeros stay, rows without a finite norm become NaN."""
    norms = torch.linalg.vector_norm(rows_BD, dim=1, keepdim=True)
    divisors = torch.where(where_finite(norms), norms.clamp(min=1e-12), torch.nan)
    return rows_BD / divisors
