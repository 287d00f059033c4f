"""Per-sample gradients as the rows that are balanced, which are formed in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from grab_xla.gradients.row_copies import flattened
from grab_xla.random_projections import Projection
from xla_replica import traits, where_finite

# How many numbers are formed at once: 4 and 64 MiB in float32. Smaller pieces would
# take notable time in calls.
PIECE_ON_HOST, PIECE_ON_DEVICE = 2**20, 2**24


class GradientMatrix:
    """Turns the gradients of a step into rows ``(B, K)``, parameter after parameter.

    Rows are gradients or random projections of them, or either of norm one. A whole
    copy of the gradients is made only where the balance needs it. Of the parameters
    only shapes are kept.

    Args:
        parameters: Tensors of the shapes of gradients, by name.
        projection: The projection, which may be that of ``kind="none"``.
        normalize: Whether rows are divided by their norms.
        dtype: The dtype of the rows.
        device: The device of the rows.
        remark: Ends the error about wrong shapes.

    Attributes:
        keeps_gradients: Whether rows are the gradients themselves.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        projection: Projection,
        normalize: bool,
        dtype: torch.dtype,
        device: torch.device,
        remark: str = "",
    ) -> None:
        self._shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self._projection, self._normalize = projection, normalize
        self._dtype, self._device, self._remark = dtype, device, remark
        self._projects = bool(projection.tables)
        self.keeps_gradients = not (normalize or self._projects)

    def pieces(
        self, grads: Mapping[str, Tensor], batched: bool, multiple: int | None
    ) -> Callable[[], Iterable[Tensor]]:
        """Returns a function that forms the rows, some after the others.

        Args:
            grads: Gradients that `count` accepts: ``(B, *shape)``, or ``shape`` for one
                sample if not ``batched``.
            multiple: A piece has a multiple of so many rows, but for the last one. None
                means all rows.
        """
        if multiple is not None and not self._projects:
            return lambda: map(self._rows, self._columns(grads, batched, multiple, 1))
        # A projection is small, but what is formed on the way to it is not.
        size = (1, 4) if self._projects else (None, 1)
        parts = [self._rows(part) for part in self._columns(grads, batched, *size)]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return lambda: [rows]

    def converted(self, rows: Tensor) -> Callable[[], Iterable[Tensor]]:
        """Returns what `pieces` does, of gradients whose columns are together."""
        rows = rows.to(device=self._device, dtype=self._dtype)
        formed = rows if self.keeps_gradients else self._rows([rows])
        return lambda: [formed]

    def _rows(self, columns: list[Tensor]) -> Tensor:
        """Returns the rows of some gradients, given their columns in parts."""
        if self._projects:
            rows = self._projection(*columns)
        else:
            rows = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        return normalized(rows) if self._normalize else rows

    def _columns(
        self,
        grads: Mapping[str, Tensor],
        batched: bool,
        multiple: int | None,
        copies: int,
    ) -> Iterator[list[Tensor]]:
        """Yields the columns of some gradients after those of others.

        The columns of R rows are detached parts of shape ``(R, numel)``, one for every
        parameter. All rows come at once on a lazy backend, where every piece would be a
        part of the program. ``copies`` says how many numbers the caller forms for each
        one of a piece.
        """
        values = [grads[name].detach() for name in self._shapes]
        values = values if batched else [value.unsqueeze(0) for value in values]
        kind = traits(self._device)
        pieces: Iterable[Sequence[Tensor]] = [values]
        if multiple is not None and not kind.is_lazy:
            numbers = PIECE_ON_HOST if kind.is_host else PIECE_ON_DEVICE
            row = copies * multiple * self._projection.num_inputs
            size = max(1, numbers // row) * multiple
            pieces = zip(*(value.split(size) for value in values))
        for parts in pieces:
            yield [
                flattened(part).to(device=self._device, dtype=self._dtype)
                for part in parts
            ]

    def count(self, grads: Mapping[str, Tensor], batched: bool) -> int:
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
