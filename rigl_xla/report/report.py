"""What a person is told about a sparse model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from rigl_xla.layers.history import COUNTS
from rigl_xla.layers.sparse_layer import SparseLayer
from rigl_xla.layers.weights import Weight, weights_of
from rigl_xla.report import cost_report
from rigl_xla.report.cost_report import CostReport
from rigl_xla.report.flops import LayerCost, size_in_bytes
from rigl_xla.report.positions import cost_of
from rigl_xla.topology.methods import Method
from rigl_xla.topology.update_schedule import UpdateSchedule
from xla_replica import Replica


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a pruner is now, all that a report is made of.

    Attributes:
        step: Number of the step.
        num_updates: Topology updates so far.
        schedule: Of the updates.
        method: Of dropping and growing.
        model: All of whose weights are counted.
        weights: Those that the pruner knows of.
        layers: Those of them that are sparse.
        replica: That reads the device.
    """

    step: int
    num_updates: int
    schedule: UpdateSchedule
    method: Method
    model: nn.Module
    weights: Sequence[Weight]
    layers: Sequence[SparseLayer]
    replica: Replica


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """Of one sparse weight.

    Attributes:
        size: Number of weights.
        num_active: Of them, active by the mask.
        num_grown: Activated by the last topology update.
        num_dropped: Inactivated by it; what was dropped and grown again is neither.
        num_explored: Active now or at any time before.
    """

    size: int
    num_active: int
    num_grown: int
    num_dropped: int
    num_explored: int

    @property
    def sparsity(self) -> float:
        """Share of inactive weights."""
        return 1 - self.num_active / self.size

    @property
    def churn(self) -> float:
        """Share of active connections that the last topology update activated."""
        return self.num_grown / max(1, self.num_active)

    @property
    def exploration_rate(self) -> float:
        """Share of weights that were ever active.

        R_s of Liu et al. 2021 (in-time over-parameterisation), arXiv:2102.02887, 3.2.
        """
        return self.num_explored / self.size


@dataclasses.dataclass(frozen=True)
class Taken:
    """One sparse layer at one moment; ``counts`` may still be on the device."""

    name: str
    size: int
    counts: torch.Tensor


