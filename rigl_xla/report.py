"""What a person is told about a sparse model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rigl_xla.update import SparseLayer
from xla_replica import Replica

if TYPE_CHECKING:
    from rigl_xla.scheduler import RigLScheduler


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """Of one sparse weight.

    Attributes:
        size: Number of weights.
        num_active: Of them, active by the mask.
        num_grown: Activated by the last topology update.
    """

    size: int
    num_active: int
    num_grown: int

    @property
    def sparsity(self) -> float:
        """Share of inactive weights."""
        return 1 - self.num_active / self.size

    @property
    def churn(self) -> float:
        """Share of active connections that the last topology update activated."""
        return self.num_grown / max(1, self.num_active)


@dataclasses.dataclass(frozen=True)
class Report:
    """Read off the masks at one moment; see `RigLScheduler.report`.

    Attributes:
        layers: By parameter name.
    """

    layers: dict[str, LayerReport]

    @property
    def sparsity(self) -> float:
        """Share of inactive weights among those of sparse layers."""
        total = sum(layer.size for layer in self.layers.values())
        active = sum(layer.num_active for layer in self.layers.values())
        return 1 - active / total if total else 0.0

    @classmethod
    def of(cls, layers: Sequence[SparseLayer], replica: Replica) -> Report:
        """Counts on the device, and fetches the counts."""
        if not layers:
            return cls({})
        with torch.no_grad():
            zero = torch.zeros((1,), dtype=torch.int64, device=layers[0].mask.device)
            active = torch.stack([layer.mask.sum() for layer in layers])
            grown = torch.cat(
                [zero if x.num_grown is None else x.num_grown for x in layers]
            )
        counts = [active, grown]
        if active.device.type != "cpu":
            counts = replica.fetch(counts)
        return cls(
            {
                layer.name: LayerReport(layer.size, num_active, num_grown)
                for layer, num_active, num_grown in zip(
                    layers, counts[0].tolist(), counts[1].tolist()
                )
            }
        )


def describe(pruner: RigLScheduler) -> str:
    """Lines as rigl-torch prints them, from counts known on the host."""
    active = {layer.name: layer.num_active for layer in pruner._layers}
    rows = [
        (active.get(weight.name, size), size, weight.is_conv)
        for weight, size in zip(pruner._weights, pruner.N)
    ]
    of_each = ", ".join(f"{nonzero}/{size}" for nonzero, size, _ in rows)
    shares = ", ".join(f"{100 * nonzero / size:.2f}%" for nonzero, size, _ in rows)
    return "\n".join(
        [
            "RigLScheduler(",
            f"layers={len(rows)},",
            f"nonzero_params=[{of_each}],",
            f"nonzero_percentages=[{shares}],",
            f"total_nonzero_params={_total(rows)},",
            f"total_CONV_nonzero_params={_total([row for row in rows if row[2]])},",
            f"step={pruner.step},",
            f"num_rigl_steps={pruner.rigl_steps},",
            f"ignoring_linear_layers={pruner.ignore_linear_layers},",
            f"sparsity_distribution={pruner.sparsity_distribution},",
            ")",
        ]
    )


def _total(rows: Sequence[tuple[int, int, bool]]) -> str:
    nonzero, size = sum(row[0] for row in rows), sum(row[1] for row in rows)
    return f"{nonzero}/{size} ({100 * nonzero / size if size else 0:.2f}%)"
