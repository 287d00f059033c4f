"""What a user asks for, checked before anything is touched."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from rigl_xla.layers.checks import check_flags, check_number
from rigl_xla.layers.snip import check_scores
from rigl_xla.layers.weights import Selector, Weight, named, weights_of
from rigl_xla.topology.distribution import Distribution, allocate, distribution_named
from rigl_xla.topology.methods import Method, Score, method_named
from rigl_xla.topology.structure import Rows, n_of_m, rows_of
from rigl_xla.topology.update_schedule import UpdateSchedule

INITIAL_MASKS = ("random", "magnitude")
INITIAL_WEIGHTS = ("rescale", "fan-in")


@dataclasses.dataclass(frozen=True)
class Options:
    """Which weights become how sparse, and how masks begin and change.

    See `RigLScheduler` for what they mean; ``from_rigl_torch`` is for runs that began
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
    include: Iterable[Selector] = ()
    exclude: Iterable[Selector] = ()
    dense_first: bool | None = None
    momentum: float = 0.9
    skip_step: bool = True
    seed: int = 0
    from_rigl_torch: bool = False

    def __post_init__(self) -> None:
        check_flags(self, "ignore_linear_layers", "static_topo", "skip_step")
        if self.dense_first is not None:
            check_flags(self, "dense_first")
        density = self.dense_allocation
        allowed = "the share of active weights, above 0 and at most 1"
        check_number("dense_allocation", density, allowed)
        if not 0 < density <= 1:
            raise ValueError(
                f"dense_allocation is {density!r}; the share of active weights must "
                "be above 0 and at most 1 (0.1 is 90 % sparse)"
            )
        distribution_named(self.sparsity_distribution)
        self.scores()
        self._check_initial_masks()
        if self.initial_weights not in (None, *INITIAL_WEIGHTS):
            raise ValueError(
                f"initial_weights={self.initial_weights!r} is not known; allowed are "
                f"{INITIAL_WEIGHTS}, or None to keep the model's"
            )
        check_number("momentum", self.momentum, "from 0 to below 1")
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"momentum is {self.momentum!r}; the share of its past that the "
                "running mean of gradients keeps must be from 0 to below 1"
            )
        given = {} if self.sparsities is None else self.sparsities
        if not isinstance(given, Mapping) or not all(isinstance(p, str) for p in given):
            raise TypeError(
                f"sparsities is {self.sparsities!r}; it must be a dict from patterns "
                "of parameter names to sparsities, like {'head': 0.5}, or None"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed is {self.seed!r}; it must be an integer")
        if self.structure is not None:
            self._check_structure(self.structure)

    def scores(self) -> Method:
        """The method, with the user's scores.

        Raises:
            ValueError, TypeError: They do not fit together.
        """
        method = method_named(self.method)
        if not self.static_topo:
            return method_named(self.method, self.drop, self.grow)
        if method.gradual:
            raise ValueError(
                f"method={self.method!r} begins dense, and with static_topo=True would "
                "stay so; leave out one of them"
            )
        return method_named("static", self.drop, self.grow)

    def check_schedule(self, schedule: UpdateSchedule) -> None:
        """Raises ValueError if the topology would never change against expectation."""
        if schedule.T_end is None and self.scores().updates and self.is_sparse:
            raise ValueError(
                f"method={self.method!r} needs T_end, the step from which on the "
                "topology stays: about 0.75 times the number of steps of the whole "
                "run; or static_topo=True for a topology that never changes"
            )
        if self.scores().gradual and self.is_sparse and not schedule.last_update:
            raise ValueError(
                f"T_end={schedule.T_end} is not past the first update at step "
                f"delta={schedule.delta}, so method={self.method!r} would leave all "
                "dense; lower delta or raise T_end"
            )

    def warn_of(self, schedule: UpdateSchedule, stacklevel: int) -> None:
        """Warns of a schedule without a step for an update."""
        if not (self.scores().updates and self.is_sparse) or schedule.T_end is None:
            return
        if not schedule.last_update:
            warnings.warn(
                f"T_end={schedule.T_end} is not past the first update at step "
                f"delta={schedule.delta}, so method={self.method!r} will never change "
                "the topology; lower delta, raise T_end, or say static_topo=True",
                stacklevel=stacklevel + 1,
            )

    @property
    def is_sparse(self) -> bool:
        """Whether any weight can be inactive."""
        asked = self.sparsities or {}
        return self.dense_allocation < 1 or bool(self.structure) or any(asked.values())

    def plan(self, model: nn.Module) -> tuple[list[Weight], dict[str, float]]:
        """All weights that can be sparse, and how sparse each is to be.

        Raises:
            ValueError, TypeError: A name or selector means nothing, no weight is left
                to be sparse, or the sparsity cannot be reached.
        """
        weights = weights_of(model, self.include, self.exclude)
        fixed = {}
        if self.ignore_linear_layers:
            fixed = {weight.name: 0.0 for weight in weights if not weight.is_conv}
        for pattern, sparsity in (self.sparsities or {}).items():
            fixed |= dict.fromkeys(named(weights, pattern), sparsity)
        pattern = n_of_m(self.structure) if self.structure else None
        target = 1 - pattern[0] / pattern[1] if pattern else 1 - self.dense_allocation
        shapes = {weight.name: tuple(weight.parameter.shape) for weight in weights}
        # An excluded first layer is dense, and no other takes its place.
        first = [weight.name for weight in weights_of(model, self.include)[:1]]
        dense_first = self.dense_first if first == list(shapes)[:1] else False
        found = allocate(shapes, target, self.sparsity_distribution, fixed, dense_first)
        if not isinstance(self.initial_masks, str):
            sparse = {name: shapes[name] for name, value in found.items() if value}
            check_scores(self.initial_masks, sparse)
        if self.is_sparse and not any(found.values()):
            raise ValueError(
                f"no weight is left to be sparse: of {list(shapes)}, "
                f"ignore_linear_layers={self.ignore_linear_layers}, dense_first and "
                "sparsities= keep all dense; a model of linear layers needs "
                "ignore_linear_layers=False"
            )
        return weights, found

    def rows(self, weight: Weight, sparsity: float) -> Rows | None:
        """The pattern that the mask of a weight keeps, if any."""
        if self.structure is None:
            return None
        shape = tuple(weight.parameter.shape)
        return rows_of(self.structure, weight.name, shape, sparsity, weight.transposed)

    def _check_initial_masks(self) -> None:
        given = self.initial_masks
        if isinstance(given, str) and given not in INITIAL_MASKS:
            raise ValueError(
                f"initial_masks={given!r} is not known; allowed are {INITIAL_MASKS}, "
                "and scores by parameter name such as those of snip_scores"
            )
        if not isinstance(given, (str, Mapping)):
            raise TypeError(
                f"initial_masks is a {type(given).__name__}; it must be one of "
                f"{INITIAL_MASKS}, or scores by parameter name"
            )
        if given != "random" and self.method == "gmp":
            raise ValueError(
                "method='gmp' begins dense and loses connections by its own score; "
                "leave out initial_masks="
            )

    def _check_structure(self, structure: str) -> None:
        pattern = n_of_m(structure)
        if self.method == "gmp":
            raise ValueError(
                f"method='gmp' loses connections anywhere and cannot keep "
                f"structure={structure!r}; use another method"
            )
        if pattern is None:
            return
        density = pattern[0] / pattern[1]
        if self.dense_allocation not in (1, density):
            raise ValueError(
                f"structure={structure!r} has a share of {density:g} active weights, "
                f"but dense_allocation is {self.dense_allocation:g}; leave it out"
            )
        if self.sparsity_distribution != "uniform":
            raise ValueError(
                f"structure={structure!r} makes all layers equally sparse; leave out "
                f"sparsity_distribution={self.sparsity_distribution!r}"
            )
        if any(value not in (0, 1 - density) for value in self._given()):
            raise ValueError(
                f"structure={structure!r} allows sparsities= of 0 and "
                f"{1 - density:g} only, got {dict(self.sparsities or {})}"
            )

    def _given(self) -> list[float]:
        return list((self.sparsities or {}).values())
