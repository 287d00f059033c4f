"""Reports of a sparse model, as a table and for TensorBoard."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from rigl_xla.layers.sparse_layer import COUNTS
from rigl_xla.layers.weights import reasons_for_dense, weights_of
from rigl_xla.report import costs as counted
from rigl_xla.report.costs import CostReport, LayerCost
from rigl_xla.report.positions import cost_of
from rigl_xla.topology.methods import cost_name
from xla_replica import Replica
from xla_replica.common.arguments import check_flag, check_integer, check_type

if TYPE_CHECKING:
    from rigl_xla.scheduler import RigLScheduler
    from rigl_xla.update.steps import TopologySteps


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """Counts of one sparse weight, or of several together.

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
        return 1 - self.num_active / self.size if self.size else 0.0

    @property
    def churn(self) -> float:
        """Share of active connections that the last topology update activated."""
        return self.num_grown / max(1, self.num_active)

    @property
    def exploration_rate(self) -> float:
        """Share of weights that were ever active.

        R_s of Liu et al. 2021 (in-time over-parameterisation), arXiv:2102.02887, 3.2.
        """
        return self.num_explored / self.size if self.size else 0.0


def _of_all(name: str) -> property:
    """Returns a property of a report: a value of all its layers together."""
    doc = f"`LayerReport.{name}` of all sparse layers together."
    return property(operator.attrgetter(f"_total.{name}"), doc=doc)


