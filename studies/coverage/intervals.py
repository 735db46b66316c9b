"""Compute all kinds of intervals from one data set: the library's, and value ± z SE."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ope_gym import Betting, Bootstrap, Trajectories, evaluate
from ope_gym.arrays import FloatArray
from ope_gym.inference import intervals
from ope_gym.policies import Policy

KINDS = ("normal", "ess-t", "percentile", "bca", "betting")
PLAIN = ("BIS", "FIS")  # betting rests on their terms, whatever the estimator


@dataclasses.dataclass(frozen=True)
class Found:
    """Ends (E, K) of each estimator's intervals of all kinds, and standard errors (E,).

    NaN where there is no interval of this kind, or it is undefined; an empty one is inf to -inf.
    """

    low: FloatArray
    high: FloatArray
    error: FloatArray

    def holds(self, truth: float) -> FloatArray:
        """Return 1 if the interval contains the truth, 0 if not, NaN if there is none, (E, K)."""
        inside = (self.low <= truth) & (truth <= self.high)
        return np.where(np.isnan(self.low), math.nan, inside)

    def width(self, level: float) -> FloatArray:
        """Return widths relative to that of the normal interval, (E, K)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            width = np.where(self.high >= self.low, self.high - self.low, math.nan)
            return np.asarray(width / (2 * _normal(level) * self.error)[:, None])


def all_intervals(
    data: Trajectories,
    target: Policy,
    names: Sequence[str],
    *,
    level: float,
    resamples: int,
    reward_range: tuple[float, float],
    horizon: int,
) -> Found:
    """Return intervals of all kinds for the estimators `names`; `evaluate` makes most of them."""
    low, high = np.full((2, len(names), len(KINDS)), math.nan)
    found = Found(low, high, np.full(len(names), math.nan))
    plain = [name for name in names if name in PLAIN]

    def put(name: str, kind: str, low: float, high: float) -> None:
        found.low[names.index(name), KINDS.index(kind)] = low
        found.high[names.index(name), KINDS.index(kind)] = high

    for name, e in evaluate(data, target, estimators=names, level=level).items():
        found.error[names.index(name)] = e.standard_error
        half = _normal(level) * e.standard_error
        put(name, "normal", e.value - half, e.value + half)
        put(name, "ess-t", e.interval.low, e.interval.high)
    drawn = evaluate(data, target, names, level=level, interval=Bootstrap(resamples, "bca"))
    for name, e in drawn.items():
        put(name, "bca", e.interval.low, e.interval.high)
        if e.replicates is not None:
            middle = intervals.percentile(e.replicates, level)
            put(name, "percentile", middle.low, middle.high)
    if plain:
        betting = Betting(reward_range, horizon)
        bets = evaluate(data, target, plain, level=level, interval=betting)
        for name, e in bets.items():
            empty = math.isnan(e.interval.low)  # no value agrees with the data: a miss
            ends = (math.inf, -math.inf) if empty else (e.interval.low, e.interval.high)
            put(name, "betting", *ends)
    return found


def _normal(level: float) -> float:
    """Return the quantile of the normal distribution for a two-sided interval."""
    from scipy.special import ndtri

    return float(ndtri(0.5 + level / 2))
