"""Checks of arguments that say what was received and what is allowed.

To Python a bool is an int and a non-empty text is true, but neither is meant where a
number or a flag is asked for. So all five packages check their arguments here.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import reprlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np


def is_integer(value: object) -> bool:
    """Returns whether ``value`` is an integer of Python or NumPy; a bool is not one."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Returns whether ``value`` is a real number; a bool is not one."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_integer(
    name: str, value: Any, least: int | None = None, most: int | None = None
) -> int:
    """Returns ``value`` as an int; raises TypeError or ValueError where it is not one.

    >>> check_integer("seed", 3, least=0, most=3)
    3
    """
    limits = {">=": least, "<=": most}
    _check_number(name, value, "an integer", is_integer(value), limits)
    return int(value)


def check_number(
    name: str,
    value: Any,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """Returns ``value``, unchanged, if it is a finite real number in the range.

    ``least`` and ``most`` are in the range, ``above`` and ``below`` are not.
    """
    limits = {">=": least, ">": above, "<=": most, "<": below}
    _check_number(name, value, "a finite number", is_number(value), limits)
    return value  # type: ignore[no-any-return]


def check_flag(name: str, value: object) -> bool:
    """Returns ``value``, which must be True or False: the text ``'no'`` is true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_choice(
    name: str, value: Any, allowed: Iterable[Any], otherwise: str = ""
) -> Any:
    """Returns ``value``, which must be one of ``allowed``, or raises ValueError.

    ``otherwise`` says what else the caller accepts, such as "a function of a Layer".
    """
    allowed = list(allowed)
    try:
        is_known = value in allowed
    except (RuntimeError, ValueError):  # an array, whose == is not one truth value
        is_known = False
    if not is_known:
        choices = ", ".join(repr(choice) for choice in allowed)
        choices += f" or {otherwise}" if otherwise else ""
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
    return value


def check_names(
    what: str, names: Iterable[str], known: Collection[str], kind: str
) -> None:
    """Raises ValueError unless all of ``names`` are among the ``known`` ones.

    >>> check_names("a sparsity is given for", ["a"], ["a", "b"], "the layers")
    """
    for name in names:
        if name not in known:
            raise ValueError(f"{what} {name!r}, which is not among {kind}, {[*known]}")


def check_function(name: str, value: Any) -> Any:
    """Returns ``value``, which must be callable."""
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}")
    return value


def check_type(name: str, value: Any, kind: Any, allowed: str) -> Any:
    """Returns ``value``, which must be of this class; ``allowed`` names it in words."""
    if not isinstance(value, kind):
        got = f"{reprlib.repr(value)} ({type(value).__name__})"
        raise TypeError(f"{name} must be {allowed}, got {got}")
    return value


def as_float(number: Any) -> float:
    """Returns a plain float, which a state can hold, of the decimal that was meant.

    >>> float(np.float32(0.1)), as_float(np.float32(0.1))
    (0.10000000149011612, 0.1)
    """
    return float(str(number)) if isinstance(number, np.floating) else float(number)


def checked(default: Any, **limits: Any) -> Any:
    """Returns a dataclass's field, of whose value `check_fields` asks more than a type.

    Args:
        default: The field's default.
        limits: Those of `check_integer` or `check_number`, or ``among``: the choices.
    """
    return dataclasses.field(default=default, metadata=limits)


def check_fields(value: Any) -> None:
    """Checks the flags, numbers and choices of a dataclass, and keeps plain numbers.

    A field's annotation says which it is, and whether it may be None.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Tree:
    ...     depth: "int" = checked(5, least=0)
    ...     is_full: "bool | None" = None
    ...     def __post_init__(self):
    ...         check_fields(self)
    >>> Tree(3)
    Tree(depth=3, is_full=None)
    """
    for field in dataclasses.fields(value):
        name, kind, limits = field.name, str(field.type), field.metadata
        given, kind_of_some = getattr(value, name), kind.removesuffix(" | None")
        if given is None and kind != kind_of_some:
            continue
        if "among" in limits:
            check_choice(name, given, limits["among"])
        elif kind_of_some == "bool":
            check_flag(name, given)
        elif kind_of_some == "int":
            given = check_integer(name, given, **limits)
        elif kind_of_some == "float":
            check_number(name, given, **limits)
            given = given if isinstance(given, int) else as_float(given)
        object.__setattr__(value, name, given)


_COMPARED = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


def _check_number(
    name: str, value: Any, kind: str, is_one: bool, limits: Mapping[str, float | None]
) -> None:
    """Raises TypeError or, if it ``is_one`` of this kind, ValueError if it is wrong."""
    given = {sign: limit for sign, limit in limits.items() if limit is not None}
    try:
        is_right = is_one and math.isfinite(value)
    except OverflowError:  # an integer of more than 300 digits
        is_right = False
    are_kept = (_COMPARED[sign](value, limit) for sign, limit in given.items())
    if not (is_right and all(are_kept)):
        range_ = " and ".join(f"{sign} {limit}" for sign, limit in given.items())
        allowed = f"{kind} {range_}".rstrip()
        error = ValueError if is_one else TypeError
        raise error(f"{name} must be {allowed}, got {value!r}")
