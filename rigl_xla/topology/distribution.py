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

from xla_replica.common.arguments import (
    as_float,
    check_choice,
    check_flag,
    check_integer,
    check_names,
    check_number,
    check_type,
)

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
# (free layers, sparsity, layers held dense) -> sparsity of every free layer
Distribution = Callable[[Shapes, float, Shapes], dict[str, float]]


def uniform(free: Shapes, sparsity: float, dense: Shapes) -> dict[str, float]:
    """Returns ``s_l = S`` for every free layer.

    Evci et al. 2020, arXiv:1911.11134, 3(1).
    """
    del dense
    return dict.fromkeys(free, sparsity)


def adjusted_uniform(free: Shapes, sparsity: float, dense: Shapes) -> dict[str, float]:
    """Returns one sparsity for all free layers that gives the whole sparsity ``S``.

    ``s = S N / N_free``: the free layers make up for those held dense. It is 1 or more,
    which `allocate` refuses, if these alone have more weights than ``S`` leaves.
    """
    num_free, num_dense = (
        sum(math.prod(shape) for shape in shapes.values()) for shapes in (free, dense)
    )
    return dict.fromkeys(free, sparsity * (num_free + num_dense) / num_free)


def erdos_renyi(free: Shapes, sparsity: float, dense: Shapes) -> dict[str, float]:
    """Returns densities proportional to ``(in + out) / (in out)``, without kernels.

    Mocanu et al. 2018, arXiv:1707.04780, eq. 2. Dense layers are outside of the budget.
    """
    del dense
    return _in_proportion(free, sparsity, lambda shape: _ratio(shape[:2]))


def erdos_renyi_kernel(
    free: Shapes, sparsity: float, dense: Shapes
) -> dict[str, float]:
    """Returns densities proportional to ``(in + out + kh + kw) / (in out kh kw)``.

    Evci et al. 2020, arXiv:1911.11134, 3(1). Dense layers are outside of the budget, as
    in the authors' code. The first layer is free: it gets a high density anyway.
    """
    del dense
    return _in_proportion(free, sparsity, _ratio)


DISTRIBUTIONS: dict[str, Distribution] = {
    "uniform": uniform,
    "adjusted-uniform": adjusted_uniform,
    "er": erdos_renyi,
    "erk": erdos_renyi_kernel,
}


def distribution_named(name: str | Distribution) -> Distribution:
    """Returns the function of a name, in upper or lower case; a function as it is."""
    if callable(name):
        return name
    key = name.lower() if isinstance(name, str) else name
    otherwise = "a function of (shapes, sparsity, dense shapes)"
    check_choice("sparsity_distribution", key, DISTRIBUTIONS, otherwise)
    return DISTRIBUTIONS[key]


def allocate(
    shapes: Shapes,
    sparsity: float,
    distribution: str | Distribution = "uniform",
    fixed: Mapping[str, float] | None = None,
    dense_first: bool | None = None,
) -> dict[str, float]:
    """Returns the sparsity of every layer, by name, in the order of ``shapes``.

    Args:
        shapes: Name and shape of every layer, in order of registration.
        sparsity: S, the share of inactive weights, ``0 <= S < 1``.
        distribution: A key of `DISTRIBUTIONS`, or a function like them.
        fixed: Sparsities given by name, ``0 <= s < 1``, outside of the others' budget.
        dense_first: Keep the first layer dense unless it is the only one. Default: for
            the uniform distributions, as in the paper.

    Raises:
        ValueError, TypeError: A number, name or distribution is not allowed.
    """
    rule = distribution_named(distribution)
    sparsity = as_float(check_number("sparsity", sparsity, 0, below=1))
    for name, shape in check_type("shapes", shapes, Mapping, "a dict by name").items():
        if not isinstance(shape, (tuple, list)) or not shape:
            raise TypeError(
                f"the shape of {name!r} must be a tuple of integers, got {shape!r}"
            )
        for size in shape:
            check_integer(f"each number of the shape of {name!r}", size, 1)
    given = dict(check_type("fixed", fixed or {}, Mapping, "a dict by name"))
    check_names("a sparsity is given for", given, shapes, "the layers")
    if dense_first is None:
        dense_first = rule in (uniform, adjusted_uniform)
    check_flag("dense_first", dense_first)
    if dense_first and len(shapes) > 1:
        given.setdefault(next(iter(shapes)), 0.0)
    free = {name: shape for name, shape in shapes.items() if name not in given}
    dense = {name: shapes[name] for name, value in given.items() if value == 0}
    is_chosen = free and sparsity > 0
    chosen = rule(free, sparsity, dense) if is_chosen else dict.fromkeys(free, 0.0)
    if not isinstance(chosen, Mapping) or chosen.keys() != free.keys():
        raise ValueError(
            f"sparsity_distribution={distribution!r} gave {chosen!r}; it must return a "
            f"sparsity for each of {list(free)} and for no other layer"
        )
    result = {}
    for name in shapes:
        source = "of" if name in given else f"that {distribution!r} gives"
        value = given[name] if name in given else chosen[name]
        value = check_number(f"the sparsity {source} {name!r}", value, 0, below=1)
        result[name] = as_float(value)
    return result


def num_inactive(sparsity: float, num_weights: int) -> int:
    """Returns ``floor(s n)`` of the decimal that was meant: ``1 - 0.9`` of 1000 is 100.

    At least one weight stays active.

    >>> int((1 - 0.9) * 1000), num_inactive(1 - 0.9, 1000)
    (99, 100)
    """
    return min(math.floor(round(sparsity * num_weights, 6)), num_weights - 1)


def _in_proportion(
    free: Shapes, sparsity: float, ratio: Callable[[Shape], float]
) -> dict[str, float]:
    """Returns sparsities of densities ``epsilon p_l``; a layer above 1 becomes dense.

    The densest become dense one after the other, ties together; what remains of the
    budget gives another epsilon.
    """
    ratios = {name: ratio(shape) for name, shape in free.items()}
    numbers = {name: math.prod(shape) for name, shape in free.items()}
    budget = sum(n - math.floor(round(sparsity * n, 6)) for n in numbers.values())
    dense: set[str] = set()
    while rest := [name for name in free if name not in dense]:
        left = budget - sum(numbers[name] for name in dense)
        epsilon = left / sum(ratios[name] * numbers[name] for name in rest)
        highest = max(ratios[name] for name in rest)
        if epsilon * highest <= 1:
            return {n: 0.0 if n in dense else 1 - epsilon * ratios[n] for n in free}
        dense |= {name for name in rest if ratios[name] == highest}
    return dict.fromkeys(free, 0.0)


def _ratio(shape: Shape) -> float:
    return sum(shape) / math.prod(shape)
