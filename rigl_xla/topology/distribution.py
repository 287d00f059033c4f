"""How sparse each layer is to be: uniform, Erdos-Renyi, and what a user overrides.

Pure functions of names, shapes and numbers. ``n`` is a layer's number of weights, ``s``
its sparsity: the share of them that is inactive. Shapes are torch's: ``(out, in)`` or
``(out, in, *kernel)``.

>>> shapes = {"stem": (8, 3, 3, 3), "body": (64, 64), "head": (10, 64)}
>>> allocate(shapes, 0.9)
{'stem': 0.0, 'body': 0.9, 'head': 0.9}
>>> erk = allocate(shapes, 0.9, "erk")
>>> {name: round(s, 3) for name, s in erk.items()}
{'stem': 0.822, 'body': 0.929, 'head': 0.738}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
# (free layers, sparsity, layers held dense) -> sparsity of every free layer
Distribution = Callable[[Shapes, float, Shapes], dict[str, float]]


def uniform(free: Shapes, sparsity: float, dense: Shapes) -> dict[str, float]:
    """``s_l = S`` for every free layer (Evci et al. 2020, arXiv:1911.11134, 3(1))."""
    del dense
    return dict.fromkeys(free, sparsity)


def adjusted_uniform(free: Shapes, sparsity: float, dense: Shapes) -> dict[str, float]:
    """One sparsity for all free layers, so high that the whole has sparsity ``S``.

    ``s = S N / N_free``: layers held dense are paid for by the others.

    Raises:
        ValueError: The dense layers alone hold more weights than ``S`` leaves active.
    """
    num_free, num_dense = _num_weights(free), _num_weights(dense)
    adjusted = sparsity * (num_free + num_dense) / num_free
    if adjusted >= 1:
        raise ValueError(
            f"sparsity_distribution='adjusted-uniform' cannot reach a sparsity of "
            f"{sparsity:g}: {num_dense} of {num_free + num_dense} weights are in "
            "layers held dense; hold fewer layers dense or lower the sparsity"
        )
    return dict.fromkeys(free, adjusted)


def erdos_renyi(free: Shapes, sparsity: float, dense: Shapes) -> dict[str, float]:
    """Density proportional to ``(in + out) / (in out)``, kernels not counted.

    Mocanu et al. 2018, arXiv:1707.04780, eq. 2; layers held dense are outside of the
    budget.
    """
    del dense
    return _in_proportion(free, sparsity, lambda shape: _ratio(shape[:2]))


def erdos_renyi_kernel(
    free: Shapes, sparsity: float, dense: Shapes
) -> dict[str, float]:
    """Density proportional to ``(in + out + kh + kw) / (in out kh kw)``.

    Evci et al. 2020, arXiv:1911.11134, 3(1); for matrices it is `erdos_renyi`. Layers
    held dense are outside of the budget, as in the authors' code.
    """
    del dense
    return _in_proportion(free, sparsity, _ratio)


DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform": uniform,
    "adjusted-uniform": adjusted_uniform,
    "er": erdos_renyi,
    "erk": erdos_renyi_kernel,
}
# Where the paper keeps the first layer dense; ERK gives it a high density by itself.
DENSE_FIRST = (uniform, adjusted_uniform)


def distribution_named(name: str | Distribution) -> Distribution:
    """The function a user means; names in upper or lower case.

    Raises:
        ValueError, TypeError: There is none of this name, or it is no name.
    """
    if callable(name):
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"sparsity_distribution is {name!r}; it must be one of "
            f"{sorted(DISTRIBUTIONS)} or a function of (shapes, sparsity, dense shapes)"
        )
    if name.lower() not in DISTRIBUTIONS:
        raise ValueError(
            f"sparsity_distribution={name!r} is not known; allowed are "
            f"{sorted(DISTRIBUTIONS)}, or a function of (shapes, sparsity, dense "
            "shapes)"
        )
    return DISTRIBUTIONS[name.lower()]


def allocate(
    shapes: Shapes,
    sparsity: float,
    distribution: str | Distribution = "uniform",
    fixed: Mapping[str, float] | None = None,
    dense_first: bool | None = None,
) -> dict[str, float]:
    """The sparsity of every layer.

    Args:
        shapes: Name and shape of every layer, in order of registration.
        sparsity: S, the share of inactive weights, ``0 <= S < 1``.
        distribution: A key of `DISTRIBUTIONS`, or a function like them.
        fixed: Sparsities that are given: by name, ``0 <= s < 1``. They are outside of
            the budget that the others share.
        dense_first: Keep the first layer dense unless it is the only one. Default: for
            the uniform distributions, as in the paper.

    Returns:
        By name, in the order of ``shapes``.

    Raises:
        ValueError: A number is out of range, or a name or distribution is not known.
    """
    rule = distribution_named(distribution)
    check_share("sparsity", sparsity)
    given = dict(fixed or {})
    for name, value in given.items():
        if name not in shapes:
            raise ValueError(
                f"a sparsity is given for {name!r}, which is no layer; layers are "
                f"{list(shapes)}"
            )
        check_share(f"the sparsity of {name!r}", value)
    if dense_first is None:
        dense_first = rule in DENSE_FIRST
    if dense_first and len(shapes) > 1:
        given.setdefault(next(iter(shapes)), 0.0)
    free = {name: shape for name, shape in shapes.items() if name not in given}
    dense = {name: shapes[name] for name, value in given.items() if value == 0}
    found = rule(free, sparsity, dense) if free and sparsity > 0 else {}
    result = {name: given.get(name, found.get(name, 0.0)) for name in shapes}
    for name, value in result.items():
        check_share(f"the sparsity that {distribution!r} gives {name!r}", value)
    return result


def num_inactive(sparsity: float, num_weights: int) -> int:
    """``floor(s n)`` of the decimal that was meant: ``1 - 0.9`` of 1000 is 100.

    At least one weight stays active.

    >>> int((1 - 0.9) * 1000), num_inactive(1 - 0.9, 1000)
    (99, 100)
    """
    return min(math.floor(round(sparsity * num_weights, 6)), num_weights - 1)


def check_share(what: str, value: float) -> None:
    """Raises ValueError or TypeError unless ``0 <= value < 1``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what} is {value!r}; it must be a number from 0 to below 1")
    if not 0 <= value < 1:
        raise ValueError(f"{what} is {value!r}; it must be from 0 to below 1")


def _in_proportion(
    free: Shapes, sparsity: float, ratio: Callable[[Shape], float]
) -> dict[str, float]:
    """Densities ``epsilon p_l``, where what would exceed 1 is dense and paid for.

    The densest layers become dense one after the other, ties together, and epsilon is
    solved for again with what remains of the budget.
    """
    ratios = {name: ratio(shape) for name, shape in free.items()}
    numbers = {name: math.prod(shape) for name, shape in free.items()}
    budget = sum(n - math.floor(round(sparsity * n, 6)) for n in numbers.values())
    dense: set[str] = set()
    while True:
        rest = [name for name in free if name not in dense]
        left = budget - sum(numbers[name] for name in dense)
        if not rest:
            return dict.fromkeys(free, 0.0)
        epsilon = left / sum(ratios[name] * numbers[name] for name in rest)
        highest = max(ratios[name] for name in rest)
        if epsilon * highest <= 1:
            break
        dense |= {name for name in rest if ratios[name] == highest}
    return {name: 0.0 if name in dense else 1 - epsilon * ratios[name] for name in free}


def _ratio(shape: Shape) -> float:
    return sum(shape) / math.prod(shape)


def _num_weights(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