class Report:
    """What a pruner was at one moment; see `RigLScheduler.report`.

    Making one reads nothing from the device. The first value that needs it reads all
    of the report, in one transfer; `read` does so for many reports.

    Attributes:
        step: Number of the step at that moment.
        num_updates: Topology updates up to then.
        drop_fraction: The largest share of connections that an update then drops.
        num_parameters: Numbers in all parameters of the model, whatever they are.
        dense: Parameters of two or more dimensions that are dense, and why.
    """

    def __init__(
        self,
        now: TopologySteps,
        model: nn.Module,
        replica: Replica,
        costs: Mapping[str, LayerCost] | None = None,
        num_steps: int | None = None,
    ) -> None:
        if costs is not None:
            counted.check_costs(costs)
        if num_steps is not None:
            check_integer("num_steps", num_steps, 1)
        self.step, self.num_updates = now.number, now.num_updates
        self.drop_fraction = now.schedule.drop_fraction(now.number)
        self._replica = replica
        # Counts may still be on the device.
        self._counts = {layer.name: (layer.size, layer.counts) for layer in now.layers}
        watched = {weight.name: cost_of(weight) for weight in weights_of(model)}
        for name, cost in watched.items() if costs is not None else ():
            assert costs is not None
            if name not in costs or costs[name].shape != cost.shape:
                raise ValueError(
                    f"costs are of another model: {name!r} of shape {cost.shape} is "
                    f"not among {list(costs)}; give rigl_xla.costs_of(model, inputs)"
                )
        self._has_costs = costs is not None
        # What is sparse only because it was included costs nothing, as norms do.
        own = {weight.name: cost_of(weight) for weight in now.weights}
        self._costs = {**watched, **own, **(costs or {})}
        self.num_parameters = sum(p.numel() for p in model.parameters())
        asked = "dense_first, ignore_linear_layers, sparsities= or the distribution"
        self.dense = {
            **{name: f"by {asked}" for name in own if name not in self._counts},
            **reasons_for_dense(model, now.weights, now.options.exclude),
        }
        self._final = {layer.name: layer.sparsity for layer in now.layers}
        self._method = cost_name(now.options.method, now.options.method_in_use)
        self._schedule, self._num_steps = now.schedule, num_steps

    @staticmethod
    def read(reports: Iterable[Report]) -> None:
        """Reads the device for several reports of one pruner, in one transfer."""
        unread = [report for report in reports if "layers" not in vars(report)]
        counts = [c for report in unread for _, c in report._counts.values()]
        fetched = iter(unread[0]._replica.fetch(counts) if counts else [])
        for report in unread:
            vars(report)["layers"] = {
                name: LayerReport(size, **dict(zip(COUNTS, next(fetched).tolist())))
                for name, (size, _) in report._counts.items()
            }

    @functools.cached_property
    def layers(self) -> dict[str, LayerReport]:
        """Every sparse layer, by parameter name. Reads the device, once."""
        Report.read([self])
        return self.layers

    @property
    def _total(self) -> LayerReport:
        fields = [field.name for field in dataclasses.fields(LayerReport)]
        layers = self.layers.values()
        return LayerReport(*(sum(getattr(x, name) for x in layers) for name in fields))

    sparsity = _of_all("sparsity")
    num_grown = _of_all("num_grown")
    num_dropped = _of_all("num_dropped")
    churn = _of_all("churn")
    exploration_rate = _of_all("exploration_rate")

    @property
    def model_sparsity(self) -> float:
        """Share of inactive weights among all parameters of the model."""
        inactive = self._total.size - self._total.num_active
        return inactive / max(1, self.num_parameters)

    @functools.cached_property
    def cost(self) -> CostReport:
        """Operations and size of all weights that can be sparse, dense ones too.

        Raises:
            ValueError: How often a pass uses each weight is not known.
        """
        if not self._has_costs:
            raise ValueError(
                "operations depend on how often a forward pass uses each weight; give "
                "report(costs), where costs = rigl_xla.costs_of(model, inputs)"
            )
        costs, now = self._costs, self._now()
        run = (self._final, self._schedule, self._num_steps)
        return CostReport(
            counted.inference_macs(costs, now),
            counted.inference_macs(costs),
            counted.inference_flops(costs, now),
            counted.inference_flops(costs),
            counted.size_in_bytes(costs, now),
            counted.size_in_bytes(costs),
            counted.training_ratios(costs, now, *run),
            self._method,
        )

    @property
    def size_in_bytes(self) -> float:
        """Size stored: float32 weights and biases, and a bit per weight of a mask."""
        return counted.size_in_bytes(self._costs, self._now())

    def scalars(self) -> dict[str, float]:
        """Returns what a log shows, by name; operations if their costs are known."""
        names = ("sparsity", "drop_fraction", "churn", "exploration_rate")
        scalars = {name: getattr(self, name) for name in (*names, "size_in_bytes")}
        scalars |= {"grown": self.num_grown, "dropped": self.num_dropped}
        if self._has_costs:
            scalars["inference_flops_ratio"] = self.cost.inference_ratio
            if self.cost.method in self.cost.training_ratios:
                scalars["training_flops_ratio"] = self.cost.training_ratio
        return scalars

    def __str__(self) -> str:
        """A table: a line for every sparse layer, and one for all of them."""
        rows = [*self.layers.items(), ("all sparse layers", self._total)]
        width = max(len(name) for name, _ in rows)
        lines = [
            f"{'':{width}} {'active':>10} {'of':>10} {'sparse':>8} {'moved':>7} "
            f"{'explored':>8}"
        ]
        for name, layer in rows:
            lines.append(
                f"{name:{width}} {layer.num_active:>10} {layer.size:>10} "
                f"{layer.sparsity:>8.2%} {layer.churn:>7.2%} "
                f"{layer.exploration_rate:>8.2%}"
            )
        lines.append(
            f"of all {self.num_parameters} parameters {self.model_sparsity:.2%} are "
            "inactive"
        )
        lines += left_out(self.dense)
        lines.append(f"{self.size_in_bytes / 1e6:.3f} MB stored")
        if self._has_costs:
            cost = self.cost
            lines.append(
                f"forward pass: {cost.flops:.4g} of {cost.dense_flops:.4g} operations "
                f"({cost.inference_ratio:.4f})"
            )
            each = (f"{name} {x:.4f}" for name, x in cost.training_ratios.items())
            lines.append(f"training: {', '.join(each)}")
        return "\n".join(lines)

    def _now(self) -> dict[str, float]:
        return {name: layer.sparsity for name, layer in self.layers.items()}


