"""Prepare the curves that figures and the OPE tab draw: thinned, and alike ones drawn once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.estimators.table import ESTIMATORS
from ope_gym.inference.estimate import Estimate


def weighted(evaluation: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Return the estimates that rest on weights; all of them if none does."""
    direct = {name for name, estimator in ESTIMATORS.items() if estimator.method == "direct"}
    return {n: e for n, e in evaluation.items() if n not in direct} or dict(evaluation)


def concentration(log_weights: FloatArray) -> FloatArray:
    """Return (n,) the share of the weight in the heaviest 1, 2, … episodes; 0 without weight."""
    top = float(log_weights.max())
    if top == -np.inf:
        return np.zeros(log_weights.size)
    held = np.cumsum(np.sort(np.exp(log_weights - top))[::-1])
    return np.asarray(held / held[-1])


def heaviest(n: int, points: int) -> IntArray:
    """Return numbers of heaviest episodes to show, from 1 to n, at most so many.

    >>> heaviest(1000, 4).tolist()
    [1, 10, 100, 1000]
    """
    return np.unique(np.geomspace(1, n, points).round().astype(np.int64))


def distinct(curves: Mapping[str, FloatArray]) -> list[tuple[list[str], FloatArray]]:
    """Group the names of curves that look the same, each group with one of its curves."""
    groups: list[tuple[list[str], FloatArray]] = []
    for name, curve in curves.items():
        for names, other in groups:
            if curve.shape == other.shape and np.allclose(curve, other, rtol=0.01):
                names.append(name)
                break
        else:
            groups.append(([name], curve))
    return groups


def shorten(name: str, most: int) -> str:
    """Return a name of at most `most` characters.

    >>> shorten("episodes", 8), shorten("episodes", 4)
    ('episodes', 'epi…')
    """
    return name if len(name) <= most else f"{name[: most - 1]}…"