class Report:
    """What a pruner was at one moment; see `RigLScheduler.report`.

    Making one reads nothing from the device. The first value that stands there is read
    with all others of the report, in one transfer; `read` does so for many reports.

    Attributes:
        step: Number of the step at that moment.
        num_updates: Topology updates up to then.
        drop_fraction: What an update at that step drops, at most.
    """

    def __init__(
        self,
        now: Snapshot,
        costs: Mapping[str, LayerCost] | None = None,
        num_steps: int | None = None,
    ) -> None:
        schedule = now.schedule
        self.step, self.num_updates = now.step, now.num_updates
        self.drop_fraction = schedule.drop_fraction(now.step)
        self._replica = now.replica
        self._taken = [
            Taken(layer.name, layer.size, layer.history.counts) for layer in now.layers
        ]
        watched = {weight.name: cost_of(weight) for weight in weights_of(now.model)}
        own = {weight.name: cost_of(weight) for weight in now.weights}
        self._has_costs = costs is not None
        # What is sparse only because it was included costs nothing, as norms do.
        self._costs = {**watched, **own, **_fitting(watched, costs)}
        self._run = cost_report.TrainingRun(
            method=_kind(now.method),
            delta=schedule.delta,
            num_collected=schedule.grad_accumulation_n,
            last_update=schedule.last_update,
            num_steps=num_steps,
            final={layer.name: layer.sparsity for layer in now.layers},
        )

    @staticmethod
    def read(reports: Iterable[Report]) -> None:
        """Reads the device for several reports of one pruner, in one transfer."""
        unread = [report for report in reports if "layers" not in vars(report)]
        counts = [taken.counts for report in unread for taken in report._taken]
        found = iter(unread[0]._replica.fetch(counts) if counts else [])
        for report in unread:
            vars(report)["layers"] = {
                taken.name: LayerReport(
                    size=taken.size, **dict(zip(COUNTS, next(found).tolist()))
                )
                for taken in report._taken
            }

    @functools.cached_property
    def layers(self) -> dict[str, LayerReport]:
        """Every sparse layer, by parameter name. Reads the device, once."""
        Report.read([self])
        return self.layers

    @property
    def sparsity(self) -> float:
        """Share of inactive weights among those of sparse layers."""
        total = self._sum("size")
        return 1 - self._sum("num_active") / total if total else 0.0

    @property
    def num_grown(self) -> int:
        """Connections that the last topology update activated."""
        return self._sum("num_grown")

    @property
    def num_dropped(self) -> int:
        """Connections that the last topology update inactivated."""
        return self._sum("num_dropped")

    @property
    def churn(self) -> float:
        """Share of active connections that the last topology update activated."""
        return self.num_grown / max(1, self._sum("num_active"))

    @property
    def exploration_rate(self) -> float:
        """Share of the weights of sparse layers that were ever active."""
        total = self._sum("size")
        return self._sum("num_explored") / total if total else 0.0

    @functools.cached_property
    def cost(self) -> CostReport:
        """Operations and size of all weights that can be sparse, dense ones too.

        Raises:
            ValueError: It needs to know how often a pass uses each weight.
        """
        if not self._has_costs:
            raise ValueError(
                "operations depend on how often a forward pass uses each weight; give "
                "report(costs), where costs = rigl_xla.costs_of(model, inputs)"
            )
        return cost_report.cost_report(self._costs, self._now(), self._run)

    @property
    def size_in_bytes(self) -> float:
        """Stored: float32 weights and biases, and a bit per weight for each mask."""
        return size_in_bytes(self._costs, self._now())

    def scalars(self) -> dict[str, float]:
        """What a log shows, by name; operations if their costs are known."""
        found = {
            "sparsity": self.sparsity,
            "drop_fraction": self.drop_fraction,
            "churn": self.churn,
            "grown": self.num_grown,
            "dropped": self.num_dropped,
            "exploration_rate": self.exploration_rate,
            "size_in_bytes": self.size_in_bytes,
        }
        if self._has_costs:
            found["inference_flops_ratio"] = self.cost.inference_ratio
            if self.cost.method in self.cost.training_ratios:
                found["training_flops_ratio"] = self.cost.training_ratio
        return found

    def __str__(self) -> str:
        """A table: a line for every sparse layer, and what they come to."""
        width = max([len(name) for name in self.layers] + [len("all sparse layers")])
        lines = [
            f"{'':{width}} {'active':>10} {'of':>10} {'sparse':>8} {'moved':>7} "
            f"{'explored':>8}"
        ]
        rows = [*self.layers.items(), ("all sparse layers", self._all())]
        for name, layer in rows:
            lines.append(
                f"{name:{width}} {layer.num_active:>10} {layer.size:>10} "
                f"{layer.sparsity:>8.2%} {layer.churn:>7.2%} "
                f"{layer.exploration_rate:>8.2%}"
            )
        lines.append(f"{self.size_in_bytes / 1e6:.3f} MB stored")
        if self._has_costs:
            cost = self.cost
            lines.append(
                f"forward pass: {cost.flops:.4g} of {cost.dense_flops:.4g} operations "
                f"({cost.inference_ratio:.4f})"
            )
            ratios = cost.training_ratios.items()
            lines.append(
                "training: "
                + ", ".join(f"{name} {ratio:.4f}" for name, ratio in ratios)
            )
        return "\n".join(lines)

    def _all(self) -> LayerReport:
        fields = [field.name for field in dataclasses.fields(LayerReport)]
        return LayerReport(*(self._sum(name) for name in fields))

    def _sum(self, name: str) -> int:
        return sum(getattr(layer, name) for layer in self.layers.values())

    def _now(self) -> dict[str, float]:
        return {name: layer.sparsity for name, layer in self.layers.items()}


def _fitting(
    watched: Mapping[str, LayerCost], costs: Mapping[str, LayerCost] | None
) -> Mapping[str, LayerCost]:
    """The costs given, if they are of these weights; none if none are."""
    if costs is None:
        return {}
    for name, cost in watched.items():
        if name not in costs or costs[name].shape != cost.shape:
            raise ValueError(
                f"costs are of another model: {name!r} of shape {cost.shape} is not "
                f"among {list(costs)}; give rigl_xla.costs_of(model, inputs)"
            )
    return costs


def _kind(method: Method) -> str:
    """What a method costs like, whatever its scores are."""
    if method.gradual:
        return "gmp"
    if not method.updates:
        return "static"
    return {"never": "set", "updates": "rigl", "always": "snfs"}[method.collects]


def describe(now: Snapshot, **options: object) -> str:
    """Lines as rigl-torch prints them, from counts known on the host."""
    active = {layer.name: layer.num_active for layer in now.layers}
    sizes = [weight.parameter.numel() for weight in now.weights]
    rows = [
        (active.get(weight.name, size), size, weight.is_conv)
        for weight, size in zip(now.weights, sizes)
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
            f"step={now.step},",
            f"num_rigl_steps={now.num_updates},",
            *(f"{name}={value}," for name, value in options.items()),
            ")",
        ]
    )


def _total(rows: Sequence[tuple[int, int, bool]]) -> str:
    nonzero, size = sum(row[0] for row in rows), sum(row[1] for row in rows)
    return f"{nonzero}/{size} ({100 * nonzero / size if size else 0:.2f}%)"
