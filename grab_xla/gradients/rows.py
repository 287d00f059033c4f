"""The gradients of samples, or of a group of them, as the rows that are balanced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

import xla_replica
from grab_xla.gradients.row_copies import flattened
from per_sample_grad import Capture, CoverageError, Dense, Projection
from xla_replica import full_matmul_precision, traits, where_finite

# How many numbers are formed at once: 4 and 64 MiB in float32. Smaller pieces would
# take notable time in calls.
PIECE_ON_HOST, PIECE_ON_DEVICE = 2**20, 2**24
Reduction = Literal["mean", "sum"]
_OF_ANOTHER_MODEL = (
    "backward(): the losses do not depend on the sampler's parameters: compute them "
    "from the model that was given to record()"
)
# `(B, *shape)` of every parameter by name, or `(B, columns)` of all of them.
Gradients = Mapping[str, Tensor] | Tensor


def numbers_at_once(device: torch.device) -> int:
    """Returns how many numbers are formed at once where there may be many."""
    return PIECE_ON_HOST if traits(device).is_host else PIECE_ON_DEVICE


@dataclasses.dataclass(frozen=True)
class GradientMatrix:
    """Runs backward passes, and turns gradients into rows ``(B, K)``.

    Rows are gradients, parameter after parameter, or projections of them, or either of
    norm one. A whole copy of the gradients is made only where the balance needs it.

    Attributes:
        shapes: Those of gradients, by name, in the sequence of the columns.
        projection: Projects gradients; None: they are balanced as they are.
        normalize: Whether rows are divided by their norms.
        dtype, device: Those of the rows.
    """

    shapes: Mapping[str, tuple[int, ...]]
    projection: Projection | None
    normalize: bool
    dtype: torch.dtype
    device: torch.device

    @functools.cached_property
    def num_columns(self) -> int:
        """K."""
        if self.projection is not None:
            return self.projection.size
        return sum(map(math.prod, self.shapes.values()))

    def parameters_of(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Returns the model's parameters of these names and shapes.

        Raises:
            ValueError: The model has no such parameter, or it is frozen.
        """
        given = model.named_parameters(remove_duplicate=False)
        found = {name: each for name, each in given if each.requires_grad}
        kinds = {name: parameter.shape for name, parameter in found.items()}
        if wrong := [n for n, shape in self.shapes.items() if kinds.get(n) != shape]:
            raise ValueError(
                f"record: {', '.join(wrong[:5])} of GraBSampler's trainable_params are "
                "not trainable parameters of the model, of the same shapes; build the "
                "sampler with {n: p for n, p in model.named_parameters() if "
                "p.requires_grad}. Of a wrapper, such as DDP, and of the model in it, "
                "take the names and the model from one of the two"
            )
        return {name: found[name] for name in self.shapes}

    def of_samples(
        self, capture: Capture, losses: Tensor, reduction: Reduction, from_samples: bool
    ) -> Gradients:
        """Runs the backward pass of the mean loss, or of the sum, of a recorded pass.

        Args:
            capture: The recorded forward pass.
            losses: ``(B,)``.
            reduction: ``"mean"`` or ``"sum"``.
            from_samples: ``.grad`` gets the mean, or the sum, of gradients of samples,
                if these are not projected.

        Returns:
            What is balanced of every sample.

        Raises:
            RuntimeError: The losses do not depend on the parameters.
            PerSampleError: As for `Capture.backward`.
        """
        from_samples = from_samples and self.projection is None and len(losses) > 0
        accumulate = None if from_samples else reduction
        rows: dict[str, Tensor] | Tensor
        try:
            if self.projection is None:
                rows = capture.materialize(losses, accumulate=accumulate)
            else:
                rows = capture.project(losses, self.projection, accumulate=accumulate)
        except CoverageError as error:
            raise CoverageError(
                f"{error}. Give such options to sampler.record(), or balance groups, "
                'for any model: GraBSampler(..., fidelity="group")'
            ) from error
        if capture.unused == capture.params.keys():
            raise RuntimeError(_OF_ANOTHER_MODEL)
        if from_samples:
            assert isinstance(rows, dict)
            sums = {name: getattr(each, reduction)(0) for name, each in rows.items()}
            capture.add_gradients(sums)
        return rows

    def of_group(
        self, parameters: dict[str, nn.Parameter], losses: Tensor, reduction: Reduction
    ) -> Gradients:
        """Returns what the backward pass of a group adds to ``.grad``: one row.

        It is by name on a lazy device, where parts of a row are copies. Gradients are
        taken from hooks, before they are added. So what other groups have left in
        ``.grad``, and sums over replicas in the same backward pass, do not matter. The
        hooks are there during the pass alone.

        Raises:
            RuntimeError: The losses do not depend on the parameters.
        """
        sizes = [parameter.numel() for parameter in parameters.values()]
        row = torch.zeros(1, sum(sizes), dtype=self.dtype, device=losses.device)
        parts = zip(row.split(sizes, dim=1), self.shapes.values())
        totals = [part.view(1, *shape) for part, shape in parts]
        if is_lazy := traits(losses).is_lazy:
            totals = [*map(torch.zeros_like, totals)]
        reached = set()

        def keep(total: Tensor, gradient: Tensor) -> None:
            # Autograd would copy a gradient that somebody keeps.
            reached.add(total)
            total[0].add_(gradient.detach().to(total.device))

        with contextlib.ExitStack() as placed:
            for parameter, total in zip(parameters.values(), totals):
                handle = parameter.register_hook(functools.partial(keep, total))
                placed.callback(handle.remove)
            add_gradient(losses, reduction)
        if not reached:
            raise RuntimeError(_OF_ANOTHER_MODEL)
        return dict(zip(parameters, totals)) if is_lazy else row

    def pieces(self, grads: Gradients, size: int | None) -> Iterable[Tensor]:
        """Returns the rows, some after the others.

        All come at once where they are projections, which are small, or one matrix.

        Args:
            grads: Those of a step.
            size: The most rows of a piece. None means all rows.
        """
        if isinstance(grads, Tensor):
            return [self._rows([grads])]
        values = [grads[name].detach() for name in self.shapes]
        if self.projection is not None:
            return [self._rows([*map(self._projections, self.shapes, values)])]
        if size is None:
            return [self._rows(values)]
        return map(self._rows, zip(*(value.split(size) for value in values)))

    def _rows(self, gradients: Sequence[Tensor]) -> Tensor:
        """Returns the rows of some samples, given their gradients by parameter."""
        is_lazy, columns = traits(self.device).is_lazy, []
        for each in gradients:
            flat = flattened(each) if is_lazy else each.unsqueeze(1).flatten(1)
            columns.append(flat.to(device=self.device, dtype=self.dtype))
        rows = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        return normalized(rows) if self.normalize else rows

    def _projections(self, name: str, gradients: Tensor) -> Tensor:
        """Returns projections of one parameter's gradients, formed in parts."""
        assert self.projection is not None
        shape, numbers = self.shapes[name] or (1,), numbers_at_once(self.device)
        found, size = [], max(1, numbers // math.prod(shape))
        with full_matmul_precision(self.device):
            for part in gradients.split(size):
                values = part.to(self.device, self.dtype).reshape(len(part), *shape)
                found.append(self.projection.of(name, [Dense(values)], 4 * numbers))
        return torch.cat(found)

    def checked(
        self, grads: Mapping[str, Tensor], batched: bool
    ) -> tuple[Mapping[str, Tensor], int]:
        """Returns gradients with a batch axis, and of how many samples they are."""
        if grads.keys() != self.shapes.keys():
            raise ValueError(
                "step() needs gradients of exactly the sampler's parameters; missing "
                f"{sorted(self.shapes.keys() - grads.keys())[:5]}, unknown "
                f"{sorted(grads.keys() - self.shapes.keys())[:5]}"
            )
        if not batched:
            grads = {name: each.unsqueeze(0) for name, each in grads.items()}
        num_rows = len(next(iter(grads.values())))
        for name, shape in self.shapes.items():
            received = tuple(grads[name].shape)
            if received != (num_rows, *shape):
                raise ValueError(
                    f"step(): the gradient of {name!r} has shape {received}; a "
                    f"parameter of shape {shape} needs (B, {str(shape)[1:]}, and all "
                    f"the same B, such as {num_rows}"
                )
        return grads, num_rows


def normalized(rows_BD: Tensor) -> Tensor:
    """Returns rows of norm one; zeros stay, rows without a finite norm become NaN."""
    norms = torch.linalg.vector_norm(rows_BD, dim=1, keepdim=True)
    divisors = torch.where(where_finite(norms), norms.clamp(min=1e-12), torch.nan)
    return rows_BD / divisors


def add_gradient(losses: Tensor, reduction: Reduction) -> None:
    """Adds the gradient of the mean loss, or of the sum, to ``.grad``."""
    xla_replica.backward(losses.mean() if reduction == "mean" else losses.sum())
