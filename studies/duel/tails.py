"""Play duels without bounds on made-up returns: skewed, heavy-tailed, with rare disasters."""

from __future__ import annotations

import math

import numpy as np

from ope_gym.arrays import FloatArray
from ope_gym.inference.rounds import Rounds
from ope_gym.inference.sequences import Assumed
from studies.duel.simulation import LEVEL, Outcome, play

CASES = (
    "skewed, the same for both",
    "heavy tails (t with 2 degrees of freedom)",
    "one skewed, one normal",
    "one fails rarely and badly",
)
ASSUMPTIONS = ("symmetric", "deviation")
_LOG_NORMAL = (math.e - 1) * math.e  # variance of exp(normal)
_DISASTER = 0.05  # chance of it
_FALL = 10.0
_VARIANCES = (
    2 * _LOG_NORMAL,
    math.inf,
    _LOG_NORMAL + 1.0,
    _DISASTER * (1 - _DISASTER) * _FALL**2 + 0.04,
)


def holds(case: int, assumption: str) -> bool:
    """Return whether returns of a case are as a duel assumes."""
    return case < 2 if assumption == "symmetric" else math.isfinite(_VARIANCES[case])


def shift(case: int) -> float:
    """Return the difference of the duels that are to be decided."""
    return 0.5 * math.sqrt(_VARIANCES[case]) if math.isfinite(_VARIANCES[case]) else 1.0


def made_up(case: int, shape: tuple[int, int], rng: np.random.Generator) -> FloatArray:
    """Return (*shape, 2) returns of two policies with the same mean."""
    normal = rng.normal(size=(*shape, 2))
    if case == 0:
        return np.asarray(np.exp(normal))
    if case == 1:
        return np.asarray(rng.standard_t(2, size=normal.shape))
    if case == 2:
        normal[..., 0] = np.exp(normal[..., 0]) - math.exp(0.5)
        return normal
    fell = rng.random(shape) < _DISASTER
    return np.stack([_FALL * (_DISASTER - fell), 0.2 * normal[..., 1]], axis=-1)


def free_duels(
    case: int, assumption: str, apart: float, count: int, limit: int, rng: np.random.Generator
) -> Outcome:
    """Play duels of pairs without bounds; a is better by `apart`."""
    deviation = math.sqrt(_VARIANCES[case]) if assumption == "deviation" else None
    returns = made_up(case, (limit, count), rng).reshape(-1, 2) + np.array([apart, 0.0])
    rounds = Rounds(Assumed(None, deviation), np.zeros(1), level=LEVEL, limit=limit, runs=count)
    played = returns, np.zeros_like(returns)
    places = np.arange(len(returns)).reshape(limit, count)
    return play(rounds, played, places, np.zeros(places.shape), limit)
