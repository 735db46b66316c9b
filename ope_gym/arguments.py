"""Arguments of public functions, checked where they enter, and how a message shows a value.

A message names the argument, what came, and what is expected:

>>> real("gamma", "0.9", "a discount lies within [0, 1]", lambda x: 0 <= x <= 1)
Traceback (most recent call last):
ValueError: gamma is '0.9'; a discount lies within [0, 1]
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
_LONG = 60  # characters of a value above which a message names its type alone


def real(
    name: str, value: Any, expected: str, holds: Callable[[float], bool] = math.isfinite
) -> float:
    """Return a number as a float; raise unless `holds`, which must be false for NaN.

    Truth values and words are no numbers; numbers of numpy and arrays without axes are.
    """
    scalar = _scalar(value, "iuf")
    if scalar is None or not holds(float(scalar)):
        raise refusal(name, value, expected)
    return float(scalar)


def probability(name: str, value: Any) -> float:
    """Return a probability; raise unless it is one."""
    return real(name, value, "a probability lies within [0, 1]", lambda x: 0.0 <= x <= 1.0)


def discount(gamma: Any) -> float:
    """Return a discount; raise unless it is one."""
    return real("gamma", gamma, "a discount lies within [0, 1]", lambda x: 0.0 <= x <= 1.0)


def confidence(level: Any) -> float:
    """Return a confidence level; raise unless it is one."""
    expected = "a confidence level lies within (0, 1), such as 0.95"
    return real("level", level, expected, lambda x: 0.0 < x < 1.0)


def whole(name: str, value: Any, least: int = 1, expected: str = "") -> int:
    """Return a whole number of at least `least`; raise for anything else.

    >>> whole("limit", 2.5)
    Traceback (most recent call last):
    ValueError: limit is 2.5; give a whole number of at least 1
    """
    scalar = value if type(value) is int else _scalar(value, "iu")
    if scalar is None or scalar < least:
        raise refusal(name, value, expected or f"give a whole number of at least {least}")
    return int(scalar)


def pair(name: str, value: Any) -> tuple[float, float]:
    """Return (lowest, highest), finite and in this order; raise for anything else."""
    expected = "give finite (lowest, highest)"
    try:
        low, high = value
    except (TypeError, ValueError):
        raise refusal(name, value, expected) from None
    ends = [_scalar(end, "iuf") for end in (low, high)]
    if None in ends or not (-np.inf < ends[0] <= ends[1] < np.inf):
        raise refusal(name, value, expected)
    return float(ends[0]), float(ends[1])


def choice(name: str, value: Any, choices: Iterable[str], more: str = "") -> str:
    """Return a word that is one of `choices`; raise for anything else.

    >>> choice("by", "mean", ("cvar", "quantile"))
    Traceback (most recent call last):
    ValueError: by is 'mean'; choose one of cvar, quantile
    """
    known = tuple(choices)
    if not isinstance(value, str) or value not in known:
        raise refusal(name, value, f"choose one of {', '.join(known)}{more}")
    return value


def instance(name: str, value: T, kind: Any, expected: str) -> T:
    """Return a value of a class; raise for anything else."""
    if not isinstance(value, kind):
        raise refusal(name, value, expected)
    return value


def path_of(name: str, value: Any) -> str | os.PathLike[str]:
    """Return a path; raise for anything else."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise refusal(name, value, "give the path of a file")
    return value


def refusal(name: str, value: Any, expected: str) -> ValueError:
    """Return the error for an argument: its name, what came, and what is expected."""
    return ValueError(f"{name} is {shortened(value)}; {expected}")


def shortened(value: object) -> str:
    """Return how a value reads in a message; of a long one, its type."""
    text = repr(value)
    return text if len(text) < _LONG and "\n" not in text else f"a {type(value).__name__}"


def _scalar(value: Any, kinds: str) -> Any:
    """Return a value as a scalar of numpy, if its type is of one of these kinds; else None."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # a ragged list
        return None
    return array[()] if array.ndim == 0 and array.dtype.kind in kinds else None
