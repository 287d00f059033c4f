"""What a sparse model costs: operations of a pass and of training, and its size.

Pure functions of shapes, sparsities and schedules, in the conventions of Evci et al.
2020 (arXiv:1911.11134, App. H): multiplications and additions count one each, biases
and activations too, norms and the loss do not; a backward pass costs two forward
passes. Ideal hardware would do so few; masked training runs dense kernels.

>>> costs = {"fc": LayerCost((10, 100))}
>>> inference_flops(costs), inference_flops(costs, {"fc": 0.5})
(2010.0, 1010.0)
>>> round(training_ratio(costs, {"fc": 0.9}, "rigl", delta=100), 4)
0.1074
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from rigl_xla.topology.methods import METHODS
from rigl_xla.topology.update_schedule import UpdateSchedule, gradual_sparsity
from xla_replica.common.arguments import (
    check_choice,
    check_integer,
    check_names,
    check_number,
    check_type,
)


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """A weight, and how often a pass multiplies by it.

    Attributes:
        shape: ``(out, in)`` or ``(out, in per group, *kernel)``.
        positions: Applications per sample: pixels of a convolution's output, of a
            transposed one's input, tokens of a sequence, 1 for a matrix and a vector.
        out_channels: Numbers of one output, and of the bias. Default: the first of
            ``shape``; another one for transposed convolutions.
        output_positions: Outputs per sample. Default: ``positions``.

    Raises:
        ValueError, TypeError: A number is negative, or of the wrong type.
    """

    shape: tuple[int, ...]
    positions: float = 1
    out_channels: int | None = None
    output_positions: float | None = None

    def __post_init__(self) -> None:
        check_type("shape", self.shape, (tuple, list), "a tuple of integers")
        if not self.shape:
            raise ValueError("shape must be (out, in, *kernel), got ()")
        for size in self.shape:
            check_integer("each number of shape", size, 0)
        check_number("positions", self.positions, 0)
        if self.out_channels is not None:
            check_integer("out_channels", self.out_channels, 0)
        if self.output_positions is not None:
            check_number("output_positions", self.output_positions, 0)

    @property
    def num_weights(self) -> int:
        """The number of weights, active or not."""
        return math.prod(self.shape)

    @property
    def num_biases(self) -> int:
        """One for each output channel."""
        return self.shape[0] if self.out_channels is None else self.out_channels

    @property
    def num_outputs(self) -> float:
        """How many numbers a pass computes per sample."""
        given = self.output_positions
        return self.num_biases * (self.positions if given is None else given)

    def macs(self, sparsity: float = 0.0) -> float:
        """Returns multiply-accumulates per sample: active weights times positions."""
        return self.num_weights * (1 - sparsity) * self.positions

    def flops(self, sparsity: float = 0.0) -> float:
        """Returns multiplications and additions per sample; bias and activation too."""
        return 2 * self.macs(sparsity) + self.num_outputs


# By name. Layers without a sparsity are dense.
Costs = Mapping[str, LayerCost]
Sparsities = Mapping[str, float]


def inference_macs(costs: Costs, sparsities: Sparsities | None = None) -> float:
    """Returns the multiply-accumulates of a forward pass, per sample."""
    return sum(cost.macs(sparsity) for cost, sparsity in _pairs(costs, sparsities))


def inference_flops(costs: Costs, sparsities: Sparsities | None = None) -> float:
    """Returns the operations of a forward pass, per sample."""
    return sum(cost.flops(sparsity) for cost, sparsity in _pairs(costs, sparsities))


def inference_ratio(costs: Costs, sparsities: Sparsities) -> float:
    """Returns the operations of a forward pass over those of the dense model's."""
    return inference_flops(costs, sparsities) / _dense_flops(costs)


def training_ratio(
    costs: Costs,
    sparsities: Sparsities,
    method: str = "rigl",
    delta: int = 100,
    num_collected: int = 1,
) -> float:
    """Returns the operations of training over those of dense training.

    With f_S and f_D of a sparse and a dense forward pass, a sample costs 3 f_D in
    dense training, 3 f_S where dense gradients are never collected (static, SET),
    2 f_S + f_D where they always are (SNFS), and where updates need them (RigL)
    (3 f_S delta + 2 f_S + f_D) / (delta + 1): one step in delta + 1 has a dense one.

    Args:
        costs, sparsities: Those of every layer, by name.
        method: ``'dense'`` or a key of `METHODS` that is not gradual.
        delta: Steps between topology updates.
        num_collected: How many steps' dense gradients an update needs.

    Raises:
        ValueError, TypeError: The method is not known, or a number is out of range.
    """
    check_integer("delta", delta, 1)
    check_integer("num_collected", num_collected, 1, delta)
    allowed = ["dense", *(name for name, row in METHODS.items() if not row.gradual)]
    gradual = ", ".join(repr(name) for name in METHODS if name not in allowed)
    check_choice("method", method, allowed, f"gradual_training_ratio for {gradual}")
    if method == "dense":
        return 1.0
    dense, sparse = _dense_flops(costs), inference_flops(costs, sparsities)
    collected = 2 * sparse + dense
    others = delta + 1 - num_collected
    per_sample = {
        "never": 3 * sparse,
        "updates": (3 * sparse * others + num_collected * collected) / (delta + 1),
        "always": collected,
    }
    return per_sample[METHODS[method].collects] / (3 * dense)


