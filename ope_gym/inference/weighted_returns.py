"""Describe the distribution of weighted returns: quantiles, tail means, probabilities, a band.

The weighted distribution function of n episodes with returns G_i and normalised weights w_i is

    F(x) = sum_i w_i 1[G_i <= x]

Quantile, tail mean and variance are those of F. Their influence values, n trajectories,

    probability p = F(x)        n w_i (1[G_i <= x] - p)
    mean m                      n w_i (G_i - m)
    variance s^2                n w_i ((G_i - m)^2 - s^2)
    CVaR c at share a           n w_i (q - max(q - G_i, 0) / a - c),   q the a-quantile

give errors inside strata as those of every estimate. A quantile has none that is of use without a
density: its interval is where the interval of F holds the level (Woodruff's inversion).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ope_gym.arrays import FloatArray, IntArray
from ope_gym.inference.bootstrap import Resamples
from ope_gym.inference.errors import cautious_error, spread_of
from ope_gym.inference.intervals import Interval, ess_t, undefined
from ope_gym.inference.outcomes import EQUAL

_ROUNDING = 1e-12  # of sums of normalised weights
_GRID = 128  # places at which an interval of F is inverted


def quantile_of(returns: FloatArray, shares: FloatArray, level: float) -> float:
    """Return the lowest return up to which at least `level` of the shares lie.

    Args:
        returns: (n,) ascending.
        shares: (n,) normalised weights.
        level: within (0, 1).
    """
    below = int(np.count_nonzero(np.cumsum(shares) < level - _ROUNDING))
    return float(returns[min(below, returns.size - 1)])


def cvar_of(returns: FloatArray, shares: FloatArray, tail: float) -> float:
    """Return the mean of the lowest `tail` of the distribution, (1 / a) integral_0^a F^-1(u) du.

    An episode at the edge counts with the part of its share that is inside.
    """
    inside = np.minimum(np.cumsum(shares), tail)
    inside[-1] = tail  # sums may fall short of 1 by rounding
    return float(np.diff(inside, prepend=0.0) @ returns / tail)


def _first(n: int, reached: Callable[[int], bool]) -> int:
    """Return the lowest place 0, ..., n that is reached, n + 1 if none is."""
    places = np.unique(np.linspace(0, n, min(n, _GRID) + 1).round().astype(np.int64)).tolist()
    at = next((i for i, place in enumerate(places) if reached(place)), None)
    if at is None:
        return n + 1
    low, high = places[max(at - 1, 0)], places[at]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return int(high)


def binomial_interval(p: float, error: float, ess: float, level: float) -> Interval:
    """Return the interval of a probability that was estimated with a standard error E.

    That of Clopper and Pearson for p m events of m, where m = p (1 - p) / E^2 independent episodes
    would leave the same error; it is not empty where no event was seen. There, and where the error
    is unknown, m is the effective sample size.
    """
    from scipy.special import betaincinv

    size = p * (1.0 - p) / error**2 if error > 0.0 and 0.0 < p < 1.0 else ess
    k, tail = p * size, (1.0 - level) / 2
    low = float(betaincinv(k, size - k + 1.0, tail)) if k > 0.0 else 0.0
    high = float(betaincinv(k + 1.0, size - k, 1.0 - tail)) if k < size else 1.0
    return Interval(low, high, level, "binomial")


def variance_of(returns: FloatArray, shares: FloatArray) -> float:
    """Return the weighted variance times ESS / (ESS - 1): divisor n - 1 for equal weights."""
    squares = float(shares @ shares)  # 1 / ESS
    return (
        float(shares @ (returns - shares @ returns) ** 2) / (1 - squares) if squares < 1 else np.nan
    )


@dataclass(frozen=True, eq=False)
class WeightedReturns:
    """Hold returns in ascending order with their normalised weights; n trajectories.

    Args:
        returns: (n,) ascending.
        shares: (n,) normalised weights; NaN if no episode has any weight.
        strata: (n,) the groups inside which trajectories are alike.
        order: (n,) place of each in the data.
    """

    returns: FloatArray
    shares: FloatArray
    strata: IntArray
    order: IntArray

    @classmethod
    def of(cls, returns: FloatArray, log_weights: FloatArray, strata: IntArray) -> WeightedReturns:
        """Sort returns and normalise weights, (n,) each in the order of the data."""
        order = np.argsort(returns, kind="stable")
        top = float(log_weights.max())
        weights = np.exp(log_weights - top) if np.isfinite(top) else np.zeros(returns.size)
        total = weights.sum()
        shares = weights / total if total > 0 else np.full(weights.size, np.nan)
        return cls(returns[order], shares[order], strata[order], order)

    @property
    def known(self) -> bool:
        """Whether any episode has weight."""
        return bool(np.isfinite(self.shares[0]))

    @property
    def ess(self) -> float:
        """Effective sample size; 0 without any weight."""
        return 1.0 / float(self.shares @ self.shares) if self.known else 0.0

    def probability(self, x: float, strict: bool = True) -> float:
        """Return the probability of a return below x, or up to x if not strict."""
        return float(self.shares[: self._place(x, strict)].sum()) if self.known else np.nan

    def probability_interval(self, x: float, level: float, strict: bool = True) -> Interval:
        """Return an interval of that probability."""
        return self._binomial(self._place(x, strict), level)

    def _place(self, x: float, strict: bool) -> int:
        return int(np.searchsorted(self.returns, x, "left" if strict else "right"))

    def _binomial(self, place: int, level: float) -> Interval:
        """Return the interval of the probability of the lowest `place` returns."""
        if not self.known:
            return undefined(level, "binomial")
        p = float(self.shares[:place].sum())
        p = 1.0 if 1.0 - p < _ROUNDING else p  # no weight is left on the other side
        inside = np.arange(self.returns.size) < place
        psi = self.returns.size * self.shares * (inside - p)
        return binomial_interval(p, cautious_error(psi, self.strata), self.ess, level)

    @property
    def mean(self) -> float:
        """Weighted mean."""
        return float(self.shares @ self.returns)

    @property
    def variance(self) -> float:
        """Variance of one return, see `variance_of`."""
        return variance_of(self.returns, self.shares)

    def quantile(self, q: float) -> float:
        """Return the lowest return up to which at least q of the weight lies."""
        return quantile_of(self.returns, self.shares, q) if self.known else np.nan

    def cvar(self, tail: float) -> float:
        """Return the mean of the lowest `tail` of the distribution."""
        return cvar_of(self.returns, self.shares, tail)

    def quantile_interval(self, q: float, level: float) -> Interval:
        """Return where the interval of F holds q; infinite where the returns do not reach.

        The low end is the lowest return at which the upper end of F is q or more, the high end the
        one after the highest at which the lower end is below q. Between `_GRID` places they are
        looked for by halving: with weights both bounds rise with the return, but for small steps
        back.
        """
        if not self.known:
            return undefined(level, "binomial")
        n = self.returns.size
        low = _first(n, lambda place: self._binomial(place, level).high >= q)
        back = _first(n, lambda place: self._binomial(n - place, level).low < q)
        return Interval(self._return(low), self._return(n + 1 - back), level, "binomial")

    def _return(self, place: int) -> float:
        if place == 0:
            return -np.inf
        return float(self.returns[place - 1]) if place <= self.returns.size else np.inf

    def mean_interval(self, level: float) -> Interval:
        """Return an interval of the mean."""
        return self._ess_t(self.mean, self.returns - self.mean, self.ess, level)

    def variance_interval(self, level: float) -> Interval:
        """Return an interval of the variance."""
        value = self.variance
        ends = self._ess_t(value, (self.returns - self.mean) ** 2 - value, self.ess, level)
        return Interval(max(ends.low, 0.0), ends.high, level, ends.method)

    def cvar_interval(self, tail: float, level: float, floor: float = np.inf) -> Interval:
        """Return an interval of the mean of the lowest `tail` of the distribution.

        Where one return has a majority in the tail, as 0 where most failures pay nothing, the
        others are hardly seen and the error knows nothing of them. Then, as far as it has a
        majority, the interval reaches down to where outcomes of a chance of ln(2 / alpha) / ESS
        of the tail would move it (3.7 / ESS at 95 %), and up to where it would be if the returns up
        to the edge of the tail had the lower end of their probability's interval.

        Args:
            tail: the share, within (0, 1].
            level: confidence level.
            floor: the lowest return to expect; none below those seen by default.
        """
        if not self.known:
            return undefined(level, "ess-t")
        edge = self.quantile(tail)
        value = self.cvar(tail)
        terms = edge - np.maximum(edge - self.returns, 0.0) / tail - value
        ess = self.tail_ess(tail)
        ends = self._ess_t(value, terms, ess, level)
        lump = self.majority(tail)
        if lump == 0.0 or tail == 1.0:
            return ends
        chance = min(1.0, -float(np.log((1.0 - level) / 2)) / ess)
        low = value - lump * chance * max(0.0, value - floor)
        high = value + lump * (self._cvar_if_rarer(tail, level) - value)
        if np.isnan(ends.low):  # a single effective episode
            return Interval(low, high, level, ends.method)
        return Interval(min(ends.low, low), max(ends.high, high), level, ends.method)

    def majority(self, tail: float) -> float:
        """Return 2 s - 1 if one return has a share s above one half of the tail, else 0."""
        part = np.diff(np.minimum(np.cumsum(self.shares), tail), prepend=0.0)
        equal = EQUAL * float(np.abs(self.returns).max())
        kinds = np.cumsum(np.diff(self.returns, prepend=self.returns[0]) > equal)
        return max(0.0, 2.0 * float(np.bincount(kinds, part).max()) / tail - 1.0)

    def _cvar_if_rarer(self, tail: float, level: float) -> float:
        """Return the tail mean if returns up to the edge of the tail were as rare as may be."""
        place = self._place(self.quantile(tail), strict=False)
        rare = self._binomial(place, level).low
        upper = float(self.shares[place:].sum())
        if upper == 0.0:
            return float(self.returns[-1])
        shares = np.array(self.shares)
        shares[:place] *= rare / float(shares[:place].sum())
        shares[place:] *= (1.0 - rare) / upper
        return cvar_of(self.returns, shares, tail)

    def smaller_side(self, x: float) -> float:
        """Return the effective number of episodes below x or of the others: the smaller."""
        place = self._place(x, True)
        parts = [p for p in (self.shares[:place], self.shares[place:]) if p.sum() > 0]
        return min(float(p.sum() ** 2 / (p @ p)) for p in parts) if len(parts) == 2 else 0.0

    def tail_ess(self, tail: float) -> float:
        """Return the effective number of episodes in the lowest `tail` of the distribution."""
        inside = np.minimum(np.cumsum(self.shares), tail)
        part = np.diff(inside, prepend=0.0)
        square = float(part @ part)
        return tail**2 / square if square > 0 else 0.0

    def _ess_t(self, value: float, terms: FloatArray, ess: float, level: float) -> Interval:
        psi = self.returns.size * self.shares * terms
        spread = spread_of(psi, self.strata)
        return ess_t(value, spread.cautious, ess, level, spread.tails)

    # Bootstrap -------------------------------------------------------------------------------

    def band(self, draws: Resamples, level: float) -> float:
        """Return half the height of a band that holds the whole distribution function.

        The larger of the bootstrap's, and the bound sqrt(ln(2 / (1 - level)) / (2 ESS)) of
        Dvoretzky, Kiefer, Wolfowitz and Massart with the effective sample size: with few effective
        episodes the bootstrap alone is too narrow, and the bound alone does not know how weights
        and returns go together.
        """
        if not self.known:
            return np.nan
        bound = float(np.sqrt(np.log(2.0 / (1.0 - level)) / (2.0 * self.ess)))
        return float(np.fmax(self.bootstrap_band(draws, level), bound))

    def bootstrap_band(self, draws: Resamples, level: float) -> float:
        """Return the `level` quantile of max_x |F* - F| over bootstrap replicates F*."""
        # F is compared after the last of equal returns: before it is not a value of F
        ends = np.append(np.flatnonzero(np.diff(self.returns) > 0), self.returns.size - 1)
        whole = np.cumsum(self.shares)[ends]
        apart = np.concatenate(
            [
                np.abs(np.cumsum(shares, axis=1)[:, ends] - whole).max(axis=1)
                for shares in self._drawn(draws)
            ]
        )
        apart = apart[np.isfinite(apart)]
        return float(np.quantile(apart, level)) if apart.size else np.nan

    def _drawn(self, draws: Resamples) -> Iterator[FloatArray]:
        """Yield normalised weights (r, n) of some replicates at a time."""
        for factors in draws.by_replicates():
            weights = factors[:, self.order] * self.shares
            with np.errstate(invalid="ignore", divide="ignore"):
                yield weights / weights.sum(axis=1, keepdims=True)
