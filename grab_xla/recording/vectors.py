"""From the gradients of a step to the vectors that are balanced."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grab_xla.balancing.rows import FactoredRows
from grab_xla.epoch.gradient_matrix import GradientMatrix, normalized
from grab_xla.epoch.progress import Progress
from grab_xla.random_projections import projection
from grab_xla.recording.capturing import Recording
from grab_xla.recording.group_gradients import GroupGradients


class Vectors:
    """What is balanced of gradients: themselves or projections, or either of norm one.

    Args:
        parameters: The parameters, by name.
        recording: Its ``balanced`` has the names and shapes of gradients.
        num_groups: The number of samples in an order, or of groups.
        kind, eps, order, seed: Those of `projection`.
        normalize: Whether vectors are divided by their norms.
        dtype: The dtype of the balance state.
        device: Where balancing runs.

    Raises:
        TypeError, ValueError: An argument is not allowed.

    Attributes:
        project: The projection, which may be that of ``kind="none"``.
        takes_factors: Whether factors can stand for the gradients: these are balanced
            as they are, in their own dtype and on their device.
        settings: What a saved state must agree with.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        recording: Recording | GroupGradients,
        num_groups: int,
        kind: str,
        eps: float,
        order: int,
        seed: int,
        normalize: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        remark = ""
        if recording.projection is not None:
            remark = (
                ". With fidelity='projected', the default above 2^20 parameters, "
                "projections are balanced, which backward() makes: pass fidelity="
                "'exact' to give gradients to step()"
            )
        self._gradients = GradientMatrix(recording.balanced, dtype, device, remark)
        self.project = projection(
            kind, self._gradients.num_columns, num_groups, eps, order, seed, dtype,
            device,
        )  # fmt: skip
        self._normalize, self._dtype, self._device = normalize, dtype, device
        projects = bool(self.project.tables)
        self.takes_factors = not (normalize or projects) and all(
            torch.promote_types(p.dtype, torch.float32) == dtype
            and p.device.type == device.type
            for p in parameters.values()
        )
        self.settings: dict[str, Any] = {
            "random_projection": (kind, eps, order, seed) if projects else kind,
            "normalize_grads": normalize,
        }

    def count(self, grads: Mapping[str, Tensor], batched: bool) -> int:
        """Returns how many samples these are the gradients of, after checking them."""
        return self._gradients.count(grads, batched)

    def balance(
        self,
        grads: Mapping[str, Tensor],
        batched: bool,
        num_rows: int,
        progress: Progress,
    ) -> None:
        """Balances the gradients of a step, or keeps their vectors until the update.

        ``num_rows`` is what `count` returned.
        """
        balancer, projects = progress.balancer, bool(self.project.tables)
        multiple = balancer.piece_size
        if multiple is not None and not projects:
            pieces = functools.partial(self._gradients.pieces, grads, batched, multiple)
            balancer.balance(lambda: map(self._vectors, pieces()))
            return
        # A projection is small, but what is formed on the way to it is not.
        size = (1, 4) if projects else (None, 1)
        parts = list(map(self._vectors, self._gradients.pieces(grads, batched, *size)))
        progress.balance(parts[0] if len(parts) == 1 else torch.cat(parts))

    def balance_rows(self, rows: Tensor | FactoredRows, progress: Progress) -> None:
        """Balances a step of which all columns are together, or keeps it.

        Rows that are not formed may come if `takes_factors`.
        """
        if isinstance(rows, FactoredRows):
            progress.balancer.balance_factored(rows)
            return
        rows = rows.to(device=self._device, dtype=self._dtype)
        if self._normalize or self.project.tables:
            rows = self._vectors([rows])
        if progress.balancer.piece_size is None:
            progress.balance(rows)
        else:
            progress.balancer.balance(lambda: [rows])

    def _vectors(self, columns: list[Tensor]) -> Tensor:
        """Returns the vectors of some gradients, given their columns in parts."""
        rows = self.project(*columns)
        return normalized(rows) if self._normalize else rows