def gradual_training_ratio(
    costs: Costs,
    sparsities: Sparsities,
    begin: int,
    end: int,
    delta: int,
    num_steps: int,
) -> float:
    """Returns `training_ratio` of gradual pruning, by the mean over its steps.

    Masks change every ``delta`` steps; up to the next change, a step costs what the
    sparsity of the last one makes it cost. The paper's 0.56 and 0.51 (ResNet-50,
    uniform, 80 % and 90 %, from step 10,000 to 25,000 of 32,000, ``delta`` 1,000) are
    the mean of 33 readings, at both ends of the run too, 0.5603 and 0.5053; the mean
    over 32 intervals, which this is, is 0.5707 and 0.5171.

    Args:
        costs, sparsities: Those of every layer, by name; the sparsities are final.
        begin, end: Steps at which pruning begins and has ended.
        delta: Steps between changes.
        num_steps: Steps of the whole run.

    Raises:
        ValueError, TypeError: A number is out of range, or of the wrong type.
    """
    check_integer("begin", begin, 0)
    check_integer("end", end, begin + 1)
    check_integer("delta", delta, 1)
    check_integer("num_steps", num_steps, 1)
    total = 0.0
    for first in range(0, num_steps, delta):
        now = {
            name: gradual_sparsity(first, final, begin, end)
            for name, final in sparsities.items()
        }
        total += min(delta, num_steps - first) * inference_flops(costs, now)
    return total / (num_steps * _dense_flops(costs))


def size_in_bytes(costs: Costs, sparsities: Sparsities | None = None) -> float:
    """Returns the size of the stored model: float32 weights and biases, and masks.

    A mask takes one bit per weight, and is stored for sparse layers only.
    """
    bits = 0.0
    for cost, sparsity in _pairs(costs, sparsities):
        bits += 32 * cost.num_weights * (1 - sparsity) + 32 * cost.num_biases
        bits += cost.num_weights if sparsity > 0 else 0
    return bits / 8


@dataclasses.dataclass(frozen=True)
class CostReport:
    """Operations per sample and bytes, of a sparse model and of the same one dense.

    Attributes:
        macs, dense_macs: See `inference_macs`.
        flops, dense_flops: See `inference_flops`.
        size_in_bytes, dense_size_in_bytes: See `size_in_bytes`.
        training_ratios: See `training_ratio`; by method, with gradual pruning where
            the number of steps is known.
        method: The key of the method in use.
    """

    macs: float
    dense_macs: float
    flops: float
    dense_flops: float
    size_in_bytes: float
    dense_size_in_bytes: float
    training_ratios: Mapping[str, float]
    method: str

    @property
    def inference_ratio(self) -> float:
        """Operations of a forward pass over those of the dense model's."""
        return self.flops / self.dense_flops

    @property
    def training_ratio(self) -> float:
        """The training ratio of the method in use.

        Raises:
            ValueError: It is gradual pruning, and the number of steps is not known.
        """
        if self.method not in self.training_ratios:
            raise ValueError(
                f"what training by method={self.method!r} costs depends on the length "
                "of the run; give report(..., num_steps=)"
            )
        return self.training_ratios[self.method]


def training_ratios(
    costs: Costs,
    now: Sparsities,
    final: Sparsities,
    schedule: UpdateSchedule,
    num_steps: int | None,
) -> dict[str, float]:
    """Returns what training costs by each method, with the sparsities ``now``.

    Gradual pruning is among them, by its ``final`` sparsities, if ``num_steps`` is the
    length of the run.

    >>> costs, sparsities = {"fc": LayerCost((10, 100))}, {"fc": 0.9}
    >>> schedule = UpdateSchedule(75_000)
    >>> ratios = training_ratios(costs, sparsities, sparsities, schedule, 100_000)
    >>> {method: round(ratio, 2) for method, ratio in ratios.items()}
    {'dense': 1.0, 'static': 0.1, 'set': 0.1, 'rigl': 0.11, 'snfs': 0.4, 'gmp': 0.27}
    """
    delta, last = schedule.delta, schedule.last_update
    num_collected = schedule.grad_accumulation_n
    ratios = {"dense": 1.0}
    for name, row in METHODS.items():
        if not row.gradual:
            ratios[name] = training_ratio(costs, now, name, delta, num_collected)
        elif num_steps is not None and last > 0:
            ratio = gradual_training_ratio(costs, final, 0, last, delta, num_steps)
            ratios[name] = ratio
    return ratios


def check_costs(costs: Costs) -> Costs:
    """Returns ``costs``; raises TypeError if they are not costs by name."""
    check_type("costs", costs, Mapping, "a dict of LayerCost by name")
    for name, cost in costs.items():
        check_type(f"the cost of {name!r}", cost, LayerCost, "a LayerCost")
    return costs


def _pairs(
    costs: Costs, sparsities: Sparsities | None
) -> Iterator[tuple[LayerCost, float]]:
    """Yields the cost and the sparsity of every layer; 0 where none is given."""
    given = {} if sparsities is None else sparsities
    check_type("sparsities", given, Mapping, "a dict of numbers by name")
    check_names("a sparsity is given for", given, costs, "the layers with a cost")
    for name, sparsity in given.items():
        check_number(f"the sparsity of {name!r}", sparsity, 0, 1)
    for name, cost in check_costs(costs).items():
        yield cost, given.get(name, 0.0)


def _dense_flops(costs: Costs) -> float:
    """Returns what ratios are over; raises ValueError where nothing is computed."""
    flops = inference_flops(costs)
    if not flops:
        raise ValueError(
            f"the layers {list(costs)} compute nothing, so no ratio to the dense model "
            "exists; give costs of layers that a forward pass calls, see costs_of"
        )
    return flops
