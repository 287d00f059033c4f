"""The report of a sparse model, and what a forward pass of it multiplies."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.rnn import PackedSequence

from rigl_xla.layers.weights import MULTIPLIERS, reasons_for_dense, weights_of
from rigl_xla.report.costs import Cost, Operations, cost_of
from xla_replica.common.arguments import check_names

if TYPE_CHECKING:
    from rigl_xla.scheduler import RigLScheduler


@torch.no_grad()
def operations_of(
    model: nn.Module, *inputs: Any, **named: Any
) -> dict[str, tuple[float, float]]:
    """Returns what a forward pass multiplies by each weight that can be sparse.

    Counts in one pass in evaluation mode: a convolution multiplies its kernel once for
    every pixel of the output (a transposed one: of the input), any other layer its
    weight once for every vector of the output (attention's keys and values: of these).
    A shared weight counts wherever a module multiplies by it; an embedding looks up,
    and a use without a call of its module, as by `torch.nn.functional`, is not seen.

    Args:
        model: Any module.
        inputs, named: The arguments of a call; the first tensor among them has samples
            along its first dimension.

    Returns:
        Multiply-accumulates and numbers that come out, per sample, by parameter name in
        order of registration; 0 for those that the pass does not reach.

    Raises:
        ValueError: No input is a tensor, or the first has no sample.
        TypeError: ``model`` is not a module.
    """
    names = {weight.parameter: weight.name for weight in weights_of(model)}
    tensors = [x for x in (*inputs, *named.values()) if isinstance(x, torch.Tensor)]
    if not tensors or tensors[0].dim() == 0 or not len(tensors[0]):
        raise ValueError(
            "operations_of needs what the model is called with; the first tensor of it "
            "counts samples along its first dimension, but there is none"
        )
    found, num_samples = dict.fromkeys(names.values(), (0.0, 0.0)), len(tensors[0])

    def count(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # Attention does not call its projection.
        inner = isinstance(module, nn.MultiheadAttention)
        for attribute, parameter in module.named_parameters(recurse=inner):
            if parameter in names:
                uses = _uses(module, attribute, args, kwargs, output) / num_samples
                numbers = len(parameter) * uses
                if isinstance(module, _ConvNd):
                    numbers = output.numel() / num_samples
                macs, outputs = found[names[parameter]]
                macs += parameter.numel() * uses
                found[names[parameter]] = macs, outputs + numbers

    training = [module for module in model.modules() if module.training]
    counted = [module for module in model.modules() if isinstance(module, MULTIPLIERS)]
    hooks = [each.register_forward_hook(count, with_kwargs=True) for each in counted]
    try:
        model.eval()(*inputs, **named)
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    return found


def _uses(
    module: nn.Module, attribute: str, args: Any, kwargs: Any, output: Any
) -> float:
    """Returns how often a call multiplied a vector by a weight."""
    if isinstance(module, _ConvNd) and module.transposed:
        pixels = args[0] if args else kwargs["input"]
        return float(pixels.numel() / module.in_channels)
    if isinstance(module, _ConvNd):
        return float(output.numel() / module.out_channels)
    while isinstance(output, (tuple, PackedSequence)):  # of attention, recurrent layers
        output = output[0]
    uses = _num_vectors(output)
    if isinstance(module, nn.MultiheadAttention):
        given = dict(zip(("query", "key", "value"), args)) | kwargs
        keys, values = _num_vectors(given["key"]), _num_vectors(given["value"])
        of_each = {"k_proj_weight": keys, "v_proj_weight": values}
        of_each["in_proj_weight"] = (uses + keys + values) / 3  # a third of it for each
        uses = of_each.get(attribute, uses)
    return uses


def _num_vectors(tensor: torch.Tensor) -> float:
    return tensor.numel() / tensor.shape[-1]


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """Counts of one sparse weight, or of several together.

    After its size they are those of `SparseLayer.counts`, in this order.

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
    of the report, in one transfer.

    Args:
        pruner: Whose masks they are.
        operations: The result of `operations_of`, for costs; None leaves them out.
        num_steps: Steps of the whole run, which gradual pruning is charged by.

    Attributes:
        step: Number of the step at that moment.
        num_updates: Topology updates up to then.
        drop_fraction: The largest share of connections that an update then drops.
        num_parameters: Numbers in all parameters of the model, whatever they are.
        dense: Parameters of two or more dimensions that are dense, and why.
    """

    def __init__(
        self,
        pruner: RigLScheduler,
        operations: Operations | None = None,
        num_steps: int | None = None,
    ) -> None:
        now, model = pruner._steps, pruner.model
        self.step, self.num_updates = now.number, now.num_updates
        self.drop_fraction = now.options.drop_fraction(now.number)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        own = [weight.name for weight in now.weights]
        asked = "by dense_first, ignore_linear_layers, sparsities= or the distribution"
        self._final = final = {layer.name: layer.sparsity for layer in now.layers}
        self.dense = dict.fromkeys((name for name in own if name not in final), asked)
        self.dense |= reasons_for_dense(model, now.weights, now.options.exclude)
        if operations is not None:
            used = [weight.name for weight in weights_of(model)]
            other = "the given operations of another model"
            check_names("the model multiplies by", used, operations, other)
            # What is sparse only because it was included costs nothing, as norms do.
            operations = {**dict.fromkeys(own, (0.0, 0.0)), **operations}
        self._operations: Any = operations
        self._replica, self._options = pruner.replica, now.options
        self._num_steps = num_steps
        # Counts may still be on the device, and are replaced by the next update.
        self._layers = [(x.name, x.mask.numel(), x.counts) for x in now.layers]

    @functools.cached_property
    def layers(self) -> dict[str, LayerReport]:
        """Every sparse layer, by parameter name. Reads the device, once."""
        counts = [counts for *_, counts in self._layers]
        fetched = self._replica.fetch(counts) if counts else []
        return {
            name: LayerReport(size, *numbers.tolist())
            for (name, size, _), numbers in zip(self._layers, fetched)
        }

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
    def cost(self) -> Cost:
        """Operations of all weights that can be sparse, dense ones too.

        Raises:
            ValueError: The report was asked for without ``operations``.
        """
        if self._operations is None:
            raise ValueError("ask report(rigl_xla.operations_of(model, inputs)).cost")
        run = self._options.method_in_use, self._options, self._num_steps
        now = {name: layer.sparsity for name, layer in self.layers.items()}
        cost = cost_of(self._operations, now, *run)
        if self._options.method_in_use.gradual:  # its cost follows from where it ends
            training = cost_of(self._operations, self._final, *run).training_flops
            cost = dataclasses.replace(cost, training_flops=training)
        return cost

    def scalars(self) -> dict[str, float]:
        """Returns what a log shows, by name; operations if they are known."""
        names = ("sparsity", "drop_fraction", "churn", "exploration_rate")
        scalars = {name: getattr(self, name) for name in names}
        scalars |= {"grown": self.num_grown, "dropped": self.num_dropped}
        if self._operations is not None:
            scalars["inference_flops_ratio"] = self.cost.inference_ratio
            if self.cost.training_ratio is not None:
                scalars["training_flops_ratio"] = self.cost.training_ratio
        return scalars

    def __str__(self) -> str:
        """A table: a line for every sparse layer, and one for all of them."""
        rows = [*self.layers.items(), ("all sparse layers", self._total)]
        width = max(len(name) for name, _ in rows)
        head = f"{'active':>10} {'of':>10} {'sparse':>8} {'moved':>7} {'explored':>8}"
        lines = [f"{'':{width}} {head}"]
        lines += [
            f"{name:{width}} {x.num_active:>10} {x.size:>10} {x.sparsity:>8.2%} "
            f"{x.churn:>7.2%} {x.exploration_rate:>8.2%}"
            for name, x in rows
        ]
        share = f"{self.num_parameters} parameters {self.model_sparsity:.2%}"
        lines += [f"of all {share} are inactive", *left_out(self.dense)]
        if self._operations is not None:
            cost = self.cost
            lines.append(
                f"forward pass: {cost.flops:.4g} of {cost.dense_flops:.4g} operations "
                f"({cost.inference_ratio:.4f})"
            )
            if cost.training_ratio is not None:
                lines.append(f"training: {cost.training_ratio:.4f} of dense training")
        return "\n".join(lines)


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


def describe(pruner: RigLScheduler) -> str:
    """Returns lines as rigl-torch prints them, and then what was left out.

    Counts are those that the host knows, but for gradual pruning.
    """
    now, layers = pruner._steps, {layer.name: layer for layer in pruner._steps.layers}
    # With gradual pruning only masks know whether an update was refused.
    counts = pruner.report().layers if now.options.method_in_use.gradual else layers
    active = {name: layer.num_active for name, layer in counts.items()}
    sizes = [(weight, weight.parameter.numel()) for weight in now.weights]
    rows = [(active.get(w.name, size), size, w.is_conv) for w, size in sizes]
    of_each = ", ".join(f"{nonzero}/{size}" for nonzero, size, _ in rows)
    shares = ", ".join(f"{100 * nonzero / size:.2f}%" for nonzero, size, _ in rows)
    lines = [
        "RigLScheduler(",
        f"layers={len(rows)},",
        f"nonzero_params=[{of_each}],",
        f"nonzero_percentages=[{shares}],",
        f"total_nonzero_params={_share(rows)},",
        f"total_CONV_nonzero_params={_share([row for row in rows if row[2]])},",
        f"step={now.number},",
        f"num_rigl_steps={now.num_updates},",
        f"ignoring_linear_layers={now.options.ignore_linear_layers},",
        f"sparsity_distribution={now.options.sparsity_distribution},",
        ")",
        *left_out(reasons_for_dense(pruner.model, now.weights, now.options.exclude)),
    ]
    return "\n".join(lines)


def _share(rows: Sequence[tuple[int, int, bool]]) -> str:
    nonzero, size = sum(row[0] for row in rows), sum(row[1] for row in rows)
    return f"{nonzero}/{size} ({100 * nonzero / size if size else 0:.2f}%)"
