"""The options of a user, and the layers that training begins with by them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from rigl_xla.layers.checks import check_kind
from rigl_xla.layers.initial import INITIAL_WEIGHTS
from rigl_xla.layers.sparse_layer import SparseLayer
from rigl_xla.layers.weights import Selector, Weight, named, selectors, weights_of
from rigl_xla.topology import masks
from rigl_xla.topology.distribution import (
    Distribution,
    allocate,
    as_float,
    distribution_named,
    num_inactive,
)
from rigl_xla.topology.methods import STATIC, Method, Score, method_named
from rigl_xla.topology.structure import RowPattern, n_of_m, row_pattern
from rigl_xla.topology.update_schedule import UpdateSchedule
from xla_replica.common.arguments import (
    check_choice,
    check_flag,
    check_integer,
    check_names,
    check_number,
    check_type,
)


@dataclasses.dataclass(frozen=True)
class Options(UpdateSchedule):
    """Which weights become how sparse, and how masks begin and when they change.

    `RigLScheduler` says what they mean. ``from_rigl_torch`` is for runs that began
    there, in which norms and embeddings may be sparse.
    """

    dense_allocation: float = 1
    sparsity_distribution: str | Distribution = "uniform"
    ignore_linear_layers: bool = True
    static_topo: bool = False
    method: str = "rigl"
    drop: str | Score | None = None
    grow: str | Score | None = None
    structure: str | None = None
    initial_masks: str | Mapping[str, torch.Tensor] = "random"
    initial_weights: str | None = None
    sparsities: Mapping[str, float] | None = None
    include: Selector | Iterable[Selector] = ()
    exclude: Iterable[Selector] = ()
    dense_first: bool | None = None
    momentum: float = 0.9
    skip_step: bool = True
    bound_new_steps: bool = True
    seed: int = 0
    from_rigl_torch: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        flags = "ignore_linear_layers", "static_topo", "skip_step", "bound_new_steps"
        for name in (*flags, *["dense_first"] * (self.dense_first is not None)):
            check_flag(name, getattr(self, name))
        density, momentum = self.dense_allocation, self.momentum
        self._set(
            include=selectors(self.include),
            exclude=selectors(self.exclude),
            dense_allocation=as_float(
                check_number("dense_allocation", density, above=0, most=1)
            ),
            momentum=as_float(check_number("momentum", momentum, 0, below=1)),
            seed=check_integer("seed", self.seed),
        )
        distribution_named(self.sparsity_distribution)
        check_choice("initial_weights", self.initial_weights, [None, *INITIAL_WEIGHTS])
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
        self._check_combinations(given)

    def _check_combinations(self, sparsities: Mapping[str, float]) -> None:
        """Raises ValueError unless the options fit each other."""
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
            (n_of_m(structure) and (self.dense_allocation not in (1, density)
             or self.sparsity_distribution != Options.sparsity_distribution
             or any(each not in (0, 1 - density) for each in sparsities.values())),
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
        why = (
            f"method={self.method!r} needs T_end, the step from which on the topology "
            "stays, about 0.75 times all steps; or static_topo=True"
        )
        if self.T_end is not None:
            without = "leave all dense" if method.gradual else "never change anything"
            why = (
                f"T_end={self.T_end} is not past the first update at step delta="
                f"{self.delta}: method={self.method!r} would {without}; raise T_end"
            )
        if self.T_end is None or method.gradual:
            raise ValueError(why)
        warnings.warn(why, stacklevel=stacklevel + 1)

    @property
    def density(self) -> float:
        """The share of active weights that layers are to have together."""
        pattern = n_of_m(self.structure)
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
            fixed |= dict.fromkeys(named(weights, pattern), sparsity)
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
        check_kind(weight)
        name, shape = weight.name, tuple(weight.parameter.shape)
        pattern, size = self.pattern(weight, sparsity), weight.parameter.numel()
        # Without a pattern, all is one row.
        row = RowPattern(shape, size, size - num_inactive(sparsity, size), False)
        rows = pattern or row
        active = rows.num_active
        if self.method_in_use.gradual:
            active, mask = size, torch.ones(shape, dtype=torch.bool)
        elif isinstance(self.initial_masks, Mapping):
            mask = rows.best_mask(_scores(self.initial_masks, name, shape))
        elif self.initial_masks == "magnitude":
            mask = rows.best_mask(weight.parameter.detach().abs())
        elif pattern is None:
            mask = masks.random_mask(self.seed, name, size, active).reshape(shape)
        else:
            scores = masks.random_scores(self.seed, name, 0, size)
            mask = pattern.best_mask(pattern.join(scores))
        return SparseLayer(weight, sparsity, active, mask, pattern)

    def pattern(self, weight: Weight, sparsity: float) -> RowPattern | None:
        """Returns the pattern that the mask of a weight keeps, if any."""
        shape, groups = tuple(weight.parameter.shape), weight.transposed
        return row_pattern(self.structure, weight.name, shape, sparsity, groups)


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
