"""The options of a user, checked before anything is touched."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from rigl_xla.layers.initial import INITIAL_MASKS, INITIAL_WEIGHTS, check_scores
from rigl_xla.layers.weights import Selector, Weight, named, selectors, weights_of
from rigl_xla.topology.distribution import (
    Distribution,
    allocate,
    as_float,
    distribution_named,
)
from rigl_xla.topology.methods import STATIC, Method, Score, method_named
from rigl_xla.topology.structure import RowPattern, n_of_m, row_pattern
from rigl_xla.topology.update_schedule import UpdateSchedule
from xla_replica.common.arguments import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
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
            check_choice("initial_masks", self.initial_masks, INITIAL_MASKS, otherwise)
        given = {} if self.sparsities is None else self.sparsities
        if not isinstance(given, Mapping) or not all(isinstance(p, str) for p in given):
            raise TypeError(
                "sparsities must be a dict from patterns of parameter names to "
                f"sparsities, like {{'head': 0.5}}, or None, got {self.sparsities!r}"
            )
        self._check_combinations(given)

    def _check_combinations(self, sparsities: Mapping[str, float]) -> None:
        """Raises ValueError unless the options fit each other."""
        method, structure, density = self.method_in_use, self.structure, self.density
        for is_wrong, why in (
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
        method = method_named(self.method, self.drop, self.grow)
        if not self.static_topo:
            return method
        if method.gradual or self.drop or self.grow:
            raise ValueError(
                "static_topo=True never changes the topology, so that drop=, grow= and "
                "a method that begins dense have nothing to do; leave them out"
            )
        return STATIC

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
        too_early = (
            f"T_end={self.T_end} is not past the first update at step "
            f"delta={self.delta}, so method={self.method!r} would"
        )
        if method.gradual:
            raise ValueError(f"{too_early} leave all dense; lower delta or raise T_end")
        warnings.warn(
            f"{too_early} never change the topology; lower delta, raise T_end, or say "
            "static_topo=True",
            stacklevel=stacklevel + 1,
        )

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

    def plan(self, model: nn.Module) -> tuple[list[Weight], dict[str, float]]:
        """Returns all weights that can be sparse, and how sparse each is to be."""
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
        if not isinstance(self.initial_masks, str):
            sparse = {name: shapes[name] for name, value in sparsities.items() if value}
            check_scores(self.initial_masks, sparse)
        if self.is_sparse and not any(sparsities.values()):
            raise ValueError(
                f"no weight is left to be sparse of {list(shapes)}: see dense_first, "
                "sparsities=, and a linear model needs ignore_linear_layers=False"
            )
        return weights, sparsities

    def pattern(self, weight: Weight, sparsity: float) -> RowPattern | None:
        """Returns the pattern that the mask of a weight keeps, if any."""
        if self.structure is None:
            return None
        shape, groups = tuple(weight.parameter.shape), weight.transposed
        return row_pattern(self.structure, weight.name, shape, sparsity, groups)
