"""The options of a user, and the layers that training begins with by them."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from rigl_xla.layers.sparse_layer import SparseLayer
from rigl_xla.layers.weights import Selector, Weight, selected, selectors, weights_of
from rigl_xla.topology import masks
from rigl_xla.topology.distribution import Distribution, allocate, num_inactive
from rigl_xla.topology.methods import STATIC, Method, Score, method_named
from rigl_xla.topology.update_schedule import UpdateSchedule
from xla_replica import Replica
from xla_replica.common.arguments import (
    as_float,
    check_choice,
    check_names,
    check_number,
    check_type,
    checked,
)

# A weight with this share of the zeros that a mask would make was sparse before.
_SPARSE_BEFORE = 0.5


def rescaled(layer: SparseLayer, seed: int) -> torch.Tensor:
    """Returns weights over the root of the density: outputs vary as before masking."""
    del seed
    return layer.data / layer.mask.to(layer.data.dtype).mean().sqrt()


def fan_in(layer: SparseLayer, seed: int) -> torch.Tensor:
    """Returns new weights of variance 2 / (active inputs of the neuron).

    Evci et al. 2022, arXiv:2010.03533, for ReLUs. A pixel after a transposed
    convolution meets, on average, 1 / stride of the kernel in each direction.
    """
    weight, transposed = layer.data, layer.weight.transposed
    draw = masks.generator(seed, f"weights of {layer.name}", 0)
    numbers = torch.randn(weight.shape, generator=draw).to(weight)
    active = masks.outputs_first(layer.mask, transposed).flatten(1).sum(1).clamp(min=1)
    inputs = active.to(weight.dtype)
    if transposed is not None:
        inputs = inputs / math.prod(layer.weight.module.stride)
    factors = (2 / inputs).sqrt().reshape(-1, *[1] * (weight.dim() - 1))
    return masks.outputs_first(
        masks.outputs_first(numbers, transposed) * factors, transposed
    )


# (layer with its first mask, seed) -> the weights it begins with
INITIAL_WEIGHTS: dict[str, Callable[[SparseLayer, int], torch.Tensor]] = {
    "rescale": rescaled,
    "fan-in": fan_in,
}


@dataclasses.dataclass(frozen=True)
class Options(UpdateSchedule):
    """Which weights become how sparse, and how masks begin and when they change.

    `RigLScheduler` says what they mean. ``from_rigl_torch`` is for runs that began
    there, in which norms and embeddings may be sparse.
    """

    dense_allocation: float = checked(1, above=0, most=1)
    sparsity_distribution: str | Distribution = "uniform"
    ignore_linear_layers: bool = True
    static_topo: bool = False
    method: str = "rigl"
    drop: str | Score | None = None
    grow: str | Score | None = None
    structure: str | None = None
    initial_masks: str | Mapping[str, torch.Tensor] = "random"
    initial_weights: str | None = checked(None, among=INITIAL_WEIGHTS)
    sparsities: Mapping[str, float] | None = None
    include: Selector | Iterable[Selector] = ()
    exclude: Iterable[Selector] = ()
    dense_first: bool | None = None
    momentum: float = checked(0.9, least=0, below=1)
    skip_step: bool = True
    bound_new_steps: bool = True
    seed: int = 0
    from_rigl_torch: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.initial_masks, Mapping):
            otherwise = (
                "scores by parameter name (SNIP's, after a backward pass: {n: (p * "
                "p.grad).abs() for n, p in model.named_parameters()})"
            )
            kinds = ("random", "magnitude")
            check_choice("initial_masks", self.initial_masks, kinds, otherwise)
        given = {} if self.sparsities is None else self.sparsities
        if not isinstance(given, Mapping) or not all(isinstance(p, str) for p in given):
            raise TypeError(
                "sparsities must be a dict from patterns of parameter names to "
                f"sparsities, like {{'head': 0.5}}, or None, got {self.sparsities!r}"
            )
        plain = {
            pattern: as_float(check_number(f"the sparsity of {pattern!r}", each, 0))
            for pattern, each in given.items()
        }
        include, exclude = map(selectors, (self.include, self.exclude))
        vars(self).update(include=include, exclude=exclude, sparsities=plain or None)
        method = method_named(self.method, self.drop, self.grow)
        structure, density = self.structure, self.density
        for is_wrong, why in (
            (self.static_topo and (method.gradual or self.drop or self.grow),
             "static_topo=True never changes the topology, so that drop=, grow= and a "
             "method that begins dense have nothing to do; leave them out"),
            (method.gradual and self.initial_masks != "random",
             f"method={self.method!r} begins dense and loses connections by its own "
             "score; leave out initial_masks="),
            (method.gradual and structure,
             f"method={self.method!r} loses connections anywhere and cannot keep "
             f"structure={structure!r}; use another method"),
            (masks.n_of_m(structure) and (self.dense_allocation not in (1, density)
             or self.sparsity_distribution != Options.sparsity_distribution
             or any(each not in (0, 1 - density) for each in plain.values())),
             f"structure={structure!r} makes every layer {1 - density:g} sparse: leave "
             "out dense_allocation=, sparsity_distribution= and all sparsities= but 0"),
        ):  # fmt: skip
            if is_wrong:
                raise ValueError(why)

    @property
    def method_in_use(self) -> Method:
        """The method with the user's scores, which never updates if so asked."""
        if self.static_topo:
            return STATIC
        return method_named(self.method, self.drop, self.grow)

    def check_schedule(self, stacklevel: int) -> None:
        """Raises ValueError, or warns, if a method that has updates would have none."""
        method = self.method_in_use
        if not (method.updates and self.is_sparse) or self.last_update:
            return
        if self.T_end is None:
            raise ValueError(
                f"method={self.method!r} needs T_end, the step from which on the "
                "topology stays, about 0.75 times all steps; or static_topo=True"
            )
        effect = "leave all dense" if method.gradual else "never change anything"
        why = (
            f"T_end={self.T_end} is not past the first update at step delta="
            f"{self.delta}: method={self.method!r} would {effect}; raise T_end"
        )
        if method.gradual:
            raise ValueError(why)
        warnings.warn(why, stacklevel=stacklevel + 1)

    @property
    def density(self) -> float:
        """The share of active weights that layers are to have together."""
        pattern = masks.n_of_m(self.structure)
        return pattern[0] / pattern[1] if pattern else self.dense_allocation

    @property
    def is_sparse(self) -> bool:
        """Whether any weight can be inactive."""
        asked = self.sparsities or {}
        return self.dense_allocation < 1 or bool(self.structure) or any(asked.values())

    def layers_of(self, model: nn.Module) -> tuple[list[Weight], list[SparseLayer]]:
        """Returns all weights that can be sparse, and those that are, with first masks.

        Raises ValueError or TypeError if they do not fit the options; touches nothing.
        """
        weights = weights_of(model, self.include, self.exclude)
        fixed = {}
        if self.ignore_linear_layers:
            fixed = {weight.name: 0.0 for weight in weights if not weight.is_conv}
        for pattern, sparsity in (self.sparsities or {}).items():
            names = [weight.name for weight in selected(pattern, weights)]
            fixed |= dict.fromkeys(names, sparsity)
        shapes = {weight.name: tuple(weight.parameter.shape) for weight in weights}
        # An excluded first layer is dense, and no other takes its place.
        first = [weight.name for weight in weights_of(model, self.include)[:1]]
        dense_first = self.dense_first if first == list(shapes)[:1] else False
        sparsities = allocate(
            shapes, 1 - self.density, self.sparsity_distribution, fixed, dense_first
        )
        if self.is_sparse and not any(sparsities.values()):
            raise ValueError(
                f"no weight is left to be sparse of {list(shapes)}: see dense_first, "
                "sparsities=, and a linear model needs ignore_linear_layers=False"
            )
        sparse = (weight for weight in weights if sparsities[weight.name])
        return weights, [self._layer_of(w, sparsities[w.name]) for w in sparse]

    def _layer_of(self, weight: Weight, sparsity: float) -> SparseLayer:
        """Returns a layer with its first mask; the weight itself is not touched."""
        weight.check_kind()
        name, shape = weight.name, tuple(weight.parameter.shape)
        pattern, size = self.pattern(weight, sparsity), weight.parameter.numel()
        # Without a pattern, all is one row.
        row = masks.RowPattern(shape, size, size - num_inactive(sparsity, size), False)
        rows = pattern or row
        active = size // rows.width * rows.per_row
        if self.method_in_use.gradual:
            active, mask = size, torch.ones(shape, dtype=torch.bool)
        elif isinstance(self.initial_masks, Mapping):
            mask = rows.best_mask(_scores(self.initial_masks, name, shape))
        elif self.initial_masks == "magnitude":
            mask = rows.best_mask(weight.parameter.detach().abs())
        elif pattern is None:
            mask = masks.random_mask(self.seed, name, size, active).reshape(shape)
        else:
            scores = masks.random_scores(self.seed, name, 0, (size,))
            mask = pattern.best_mask(pattern.join(scores))
        return SparseLayer(weight, sparsity, active, mask, pattern)

    def pattern(self, weight: Weight, sparsity: float) -> masks.RowPattern | None:
        """Returns the pattern that the mask of a weight keeps, if any.

        For constant fan-in, the sparsity is rounded to whole inputs, at least one.

        Raises ValueError if the structure does not fit the weight.
        """
        if self.structure is None:
            return None
        shape, groups = tuple(weight.parameter.shape), weight.transposed
        inputs = masks.outputs_first(torch.empty(shape, device="meta"), groups)[0]
        if (pattern := masks.n_of_m(self.structure)) is None:
            per_row = max(1, round((1 - sparsity) * inputs.numel()))
            return masks.RowPattern(shape, inputs.numel(), per_row, False, groups)
        per_row, width = pattern
        if len(inputs) % width:
            raise ValueError(
                f"structure={self.structure!r} does not fit {weight.name!r} of shape "
                f"{shape}: its {len(inputs)} inputs are not a multiple of {width}; put "
                "it into exclude="
            )
        return masks.RowPattern(shape, width, per_row, True, groups)

    def warn_of_lost_connections(
        self, layers: Sequence[SparseLayer], replica: Replica, stacklevel: int
    ) -> None:
        """Warns if random masks replace connections that a model seems to have had.

        Reads the device once. A weight of zeros alone has no connections to lose.
        """
        if self.initial_masks != "random" or self.method_in_use.gradual:
            return
        counts, lost = [], []
        for layer in layers:
            connected = layer.data.ne(0)
            counts.append(
                torch.stack([connected.sum(), (connected & ~layer.mask).sum()])
            )
        for layer, numbers in zip(layers, replica.fetch(counts)):
            present, dropped = numbers.tolist()
            size = layer.mask.numel()
            if dropped and size - present >= _SPARSE_BEFORE * layer.sparsity * size:
                lost.append(f"{dropped} of {present} connections of {layer.name!r}")
        if lost:
            warnings.warn(
                f"{len(lost)} of {len(layers)} weights are sparse already, and random "
                f"masks drop {lost[0]}: to resume, give the saved state_dict= here; "
                "initial_masks='magnitude' keeps the largest of a pruned model",
                stacklevel=stacklevel + 1,
            )


def _scores(
    given: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Returns the scores of a weight; raises unless they are finite numbers."""
    check_names("scores are needed for", [name], given, "the weights that have some")
    scores = check_type(
        f"the scores of {name!r}", given[name], torch.Tensor, "a tensor"
    )
    fits = scores.shape == shape and not (scores.is_complex() or scores.is_meta)
    if not (fits and bool(torch.isfinite(scores).all())):
        raise ValueError(
            f"the scores of {name!r} must be finite real numbers of shape {shape}, got "
            f"{scores.dtype} of shape {tuple(scores.shape)} on {scores.device}"
        )
    return scores.detach()  # on any device
