"""Compute all kinds of intervals from one data set: the library's, and two to compare with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ope_gym import Betting, Bootstrap, Trajectories, evaluate
from ope_gym.arrays import FloatArray
from ope_gym.inference import intervals
from ope_gym.policies import Policy

KINDS = ("normal", "ess-t", "percentile", "bca", "betting", "HCOPE")
PLAIN = ("BIS", "FIS")  # betting and HCOPE rest on their terms, whatever the estimator
_PILOT = 20  # HCOPE chooses its threshold on every 20th episode


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
        for name, ends in hcope(data, target, plain, level, reward_range, horizon).items():
            put(name, "HCOPE", *ends)
    return found


def hcope(
    data: Trajectories,
    target: Policy,
    names: Sequence[str],
    level: float,
    reward_range: tuple[float, float],
    horizon: int,
) -> dict[str, tuple[float, float]]:
    """Return intervals whose ends are bounds by `hcope_lower`.

    The lower end bounds gains above the lowest reward, the upper end losses below the highest, up
    to the horizon, as the library's betting intervals do.
    """
    low, high = min(reward_range[0], 0.0), max(reward_range[1], 0.0)
    last = data.offsets[1:] - 1
    ends = {}
    gain, loss = data.rewards - low, high - data.rewards
    gain[last] -= low * (horizon - data.lengths)  # after its end an episode pays 0: its last weight
    loss[last] += high * (horizon - data.lengths)  # stays, so the last step can pay for the rest
    terms = [
        evaluate(dataclasses.replace(data, rewards=pay), target, estimators=names)
        for pay in (gain, loss)
    ]
    for name in names:
        bounds = [hcope_lower(e[name].influence, (1 - level) / 2) for e in terms]
        ends[name] = low * horizon + bounds[0], high * horizon - bounds[1]
    return ends


def hcope_lower(x: FloatArray, alpha: float) -> float:
    """Return a lower bound on the mean of x >= 0.

    It is theorem 1 of Thomas, Theocharous and Ghavamzadeh, "High-confidence off-policy evaluation".
    Values are clipped at c, then an empirical Bernstein bound holds: mean - 7 c L / (3 (n - 1)) -
    sqrt(2 L var / n), L = ln(2 / alpha). As recommended, c is chosen for the best bound on a
    twentieth of the data, which is not used afterwards.
    """
    pilot = np.arange(x.size) % _PILOT == 0
    first, rest = x[pilot], x[~pilot]
    if first.size < 2 or not first.max() > 0.0:
        return 0.0
    cuts = np.geomspace(1e-3, 1e2, 200) * first.max()
    cut = cuts[np.argmax(_bernstein(first, cuts, rest.size, alpha))]
    return max(float(_bernstein(rest, cut[None], rest.size, alpha)[0]), 0.0)


def _bernstein(x: FloatArray, cuts: FloatArray, n: int, alpha: float) -> FloatArray:
    """Return the bounds (cuts,) for n values with the means and variances of x clipped there."""
    y, log = np.minimum(x, cuts[:, None]), math.log(2 / alpha)
    spread = np.sqrt(2 * log * y.var(axis=1, ddof=1) / n)
    return np.asarray(y.mean(axis=1) - 7 * cuts * log / (3 * (n - 1)) - spread)


def _normal(level: float) -> float:
    """Return the quantile of the normal distribution for a two-sided interval."""
    from scipy.special import ndtri

    return float(ndtri(0.5 + level / 2))
