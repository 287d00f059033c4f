"""What a sparse model costs: operations of a pass and of training, and its size.

Pure functions of shapes and sparsities, in the conventions of Evci et al. 2020
(arXiv:1911.11134, App. H): multiplications and additions count one each, biases and
activations too, norms and the loss do not; a backward pass costs two forward passes.
They are what ideal hardware would do. None that this package knows does: masked
training runs dense kernels.

>>> costs = {"fc": LayerCost((10, 100))}
>>> inference_flops(costs), inference_flops(costs, {"fc": 0.5})
(2010.0, 1010.0)
>>> round(training_ratio(costs, {"fc": 0.9}, "rigl", delta=100), 4)
0.1074
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from rigl_xla.topology.update_schedule import gradual_sparsity


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
    """

    shape: tuple[int, ...]
    positions: float = 1
    out_channels: int | None = None
    output_positions: float | None = None

    @property
    def num_weights(self) -> int:
        """Of them all."""
        return math.prod(self.shape)

    @property
    def num_biases(self) -> int:
        """One for each output channel."""
        return self.shape[0] if self.out_channels is None else self.out_channels

    @property
    def num_outputs(self) -> float:
        """Numbers that a pass gives, per sample."""
        given = self.output_positions
        return self.num_biases * (self.positions if given is None else given)

    def macs(self, sparsity: float = 0.0) -> float:
        """Multiply-accumulates per sample: one for each active weight and position."""
        return self.num_weights * (1 - sparsity) * self.positions

    def flops(self, sparsity: float = 0.0) -> float:
        """Multiplications and additions per sample, with bias and activation."""
        return 2 * self.macs(sparsity) + self.num_outputs


Costs = Mapping[str, LayerCost]
Sparsities = Mapping[str, float]
# Methods that a sparse step costs by; gradual pruning costs by the length of the run.
TRAINED_LIKE = ("dense", "static", "set", "rigl", "snfs")


def inference_macs(costs: Costs, sparsities: Sparsities | None = None) -> float:
    """Multiply-accumulates of a forward pass, per sample."""
    return sum(c.macs(_of(sparsities, name)) for name, c in costs.items())


def inference_flops(costs: Costs, sparsities: Sparsities | None = None) -> float:
    """Operations of a forward pass, per sample; layers without a sparsity are dense."""
    return sum(c.flops(_of(sparsities, name)) for name, c in costs.items())


def inference_ratio(costs: Costs, sparsities: Sparsities) -> float:
    """Operations of the sparse model's forward pass over those of the dense one."""
    return inference_flops(costs, sparsities) / inference_flops(costs)


def training_ratio(
    costs: Costs,
    sparsities: Sparsities,
    method: str = "rigl",
    delta: int = 100,
    num_collected: int = 1,
) -> float:
    """Operations of training over those of dense training, for as many samples.

    Per sample, with f_S and f_D of a sparse and a dense forward pass: dense 3 f_D;
    static and SET 3 f_S; SNFS 2 f_S + f_D; RigL (3 f_S delta + 2 f_S + f_D) /
    (delta + 1), where one step in delta + 1 has a dense gradient.

    Args:
        costs: Of every layer.
        sparsities: By name.
        method: ``'dense'``, ``'static'``, ``'set'``, ``'rigl'`` or ``'snfs'``; see
            `gradual_training_ratio` for gradual pruning.
        delta: Steps between topology updates.
        num_collected: How many steps' dense gradients each of RigL's updates needs.

    Raises:
        ValueError: The method is not known.
    """
    dense, sparse = inference_flops(costs), inference_flops(costs, sparsities)
    if method not in TRAINED_LIKE:
        raise ValueError(
            f"method={method!r} is not known here; allowed are {TRAINED_LIKE}, and "
            "gradual_training_ratio for 'gmp'"
        )
    collected = 2 * sparse + dense
    others = delta + 1 - num_collected
    per_sample = {
        "dense": 3 * dense,
        "static": 3 * sparse,
        "set": 3 * sparse,
        "snfs": collected,
        "rigl": (3 * sparse * others + num_collected * collected) / (delta + 1),
    }
    return per_sample[method] / (3 * dense)


def gradual_training_ratio(
    costs: Costs,
    sparsities: Sparsities,
    begin: int,
    end: int,
    delta: int,
    num_steps: int,
) -> float:
    """The same for gradual pruning that changes masks every ``delta`` steps.

    The mean over steps: from each change to the next, a step costs what the sparsity
    at the first of them makes it cost. The paper's 0.56 and 0.51 (ResNet-50, uniform,
    80 % and 90 %, from step 10,000 to 25,000 of 32,000 with ``delta`` 1,000) are the
    mean of 33 readings, at both ends of the run too, 0.5603 and 0.5053; the mean over
    32 intervals, which this is, is 0.5707 and 0.5171.

    Args:
        costs: Of every layer.
        sparsities: Final ones, by name.
        begin: Step at which pruning begins.
        end: Step at which it has ended.
        delta: Steps between changes.
        num_steps: Of the whole run.
    """
    total = 0.0
    for first in range(0, num_steps, delta):
        now = {
            name: gradual_sparsity(first, final, begin, end)
            for name, final in sparsities.items()
        }
        total += min(delta, num_steps - first) * inference_flops(costs, now)
    return total / (num_steps * inference_flops(costs))


def size_in_bytes(costs: Costs, sparsities: Sparsities | None = None) -> float:
    """Of the stored model: float32 weights and biases, one bit per weight for a mask.

    A mask is stored for sparse layers only.
    """
    bits = 0.0
    for name, cost in costs.items():
        sparsity = _of(sparsities, name)
        bits += 32 * cost.num_weights * (1 - sparsity) + 32 * cost.num_biases
        bits += cost.num_weights if sparsity > 0 else 0
    return bits / 8


def _of(sparsities: Sparsities | None, name: str) -> float:
    return (sparsities or {}).get(name, 0.0)