class TopologyLog:
    """Writes a `Report` for every topology update.

    Call it after the optimizer's step, or attach it to an elastic optimizer: it makes
    a report if the topology has changed, and reads nothing. Call `flush` where training
    reads its loss.

    Tags are ``prefix/sparsity``, ``/drop_fraction``, ``/churn``, ``/grown``,
    ``/dropped``, ``/exploration_rate``, ``/size_in_bytes`` and, with costs,
    ``/inference_flops_ratio`` and ``/training_flops_ratio``; of single layers
    ``prefix_sparsity/NAME``, ``prefix_churn/NAME``, ``prefix_exploration_rate/NAME``.

    Args:
        pruner: The pruner whose topology is logged.
        writer: A ``SummaryWriter`` of tensorboardX or of torch; None, as on all
            replicas but one, logs nothing.
        costs: The result of `costs_of`, for operations.
        num_steps: Steps of the whole run, for the operations of gradual pruning.
        layers: Whether to log single layers too.
        prefix: Begins the tags.

    Raises:
        TypeError: The writer has no ``add_scalar``, or an argument is of a wrong type.
        ValueError: The costs are of another model.
    """

    def __init__(
        self,
        pruner: RigLScheduler,
        writer: Any | None,
        *,
        costs: Mapping[str, LayerCost] | None = None,
        num_steps: int | None = None,
        layers: bool = True,
        prefix: str = "rigl",
    ) -> None:
        if not hasattr(pruner, "report"):
            raise TypeError(f"pruner must be a RigLScheduler, got {pruner!r}")
        if writer is not None and not hasattr(writer, "add_scalar"):
            raise TypeError(
                f"writer must be a SummaryWriter or have its add_scalar, got {writer!r}"
            )
        check_flag("layers", layers)
        check_type("prefix", prefix, str, "a string")
        self._pruner, self._writer = pruner, writer
        self._costs, self._num_steps = costs, num_steps
        self._layers, self._prefix = layers, prefix
        self._waiting: list[Report] = []
        self._num_updates = -1  # so that the first call logs how it began
        pruner.report(costs, num_steps)  # costs that do not fit are found now

    def __call__(self, *_: object) -> None:
        """Makes a report, after a step; ignores what an elastic optimizer passes."""
        if self._writer is None or self._pruner.rigl_steps == self._num_updates:
            return
        self._num_updates = self._pruner.rigl_steps
        self._waiting.append(self._pruner.report(self._costs, self._num_steps))

    def flush(self) -> None:
        """Reads, in one transfer, and writes the reports made since the last flush."""
        waiting, self._waiting = self._waiting, []
        if not waiting or self._writer is None:
            return
        Report.read(waiting)
        for report in waiting:
            for name, value in report.scalars().items():
                self._writer.add_scalar(f"{self._prefix}/{name}", value, report.step)
            for layer, of_layer in report.layers.items() if self._layers else ():
                for name in ("sparsity", "churn", "exploration_rate"):
                    tag = f"{self._prefix}_{name}/{layer}"
                    self._writer.add_scalar(tag, getattr(of_layer, name), report.step)


def left_out(dense: Mapping[str, str]) -> list[str]:
    """Returns a line for every reason why parameters are dense."""
    names: dict[str, list[str]] = {}
    for name, reason in dense.items():
        names.setdefault(reason, []).append(name)
    lines = []
    for reason, group in names.items():
        more = f" and {len(group) - 3} more" if len(group) > 3 else ""
        lines.append(f"dense: {', '.join(group[:3])}{more} ({reason})")
    return lines


def describe(now: TopologySteps, model: nn.Module) -> str:
    """Returns lines as rigl-torch prints them, from counts known on the host.

    What was left out comes after them.
    """
    active = {layer.name: layer.num_active for layer in now.layers}
    sizes = [weight.parameter.numel() for weight in now.weights]
    rows = [(active.get(w.name, n), n, w.is_conv) for w, n in zip(now.weights, sizes)]
    of_each = ", ".join(f"{nonzero}/{size}" for nonzero, size, _ in rows)
    shares = ", ".join(f"{100 * nonzero / size:.2f}%" for nonzero, size, _ in rows)
    lines = {
        "layers": len(rows),
        "nonzero_params": f"[{of_each}]",
        "nonzero_percentages": f"[{shares}]",
        "total_nonzero_params": _share(rows),
        "total_CONV_nonzero_params": _share([row for row in rows if row[2]]),
        "step": now.number,
        "num_rigl_steps": now.num_updates,
        "ignoring_linear_layers": now.options.ignore_linear_layers,
        "sparsity_distribution": now.options.sparsity_distribution,
    }
    values = [f"{name}={value}," for name, value in lines.items()]
    dense = reasons_for_dense(model, now.weights, now.options.exclude)
    return "\n".join(["RigLScheduler(", *values, ")", *left_out(dense)])


def _share(rows: Sequence[tuple[int, int, bool]]) -> str:
    nonzero, size = sum(row[0] for row in rows), sum(row[1] for row in rows)
    return f"{nonzero}/{size} ({100 * nonzero / size if size else 0:.2f}%)"
